"""What the machine can do: every other figure is read against this. And how fast adapters are copied to it (G17)."""

from collections.abc import Iterator
from itertools import cycle

import torch

from benchmarks.gpu_goals.bench import Bench
from benchmarks.gpu_goals.clock import Way
from benchmarks.gpu_goals.figures import Figure
from benchmarks.gpu_goals.twins import nothing, reads

CHUNKS = 8
"""How many copies a plain copy of a large piece is compared with"""


def g0(bench: Bench) -> Iterator[Figure]:
    empty = bench.clock.compare({"empty": nothing(bench)})
    yield Figure(name="empty_kernel", value=empty.median("empty"), unit="us", spread=empty.spread("empty"))
    for size in bench.sizes.stream_bytes:
        times = bench.clock.compare({"read": reads(bench, size), "copy": _copies(bench, size)}, seconds=0.3)
        read, copy = times.median("read"), times.median("copy")
        yield Figure(name=f"read_{size >> 10}_kib", value=size / read / 1e3, unit="GB/s", note=f"{read:.4g} us")
        yield Figure(name=f"copy_{size >> 10}_kib", value=2 * size / copy / 1e3, unit="GB/s", note="reads and writes")
        bench.freed()


def g17(bench: Bench) -> Iterator[Figure]:
    """The bytes of one adapter, copied from pinned memory, against as many bytes of a copy of several."""
    size = bench.sizes.slab_bytes
    pinned = bench.device.type == "cuda"
    slab = torch.randint(0, 255, (size,), dtype=torch.uint8, pin_memory=pinned)
    large = torch.randint(0, 255, (size * CHUNKS,), dtype=torch.uint8, pin_memory=pinned)
    into = torch.empty(size * CHUNKS, dtype=torch.uint8, device=bench.device)
    times = bench.clock.host(
        {
            "adapter": lambda: into[:size].copy_(slab, non_blocking=True),
            "plain": lambda: into.copy_(large, non_blocking=True),
        },
        before=lambda: None,
        rounds=20,
    )
    into.copy_(large)  # whichever way came last
    if not torch.equal(into.cpu(), large):
        raise AssertionError("the copy differs from what was copied")
    adapter, plain = times.median("adapter"), times.median("plain") / CHUNKS
    yield Figure(
        name=f"adapter_copy_{size >> 20}_mib",
        value=size / adapter / 1e3,
        unit="GB/s",
        floor=plain,
        at_least=0.8 * size / plain / 1e3,
        note="to the card, from pinned memory",
    )


def _copies(bench: Bench, size: int) -> Way:
    words = max(1, size // 4)
    sets = bench.sets(words * 8)
    pairs = torch.randint(-9, 9, (sets, 2, words), dtype=torch.int32, device=bench.device)
    following = cycle(range(sets))

    def step() -> None:
        of_set = pairs[next(following)]
        of_set[1].copy_(of_set[0])

    return Way(step, sets)
