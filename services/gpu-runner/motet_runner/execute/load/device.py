"""The device that `engine.device` names, and whether this process can compute on a GPU."""

from collections.abc import Collection
from pathlib import Path

import structlog
import torch

from motet.errors import SetupError

log = structlog.get_logger(__name__)

_A_GPU = Path("/dev/nvidia0")


def device_named(wanted: str) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if cuda_is_usable() else "cpu"
    if wanted not in ("cpu", "cuda"):
        raise SetupError(
            f"engine.device {wanted!r} is unknown. Choose one of auto, cpu, cuda; CUDA_VISIBLE_DEVICES chooses one of "
            "several GPUs."
        )
    device = torch.device(wanted)
    if wanted == "cuda":
        if not cuda_is_usable():
            raise SetupError(
                f"engine.device is cuda and no CUDA device is visible ({why_not()}). Mend that, or use auto or cpu."
            )
        check_card(device)
    return device


def cuda_is_usable() -> bool:
    """Logs why a GPU that exists cannot be used, for example because of an old driver."""
    if torch.cuda.is_available():
        return True
    if _A_GPU.exists():
        log.warning("gpu_not_usable", reason=why_not())
    return False


def why_not() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().partition("\n")[0].rstrip(".")
    return "torch sees none"


def check_card(device: torch.device) -> None:
    """Raises SetupError if this torch has no code for the card."""
    capability = torch.cuda.get_device_capability(device)
    architectures = torch.cuda.get_arch_list()
    if not has_code_for(capability, architectures):
        major, minor = capability
        raise SetupError(
            f"The GPU is a {torch.cuda.get_device_name(device)} of compute capability {major}.{minor}, and this torch "
            f"({torch.__version__}) has code for {', '.join(architectures)} only. Install a torch for this GPU, or set "
            "engine.device to cpu."
        )


def has_code_for(capability: tuple[int, int], architectures: Collection[str]) -> bool:
    """`architectures`: `sm_90` is code for capability 9.0 and later minor versions; `compute_90` is compiled on the
    machine for 9.0 and all later versions."""
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        digits = number.rstrip("af")  # suffixes: for one chip, or one family
        has = int(digits[:-1]), int(digits[-1])
        if kind == "compute" and has <= capability:
            return True
        if kind == "sm" and has[0] == capability[0] and has[1] <= capability[1]:
            return True
    return False
