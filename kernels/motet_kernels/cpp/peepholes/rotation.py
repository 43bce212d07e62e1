"""Rotations of queries and keys: the first half of each head with the second half. A norm of each head may come before
the rotation. After the rotation, keys are written into their pages."""

from dataclasses import replace

from motet_kernels.cpp.peepholes.matching import Found, Numbers, Uses, pairs_in, read_in, together, written_in
from motet_kernels.cpp.steps import Compute, Place


def rotate(uses: Uses, number: int) -> Found | None:
    """x · cosines + [-second half of x, first half of x] · sines. `number`: the step that adds the two products"""
    add = uses.compute(number, "add")
    if add is None:
        return None
    for straight, turned in pairs_in(add):
        of_cosines, of_sines = uses.source(straight, "multiply"), uses.source(turned, "multiply")
        if of_cosines is None or of_sines is None:
            continue
        for other, sines in pairs_in(of_sines[1]):
            partners = _partners(uses, other)
            if partners is None:
                continue
            x, steps = partners
            cosines = next((one for one, of_x in pairs_in(of_cosines[1]) if of_x.are(x)), None)
            if cosines is None:
                continue
            sizes = of_sines[1].sizes
            places = together(sizes, x, cosines, sines, written_in(add), straight, turned, other)
            if places is not None:
                by = Compute("rotate", sizes, places[3], tuple(places[:3]))
                return Found(frozenset({*steps, number, of_cosines[0], of_sines[0]}), by)
    return None


def _partners(uses: Uses, other: Numbers) -> tuple[Numbers, set[int]] | None:
    """x, and the numbers of the steps that compute `other`, if this is (-second half of x, first half of x)."""
    half = other.sizes[-1] // 2
    of_half = (*other.sizes[:-1], half)
    moved = uses.source(Numbers(other.place, of_half), "copy")
    straight = uses.source(Numbers(_later(other.place, half), of_half), "copy")
    if moved is None or straight is None:
        return None
    (minus,), (of_first,) = read_in(moved[1]), read_in(straight[1])
    negative, first = uses.source(minus, "negative"), of_first.in_sizes(of_half)
    if negative is None or first is None or minus.dtype is not of_first.dtype:
        return None
    (second,) = read_in(negative[1])
    if not second.are(Numbers(_later(first, half), of_half)):
        return None
    return Numbers(first, other.sizes), {moved[0], straight[0], negative[0]}


def _later(place: Place, numbers: int) -> Place:
    return replace(place, offset=place.offset + numbers * place.strides[-1])


def norm_and_rotate(uses: Uses, number: int) -> Found | None:
    """A rotation of heads, with the norm before it"""
    turn = uses.compute(number, "rotate")
    if turn is None:
        return None
    normed = uses.source(read_in(turn)[0], "modules_norm")
    if normed is None or normed[1].sizes != turn.sizes:
        return None
    (x, weight), (_, cosines, sines) = normed[1].inputs, turn.inputs
    by = Compute("norm_and_rotate", turn.sizes, turn.out, (x, cosines, sines, weight), real=normed[1].real)
    return Found(frozenset({number, normed[0]}), by)


def write_rotated(uses: Uses, number: int) -> Found | None:
    """The write of keys and values, with the rotation of the keys"""
    write = uses.compute(number, "write")
    if write is None:
        return None
    turned = uses.source(read_in(write)[0], "rotate", "norm_and_rotate")
    if turned is None or turned[1].sizes != write.sizes:
        return None
    turn, values = turned[1], write.inputs[1]
    operation = "write_rotated" if turn.operation == "rotate" else "write_normed_rotated"
    by = Compute(operation, write.sizes, None, (*turn.inputs, values), number=write.number, real=turn.real)
    return Found(frozenset({number, turned[0]}), by)
