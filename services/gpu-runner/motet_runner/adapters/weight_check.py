"""Checks that an adapter's weights are finite and change something. It reads them with numpy and needs no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from motet.errors import AdapterIncompatible
from motet_runner.adapters.compatibility_check import LoraTensor
from motet_runner.adapters.peft_config import WEIGHTS_NAME

# For each float type: an integer type of its width, the bits of its exponent (all set: infinite or not a number), and
# all bits but the sign (none set: zero). numpy has no bfloat16; the bits are enough here.
_BITS: dict[str, tuple[type[np.unsignedinteger], int, int]] = {
    "F64": (np.uint64, 0x7FF0000000000000, 0x7FFFFFFFFFFFFFFF),
    "F32": (np.uint32, 0x7F800000, 0x7FFFFFFF),
    "F16": (np.uint16, 0x7C00, 0x7FFF),
    "BF16": (np.uint16, 0x7F80, 0x7FFF),
}


def check_values(path: Path, tensors: Mapping[str, LoraTensor]) -> None:
    """Raises AdapterIncompatible for weights that are not finite, and for a LoRA that is zero everywhere."""
    acting: set[str] = set()
    idle: set[tuple[str, str]] = set()
    for name, half in tensors.items():
        kind, exponent, magnitude = _BITS[half.tensor.dtype]
        count = half.tensor.bytes // kind().itemsize
        bits: npt.NDArray[Any] = np.memmap(path, kind, mode="r", offset=half.tensor.start, shape=(count,))
        if bool(((bits & exponent) == exponent).any()):
            raise AdapterIncompatible(
                f"{name} in {WEIGHTS_NAME} has values that are infinite or not a number. The training has diverged. "
                "Use an earlier checkpoint.",
                reason="FormatRejected",
            )
        if not bool((bits & magnitude).any()):
            idle.add((half.module, half.half))
        acting.add(half.module)
    if all((module, "A") in idle or (module, "B") in idle for module in acting):
        raise AdapterIncompatible(
            f"{WEIGHTS_NAME} changes nothing: in every module, lora_A or lora_B is all zeros. Save the adapter again "
            "after training.",
            reason="NoEffect",
        )
