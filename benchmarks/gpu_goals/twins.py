"""Kernels that stand for what hardware can do: one only reads, one does nothing."""

from itertools import cycle

import torch
import triton
import triton.language as tl

from benchmarks.gpu_goals.bench import Bench
from benchmarks.gpu_goals.clock import Way
from motet_kernels.gpu.launches import launch

BLOCK = 2048
"""Words of four bytes that a program reads at once. Bytes are rounded up to such blocks."""
PROGRAMS_EACH = 8
"""Of a multiprocessor"""


@triton.jit(do_not_specialize=["blocks"])
def only_read(source, sums, blocks, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.int32)
    for block in range(program, blocks, tl.num_programs(0)):
        # Without a mask, so that loads are as wide as can be.
        total += tl.load(source + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + program, tl.sum(total))


@triton.jit
def do_nothing(sums):
    pass


def reads(bench: Bench, size: int) -> Way:
    """A way that reads `size` bytes in one launch, each time others."""
    blocks = -(-size // (BLOCK * 4))
    words = blocks * BLOCK
    sets = bench.sets(words * 4)
    generator = torch.Generator(bench.device).manual_seed(1)
    source = torch.randint(-9, 9, (sets, words), generator=generator, device=bench.device, dtype=torch.int32)
    programs = min(bench.programs * PROGRAMS_EACH, blocks)
    sums = torch.empty(programs, dtype=torch.int32, device=bench.device)
    following = cycle(range(sets))

    def step() -> None:
        launch(only_read, (programs,), source[next(following)], sums, blocks, BLOCK=BLOCK, num_warps=4)

    step()
    if int(sums.sum()) != int(source[0].sum()):
        raise AssertionError("the kernel that reads has not read all bytes")
    return Way(step, sets)


def bandwidth(bench: Bench) -> float:
    """Bytes a microsecond: of a plain read of much memory on this machine, measured once"""
    if not bench.known_bandwidth:
        size = bench.sizes.stream_bytes[-1]
        read = bench.clock.compare({"read": reads(bench, size)}, seconds=0.2)
        bench.known_bandwidth = size / read.median("read")
    return bench.known_bandwidth


def nothing(bench: Bench) -> Way:
    sums = torch.empty(1, dtype=torch.int32, device=bench.device)
    return Way(lambda: launch(do_nothing, (1,), sums), 100)
