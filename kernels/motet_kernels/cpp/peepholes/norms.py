"""The norm by the root of the mean of squares, as modules compute it: in float32, rounded before the weight."""

from dataclasses import replace

import torch

from motet_kernels.cpp.peepholes.matching import Found, Uses, in_sizes, is_whole, lie_together, same
from motet_kernels.cpp.steps import Compute, Place, Value


def modules_norm(uses: Uses, number: int) -> Found | None:
    """weight · (x · rsqrt(mean(x · x) + epsilon)), found by its mean"""
    mean = uses.compute(number, "mean")
    if mean is None or mean.out is None:
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
    scale = uses.steps[scaled]
    assert isinstance(scale, Compute)
    factors = [in_sizes(place, scale.sizes, sizes) for place in scale.inputs]
    if not any(same(one, wide) and same(other, root) for one, other in (factors, factors[::-1])):
        return None
    if wide.of is not x.of and not steps.issuperset(uses.readers(wide.of)):
        return None
    result = scale
    if wide.of is not x.of:
        rounded = uses.only_reader(result.out.of if result.out else None, "copy")
        if rounded is None:
            return None
        narrow = uses.steps[rounded]
        assert isinstance(narrow, Compute)
        if not same(in_sizes(narrow.inputs[0], narrow.sizes, sizes), in_sizes(result.out, result.sizes, sizes)):
            return None
        steps.add(rounded)
        result = narrow
    weighted = uses.only_reader(result.out.of if result.out else None, "multiply")
    if weighted is None:
        return None
    last = uses.steps[weighted]
    assert isinstance(last, Compute)
    normed, out = in_sizes(result.out, result.sizes, sizes), in_sizes(last.out, last.sizes, sizes)
    both = [in_sizes(place, last.sizes, sizes) for place in last.inputs]
    weight = next((one for one, other in (both, both[::-1]) if same(other, normed)), None)
    if weight is None or out is None or not isinstance(weight.of, torch.Tensor):
        return None
    if not lie_together([x, weight, out], x.of.dtype):
        return None
    return Found(frozenset({*steps, weighted}), Compute("modules_norm", sizes, out, (x, weight), real=epsilon))


def _before(uses: Uses, mean: Compute) -> tuple[Place, Place, set[int]] | None:
    """The float32 numbers whose squares have this mean, what they were before, and the steps."""
    squares = in_sizes(mean.inputs[0], mean.sizes, mean.sizes)
    number = None if squares is None else uses.only_writer(squares.of, "multiply")
    if squares is None or number is None or len(uses.readers(squares.of)) != 1:
        return None
    square = uses.steps[number]
    assert isinstance(square, Compute)
    wide = in_sizes(square.inputs[0], square.sizes, mean.sizes)
    if not same(*square.inputs) or not same(in_sizes(square.out, square.sizes, mean.sizes), squares):
        return None
    if wide is None or squares.of.dtype is not torch.float32 or wide.of.dtype is not torch.float32:
        return None
    copied = uses.only_writer(wide.of, "copy")
    if copied is None:
        return wide, wide, {number}
    copy = uses.steps[copied]
    assert isinstance(copy, Compute)
    x = in_sizes(copy.inputs[0], copy.sizes, mean.sizes)
    if x is None or x.of.dtype is torch.float32:
        return wide, wide, {number}
    return (wide, x, {number, copied}) if same(in_sizes(copy.out, copy.sizes, mean.sizes), wide) else None


def _after(uses: Uses, mean: Compute) -> tuple[float, Place, set[int]] | None:
    """What is added to this mean, its inverse root in the mean's sizes, and the steps."""
    means = in_sizes(mean.out, mean.sizes, mean.sizes)
    added = None if means is None else uses.only_reader(means.of, "add")
    if means is None or added is None:
        return None
    plus = uses.steps[added]
    assert isinstance(plus, Compute)
    epsilon = next((place.of for place in plus.inputs if isinstance(place.of, torch.Tensor)), None)
    rooted = uses.only_reader(plus.out.of if plus.out else None, "rsqrt")
    if rooted is None or epsilon is None or epsilon.numel() != 1 or epsilon.dtype is not torch.float32:
        return None
    root = uses.steps[rooted]
    assert isinstance(root, Compute)
    values = [place for place in (*plus.inputs, plus.out) if place is not None and isinstance(place.of, Value)]
    wholes = [*((place, plus.sizes) for place in values), (root.inputs[0], root.sizes), (root.out, root.sizes)]
    if root.out is None or len(values) != 2 or not all(is_whole(place, sizes) for place, sizes in wholes):
        return None
    if any(place is None or place.of.dtype is not torch.float32 for place in (*values, means, root.out)):
        return None
    return float(epsilon), replace(means, of=root.out.of), {added, rooted}


def sum_and_norm(uses: Uses, number: int) -> Found | None:
    """A norm of all numbers of a sum, which others read later, too"""
    norm = uses.compute(number, "modules_norm")
    if norm is None or norm.sizes[:-1] != (1, 1):  # of all numbers, and not of those of each head
        return None
    x, weight = norm.inputs
    added = uses.only_writer(x.of, "add")
    if added is None or not is_whole(x, norm.sizes) or min(uses.readers(x.of)) < number:
        return None
    add = uses.steps[added]
    assert isinstance(add, Compute)
    terms = [in_sizes(place, add.sizes, norm.sizes) for place in add.inputs]
    one, other = terms
    if one is None or other is None or not is_whole(add.out, add.sizes):
        return None
    if not all(isinstance(place.of, Value) for place in (one, other)) or not lie_together([one, other], x.of.dtype):
        return None
    return Found(
        frozenset({added, number}),
        Compute("sum_and_norm", norm.sizes, norm.out, (one, other, weight), real=norm.real, also=x),
    )
