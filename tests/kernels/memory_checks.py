"""Lets each allocation of the compiled kernels fail in turn, see `failing_new.cpp`. `test_cpp_memory.py` runs it.

What fails is a MemoryError, and the same call gives the right results afterwards.
"""

import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch

from motet.domain import Digest
from motet_kernels.cpp import Library
from motet_kernels.cpp.linear import PackedWeights
from motet_runner.execute.batch.memory_parts import InParts
from testbed.compiled_kernels import CACHE, compiled_library
from tests.kernels.test_add_lora import Projection
from tests.kernels.test_cpp_add_lora import spread
from tests.kernels.test_cpp_attention import Shape, World, dense
from tests.runner.engines import ask, load, make_local_engine, run
from tests.runner.families import BY_NAME, save_adapters, save_model

HOOK = ctypes.CDLL(None)
HOOK.fail_allocation.argtypes = (ctypes.c_long, ctypes.c_bool)
HOOK.allocations.restype = ctypes.c_long

Compute = Callable[[], torch.Tensor]


def fails(compute: Callable[[], object], number: int, *, in_helper: bool = False) -> bool:
    """Whether the allocation of this number was reached."""
    HOOK.fail_allocation(number, in_helper)
    try:
        compute()
    except MemoryError:
        return True
    finally:
        reached = HOOK.allocations() > number
        HOOK.fail_allocation(-1, False)
    assert not reached, "an allocation failed, and nobody was told"
    return False


def check_each(name: str, compute: Compute) -> None:
    """At first with the memory of a thread that has computed nothing before, and then with what it has."""
    with ThreadPoolExecutor(1) as another:
        expected = another.submit(compute).result()
    first = next(number for number in count() if not fails(compute, number))
    assert torch.equal(compute(), expected), f"{name} is wrong after its first allocations failed"
    for number in range(first):
        if fails(compute, number):
            assert torch.equal(compute(), expected), f"{name} is wrong after allocation {number} failed"
    assert first > 0, f"{name} takes no memory"


def check_helpers(library: Library) -> None:
    """Attention takes memory of each thread's own, and more of it for wider heads. Helpers come when they can."""
    for width in range(32, 32 * 200, 32):
        world = World(library, Shape(8, 4, width), [(0, 40), (30, 1), (50, 1), (0, 33)])
        if fails(world.attend, 0, in_helper=True):
            out = world.attend()
            for sequence, there in zip(world.sequences, world.rows, strict=True):
                expected = dense(world.query[:, there].double(), sequence, width**-0.5, None, None)
                torch.testing.assert_close(out[there].double(), expected, rtol=1e-4, atol=1e-4)
            return
    raise AssertionError("no helper has computed anything")


def check_kernels(library: Library) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(40, 300, generator=random)
    weights = torch.randn(1024, 300, generator=random)

    def pack() -> torch.Tensor:
        return PackedWeights(library, [weights]).rows(torch.arange(1024))

    projection = Projection(300, 512, [8, 64, 16], library=library)
    y = projection.random(40, 512)

    def add() -> torch.Tensor:
        into = y.clone()
        projection.add(into, x, spread(projection, [1, 7, 20]))
        return into

    for threads in (1, 2):
        torch.set_num_threads(threads)
        world = World(library, Shape(4, 2, 64 * threads), [(0, 37), (100, 1)])
        check_each("attention", lambda world=world: world.attend()[1:-1])  # nobody's rows get nothing
        check_each("add_lora", add)
        if threads > 1:
            check_each("linear", partial(PackedWeights(library, [weights]).linear, x))
            check_each("pack", pack)
    check_helpers(library)


def check_engine(family: str, folder: Path) -> None:
    """Each iteration of several rows fails once, somewhere, and is computed in parts. No token is another one."""
    base = save_model(BY_NAME[family].config, folder / "base")
    adapters = save_adapters(base, BY_NAME[family], folder / "adapters")
    asked = [ask(f"{n}", prompt=4 + n, max_tokens=16, adapter=Digest(f"sha256:{n % 3}")) for n in range(6)]

    def tokens() -> dict[str, list[int]]:
        engine = make_local_engine(base, kernels="cpp", kernel_cache=CACHE, prefill_chunk_tokens=32, threads=2)
        assert engine.diagnostics.loaded.fused is not None
        for number, adapter in enumerate(adapters):
            load(engine, Digest(f"sha256:{number}"), adapter)
        return run(engine, *asked).tokens

    expected = tokens()
    random, fits, failed = Random(0), InParts._fits, 0  # noqa: SLF001
    most: dict[bool, int] = {}
    """Allocations, with prompts and without"""

    def attempt(its: InParts[Any], plan: Any, parts: Any) -> bool:
        nonlocal failed
        its.decodes.size = sys.maxsize  # all at once, although it did not suffice before
        if plan.count == 1 or parts.retries:
            return fits(its, plan, parts)
        kind = bool(plan.prefills)
        HOOK.fail_allocation(random.randrange(most.get(kind, 20)), False)
        fitted = fits(its, plan, parts)
        most[kind] = max(most.get(kind, 1), HOOK.allocations())
        HOOK.fail_allocation(-1, False)
        failed += not fitted
        return fitted

    with (
        patch.object(InParts, "_fits", attempt),
        patch("motet_runner.execute.worker.local_worker.LocalWorker._may_go_on") as never,
    ):
        never.return_value = False
        assert tokens() == expected
    assert failed > 10


if __name__ == "__main__":
    compiled = compiled_library()
    HOOK.watch(ctypes.cast(compiled.loaded.motet_lanes, ctypes.c_void_p))
    check_kernels(compiled)
    for of_family in ("Llama", "Gemma"):
        check_engine(of_family, Path(sys.argv[1]) / of_family)
