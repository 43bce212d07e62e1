"""Build the Kubernetes tools for the tests of a cluster into the user's cache (`make kube`). Run it from the root:
`python -m tools.kube.build [tool ...]`.

The Go client downloads the sources and checks them against the go.sum files beside this one. A tool is not built if it
is current, or if the environment names it (see binaries.py). Each file appears complete or not at all. If several
builds run at the same time, one builds and the others wait for it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time

from tools.kube.binaries import MODULES, NOT_NEEDED_BESIDE_A_CLUSTER, Module, cache, find, uses_existing_cluster
from tools.lock import locked

NO_GO = """\
Building the Kubernetes tools needs Go 1.26 or newer, and there is no `go` in PATH.
Install Go, or set KUBEBUILDER_ASSETS to a folder with etcd, kube-apiserver, kube-controller-manager and kubectl.
Without these tools, tests on a real control plane are skipped; everything else works."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def build(module: Module, tool: str, package: str) -> None:
    started = time.monotonic()
    module.built.mkdir(parents=True, exist_ok=True)
    partial, whole = module.built / f".{tool}.partial", module.built / tool
    subprocess.run(
        ["go", "build", *module.flags, "-o", partial, package],
        cwd=module.folder,
        # A go.work of the caller does not list this module. Without cgo, no C compiler is needed.
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
        parser.error(f"there is no tool {unknown[0]}; the tools are {', '.join(known)}")
    wanted = set(asked or known) - (NOT_NEEDED_BESIDE_A_CLUSTER if uses_existing_cluster() else set())

    try:
        missing = [tool for tool in known if tool in wanted and find(tool) is None]
    except FileNotFoundError as error:
        sys.exit(f"{error}.")
    if not missing:
        say("Nothing to build: all tools exist.")
        return
    if shutil.which("go") is None:
        sys.exit(NO_GO)

    say(f"Building {', '.join(missing)} into {cache()}.")
    say("The first build takes a quarter of an hour on two cores, and disk: 1.2 GB for sources, 4 GB for Go's cache.")
    waits = "Another build of the Kubernetes tools is running. Waiting for it."
    with locked(cache() / "lock", waiting=lambda: say(waits)):
        for module, tool, package in all_tools:
            # Check again: another build may have made it while this one waited.
            if tool in missing and find(tool) is None:
                build(module, tool, package)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError:
        sys.exit(
            "The build failed; Go's messages are above. Finished tools are kept: run `make kube` again to continue."
        )
    except KeyboardInterrupt:
        sys.exit("Stopped. Finished tools are kept: run `make kube` again to continue.")
