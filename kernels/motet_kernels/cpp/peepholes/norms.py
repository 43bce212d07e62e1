"""RMS norms, as modules compute them: in float32, rounded before the weight or after it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from motet_kernels.cpp.peepholes.matching import Found, Uses, in_sizes, is_whole, lie_together, same
from motet_kernels.cpp.steps import Compute, Place, Value


def modules_norm(uses: Uses, number: int) -> Found | None:
    """weight · (x · rsqrt(mean(x · x) + epsilon)), found from its mean"""
    mean = uses.compute(number, "mean")
    if mean is None:
        return None
    sizes, before, after = mean.sizes, _before(uses, mean), _after(uses, mean)
    if before is None or after is None:
        return None
    wide, x, of_squares = before
    epsilon, root, of_root = after
    scaled = uses.only_reader(root.of, "multiply")
    if scaled is None:
        return None
    steps = {number, *of_squares, *of_root, scaled}
    scale = uses.step(scaled)
    factors = [in_sizes(place, scale.sizes, sizes) for place in scale.inputs]
    if not any(same(one, wide) and same(other, root) for one, other in (factors, factors[::-1])):
        return None
    if scale.result.of.dtype is not torch.float32:
        return None
    weighted = _weighted(uses, scale, sizes, x.of.dtype)
    if weighted is None:
        return None
    weight, out, of_weight = weighted
    if not lie_together([x, out], x.of.dtype) or weight.strides[-1] != 1:
        return None
    by = Compute("modules_norm", sizes, out, (x, weight), real=epsilon)
    return Found(frozenset({*steps, *of_weight}), by)


def _weighted(
    uses: Uses, scale: Compute, sizes: Sequence[int], dtype: torch.dtype
) -> tuple[Place, Place, set[int]] | None:
    """The weight that these float32 numbers are multiplied with, the result, and the steps.

    A model in another type rounds either before this product, with a weight of its type, or after it, with a weight in
    float32.
    """
    rounded = _following(uses, scale, sizes, "copy") if dtype is not torch.float32 else None
    product = _following(uses, rounded.step if rounded else scale, sizes, "multiply")
    if product is None or product.other is None or not isinstance(product.other.of, torch.Tensor):
        return None
    weight, steps, last = product.other, {product.number}, product
    if rounded is not None:
        if rounded.step.result.of.dtype is not dtype:
            return None
        steps.add(rounded.number)
    elif dtype is not torch.float32:
        after = _following(uses, product.step, sizes, "copy")
        if after is None or product.step.result.of.dtype is not torch.float32:
            return None
        if not product.other.of.is_contiguous():  # its copy would have another layout
            return None
        steps.add(after.number)
        weight, last = replace(weight, of=product.other.of.float()), after
    out = in_sizes(last.step.result, last.step.sizes, sizes)
    of_type = dtype if rounded is not None else torch.float32
    return (weight, out, steps) if out is not None and weight.of.dtype is of_type else None


@dataclass(frozen=True)
class _Following:
    number: int
    step: Compute
    other: Place | None
    """The step's other operand"""


def _following(uses: Uses, step: Compute, sizes: Sequence[int], operation: str) -> _Following | None:
    """The only step that reads a result, if it computes this operation"""
    number = uses.only_reader(step.result.of, operation)
    if number is None:
        return None
    reader = uses.step(number)
    result = in_sizes(step.result, step.sizes, sizes)
    places = [in_sizes(place, reader.sizes, sizes) for place in reader.inputs]
    if len(places) == 1:
        return _Following(number, reader, None) if same(places[0], result) else None
    other = next((one for one, read in (places, places[::-1]) if same(read, result)), None)
    return None if other is None else _Following(number, reader, other)


def _before(uses: Uses, mean: Compute) -> tuple[Place, Place, set[int]] | None:
    """The float32 numbers whose squares have this mean, their source before the conversion, and the steps."""
    squares = in_sizes(mean.inputs[0], mean.sizes, mean.sizes)
    number = None if squares is None else uses.only_writer(squares.of, "multiply")
    if squares is None or number is None:
        return None
    square = uses.step(number)
    wide = in_sizes(square.inputs[0], square.sizes, mean.sizes)
    if not same(*square.inputs) or not same(in_sizes(square.result, square.sizes, mean.sizes), squares):
        return None
    if wide is None or squares.of.dtype is not torch.float32 or wide.of.dtype is not torch.float32:
        return None
    copied = uses.only_writer(wide.of, "copy")
    if copied is None:
        return wide, wide, {number}
    copy = uses.step(copied)
    x = in_sizes(copy.inputs[0], copy.sizes, mean.sizes)
    if x is None or x.of.dtype is torch.float32:
        return wide, wide, {number}
    return (wide, x, {number, copied}) if same(in_sizes(copy.result, copy.sizes, mean.sizes), wide) else None


def _after(uses: Uses, mean: Compute) -> tuple[float, Place, set[int]] | None:
    """The epsilon of this mean, its inverse root in the mean's sizes, and the steps."""
    means = in_sizes(mean.result, mean.sizes, mean.sizes)
    added = None if means is None else uses.only_reader(means.of, "add")
    if means is None or added is None:
        return None
    plus = uses.step(added)
    epsilon = next((place.of for place in plus.inputs if isinstance(place.of, torch.Tensor)), None)
    rooted = uses.only_reader(plus.result.of, "rsqrt")
    if rooted is None or epsilon is None or epsilon.numel() != 1 or epsilon.dtype is not torch.float32:
        return None
    root = uses.step(rooted)
    values = [place for place in (*plus.inputs, plus.result) if isinstance(place.of, Value)]
    wholes = [*((place, plus.sizes) for place in values), (root.inputs[0], root.sizes), (root.result, root.sizes)]
    if len(values) != 2 or not all(is_whole(place, sizes) for place, sizes in wholes):
        return None
    if any(place.of.dtype is not torch.float32 for place in (*values, means, root.result)):
        return None
    return float(epsilon), replace(means, of=root.result.of), {added, rooted}


def sum_and_norm(uses: Uses, number: int) -> Found | None:
    """A norm of all numbers of a sum that later steps also read"""
    norm = uses.compute(number, "modules_norm")
    if norm is None or norm.sizes[:-1] != (1, 1):  # of all numbers, not per head
        return None
    x, weight = norm.inputs
    added = uses.only_writer(x.of, "add")
    if added is None or not is_whole(x, norm.sizes):
        return None
    add = uses.step(added)
    terms = [in_sizes(place, add.sizes, norm.sizes) for place in add.inputs]
    one, other = terms
    if one is None or other is None or not is_whole(add.result, add.sizes):
        return None
    if not all(isinstance(place.of, Value) for place in (one, other)) or not lie_together([one, other], x.of.dtype):
        return None
    return Found(
        frozenset({added, number}),
        Compute("sum_and_norm", norm.sizes, norm.out, (one, other, weight), real=norm.real, also=x),
    )
