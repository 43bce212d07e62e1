"""Launches Triton kernels. Tests count the launches: in a decode step, most launches take longer than their kernels."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import triton

_TRACES: list[list[str]] = []


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
    """Run a kernel, with one program per place of the grid.

    `enable_fp_fusion`: a product and a sum may round only once. This is the default of Triton, until a later version,
    which warns about the change.
    """
    for trace in _TRACES:
        trace.append(kernel.__name__)
    kernel[tuple(grid)](*arguments, enable_fp_fusion=True, **options)


@contextmanager
def traced_launches() -> Iterator[list[str]]:
    """The names of the kernels launched within this context, in order."""
    trace: list[str] = []
    _TRACES.append(trace)
    try:
        yield trace
    finally:
        _TRACES.remove(trace)


def interpreted() -> bool:
    """True if Triton's interpreter runs the kernels, one program after the other, on a CPU."""
    return bool(triton.knobs.runtime.interpret)
