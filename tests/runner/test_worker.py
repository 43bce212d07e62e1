"""Plans and results are all that passes between the engine and its worker, and they are numbers (OR-13, OR-14)."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from motet.domain import BASE, Digest, KVShape, ParkMethod, RequestId
from motet_runner.engine import Engine
from motet_runner.execute.adapters.adapter_uploads import AdapterLoads
from motet_runner.execute.batch.flat_batch import FlatBatch
from motet_runner.memory.paged import PagedStore
from motet_runner.memory.tiers import PageTiers
from motet_runner.plan import Copy, StepPlan, StepResult, Tier
from motet_runner.plan.size_limit import CALLS_UNTIL_LARGER
from motet_runner.step_costs import StepCosts
from motet_runner.worker_control import Worker
from tests.runner.engines import ask, load, make_device_engine, make_engine, make_local_engine, run
from tests.runner.random_models import RandomAdapter, save_adapter

DIGEST = Digest("sha256:1")


class Channel:
    """A worker at the other end of a channel that carries bytes."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.plans: list[bytes] = []
        self.results: list[bytes] = []

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(pickle.dumps(plan))
        self._worker.launch(pickle.loads(self.plans[-1]))

    def collect(self) -> StepResult:
        self.results.append(pickle.dumps(self._worker.collect()))
        result: StepResult = pickle.loads(self.results[-1])
        return result


def through_a_channel(engine: Engine) -> Channel:
    channel = Channel(engine.diagnostics.worker)
    engine._worker = channel  # type: ignore[assignment]  # noqa: SLF001
    return channel


@pytest.fixture
def adapter(llama: Path, tmp_path: Path) -> Path:
    return save_adapter(llama, "llama", RandomAdapter(4, 8), tmp_path / "adapter", seed=3)


def everything(engine: Engine, adapter: Path) -> dict[str, list[int]]:
    """Joins, chunks, an adapter, sampling options, a park of each kind and leaves."""
    load(engine, DIGEST, adapter)
    engine.set_supervised(True)
    asked = [
        ask("greedy", prompt=50),
        ask("tuned", prompt=30, adapter=DIGEST),
        ask("drawn", prompt=5, temperature=1.0, top_k=20, seed=7, repetition_penalty=1.2),
        ask("moved", prompt=9, delivered=(3, 4, 5), min_tokens=10),
    ]
    ran = run(engine, *asked, steps=8)
    for request, method in (("greedy", ParkMethod.SWAP), ("drawn", ParkMethod.RECOMPUTE)):
        assert engine.park(RequestId(request), 1, asked[0 if request == "greedy" else 2].promise, 6, method)
    run(engine, steps=3, ran=ran)
    for request in ("greedy", "drawn"):
        assert engine.resume(RequestId(request), 1, 6)
    return run(engine, ran=ran).tokens


def test_a_worker_behind_a_channel_of_bytes_computes_the_same(llama: Path, adapter: Path) -> None:
    expected = everything(make_engine(llama, host_kv_mib=1), adapter)
    engine = make_engine(llama, host_kv_mib=1)
    channel = through_a_channel(engine)
    assert everything(engine, adapter) == expected
    assert not any(b"torch" in message for message in channel.plans + channel.results), "no tensor travels"


@pytest.mark.parametrize("make", [make_local_engine, make_device_engine], ids=["local", "device"])
def test_adapters_come_to_their_pages_before_rows_are_computed(
    make: Callable[..., Engine], llama: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that is given up may have written to pages that these rows begin."""
    engine = make(llama)
    worker = engine.diagnostics.worker
    order: list[str] = []
    for owner, name in ((AdapterLoads, "advance"), (type(worker), "_compute")):
        monkeypatch.setattr(owner, name, noting(order, getattr(owner, name)))
    load(engine, DIGEST, adapter)
    run(engine, *(ask(f"r{number}", adapter=DIGEST if number else BASE, max_tokens=6) for number in range(3)))
    before = [order[at - 1] for at, one in enumerate(order) if one == "_compute"]
    assert before, order
    assert set(before) == {"advance"}


def noting(order: list[str], method: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*given: object, **more: object) -> object:
        order.append(method.__name__)
        return method(*given, **more)

    return noted


def test_the_plan_of_a_long_sequence_is_as_short_as_that_of_a_short_one(llama: Path) -> None:
    sizes = []
    for prompt in (20, 420):
        engine = make_engine(llama)
        channel = through_a_channel(engine)
        run(engine, ask("a", prompt=prompt, max_tokens=12))
        sizes.append(max(map(len, channel.plans[-9:])))
    assert abs(sizes[1] - sizes[0]) < 16


def limit_tokens(engine: Engine, most: int, in_vain: list[int] | None = None) -> list[int]:
    """Memory suffices for `most` tokens at once. Returns a list that gets the size of each batch that fits; `in_vain`
    gets those of the others."""
    forward, sizes = engine.diagnostics.loaded.forward, []

    def limited(batch: FlatBatch) -> torch.Tensor:
        if batch.tokens > most:
            if in_vain is not None:
                in_vain.append(batch.tokens)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        sizes.append(batch.tokens)
        return forward(batch)

    engine.diagnostics.worker.loaded = Mock(
        wraps=engine.diagnostics.loaded, forward=limited, device=engine.diagnostics.loaded.device
    )
    return sizes


def test_a_batch_that_memory_cannot_hold_is_computed_in_parts(llama: Path, adapter: Path) -> None:
    expected = everything(make_engine(llama, host_kv_mib=1), adapter)
    engine = make_engine(llama, host_kv_mib=1)
    sizes = limit_tokens(engine, 7)
    assert everything(engine, adapter) == expected
    assert max(sizes) <= 7


def test_after_a_batch_in_parts_prompts_are_cut_smaller(llama: Path) -> None:
    engine = make_engine(llama, prefill_chunk_tokens=256)
    sizes = limit_tokens(engine, 60)
    run(engine, ask("first", prompt=200, max_tokens=2))
    sizes.clear()
    run(engine, ask("second", prompt=200, max_tokens=2))
    assert max(sizes) <= 60
    assert engine.diagnostics.planner.chunk.size < 256


def test_prompts_are_cut_larger_again_once_memory_suffices(llama: Path) -> None:
    engine = make_engine(llama, prefill_chunk_tokens=256)
    limit_tokens(engine, 60)
    run(engine, ask("first", prompt=200, max_tokens=2))
    sizes = limit_tokens(engine, 1000)
    run(engine, ask("second", prompt=5, max_tokens=CALLS_UNTIL_LARGER + 1))
    sizes.clear()
    run(engine, ask("third", prompt=200, max_tokens=2))
    assert sizes[0] == 200


@pytest.mark.parametrize("ahead", [0, 1])
def test_decodes_that_do_not_fit_together_are_tried_together_only_now_and_then(llama: Path, ahead: int) -> None:
    engine = make_engine(llama, plan_ahead=ahead)
    asked = [ask(f"{number}", prompt=3, max_tokens=300) for number in range(6)]
    expected = run(make_engine(llama), *asked).tokens
    ran = run(engine, *asked, steps=3)
    in_vain: list[int] = []
    sizes = limit_tokens(engine, 4, in_vain)
    run(engine, ran=ran)
    assert ran.tokens == expected
    assert set(in_vain) == {6}
    assert 3 <= len(in_vain) <= 1 + len(sizes) // CALLS_UNTIL_LARGER, "at first, and then now and then"
    assert engine.diagnostics.planner.chunk.size == 512, "there is no prompt to cut"


def test_decodes_beside_a_prompt_that_does_not_fit_stay_together(llama: Path) -> None:
    engine = make_engine(llama, prefill_chunk_tokens=256)
    ran = run(engine, *(ask(f"{number}", prompt=3, max_tokens=60) for number in range(5)), steps=3)
    sizes = limit_tokens(engine, 60)
    run(engine, ask("long", prompt=200, max_tokens=20), ran=ran, steps=15)
    assert sizes[-1] == 6


def test_a_moment_without_memory_does_not_slow_decodes_down_for_long(llama: Path) -> None:
    engine = make_engine(llama)
    ran = run(engine, *(ask(f"{number}", prompt=3, max_tokens=300) for number in range(6)), steps=3)
    limit_tokens(engine, 1)
    run(engine, ran=ran, steps=1)
    sizes = limit_tokens(engine, 100)
    run(engine, ran=ran)
    assert sizes[0] == 1
    assert sizes.count(6) > 200


@pytest.mark.parametrize("ahead", [0, 1])
def test_without_memory_for_a_single_token_the_request_ends_and_the_engine_lives(llama: Path, ahead: int) -> None:
    engine = make_engine(llama, plan_ahead=ahead)
    limit_tokens(engine, 0)
    ran = run(engine, ask("a", prompt=5), ask("b", prompt=50))
    assert {name: output.error.code for name, output in ran.last.items()} == {"a": "overloaded", "b": "overloaded"}
    limit_tokens(engine, 100)
    assert len(run(engine, ask("c", prompt=5)).tokens["c"]) == 40
    assert engine.report().pages_free == engine.info.pages


def move_all_pages(engine: Engine) -> int:
    """Every page that a sequence or the prefix cache holds, as far as there are empty ones."""
    memory = engine.diagnostics.planner.memory
    used = {page for sequence in engine.diagnostics.planner.sequences for page in sequence.pages} | set(
        memory.cache.held
    )
    moves = dict(zip(sorted(used), memory.pages.empty_pages, strict=False))
    memory.pages.relocate(moves)
    copies = [Copy(Tier.DEVICE, tuple(moves), Tier.DEVICE, tuple(moves.values()))]
    memory.move_pages(moves, copies if moves else [])
    return len(moves)


@pytest.mark.parametrize("ahead", [0, 1])
def test_pages_may_be_moved_between_any_two_iterations(llama: Path, adapter: Path, ahead: int) -> None:
    asked = [
        ask("long", prompt=90),
        ask("tuned", prompt=30, adapter=DIGEST),
        replace(ask("one", prompt=50), prefix_salt=b"salt"),
        replace(ask("two", prompt=ask("one", prompt=50).prompt), prefix_salt=b"salt"),
    ]

    def outcome(*, move: bool) -> dict[str, list[int]]:
        engine = make_engine(llama, plan_ahead=ahead, prefill_chunk_tokens=32)
        load(engine, DIGEST, adapter)
        ran, moved = run(engine, *asked, steps=1), 0
        while engine.has_work():
            if move and len(engine.diagnostics.planner.sequences):
                moved += move_all_pages(engine)
            run(engine, ran=ran, steps=1)
        assert (moved > 100) == move
        return ran.tokens

    assert outcome(move=True) == outcome(move=False)


def test_swaps_are_learned_when_their_copies_have_ended() -> None:
    costs = StepCosts(prefill_seconds_per_token=1.0, swap_seconds_per_page=1.0)
    out = Copy(Tier.DEVICE, (5, 6), Tier.HOST, (0, 1))
    costs.learn(StepPlan(number=1, copies=(out,)), StepResult(number=1))
    assert costs.swap_seconds_per_page == 1.0, "they are under way"
    costs.learn(StepPlan(number=2), StepResult(number=2, swapped_pages=2, swap_seconds=4.0))
    assert costs.swap_seconds_per_page == pytest.approx(1.2)


def tiers(shape: KVShape, device: str) -> tuple[PagedStore, PageTiers]:
    store = PagedStore(64, shape, torch.float32, torch.device(device))
    store.data.copy_(torch.arange(64.0).view(-1, 1, 1, 1, 1, 1).expand_as(store.data))
    ticks = count(0.0)
    return store, PageTiers(store, 64, clock=lambda: next(ticks))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_page_is_written_again_at_once_and_its_copy_is_still_what_it_was(device: str) -> None:
    """Larger than what a GPU copies in an instant, so that the copy is under way."""
    store, both = tiers(KVShape(layers=8, kv_heads=8, head_dim=64, dtype_bytes=4), device)
    pages, there = tuple(range(64)), tuple(reversed(range(64)))
    both.carry_out(Copy(Tier.DEVICE, pages, Tier.HOST, there))
    store.data.fill_(-1.0)
    both.carry_out(Copy(Tier.HOST, there, Tier.DEVICE, pages))
    assert store.data[:, 0, 0, 0, 0, 0].tolist() == list(map(float, range(64)))
    assert store.data.std(dim=(1, 2, 3, 4, 5)).max() == 0
    if device == "cuda":
        torch.cuda.synchronize()
    swapped = both.take_swap_time()
    assert swapped.pages == 128
    assert swapped.seconds > 0
    assert both.take_swap_time() == (0, 0.0)


def test_copies_within_the_device_are_no_swaps() -> None:
    store, both = tiers(KVShape(layers=1, kv_heads=1, head_dim=4, dtype_bytes=4), "cpu")
    both.carry_out(Copy(Tier.DEVICE, (1, 2), Tier.DEVICE, (3, 4)))
    assert store.data[3:6, 0, 0, 0, 0, 0].tolist() == [1.0, 2.0, 5.0]
    assert both.take_swap_time() == (0, 0.0)


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_pages_are_moved_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """A copy takes as much memory again, and a large adapter may have many pages to move."""
    shape = KVShape(layers=2, kv_heads=2, head_dim=4, dtype_bytes=4)
    monkeypatch.setattr("motet_runner.memory.paged.COPY_BYTES", at_once * shape.bytes_per_page())
    store, both = tiers(shape, "cpu")
    both.carry_out(Copy(Tier.DEVICE, tuple(range(8)), Tier.DEVICE, tuple(range(20, 28))))
    assert store.data[20:28].flatten(1)[:, 0].tolist() == list(range(8))
