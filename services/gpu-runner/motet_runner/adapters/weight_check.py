"""Checks that an adapter's weights and products are finite, and that they change something. Needs no torch.

The products of finite weights may be infinite. `check_products` bounds them for all inputs of numbers from -1 to 1, by
the weights' absolute values. A norm gives hidden states about this size. Real adapters stay many orders of magnitude
below the limits.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from motet.errors import AdapterIncompatible
from motet_runner.adapters.compatibility_check import LoraTensor
from motet_runner.adapters.layout import AdapterLayout, LoraLinear, StoredTensor
from motet_runner.adapters.peft_config import WEIGHTS_NAME

MAX_NUMBERS = {"float32": 3.4e38, "bfloat16": 3.38e38, "float16": 65504.0}
"""The largest number of each type that an engine computes in."""

_TYPES: dict[str, type[np.generic]] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def check_values(path: Path, tensors: Mapping[str, LoraTensor]) -> None:
    """Raises AdapterIncompatible for weights that are not finite, and for a LoRA that is zero everywhere."""
    acting: set[str] = set()
    shifted: set[str] = set()
    """Those whose own result may be scaled or shifted"""
    idle: set[tuple[str, str]] = set()
    for name, half in tensors.items():
        values = _values(path, half.tensor)
        if not np.isfinite(values).all():
            raise AdapterIncompatible(
                f"{name} in {WEIGHTS_NAME} has values that are infinite or not a number. The training has diverged. "
                "Use an earlier checkpoint.",
                reason="FormatRejected",
            )
        if half.place.half == "magnitude" and not values.all():
            raise AdapterIncompatible(
                f"{name} in {WEIGHTS_NAME} has a magnitude of 0, so the linear would have no result. The training has "
                "diverged. Use an earlier checkpoint.",
                reason="FormatRejected",
            )
        if half.place.half in {"magnitude", "lora_bias", "bias"} and values.any():
            shifted.add(half.place.module)
        if not values.any():
            idle.add((half.place.module, half.place.half))
        acting.add(half.place.module)
    if not shifted and all((module, "A") in idle or (module, "B") in idle for module in acting):
        raise AdapterIncompatible(
            f"{WEIGHTS_NAME} changes nothing: in every module, lora_A or lora_B is all zeros. Save the adapter again "
            "after training.",
            reason="NoEffect",
        )


def check_products(layout: AdapterLayout, dtype: str) -> None:
    """Raises AdapterIncompatible, with the name of the first linear whose LoRA, magnitudes or biases overflow in an
    engine of `dtype`."""
    with np.errstate(over="ignore", invalid="ignore"):
        for linear in layout.linears:
            _check_vectors(layout, linear, dtype)
            if linear.a is not None and linear.b is not None:
                reached = _reach(layout, linear.a, linear.b, linear.scale)
                _check_reached(f"lora_B · lora_A of {linear.module}", reached, dtype)


def _check_vectors(layout: AdapterLayout, linear: LoraLinear, dtype: str) -> None:
    """A row of a changed weight is as long as its magnitude says, and an input at most as long as one of ones. What is
    added to the result before is divided by norms in float32."""
    longest = 1.0 if linear.a is None else math.sqrt(linear.a.shape[1])
    of_result = "float32" if linear.magnitude is not None else dtype
    for name, vector, scale, kind in (
        ("lora_magnitude_vector", linear.magnitude, longest, dtype),
        ("lora_B.bias", linear.lora_bias, linear.scale, of_result),
        ("bias", linear.bias, 1.0, dtype),
    ):
        if vector is not None:
            added = _magnitudes(layout, vector) * np.float32(abs(scale))
            _check_reached(f"{name} of {linear.module}", _largest(added), kind)


def _check_reached(what: str, reached: float, dtype: str) -> None:
    if reached <= MAX_NUMBERS[dtype]:
        return
    fault = f"may reach {reached:.1e}, but {dtype} ends at {MAX_NUMBERS[dtype]:.1e}"
    if math.isinf(reached):
        fault = "or the sum of its squares may overflow float32"
    raise AdapterIncompatible(
        f"{what} in {WEIGHTS_NAME} can't be computed in {dtype}: for inputs from -1 to 1, it {fault}. The training has "
        "diverged. Use an earlier checkpoint.",
        reason="FormatRejected",
    )


def _reach(layout: AdapterLayout, lora_a: StoredTensor, lora_b: StoredTensor, scale: float) -> float:
    """The largest number in the computation of the LoRA's result; infinite if the sum of the result's squares is."""
    a, b = _magnitudes(layout, lora_a), _magnitudes(layout, lora_b) * np.float32(abs(scale))
    inner = a.sum(axis=1)
    return max(_largest(b @ inner), *(float(each.max()) for each in (a, b, inner)))


def _largest(added: npt.NDArray[np.float32]) -> float:
    """Of the numbers that are added to a result; infinite if the sum of their squares is. That is computed in float32:
    the next operation on the result, a norm or the product of queries and keys, also computes in float32 at least."""
    return float(added.max()) if np.isfinite(np.square(added).sum()) else math.inf


def _magnitudes(layout: AdapterLayout, matrix: StoredTensor) -> npt.NDArray[np.float32]:
    """Absolute values. A value that float32 can't hold becomes infinite."""
    magnitudes: npt.NDArray[np.float32] = np.abs(_values(layout.file, matrix).astype(np.float32, copy=False))
    return magnitudes


def _values(path: Path, matrix: StoredTensor) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = np.fromfile(path, _TYPES[matrix.dtype], math.prod(matrix.shape), offset=matrix.start)
    if matrix.dtype == "BF16":  # the upper half of a float32
        values = np.left_shift(values, 16, dtype=np.uint32).view(np.float32)
    return values.reshape(matrix.shape)
