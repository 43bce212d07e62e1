"""Memory for the next adapters, before they come (PU-07).

The operating system gives a CPU's memory when it is first written to. In a virtual machine whose host has to find it,
too, that takes ten times as long as to read an adapter. The engine's thread would wait for it in each load, until all
places of adapters have been used once. So another thread has it given: only a little ahead, because adapters that never
come shall take no memory.
"""

from contextlib import suppress
from functools import partial

import torch

from motet_kernels.huge_pages import have_given
from motet_runner.adapters.load_threads import THREADS

AHEAD_BYTES = 32 * 1024 * 1024
LEAST_BYTES = 2 * 1024 * 1024
"""Less is not worth a thread's turn."""


class MemoryAhead:
    def __init__(self, memory: torch.Tensor) -> None:
        """`memory`: [bytes] of the host. Adapters lie at its end, the next one mostly before the others."""
        self._memory = memory
        self._given = len(memory)
        """From this byte on"""
        self.before(len(memory))

    def before(self, place: int) -> None:
        """An adapter begins at this byte."""
        begin = max(0, place - AHEAD_BYTES)
        if self._given - begin < LEAST_BYTES:
            return
        piece, self._given = self._memory[begin : self._given], begin
        with suppress(RuntimeError):  # no more threads available
            THREADS.run(partial(have_given, piece))
