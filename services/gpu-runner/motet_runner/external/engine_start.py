"""How the service starts the engine of a pool: our own, or one in another environment.

The service asks that environment first what it has. So a missing package is one sentence, and not the end of a process.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import requires, version
from pathlib import Path
from typing import NamedTuple

import motet
import motet_runner
from motet.errors import SetupError
from motet_runner.engine_client import ENGINE_COMMAND, NO_VARIABLES
from motet_runner.external.vllm.grammar_package import service_package
from motet_runner.external.vllm.names import differing
from motet_runner.external.vllm.versions import SETTING, check_version
from motet_runner.settings import Settings

ASKED = """
import json
from importlib.metadata import distributions
print(json.dumps({one.name: one.version for one in distributions()}))
"""
ANSWER_SECONDS = 60.0
VLLMS_ALONE = ("tensor_parallel", "stages", "kv_cache_dtype", "enforce_eager", "attention_backend")
"""Settings"""


class EngineStart(NamedTuple):
    command: tuple[str, ...]
    variables: Mapping[str, str]


def engine_start(settings: Settings) -> EngineStart:
    """Raises SetupError if the environment of the pool's engine is not as it must be."""
    if settings.backend == "motet":
        check_own(settings)
        return EngineStart(ENGINE_COMMAND, NO_VARIABLES)
    if settings.kernels == "exact":
        raise SetupError("MOTET_RUNNER_KERNELS is exact, and engine.backend is vllm, which has no exact mode.")
    python = settings.engine_python
    if python is None:
        raise SetupError(f"engine.backend is vllm, and {SETTING} is not set. Set it to the Python of its environment.")
    installed = packages_of(python)
    check_version(installed, str(python), lambda: differing(sources_of_vllm(python)))
    path = source_path()
    if not path:
        check_same_motet(installed, python)
    missing = [name for name in dependencies() if name not in installed]
    if missing:
        raise SetupError(f"{python} lacks packages that Motet needs. Install them there: {' '.join(missing)}.")
    paths = [*path, *filter(None, [os.environ.get("PYTHONPATH", "")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    variables |= service_package()
    return EngineStart((str(python), "-P", "-W", "ignore", "-m", "motet_runner.external.vllm"), variables)


def check_own(settings: Settings) -> None:
    """Raises SetupError for what only vLLM can do."""
    for name in VLLMS_ALONE:
        if getattr(settings, name) != Settings.model_fields[name].default:
            raise SetupError(f"MOTET_RUNNER_{name.upper()} is for engine.backend vllm, and this runner's is motet.")


def dependencies() -> list[str]:
    """The packages that every process of Motet needs."""
    names = [re.match(r"[\w.-]+", one) for one in requires("motet") or () if "extra ==" not in one]
    return [canonical(name[0]) for name in names if name is not None]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def packages_of(python: Path) -> dict[str, str]:
    """Package → version, of this interpreter's environment."""
    try:
        said = subprocess.run(
            [python, "-P", "-c", ASKED], capture_output=True, timeout=ANSWER_SECONDS, check=True, text=True
        )
        return {canonical(name): found for name, found in json.loads(said.stdout).items()}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it does not run"
        raise SetupError(f"{SETTING} is {python}, which is no Python of an environment: {reason}.") from None


def sources_of_vllm(python: Path) -> Callable[[str], str | None]:
    """Reads a file of the vLLM of this interpreter."""
    code = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    try:
        said = subprocess.run(
            [python, "-P", "-c", code], capture_output=True, timeout=ANSWER_SECONDS, check=True, text=True
        )
    except (OSError, subprocess.SubprocessError):
        return lambda _: None
    folder = Path(said.stdout.strip())

    def read(file: str) -> str | None:
        try:
            return (folder / file).read_text()
        except OSError:
            return None

    return read


def source_path() -> list[str]:
    """The folders with our own packages, if they are in a source tree. An installed Motet is beside packages that the
    engine must not see: then its environment needs a Motet of its own."""
    folders = [Path(one.__path__[0]).parent for one in (motet, motet_runner)]
    return [] if any(str(folder) in site_folders() for folder in folders) else [str(folder) for folder in folders]


def site_folders() -> list[str]:
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def check_same_motet(installed: Mapping[str, str], python: Path) -> None:
    """The two processes exchange pickles, so both must have the same classes."""
    ours, theirs = version("motet"), installed.get("motet")
    if theirs != ours:
        has = "has no Motet" if theirs is None else f"has Motet {theirs}"
        raise SetupError(f"{python} {has}, and this runner is Motet {ours}. Install motet=={ours} there.")
