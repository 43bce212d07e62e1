"""Plans and results are all that passes between the engine and its worker, and they are numbers (OR-13, OR-14)."""

import pickle
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from motet.domain import Digest, ParkMethod, RequestId
from motet_runner.engine import Engine
from motet_runner.execute.flat_batch import FlatBatch
from motet_runner.plan import StepPlan, StepResult
from motet_runner.worker_control import Worker
from tests.runner.engines import ask, load, make_engine, run
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
    channel = Channel(engine._worker)
    engine._worker = channel  # type: ignore[assignment]
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


def test_the_plan_of_a_long_sequence_is_as_short_as_that_of_a_short_one(llama: Path) -> None:
    sizes = []
    for prompt in (20, 420):
        engine = make_engine(llama)
        channel = through_a_channel(engine)
        run(engine, ask("a", prompt=prompt, max_tokens=12))
        sizes.append(max(map(len, channel.plans[-9:])))
    assert abs(sizes[1] - sizes[0]) < 16


def limit_tokens(engine: Engine, most: int) -> list[int]:
    """Memory suffices for `most` tokens at once. Returns a list that gets the size of each batch that fits."""
    forward, sizes = engine._loaded.forward, []

    def limited(batch: FlatBatch) -> torch.Tensor:
        if batch.tokens > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        sizes.append(batch.tokens)
        return forward(batch)

    engine._worker._loaded = Mock(wraps=engine._loaded, forward=limited, device=engine._loaded.device)
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
    assert engine._planner.chunk_tokens < 256


@pytest.mark.parametrize("ahead", [0, 1])
def test_without_memory_for_a_single_token_the_request_ends_and_the_engine_lives(llama: Path, ahead: int) -> None:
    engine = make_engine(llama, plan_ahead=ahead)
    limit_tokens(engine, 0)
    ran = run(engine, ask("a", prompt=5), ask("b", prompt=50))
    assert {name: output.error.code for name, output in ran.last.items()} == {"a": "overloaded", "b": "overloaded"}
    limit_tokens(engine, 100)
    assert len(run(engine, ask("c", prompt=5)).tokens["c"]) == 40
    assert engine.report().pages_free == engine.info.pages
