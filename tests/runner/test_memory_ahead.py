"""The memory of the next adapters is there before they come, and no more than that."""

import ctypes
import mmap
import time

import numpy as np
import pytest
import torch

from motet.clock import FakeClock
from motet_kernels.huge_pages import HUGE_PAGE, SMALL_PAGE, have_given
from motet_runner.execute.adapters.adapter_uploads import AdapterLoads
from motet_runner.execute.adapters.memory_ahead import AHEAD_BYTES, MemoryAhead

MIB = 1 << 20
SIZE = 4 * AHEAD_BYTES


def there(memory: torch.Tensor) -> np.ndarray:
    """Which of its small pages the operating system has given"""
    begin = -(-memory.data_ptr() // SMALL_PAGE) * SMALL_PAGE
    count = (memory.data_ptr() + memory.nbytes - begin) // SMALL_PAGE
    found = np.zeros(count, np.uint8)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(begin, count * SMALL_PAGE, found.ctypes.data) == 0
    return (found & 1).astype(bool)


def given(memory: torch.Tensor) -> int:
    return int(there(memory).sum()) * SMALL_PAGE


def wait_for(memory: torch.Tensor, size: int) -> None:
    until = time.monotonic() + 30
    while given(memory) < size and time.monotonic() < until:
        time.sleep(0.01)


def untouched(size: int) -> torch.Tensor:
    """Not of the heap: a test before may have written there."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _needs_a_kernel_that_gives() -> None:
    trial = untouched(8 * MIB)
    have_given(trial)
    assert given(trial) >= 7 * MIB, "this kernel has no MADV_POPULATE_WRITE: Linux 5.14 has"


def test_what_is_given_keeps_what_it_holds() -> None:
    memory = untouched(8 * MIB)
    memory[MIB : 2 * MIB] = 7
    have_given(memory[1:-1])
    assert bool((memory[MIB : 2 * MIB] == 7).all())
    assert not memory[4 * MIB :].any()
    have_given(memory[:0])


def test_the_end_is_given_at_first_and_then_a_little_before_the_last_adapter() -> None:
    memory = untouched(SIZE)
    ahead = MemoryAhead(memory)
    wait_for(memory, AHEAD_BYTES - SMALL_PAGE)
    assert AHEAD_BYTES - SMALL_PAGE <= given(memory) <= AHEAD_BYTES + HUGE_PAGE
    place = SIZE - AHEAD_BYTES // 2
    ahead.before(place)
    wait_for(memory, SIZE - place + AHEAD_BYTES - SMALL_PAGE)
    assert there(memory[place - AHEAD_BYTES + SMALL_PAGE :]).all()
    assert given(memory) <= SIZE - place + AHEAD_BYTES + HUGE_PAGE, "adapters that never come take no memory"
    ahead.before(SIZE - MIB)  # in the place of one that has gone
    ahead.before(0)
    wait_for(memory, SIZE - 2 * SMALL_PAGE)
    assert given(memory) >= SIZE - 2 * SMALL_PAGE


def test_loads_of_a_cpu_find_their_memory_there() -> None:
    memory = untouched(SIZE).view(64, -1)
    AdapterLoads(memory, lambda _: pytest.fail("nothing is loaded"), FakeClock())
    wait_for(memory.view(-1), AHEAD_BYTES - SMALL_PAGE)
    assert there(memory.view(-1)[SIZE - AHEAD_BYTES + SMALL_PAGE :]).all()
