"""Launches Triton kernels. Tests count the launches: in a decode step, most launches take longer than their kernels."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import triton

OVERLAPPING_CAPABILITY = 90
"""From this compute capability on (9.0), a kernel can begin before the one before it has ended."""

_TRACES: list[list[str]] = []


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
    """Run a kernel, with one program per place of the grid.

    `enable_fp_fusion`: a product and a sum may round only once. This is the default of Triton, until a later version,
    which warns about the change.
    """
    for trace in _TRACES:
        trace.append(kernel.__name__)
    kernel[tuple(grid)](*arguments, enable_fp_fusion=True, **options)


def launch_overlapping(kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
    """Run a kernel with the constant OVERLAPS (`overlap.py`), which may begin before the one before it has ended."""
    if not interpreted() and _can_overlap():
        launch(kernel, grid, *arguments, OVERLAPS=True, launch_pdl=True, **options)
    else:
        launch(kernel, grid, *arguments, OVERLAPS=False, **options)


@cache
def _can_overlap() -> bool:
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= OVERLAPPING_CAPABILITY)


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
