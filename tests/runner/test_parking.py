"""Sequences that leave the device and come back say what they would have said (S3-10, S3-11, S3-13, S3-14)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from motet.domain import Digest, ParkMethod, RequestId
from motet_runner.interface import OverflowAhead, ParkedNow, ResumedNow, StateChanged
from tests.runner.engines import PLAN_AHEAD, EngineRun, ask, load, make_engine, run

MANY = [f"r{i}" for i in range(6)]


@pytest.fixture(scope="module")
def unparked(llama: Path) -> dict[str, list[int]]:
    return run(make_engine(llama), *(ask(name, seed=7, temperature=0.8) for name in MANY)).tokens


@pytest.mark.parametrize("method", ParkMethod)
@pytest.mark.parametrize("after", [1, 5, 30])
def test_a_parked_sequence_gives_the_same_tokens(
    llama: Path, unparked: dict[str, list[int]], method: ParkMethod, after: int
) -> None:
    engine = make_engine(llama, host_kv_mib=4)
    engine.set_supervised(True)
    ran = run(engine, *(ask(name, seed=7, temperature=0.8) for name in MANY), steps=after)
    for name in MANY[::2]:
        promise = next(entry.promise for entry in engine.report().sequences if entry.request == name)
        assert engine.park(RequestId(name), 1, promise, promise + 1, method)
    ran = run(engine, ran=ran)
    assert engine.report().parked == 3
    for name in MANY[::2]:
        assert engine.resume(RequestId(name), 1, 5)
    ran = run(engine, ran=ran)
    assert ran.tokens == unparked
    assert {event.method for event in ran.of(ParkedNow)} == {method}
    assert len(ran.of(ResumedNow)) == 3
    assert engine.report().pages_free == engine.info.pages
    assert engine.report().host_bytes_free == engine.info.host_bytes


def test_a_prompt_parked_during_prefill_gives_the_same_tokens(llama: Path) -> None:
    whole = run(make_engine(llama), ask("a", prompt=200)).tokens
    engine = make_engine(llama, host_kv_mib=4, prefill_chunk_tokens=48)
    engine.set_supervised(True)
    ran = run(engine, ask("a", prompt=200), steps=2)
    promise = engine.report().sequences[0].promise
    assert engine.park(RequestId("a"), 1, promise, promise, ParkMethod.SWAP)
    run(engine, ran=ran)
    assert engine.resume(RequestId("a"), 1, promise)
    assert run(engine, ran=ran).tokens == whole


def test_without_a_supervisor_all_sequences_finish_with_the_right_tokens(llama: Path, tmp_path: Path) -> None:
    """Promises of one page in a memory far too small for all: b, 2b, 4b are in the trace, and parks and resumes."""
    trace = tmp_path / "trace.jsonl"
    asked = [ask(f"r{i}", prompt=12, max_tokens=180, promise=1) for i in range(16)]
    expected = run(make_engine(llama, kv_cache_mib=16), *asked).tokens
    engine = make_engine(llama, kv_cache_mib=1, host_kv_mib=1, step_trace=trace)
    assert engine.info.pages < 16 * 12 / 2
    ran = run(engine, *asked)
    assert ran.tokens == expected
    assert ran.of(OverflowAhead)
    assert ran.of(ParkedNow)
    assert all(event.by_itself for event in ran.of(ParkedNow))
    assert len(ran.of(ResumedNow)) == len(ran.of(ParkedNow))
    promises = [
        line["promises"]["r0"]
        for line in map(json.loads, trace.read_text().splitlines())
        if "r0" in line.get("promises", {})
    ]
    assert promises[:3] == [1, 2, 4]
    assert any("parks" in json.loads(line) for line in trace.read_text().splitlines())


def test_with_a_supervisor_only_the_sequence_at_its_promise_waits_for_an_order(llama: Path) -> None:
    engine = make_engine(llama, protect_after_steps=1000)
    engine.set_supervised(True)
    ran = run(engine, ask("tight", prompt=10, promise=1), ask("wide", prompt=10, max_tokens=60), steps=30)
    assert (len(ran.tokens["tight"]), len(ran.tokens["wide"])) == (7, 30)
    assert [(event.request, event.promise) for event in ran.of(OverflowAhead)] == [("tight", 1)]
    assert engine.extend(RequestId("tight"), 1, 1, 2)
    assert not engine.extend(RequestId("tight"), 1, 1, 4)
    run(engine, ran=ran, steps=1 + PLAN_AHEAD)
    assert len(ran.tokens["tight"]) == 8


def test_a_parked_sequence_frees_its_adapters_slot_and_gets_one_again(llama: Path, adapters: list[Path]) -> None:
    first, second = Digest("first"), Digest("second")
    engine = make_engine(llama, max_resident_adapters=1)
    for digest, folder in zip((first, second), adapters, strict=False):
        load(engine, digest, folder)
    expected = run(engine, ask("a", adapter=first)).tokens["a"]
    engine.set_supervised(True)
    ran = run(engine, ask("a", adapter=first), steps=5)
    promise = engine.report().sequences[0].promise
    assert engine.park(RequestId("a"), 1, promise, promise, ParkMethod.SWAP)
    run(engine, ask("b", adapter=second), ran=ran)
    assert len(ran.tokens["b"]) == 40
    assert engine.resume(RequestId("a"), 1, promise)
    assert run(engine, ran=ran).tokens["a"] == expected


def test_a_cancelled_sequence_is_gone_within_the_iteration(llama: Path) -> None:
    engine = make_engine(llama)
    run(engine, ask("a"), ask("b"), steps=3)
    assert engine.cancel(RequestId("a"), 1)
    assert not engine.cancel(RequestId("a"), 1)
    ran = EngineRun()
    ran.take(engine)
    assert set(ran.tokens) == {"b"}
    run(engine)
    assert engine.report().pages_free == engine.info.pages


def test_a_suspect_gives_the_same_tokens_as_beside_others(llama: Path, unparked: dict[str, list[int]]) -> None:
    """The real engine computes it alone first, and says so before (`tests/runner/plan/test_suspects.py`)."""
    suspects = MANY[1::2]
    requests = [ask(name, seed=7, temperature=0.8) for name in MANY]
    ran = run(make_engine(llama), *(replace(one, engines_lost=int(one.request in suspects)) for one in requests))
    assert ran.tokens == unparked
    alone = [event.request for event in ran.of(StateChanged) if event.alone]
    assert sorted(alone) == sorted(suspects * 2)
