"""Two calls for kernels that begin before the kernel before them has ended (programmatic dependent launch).

A kernel with them reads its arguments and what no kernel writes, such as weights, while the one before it ends. Each of
its programs must wait once, also one without work: the kernel after it waits for this kernel alone, and so for all
before it. `launch_overlapping` starts such a kernel.

What is read before the wait must be written by copies, not by a kernel: a work list, adapters, scales.
"""

import triton
import triton.language as tl


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr) -> None:
    """The next kernel may begin as soon as all programs of this one have called this."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr) -> None:
    """What earlier kernels have written may be read from here on. A second call costs nothing."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
