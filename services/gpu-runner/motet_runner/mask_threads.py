"""Makes the masks of rows: the quick ones at once, and all others beside the engine's thread.

Most masks take some hundredths of a millisecond. To hand them to another thread and to hear of them takes longer, and
many times longer on a machine whose cores are busy. So the engine's thread makes those of rows whose last ones were
quick. The first one of a row, and all of a row that has had a slow one lately, are made by other threads. For these the
engine's thread waits a moment, unless the row's last one was slow. A row whose mask comes later sits out iterations,
and nobody waits for it.

On Linux the other threads have a lower priority than the engine's own: slow masks use the cores that iterations leave.
Elsewhere threads of a process have one priority, and slow masks slow down iterations on a machine without idle cores.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue

from motet_runner.row_mask import RowMask

MAX_THREADS = 16
"""Fewer slow masks than this delay no other mask."""
THREADS_AT_FIRST = 2
NICENESS = 10
"""How much lower their priority is than that of the thread that begins them"""
MAX_WAIT_SECONDS, MAX_WAIT_SHARE = 0.000_15, 0.05
"""The longest wait for one more mask: in seconds, or as a share of the iteration so far if that is longer. A mask that
takes more is slow."""
MAX_WAITS_SECONDS, MAX_WAITS_SHARE = 0.001, 0.25
"""The same for all masks of an iteration, those that the engine's thread makes included."""


class MaskThreads:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_THREADS, "masks", initializer=_lower_priority)
        self._to_make: deque[tuple[RowMask, float]] = deque()
        """With the seconds above which each is slow"""
        self._made: SimpleQueue[RowMask] = SimpleQueue()

    def make(self, masks: Iterable[RowMask], *, spent: float) -> None:
        """Make those that nobody has begun, or begin them and wait a moment. `spent`: the seconds of the iteration so
        far."""
        begun = [mask for mask in masks if mask.begin()]
        limit = max(MAX_WAIT_SECONDS, MAX_WAIT_SHARE * spent)
        end = time.perf_counter() + max(MAX_WAITS_SECONDS, MAX_WAITS_SHARE * spent)
        quick = deque(mask for mask in begun if mask.quick)
        others = [mask for mask in begun if not mask.quick]
        self._begin(others, limit)
        while quick and time.perf_counter() < end:
            quick.popleft().make(limit)
        self._begin(quick, limit)
        others += quick
        while any(mask.late and not mask.slow for mask in others):
            left = end - time.perf_counter()
            if left <= 0 or not self.wait(min(limit, left)):
                break
        for _ in range(min(len(self._to_make), len(others))):  # the threads are busy with slow ones
            self._threads.submit(self._make)

    def _begin(self, masks: Collection[RowMask], limit: float) -> None:
        if not masks:
            return
        while not self._made.empty():  # they were late
            self._made.get()
        self._to_make += [(mask, limit) for mask in masks]
        for _ in range(min(len(masks), THREADS_AT_FIRST)):
            self._threads.submit(self._make)

    def wait(self, seconds: float) -> bool:
        """Wait for the next mask. False: none has come."""
        try:
            self._made.get(timeout=seconds)
        except Empty:
            return False
        return True

    def _make(self) -> None:
        while self._to_make:
            try:
                mask, limit = self._to_make.popleft()
            except IndexError:  # another thread took the last one
                return
            mask.make(limit)
            self._made.put(mask)


def _lower_priority() -> None:
    if sys.platform == "linux":  # elsewhere this is the priority of the whole process
        thread = threading.get_native_id()
        with suppress(OSError):  # a sandbox may forbid it; an error here would break all threads
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
