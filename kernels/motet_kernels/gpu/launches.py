"""Launches of Triton kernels, which can be counted: in a decode step a launch costs more than most of them compute."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import triton

_TRACES: list[list[str]] = []


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
    """Run a kernel, with as many programs as the grid has places.

    A product and a sum may become one instruction, which rounds once: Triton's default, which a later version changes,
    and warns of.
    """
    for trace in _TRACES:
        trace.append(kernel.__name__)
    kernel[tuple(grid)](*arguments, enable_fp_fusion=True, **options)


@contextmanager
def traced_launches() -> Iterator[list[str]]:
    """The names of the kernels that are launched meanwhile, in their order."""
    trace: list[str] = []
    _TRACES.append(trace)
    try:
        yield trace
    finally:
        _TRACES.remove(trace)


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, one program after the other, on a CPU."""
    return bool(triton.knobs.runtime.interpret)
