"""A gate with SiLU."""

from motet_kernels.cpp.peepholes.matching import Found, Uses, read_in, together, written_in
from motet_kernels.cpp.steps import Compute


def silu_times(uses: Uses, number: int) -> Found | None:
    """silu(gate) · up"""
    silu = uses.compute(number, "silu")
    if silu is None:
        return None
    product = uses.user(written_in(silu), "multiply")
    if product is None:
        return None
    step = product.step
    places = together(step.sizes, *read_in(silu), *product.others, written_in(silu), written_in(step))
    if places is None:
        return None
    return Found(frozenset({number, product.number}), Compute("silu_times", step.sizes, step.out, tuple(places[:2])))
