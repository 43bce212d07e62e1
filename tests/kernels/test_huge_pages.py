"""Memory in huge pages: who has it notices nothing but the speed."""

from pathlib import Path

import pytest
import torch

from motet_kernels.huge_pages import CHUNK, HUGE_PAGE, Chunks, prefer_huge_pages

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def prefers_huge_pages(address: int) -> bool:
    """What the kernel has noted of the memory at this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(border, 16) for border in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError("there is no such memory")


def test_the_kernel_is_asked_for_huge_pages_in_all_whole_ones() -> None:
    memory = torch.empty(8 * HUGE_PAGE, dtype=torch.uint8)
    assert prefer_huge_pages(memory) is memory
    if SWITCH.exists():  # a kernel without huge pages notes nothing
        first = -(-memory.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        assert all(prefers_huge_pages(first + page * HUGE_PAGE) for page in range(7))
    memory.fill_(1)
    assert int(memory.sum()) == len(memory)


@pytest.mark.parametrize("count", [0, 1, HUGE_PAGE - 1])
def test_memory_without_a_whole_huge_page_stays_as_it_is(count: int) -> None:
    assert len(prefer_huge_pages(torch.empty(count, dtype=torch.uint8))) == count


def test_tensors_of_chunks_begin_with_a_line_of_the_cache_and_share_no_byte() -> None:
    chunks = Chunks()
    sizes = [(1, torch.bfloat16), (100, torch.float32), (CHUNK // 2, torch.uint8), (CHUNK // 4, torch.float32)] * 3
    tensors = [chunks.empty(count, dtype) for count, dtype in sizes]
    assert [(len(one), one.dtype) for one in tensors] == sizes
    assert all(one.data_ptr() % 64 == 0 for one in tensors)
    del chunks
    for number, one in enumerate(tensors):
        one.fill_(number)
    assert all((one == number).all() for number, one in enumerate(tensors))


def test_small_tensors_share_a_chunk_that_begins_with_a_huge_page() -> None:
    chunks = Chunks()
    first, second = chunks.empty(100, torch.uint8), chunks.empty(100, torch.uint8)
    assert first.data_ptr() % HUGE_PAGE == 0
    assert second.data_ptr() == first.data_ptr() + 128
