"""Rotations of queries and keys: the first half of each head with the second. Before, each head may be normed; after,
keys are written into their pages."""

from dataclasses import replace

from motet_kernels.cpp.peepholes.matching import Found, Uses, in_sizes, is_whole, lie_together, same
from motet_kernels.cpp.steps import Compute, Place


def rotate(uses: Uses, number: int) -> Found | None:
    """x · cosines + [-second half of x, first half of x] · sines, found from its sum"""
    add = uses.compute(number, "add")
    if add is None or not all(is_whole(place, add.sizes) for place in (*add.inputs, add.result)):
        return None
    products = [uses.only_writer(place.of, "multiply") for place in add.inputs]
    straight, turned = products
    if straight is None or turned is None:
        return None
    return _rotation(uses, number, straight, turned) or _rotation(uses, number, turned, straight)


def _rotation(uses: Uses, number: int, straight: int, turned: int) -> Found | None:
    add, of_cosines, of_sines = map(uses.step, (number, straight, turned))
    sizes = of_sines.sizes
    for other, sines in (of_sines.inputs, of_sines.inputs[::-1]):
        partners = _partners(uses, other, sizes)
        if partners is None:
            continue
        x, steps = partners
        both = [in_sizes(place, of_cosines.sizes, sizes) for place in of_cosines.inputs]
        cosines = next((one for one, of_x in (both, both[::-1]) if same(of_x, x)), None)
        out = in_sizes(add.result, add.sizes, sizes)
        if cosines is None or out is None or not is_whole(of_cosines.result, of_cosines.sizes):
            continue
        if is_whole(of_sines.result, sizes) and lie_together([x, cosines, sines, out], x.of.dtype):
            products = (place.of.dtype for place in add.inputs)
            if all(dtype is x.of.dtype for dtype in products):
                by = Compute("rotate", sizes, out, (x, cosines, sines))
                return Found(frozenset({*steps, number, straight, turned}), by)
    return None


def _partners(uses: Uses, other: Place, sizes: tuple[int, ...]) -> tuple[Place, set[int]] | None:
    """x = (first half, second half), and the steps, if `other` is (-second half, first half)."""
    writers, half = uses.writers(other.of), sizes[-1] // 2
    if len(writers) != 2 or sizes[-1] % 2 or not is_whole(other, sizes):
        return None
    of_half = (*sizes[:-1], half)
    negative = next((found for one in writers if (found := _negative(uses, one, of_half)) is not None), None)
    if negative is None:
        return None
    second, (copied, negated) = negative
    straight = next(one for one in writers if one != copied)
    copy, moved = uses.compute(straight, "copy"), uses.compute(copied, "copy")
    if copy is None or moved is None:
        return None
    first, whole = in_sizes(copy.inputs[0], copy.sizes, of_half), in_sizes(other, sizes, sizes)
    if first is None or whole is None or first.of.dtype is not whole.of.dtype:
        return None
    if not same(second, replace(first, offset=first.offset + half * first.strides[-1])):
        return None
    if not same(in_sizes(moved.result, moved.sizes, of_half), whole):
        return None
    if not same(in_sizes(copy.result, copy.sizes, of_half), replace(whole, offset=half)):
        return None
    return first, {copied, negated, straight}


def _negative(uses: Uses, copied: int, sizes: tuple[int, ...]) -> tuple[Place, tuple[int, int]] | None:
    """The place whose negative is copied, and the steps"""
    copy = uses.compute(copied, "copy")
    if copy is None:
        return None
    number = uses.only_writer(copy.inputs[0].of, "negative")
    if number is None:
        return None
    negative = uses.step(number)
    if not is_whole(copy.inputs[0], copy.sizes) or not is_whole(negative.result, negative.sizes):
        return None
    place = in_sizes(negative.inputs[0], negative.sizes, sizes)
    if place is None or copy.inputs[0].of.dtype is not place.of.dtype:
        return None
    return place, (copied, number)


def norm_and_rotate(uses: Uses, number: int) -> Found | None:
    """A rotation of heads that are normed"""
    turn = uses.compute(number, "rotate")
    if turn is None:
        return None
    x, cosines, sines = turn.inputs
    normed = uses.only_writer(x.of, "modules_norm")
    if normed is None:
        return None
    norm = uses.step(normed)
    if norm.sizes != turn.sizes or not same(norm.result, x):
        return None
    inputs = norm.inputs[0], cosines, sines, norm.inputs[1]
    by = Compute("norm_and_rotate", turn.sizes, turn.out, inputs, real=norm.real)
    return Found(frozenset({number, normed}), by)


def write_rotated(uses: Uses, number: int) -> Found | None:
    """The write of rotated keys, and of the values beside them"""
    write = uses.compute(number, "write")
    if write is None:
        return None
    keys, values = write.inputs
    turned = uses.only_writer(keys.of, "rotate")
    if turned is None:
        turned = uses.only_writer(keys.of, "norm_and_rotate")
    if turned is None:
        return None
    turn = uses.step(turned)
    of_heads = in_sizes(keys, write.sizes, turn.sizes)
    if turn.sizes != write.sizes or not same(turn.result, of_heads) or values.of.dtype is not keys.of.dtype:
        return None
    operation = "write_rotated" if turn.operation == "rotate" else "write_normed_rotated"
    by = Compute(operation, write.sizes, None, (*turn.inputs, values), number=write.number, real=turn.real)
    return Found(frozenset({number, turned}), by)
