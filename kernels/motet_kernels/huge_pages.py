"""Memory in huge pages, where the operating system has them.

With pages of 4 KiB, kernels wait for address translation (TLB misses), above all in a virtual machine. Where the
operating system gives no huge pages, everything works, only slower.
"""

import ctypes
import sys
from functools import cache
from typing import Any

import torch

from motet_kernels.run_layout import ALIGNMENT_BYTES

HUGE_PAGE = 2 << 20
SMALL_PAGE = 4 << 10
CHUNK = 32 << 20
"""Bytes that several tensors share. Pages that no tensor uses cost nothing: they are never touched."""

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23


def prefer_huge_pages(memory: torch.Tensor) -> torch.Tensor:
    """Ask for huge pages for the part of this unused memory that consists of whole huge pages. Returns the memory."""
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    first, last = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
    if memory.device.type == "cpu" and first < last:
        _madvise()(first, last - first, _MADV_HUGEPAGE)  # a refusal changes nothing
    return memory


def have_given(memory: torch.Tensor) -> None:
    """Let the operating system give this memory now, and not at the first write. What it holds stays."""
    begin = memory.data_ptr() // SMALL_PAGE * SMALL_PAGE
    size = memory.data_ptr() + memory.nbytes - begin
    _madvise()(begin, size, _MADV_POPULATE_WRITE)  # an older kernel refuses: then the first write waits


@cache
def _madvise() -> Any:
    if sys.platform != "linux":
        return lambda *_: -1
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise


class Chunks:
    """Memory for tensors that are smaller than a huge page: they are placed one after the other in larger chunks."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """[count]; the tensor keeps its chunk alive."""
        begin = -(-self._used // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        size = count * dtype.itemsize
        if begin + size > len(self._chunk):
            self._chunk = prefer_huge_pages(torch.empty(max(CHUNK, size + HUGE_PAGE), dtype=torch.uint8))
            begin = -self._chunk.data_ptr() % HUGE_PAGE
        self._used = begin + size
        return self._chunk[begin : begin + size].view(dtype)
