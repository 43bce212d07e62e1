"""A gate with SiLU."""

from motet_kernels.cpp.peepholes.matching import Found, Uses, in_sizes, lie_together, same
from motet_kernels.cpp.steps import Compute, Value


def silu_times(uses: Uses, number: int) -> Found | None:
    """silu(gate) · up"""
    silu = uses.compute(number, "silu")
    if silu is None:
        return None
    multiplied = uses.only_reader(silu.result.of, "multiply")
    if multiplied is None:
        return None
    product = uses.step(multiplied)
    sizes = product.sizes
    active, gate = in_sizes(silu.result, silu.sizes, sizes), in_sizes(silu.inputs[0], silu.sizes, sizes)
    up = next((one for one, other in (product.inputs, product.inputs[::-1]) if same(other, active)), None)
    if gate is None or active is None or up is None or not isinstance(up.of, Value):
        return None
    if not lie_together([gate, active, up, product.result], gate.of.dtype):
        return None
    return Found(frozenset({number, multiplied}), Compute("silu_times", sizes, product.result, (gate, up)))
