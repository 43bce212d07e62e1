"""Decodes that are captured for a few numbers of rows: the same answers, whatever rows, pages and adapters they have,
from the graphs that were made at the start."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from structlog.testing import capture_logs

from motet.domain import BASE, Digest
from motet_runner.engine import Engine
from motet_runner.execute.worker import device_worker
from motet_runner.execute.worker.captured_graph import NotCaptured, call_again
from motet_runner.execute.worker.decode_graphs import CapturedGraph, captured_sizes
from motet_runner.memory.link import Link
from motet_runner.memory.parcel import Returning
from motet_runner.plan import StepPlan
from motet_runner.plan.presets import UNBOUNDED
from tests.runner.engines import ask, load, make_device_engine, make_local_engine, run
from tests.runner.test_device_worker import answers, watch_decodes
from tests.runner.test_worker import move_all_pages
from tests.support.fixed_batches import FixedCppBackend, fixed_batches
from tests.support.little_memory import memory_that_ends


@pytest.fixture(autouse=True)
def _fixed_batches() -> Iterator[None]:
    with fixed_batches():
        yield


def make_recorded_engine(base: Path, **settings) -> Engine:
    return make_device_engine(base, kernels="cpp", **settings)


def replays(engine: Engine) -> list[int]:
    """The size of each graph that is replayed from now on"""
    graphs, sizes = engine.diagnostics.worker.graphs, []
    replay = graphs.replay

    def counted(graph: CapturedGraph) -> torch.Tensor:
        sizes.append(len(graph.rows))
        return replay(graph)

    graphs.replay = counted
    return sizes


@pytest.mark.parametrize("ahead", [0, 1])
def test_recorded_decodes_say_the_same_and_none_waits(llama: Path, adapters: list[Path], ahead: int) -> None:
    """[syncs = 0] with every option, prompts in chunks beside decodes, and adapters that arrive"""
    engine = make_recorded_engine(llama, plan_ahead=ahead, prefill_chunk_tokens=24, max_concurrent_sequences=24)
    sizes, watched = replays(engine), watch_decodes(engine)
    assert answers(engine, adapters).tokens == answers(make_local_engine(llama, kernels="cpp"), adapters).tokens
    assert set(sizes) >= {8, 16}
    assert len(sizes) == len(watched) > 30
    assert engine.diagnostics.worker.captures == len(captured_sizes(24))


@pytest.mark.parametrize("swaps", [100, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("ahead", [0, 1])
def test_many_swaps_of_adapters_need_no_other_recording(
    llama: Path, adapters: list[Path], ahead: int, swaps: int
) -> None:
    """[recaptures = 0] Places for two of four adapters: most requests swap one in, and batches change all the time."""
    engine = make_recorded_engine(llama, plan_ahead=ahead, max_resident_adapters=2, max_concurrent_sequences=4)
    digests = [Digest(f"sha256:{number}") for number in range(4)]
    for digest, folder in zip(digests, adapters, strict=True):
        load(engine, digest, folder)
    expected = {}
    local = make_local_engine(llama, kernels="cpp")
    for digest, folder in zip(digests, adapters, strict=True):
        load(local, digest, folder)
        expected[digest] = run(local, ask("same", adapter=digest, prompt=3, max_tokens=4)).tokens["same"]
    assert len({tuple(tokens) for tokens in expected.values()}) == 4
    filled, recorded = FixedCppBackend.filled, engine.diagnostics.worker.captures
    for number in range(swaps * 65 // 100):
        first, second = digests[number % 4], digests[(number + 1 + number % 3) % 4]
        asked = [
            ask(name, adapter=digest, prompt=ask("same", prompt=3).prompt, max_tokens=4)
            for name, digest in ((f"{number} first", first), (f"{number} second", second))
        ]
        ran = run(engine, *asked)
        assert ran.tokens == {f"{number} first": expected[first], f"{number} second": expected[second]}
    assert FixedCppBackend.filled - filled >= swaps
    assert engine.diagnostics.worker.captures == recorded == len(captured_sizes(4))


def test_pages_may_be_moved_between_any_two_recorded_iterations(llama: Path, adapters: list[Path]) -> None:
    digest = Digest("sha256:0")

    def tokens(*, move: bool) -> dict[str, list[int]]:
        engine = make_recorded_engine(llama, plan_ahead=1)
        load(engine, digest, adapters[0])
        ran, moved = run(engine, ask("a", prompt=50, adapter=digest), ask("b", prompt=20), steps=1), 0
        while engine.has_work():
            if move and len(engine.diagnostics.planner.sequences):
                moved += move_all_pages(engine)
            run(engine, ran=ran, steps=1)
        assert (moved > 50) == move
        return ran.tokens

    assert tokens(move=True) == tokens(move=False)


def test_more_rows_than_there_was_room_for_are_recorded_anew(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_worker, "ROWS_OF_EACH", 0)
    engine = make_recorded_engine(llama, max_concurrent_sequences=8)
    asked = [ask(f"{number}", prompt=5 + number) for number in range(7)]
    assert run(engine, *asked).tokens == run(make_local_engine(llama, kernels="cpp"), *asked).tokens
    assert engine.diagnostics.worker.captures > len(captured_sizes(8))


class LittleMemory:
    """It suffices for graphs of at most `most` rows."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls = 0

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        self._calls += 1
        if self._calls <= len(captured_sizes(24)) - len(captured_sizes(self._most)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it.")
        return call_again(compute)


def test_where_memory_ends_the_smaller_ones_are_recorded(llama: Path) -> None:
    with patch.object(device_worker, "capture_for", lambda _: LittleMemory(4)), capture_logs() as logs:
        engine = make_recorded_engine(llama, max_concurrent_sequences=24)
    lines = [line for line in logs if line["event"] == "decodes_not_recorded"]
    assert [line["rows"] for line in lines] == [24, 16, 8]
    assert lines[0]["reason"] == "CUDA out of memory. Tried to allocate 2.00 GiB."
    sizes = replays(engine)
    asked = [ask(f"{number}", prompt=5, max_tokens=5 + 5 * number) for number in range(7)]
    assert run(engine, *asked).tokens == run(make_local_engine(llama, kernels="cpp"), *asked).tokens
    assert set(sizes) == {1, 2, 4}


class NoCapture:
    """As a GPU, of a model that asks it for a value: the end of the capture fails, too, with an error of its own."""

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        try:
            try:
                raise torch.AcceleratorError(f"CUDA error: {self.reason}\nMore about it.")
            finally:
                raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
        except RuntimeError as error:
            raise NotCaptured(error) from error

    def __init__(self, reason: str) -> None:
        self.reason = reason


@pytest.mark.parametrize(
    ("reason", "tried"),
    [("operation not permitted when stream is capturing", [4]), ("out of memory", [4, 2, 1])],
)
def test_a_model_that_cannot_be_recorded_is_served_without(llama: Path, reason: str, tried: list[int]) -> None:
    with patch.object(device_worker, "capture_for", lambda _: NoCapture(reason)), capture_logs() as logs:
        engine = make_recorded_engine(llama, max_concurrent_sequences=4)
    lines = [line for line in logs if line["event"] == "decodes_not_recorded"]
    assert [(line["rows"], line["reason"]) for line in lines] == [(size, f"CUDA error: {reason}") for size in tried]
    asked = [ask(f"{number}", prompt=5) for number in range(4)]
    assert run(engine, *asked).tokens == run(make_local_engine(llama, kernels="cpp"), *asked).tokens


@pytest.mark.parametrize("ahead", [0, 1])
def test_memory_that_ends_after_a_replay_costs_no_token(llama: Path, ahead: int) -> None:
    """What the device has of its rows is undone, and they are computed in parts."""
    engine = make_recorded_engine(llama, plan_ahead=ahead)
    asked = [
        *(ask(f"{number}", prompt=5, presence_penalty=1.5, min_tokens=9) for number in range(3)),
        ask("drawn", prompt=7, temperature=1.0, seed=4),
        ask("greedy", prompt=15),
    ]
    ran, sizes, failures = run(engine, *asked, steps=5), replays(engine), 0

    def fails_now_and_then(link: Link, results: Sequence[torch.Tensor]) -> Returning:
        nonlocal failures
        if len(sizes) % 5 == 4 and len(results[0]) > 2:
            failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return Returning(link, results)

    with patch.object(device_worker, "Returning", fails_now_and_then):
        while engine.has_work():
            engine.diagnostics.worker.in_parts.decodes.size = UNBOUNDED
            run(engine, ran=ran, steps=1)
    assert ran.tokens == run(make_local_engine(llama, kernels="cpp"), *asked).tokens
    assert failures > 5


@pytest.mark.parametrize("seed", range(3))
def test_memory_that_ends_in_any_operation_costs_no_token(llama: Path, adapters: list[Path], seed: int) -> None:
    settings = {"prefill_chunk_tokens": 24, "max_concurrent_sequences": 24}
    engine = make_recorded_engine(llama, plan_ahead=1, **settings)
    sizes = replays(engine)
    with memory_that_ends(seed, near_the_end=True) as failures:
        ours = answers(engine, adapters)
    assert failures.count > 10
    assert len(sizes) > 30
    assert ours.tokens == answers(make_local_engine(llama, kernels="cpp", **settings), adapters).tokens


def test_a_model_whose_rope_depends_on_lengths_is_not_recorded(llama: Path) -> None:
    engine = make_recorded_engine(llama)
    worker = engine.diagnostics.worker
    assert worker.graphs is not None
    engine.diagnostics.loaded.rope = object()
    worker.use(worker._backend, worker._attention)  # noqa: SLF001
    assert worker.graphs is None


def test_nobodys_rows_write_no_page(llama: Path) -> None:
    """Three rows in a graph of four: the pages that nobody has stay as they are."""
    engine = make_recorded_engine(llama, max_concurrent_sequences=4, prefix_cache=False)
    asked = [ask(f"{number}", prompt=5) for number in range(3)]
    ran = run(engine, *asked, steps=3)
    launch, seen = engine.diagnostics.worker.launch, []

    def launched(plan: StepPlan) -> None:
        used = {page for sequence in engine.diagnostics.planner.sequences for page in sequence.pages}
        free = [page for page in range(engine.info.pages) if page not in used]
        with torch.inference_mode():
            engine.diagnostics.store.data[free] = float("nan")
            launch(plan)
            seen.append(bool(engine.diagnostics.store.data[free].isnan().all()))

    engine.diagnostics.worker.launch = launched  # type: ignore[method-assign]
    run(engine, ran=ran)
    assert ran.tokens == run(make_local_engine(llama, kernels="cpp"), *asked).tokens
    assert len(seen) > 30
    assert all(seen)
    assert all(output.error is None for output in ran.outputs)


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (3, [1, 2]), (4, [1, 2, 4]), (20, [1, 2, 4, 8, 16, 24])])
def test_the_sizes_that_are_recorded(most: int, sizes: list[int]) -> None:
    assert captured_sizes(most) == sizes


def test_the_base_alone_needs_no_adapter(llama: Path) -> None:
    asked = [ask("a", adapter=BASE), ask("b", prompt=40)]
    assert (
        run(make_recorded_engine(llama), *asked).tokens == run(make_local_engine(llama, kernels="cpp"), *asked).tokens
    )
