"""Writes the replace lines of kubernetes/go.mod, which depend on the version of Kubernetes.

Kubernetes requires its staging modules (k8s.io/api and so on) at v0.0.0 and replaces them with folders of its own tree.
Go ignores the replace lines of a dependency. So our module must replace each of them with its published version:
`k8s.io/X => k8s.io/X v0.N.P` for Kubernetes v1.N.P. This script reads the list from the go.mod of the version that our
go.mod requires. `--check` writes nothing and fails if the lines are not current.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODULE = Path(__file__).resolve().parent / "kubernetes"
KUBERNETES = "k8s.io/kubernetes"
Replaces = dict[str, str]


def go(*arguments: str) -> str:
    return subprocess.run(["go", *arguments], cwd=MODULE, check=True, stdout=subprocess.PIPE, text=True).stdout


def parsed(mod: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(go("mod", "edit", "-json", str(mod)))
    return result


def published(version: str, *, offline: bool = False) -> Path | None:
    """The go.mod of this Kubernetes in Go's cache. None if offline and it was never downloaded."""
    # Run go outside of our module: its replace lines may not be current yet.
    with tempfile.TemporaryDirectory() as outside:
        command = ["go", "list", "-m", "-f", "{{.GoMod}}", f"{KUBERNETES}@{version}"]
        env = os.environ | ({"GOPROXY": "off"} if offline else {})
        done = subprocess.run(
            command,
            cwd=outside,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if offline else None,
            text=True,
            check=False,
        )
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def required(mod: dict[str, Any]) -> dict[str, str]:
    return {line["Path"]: line["Version"] for line in mod["Require"]}


def wanted(mod_of_kubernetes: dict[str, Any], version: str) -> Replaces:
    """Only v0.0.0 is replaced: a pseudo-version, such as that of k8s.io/utils, is published and stays."""
    staging = [
        path for path, at in required(mod_of_kubernetes).items() if path.startswith("k8s.io/") and at == "v0.0.0"
    ]
    return dict.fromkeys(sorted(staging), version.replace("v1.", "v0.", 1))


def present(ours: dict[str, Any]) -> Replaces:
    return {line["Old"]["Path"]: line["New"].get("Version", "") for line in ours.get("Replace") or []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the lines are not current")
    check = parser.parse_args().check

    ours = parsed(MODULE / "go.mod")
    version = required(ours)[KUBERNETES]
    theirs = published(version)
    if theirs is None:
        sys.exit(f"Go did not return the go.mod of {KUBERNETES} {version}. Its message is above.")
    have, want = present(ours), wanted(parsed(theirs), version)
    if have == want:
        return
    changes = sorted(have.items() ^ want.items())
    if check:
        sys.exit(f"{MODULE / 'go.mod'} is not current; run tools/kube/go_replaces.py. It differs in {dict(changes)}.")
    stale = (f"-dropreplace={path}" for path in have.keys() - want.keys())
    go("mod", "edit", *stale, *(f"-replace={path}={path}@{version}" for path, version in want.items()))


if __name__ == "__main__":
    main()
