"""The type of numbers that `engine.dtype` names."""

from typing import Any

import torch

from motet.errors import SetupError
from motet_runner.supported_models import stored_dtype


def dtype_named(wanted: str, device: torch.device, raw: dict[str, Any]) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if wanted == "auto":
        wanted = stored_dtype(raw) or "bfloat16"
        if wanted == "bfloat16" and _lacks_bfloat16(device):
            wanted = "float16"
        if wanted not in known:
            raise SetupError(f"config.json has dtype {wanted!r}. Set engine.dtype to one of {', '.join(known)}.")
    if wanted not in known:
        raise SetupError(f"engine.dtype {wanted!r} is unknown. Choose one of auto, {', '.join(known)}.")
    if wanted == "bfloat16" and _lacks_bfloat16(device):
        raise SetupError(
            "engine.dtype is bfloat16, which this GPU does not compute with; use auto, float16 or float32."
        )
    return known[wanted]


def _lacks_bfloat16(device: torch.device) -> bool:
    """True for GPUs before NVIDIA's Ampere"""
    return device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
