"""RMS norms, as modules compute them: in float32, and rounded before or after the multiplication with the weight."""

from dataclasses import replace

import torch

from motet_kernels.cpp.peepholes.matching import Found, Numbers, Uses, read_in, together, written_in
from motet_kernels.cpp.steps import Compute


def modules_norm(uses: Uses, number: int) -> Found | None:
    """weight · (x · rsqrt(mean(x · x) + epsilon)), found from its mean"""
    mean = uses.compute(number, "mean")
    if mean is None:
        return None
    before, after = _before(uses, mean), _after(uses, mean)
    if before is None or after is None:
        return None
    wide, x, of_squares = before
    epsilon, root, of_root = after
    scale = uses.user(root, "multiply")
    if scale is None or not scale.others[0].are(wide) or scale.step.result.of.dtype is not torch.float32:
        return None
    weighted = _weighted(uses, scale.step, x.dtype)
    if weighted is None:
        return None
    weight, out, of_weight = weighted
    places, of_one = together(mean.sizes, x, out), together(mean.sizes, weight)
    if places is None or of_one is None:
        return None
    steps = frozenset({number, scale.number, *of_squares, *of_root, *of_weight})
    return Found(steps, Compute("modules_norm", mean.sizes, places[1], (places[0], *of_one), real=epsilon))


def _weighted(uses: Uses, scale: Compute, dtype: torch.dtype) -> tuple[Numbers, Numbers, set[int]] | None:
    """The weight that the result of `scale` is multiplied with, the product, and the steps.

    A model that is not in float32 rounds before this product, and the weight has the model's type; or it rounds after
    this product, and the weight is in float32.
    """
    rounded = uses.user(written_in(scale), "copy")
    product = uses.user(written_in(rounded.step if rounded else scale), "multiply")
    if product is None:
        return None
    (weight,), last, steps = product.others, product, {product.number}
    of = weight.of
    if not isinstance(of, torch.Tensor):
        return None
    if rounded is not None:
        if rounded.step.result.of.dtype is not dtype:
            return None
        steps.add(rounded.number)
    elif dtype is not torch.float32:
        after = uses.user(written_in(product.step), "copy")
        if after is None or product.step.result.of.dtype is not torch.float32:
            return None
        if not of.is_contiguous():  # its copy would have another layout
            return None
        steps.add(after.number)
        weight, last = Numbers(replace(weight.place, of=of.float()), weight.sizes), after
    of_type = dtype if rounded is not None else torch.float32
    return (weight, written_in(last.step), steps) if weight.dtype is of_type else None


def _before(uses: Uses, mean: Compute) -> tuple[Numbers, Numbers, set[int]] | None:
    """The float32 numbers whose squares have this mean, their source before the conversion, and the steps."""
    (squares,) = read_in(mean)
    square = uses.source(squares, "multiply")
    if square is None:
        return None
    wide, other = read_in(square[1])
    if not wide.are(other) or squares.dtype is not torch.float32 or wide.dtype is not torch.float32:
        return None
    copy = uses.source(wide, "copy")
    if copy is None or copy[1].inputs[0].of.dtype is torch.float32:
        return wide, wide, {square[0]}
    (narrow,) = read_in(copy[1])
    return wide, narrow, {square[0], copy[0]}


def _after(uses: Uses, mean: Compute) -> tuple[float, Numbers, set[int]] | None:
    """The epsilon of this mean, its inverse root in the mean's sizes, and the steps."""
    means = Numbers(mean.result, (*mean.sizes[:-1], 1))
    plus = uses.user(means, "add")
    if plus is None:
        return None
    rooted = uses.user(written_in(plus.step), "rsqrt")
    if rooted is None:
        return None
    epsilon, root = plus.others[0].of, written_in(rooted.step).in_sizes(means.sizes)
    if root is None or not isinstance(epsilon, torch.Tensor) or epsilon.numel() != 1:
        return None
    if any(step.result.of.dtype is not torch.float32 for step in (mean, plus.step, rooted.step)):
        return None
    return float(epsilon), Numbers(root, mean.sizes), {plus.number, rooted.number}


def sum_and_norm(uses: Uses, number: int) -> Found | None:
    """A norm of all numbers of a sum. The fused step writes the sum, too."""
    norm = uses.compute(number, "modules_norm")
    if norm is None or norm.sizes[:-1] != (1, 1):  # of all numbers, not per head
        return None
    x, weight = read_in(norm)
    added = uses.source(x, "add")
    if added is None or len(uses.writers(x.of)) > 1:
        return None
    places = together(norm.sizes, x, *read_in(added[1]))
    if places is None:
        return None
    also, *terms = places
    by = Compute("sum_and_norm", norm.sizes, norm.out, (*terms, weight.place), real=norm.real, also=also)
    return Found(frozenset({added[0], number}), by)
