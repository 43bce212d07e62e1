"""Run the tests of models with the oldest and the newest transformers that the product accepts, and those of vLLM with
the oldest version that the product drives (`make compat`).

Each transformers lies in a folder of its own in the user's cache, or below the folder that MOTET_COMPAT names. The
tests run with the packages of .venv; only transformers comes from that folder.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.cache_folder import cache_folder
from tools.lock import locked
from tools.peers.environment import folder as peer_folder
from tools.peers.environment import python_of
from tools.peers.vllm import VLLM, VLLM_0_31

ROOT = Path(__file__).resolve().parent.parent
SUITE = (
    "tests/runner/test_families.py",
    "tests/runner/test_length_rope.py",
    "tests/runner/test_models.py",
    "tests/runner/test_checkpoints.py",
    "tests/runner/test_engine_matches_peft.py",
    "tests/runner/test_fused.py",
    "tests/contract/test_engines.py",
    "tests/runner/external/test_vllm.py",
    "tests/stack/test_vllm_groups.py",
)
"""Also the tests of it that `make test` leaves out"""
SUITE_OF_VLLM = ("tests/contract/test_engines.py", "tests/runner/external/test_vllm.py", "-k", "test_vllm or itself")
"""With an older vLLM"""
LIBRARY = "transformers"
OLDER = "vllm-0.31"
NAMED_BY = "MOTET_COMPAT"
"""The variable that names another folder"""


class CannotRun(Exception):
    pass


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


# ----------------------------------------------------------------------------------------------- decisions, without I/O


def folder(environment: Mapping[str, str]) -> Path:
    return cache_folder(environment, "compat", named_by=NAMED_BY)


def requirements(project: str) -> dict[str, str]:
    """What pip is asked for, by `oldest` and `newest`, from the text of pyproject.toml."""
    extras = tomllib.loads(project)["project"]["optional-dependencies"]
    (wanted,) = [one for one in extras["runner"] if re.match(rf"{LIBRARY}\b", one)]
    parts = re.fullmatch(rf"{LIBRARY}>=([\d.]+),<([\d.]+)", wanted.replace(" ", ""))
    if parts is None:
        raise CannotRun(f"pyproject.toml requires {wanted!r}, and this needs {LIBRARY}>=OLDEST,<NEXT.")
    return {"oldest": f"{LIBRARY}=={parts[1]}", "newest": parts[0]}


# ------------------------------------------------------------------------------------------------------ the two folders


def install(requirement: str, into: Path) -> None:
    """In place of what the folder has. The library itself says when it is imported that another package does not
    suffice."""
    with tempfile.TemporaryDirectory(dir=into.parent, prefix="download-") as work:
        new = Path(work) / "new"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        if subprocess.run([*pip, "--target", new, requirement], check=False).returncode:
            raise CannotRun(f"The package index gave no {requirement}; pip's message is above.")
        if into.exists():
            into.rename(Path(work) / "old")
        new.rename(into)


def run_suite(library: Path, arguments: Sequence[str]) -> int:
    paths = os.pathsep.join([str(library), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths}
    asked = [sys.executable, "-c", f"import {LIBRARY}; print({LIBRARY}.__file__, {LIBRARY}.__version__, sep=chr(10))"]
    done = subprocess.run(asked, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    file, _, version = done.stdout.strip().partition("\n")
    if done.returncode or not Path(file).is_relative_to(library):
        raise CannotRun(f"{LIBRARY} of {library} cannot be imported; the reason is above.")
    say(f"{LIBRARY} {version}")
    pytest = [sys.executable, "-m", "pytest", "-q", "--timeout", "7200", *SUITE, *arguments]
    return subprocess.run(pytest, cwd=ROOT, env=environment, check=False).returncode


def run_suite_of_vllm(arguments: Sequence[str]) -> int:
    """With .venv's transformers. 0 also if that vLLM is not built: this says so."""
    python = python_of(peer_folder(VLLM_0_31, os.environ))
    if not python.exists():
        say(f"No tests with {VLLM_0_31.requirement}: `make peer PEERS=vllm-0.31` builds an environment.")
        return 0
    say(VLLM_0_31.requirement)
    environment = os.environ | {VLLM.named_by: str(python.parent.parent)}
    pytest = [sys.executable, "-m", "pytest", "-q", "--timeout", "7200", *SUITE_OF_VLLM, *arguments]
    return subprocess.run(pytest, cwd=ROOT, env=environment, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.compat", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=["oldest", "newest", OLDER], help="one of the three")
    given, arguments = parser.parse_known_args()
    place = folder(os.environ)
    try:
        wanted = requirements((ROOT / "pyproject.toml").read_text())
        place.mkdir(parents=True, exist_ok=True)
        failed = []
        with locked(place / "lock", waiting=lambda: say("Another run of these tests is under way. Waiting for it.")):
            for name in [given.only] if given.only else [*wanted, OLDER]:
                if name == OLDER:
                    if run_suite_of_vllm(arguments):
                        failed.append(name)
                    continue
                install(wanted[name], place / name)
                if run_suite(place / name, arguments):
                    failed.append(name)
    except CannotRun as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{place} cannot be written: {error}. Set {NAMED_BY} to another folder.")
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
