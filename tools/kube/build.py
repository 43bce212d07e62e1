"""Build the Kubernetes tools of the cluster tests into the user's cache (`make kube`). Run from the repository's root:
`python -m tools.kube.build [tool ...]`.

The Go client downloads the sources and checks them against the go.sum files beside this one. A tool is not built if it
is current, or if the environment names it (see binaries.py). Each file appears complete or not at all. Of several
builds at the same time, one works and the others wait for it.
"""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.kube.binaries import MODULES, NOT_NEEDED_BESIDE_A_CLUSTER, Module, cache, find, uses_existing_cluster

NO_GO = """\
The Kubernetes tools are built from source, and that needs Go 1.26 or newer; no `go` was found in PATH.
Install Go, or say where ready tools are: KUBEBUILDER_ASSETS=FOLDER with etcd, kube-apiserver, kube-controller-manager
and kubectl in it. Without them the tests on a real control plane are skipped; everything else works."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """A lock that the kernel releases when its process ends, also if it is killed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another build of the Kubernetes tools is running; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(module: Module, tool: str, package: str) -> None:
    started = time.monotonic()
    module.built.mkdir(parents=True, exist_ok=True)
    partial, whole = module.built / f".{tool}.partial", module.built / tool
    subprocess.run(
        ["go", "build", *module.flags, "-o", partial, package],
        cwd=module.folder,
        # The module is not part of a go.work of the caller, and C compilers differ.
        env=os.environ | {"CGO_ENABLED": "0", "GOWORK": "off"},
        check=True,
    )
    partial.replace(whole)
    size = whole.stat().st_size / 1e6
    say(f"  {tool:<24} {size:4.0f} MB  {time.monotonic() - started:4.0f} s")


def main() -> None:
    all_tools = [(module, tool, package) for module in MODULES for tool, package in module.packages]
    known = [tool for _, tool, _ in all_tools]
    parser = argparse.ArgumentParser(prog="python -m tools.kube.build", description="Build the Kubernetes tools.")
    parser.add_argument("tools", nargs="*", metavar="tool", help=f"only these of: {', '.join(known)}")
    asked = parser.parse_args().tools
    if unknown := sorted(set(asked) - set(known)):
        parser.error(f"there is no tool {unknown[0]}; there are {', '.join(known)}")
    wanted = set(asked or known) - (NOT_NEEDED_BESIDE_A_CLUSTER if uses_existing_cluster() else set())

    try:
        missing = [tool for tool in known if tool in wanted and find(tool) is None]
    except FileNotFoundError as error:
        sys.exit(f"{error}.")
    if not missing:
        say("Nothing to build: every tool is there already.")
        return
    if shutil.which("go") is None:
        sys.exit(NO_GO)

    say(f"Building {', '.join(missing)} into {cache()}.")
    say("From nothing that takes about eight minutes on two cores, 1.2 GB of sources and 4 GB of Go's build cache.")
    with locked(cache() / "lock"):
        for module, tool, package in all_tools:
            # Look again: another build may have made it while this one waited.
            if tool in missing and find(tool) is None:
                build(module, tool, package)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError:
        sys.exit("That failed; what Go says is above. What was built stays: `make kube` goes on from here.")
    except KeyboardInterrupt:
        sys.exit("Stopped. What was built stays: `make kube` goes on from here.")
