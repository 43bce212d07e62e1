"""Slots: shared loads, bounded places, nobody evicted under live sequences, failures that stay at home (PU-07)."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import orjson
import pytest
import regex
from safetensors.torch import load_file, save_file

from motet.domain import Digest, ParkMethod, RequestId
from motet.errors import AdapterFetchFailed
from motet_runner.adapters import layout as layout_module
from motet_runner.adapters.certification import certify
from motet_runner.adapters.layout import AdapterLayout, StoredTensor
from motet_runner.adapters.load_threads import LoadThreads
from motet_runner.adapters.peft_config import CONFIG_NAME, WEIGHTS_NAME
from motet_runner.adapters.weight_reader import Values, WeightReader
from motet_runner.engine import Engine
from motet_runner.execute.adapters.adapter_uploads import HURRY_SECONDS
from motet_runner.interface import AdapterEvicted, AdapterFailed, AdapterLoaded, Finish, State
from tests.runner.engines import ask, load, make_engine, run, step_beside_load
from tests.runner.random_models import RandomAdapter, save_adapter

A, B, C = map(Digest, "ABC")


def on_device(engine) -> set[str]:
    return {entry.digest for entry in engine.report().adapters if entry.on_device}


def test_a_known_adapter_is_prefetched_while_a_slot_is_free(llama: Path, adapters: list[Path]) -> None:
    engine = make_engine(llama, max_resident_adapters=2)
    for digest, folder in zip((A, B, C), adapters, strict=False):
        load(engine, digest, folder)
    run(engine)
    assert on_device(engine) == {A, B}
    assert not engine.has_work()


def test_the_least_recently_used_adapter_is_evicted_and_never_one_in_use(llama: Path, adapters: list[Path]) -> None:
    engine = make_engine(llama, max_resident_adapters=2)
    for digest, folder in zip((A, B, C), adapters, strict=False):
        load(engine, digest, folder)
    run(engine)
    alone = {d: run(engine, ask("q", adapter=d)).tokens["q"] for d in (A, B, C)}
    assert on_device(engine) == {B, C}
    ran = run(engine, ask("b", adapter=B, prompt=ask("q").prompt), ask("c", adapter=C, prompt=ask("q").prompt), steps=2)
    engine.add(ask("a", adapter=A, prompt=ask("q").prompt))
    while len(engine.report().sequences) == 3:
        assert on_device(engine) == {B, C}
        assert {e.request: e.state for e in engine.report().sequences}["a"] is State.LOADING
        ran.take(engine)
    run(engine, ran=ran)
    assert ran.tokens == {"a": alone[A], "b": alone[B], "c": alone[C]}


def test_waiting_sequences_share_one_load(llama: Path, adapters: list[Path]) -> None:
    engine = make_engine(llama)
    for index in range(5):
        engine.add(ask(f"r{index}", adapter=A))
    run(engine)
    assert not engine.has_work()
    assert engine.report().waiting == 5
    load(engine, A, adapters[0])
    load(engine, A, adapters[0])
    ran = run(engine)
    assert len(ran.of(AdapterLoaded)) == 1
    assert len(ran.tokens) == 5


def test_sequences_continue_while_an_adapter_loads_in_slices(llama: Path, adapters: list[Path], monkeypatch) -> None:
    monkeypatch.setattr("motet_runner.execute.adapters.load_pace.SLICE_BYTES", 4096)
    engine = make_engine(llama)
    ran = run(engine, ask("base", max_tokens=60), steps=1)
    load(engine, A, adapters[0])
    engine.add(ask("tuned", adapter=A))
    while "tuned" not in ran.tokens:
        before = len(ran.tokens["base"])
        step_beside_load(engine, ran)
        assert len(ran.tokens["base"]) == before + 1
    assert len(ran.tokens["base"]) > 10


def test_what_an_adapter_does_not_change_is_copied_in_slices_too(llama: Path, tmp_path: Path, monkeypatch) -> None:
    """It is zeros, and nothing of it is read."""
    monkeypatch.setattr("motet_runner.execute.adapters.load_pace.SLICE_BYTES", 4096)
    small = save_adapter(llama, "llama", RandomAdapter(8, 8, targets=("q_proj",)), tmp_path / "small", seed=9)
    engine = make_engine(llama)
    ran = run(engine, ask("base", max_tokens=60), steps=1)
    load(engine, A, small)
    while not on_device(engine):
        step_beside_load(engine, ran)
    assert len(ran.tokens["base"]) > 8 * engine.info.adapter_rank_bytes / 4096


def test_a_load_that_fails_fails_its_own_sequences_only(llama: Path, adapters: list[Path], tmp_path: Path) -> None:
    changed = Path(shutil.copytree(adapters[0], tmp_path / "changed"))
    engine = make_engine(llama)
    load(engine, A, changed)
    load(engine, B, adapters[1])
    overwrite(changed / WEIGHTS_NAME)  # as long as before
    ran = run(engine, ask("a", adapter=A), ask("b", adapter=B), ask("base"))
    assert ran.last["a"].finish is Finish.FAILED
    assert isinstance(ran.last["a"].error, AdapterFetchFailed)
    assert [event.digest for event in ran.of(AdapterFailed)] == [A]
    assert {name: len(tokens) for name, tokens in ran.tokens.items()} == {"a": 0, "b": 40, "base": 40}
    load(engine, A, adapters[0])
    assert len(run(engine, ask("again", adapter=A)).tokens["again"]) == 40


def test_an_adapter_checked_against_another_model_is_not_copied(llama: Path, adapters: list[Path]) -> None:
    engine = make_engine(llama)
    layout = certify(adapters[0], engine.info).layout
    first, *others = layout.linears
    linears = [first._replace(module="model.layers.99.q_proj"), *others]
    engine.load_adapter(A, AdapterLayout.of(layout.file, layout.stamp, layout.rank, linears))
    assert [event.digest for event in run(engine).of(AdapterFailed)] == [A]


@pytest.mark.parametrize("field", ["dtype", "module"])
def test_a_layout_that_makes_no_sense_fails_the_adapter_and_not_the_engine(
    llama: Path, adapters: list[Path], field: str
) -> None:
    """The process that checks has parsed what a tenant has written, so it may say anything."""
    engine = make_engine(llama)
    layout = certify(adapters[0], engine.info).layout
    first, *others = layout.linears
    assert first.a is not None
    wrong = first._replace(a=first.a._replace(dtype="F8")) if field == "dtype" else first._replace(module=["a list"])
    engine.load_adapter(A, AdapterLayout.of(layout.file, layout.stamp, layout.rank, [wrong, *others]))
    ran = run(engine, ask("tuned", adapter=A), ask("base"))
    assert ran.last["tuned"].finish is Finish.FAILED
    assert [event.digest for event in ran.of(AdapterFailed)] == [A]
    assert len(ran.tokens["base"]) == 40


def cut(weights: Path) -> None:
    os.truncate(weights, weights.stat().st_size // 2)


def swap(weights: Path) -> None:
    other = weights.with_name("other")
    shutil.copy2(weights, other)
    other.replace(weights)


@pytest.mark.parametrize("change", [cut, swap, Path.unlink])
def test_bytes_that_changed_after_the_check_are_not_copied(
    llama: Path, adapters: list[Path], tmp_path: Path, change
) -> None:
    changed = Path(shutil.copytree(adapters[0], tmp_path / "changed"))
    engine = make_engine(llama)
    load(engine, A, changed)
    change(changed / WEIGHTS_NAME)
    ran = run(engine)
    assert [event.digest for event in ran.of(AdapterFailed)] == [A]
    assert not on_device(engine)


def overwrite(weights: Path) -> None:
    with weights.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"1234")


@pytest.mark.parametrize("change", [cut, overwrite])
def test_a_file_that_changes_while_it_is_read_fails_the_load_and_not_the_engine(
    llama: Path, adapters: list[Path], tmp_path: Path, monkeypatch, change
) -> None:
    changed = Path(shutil.copytree(adapters[0], tmp_path / "changed"))
    engine = make_engine(llama)
    ran = run(engine, ask("base", max_tokens=60), steps=1)
    load(engine, A, changed)
    read, reads = WeightReader.read_into, []

    def change_in_between(self: WeightReader, into: Values, matrix: StoredTensor) -> None:
        reads.append(matrix)
        if len(reads) == 3:
            change(changed / WEIGHTS_NAME)
        read(self, into, matrix)

    monkeypatch.setattr(WeightReader, "read_into", change_in_between)
    run(engine, ran=ran)
    assert [event.digest for event in ran.of(AdapterFailed)] == [A]
    assert len(ran.tokens["base"]) == 60


def test_others_go_on_while_an_adapter_is_read_and_nobody_reads_it_twice(
    llama: Path, adapters: list[Path], monkeypatch
) -> None:
    """As long as the disk does not answer."""
    answers, threads = threading.Event(), []
    read = WeightReader.read_into

    def slow(self: WeightReader, into: Values, matrix: StoredTensor) -> None:
        threads.append(threading.get_ident())
        assert answers.wait(60)
        read(self, into, matrix)

    monkeypatch.setattr(WeightReader, "read_into", slow)
    engine = make_engine(llama)
    load(engine, A, adapters[0])
    ran = run(engine, *(ask(f"tuned{i}", adapter=A) for i in range(3)), ask("base"), steps=1)
    while not ran.last.get("base") or ran.last["base"].finish is None:
        ran.take(engine)
    assert not on_device(engine)
    began, turns = time.perf_counter(), 20
    run(engine, ran=ran, steps=turns)
    assert time.perf_counter() - began > 0.9 * turns * HURRY_SECONDS, "it waits for the disk and does not spin"
    answers.set()
    run(engine, ran=ran)
    assert {name: len(tokens) for name, tokens in ran.tokens.items()} == {
        **{f"tuned{i}": 40 for i in range(3)},
        "base": 40,
    }
    assert len(ran.of(AdapterLoaded)) == 1
    assert set(threads).isdisjoint({threading.get_ident()})


def test_an_adapter_whose_disk_does_not_answer_delays_no_other_adapter(
    llama: Path, adapters: list[Path], monkeypatch
) -> None:
    engine = make_engine(llama)
    load(engine, B, adapters[1])
    expected = run(engine, ask("tuned", adapter=B)).tokens["tuned"]
    answers, read = threading.Event(), WeightReader.read_into

    def slow(self: WeightReader, into: Values, matrix: StoredTensor) -> None:
        assert self._layout.path != hangs or answers.wait(60)
        read(self, into, matrix)

    hangs = certify(adapters[0], engine.info).layout.path
    monkeypatch.setattr(WeightReader, "read_into", slow)
    engine = make_engine(llama)
    ran = run(engine, ask("hangs", adapter=A), ask("tuned", adapter=B), steps=1)
    load(engine, A, adapters[0])
    load(engine, B, adapters[1])
    while len(ran.tokens.get("tuned", ())) < len(expected):
        ran.take(engine)
    assert not ran.tokens.get("hangs")
    answers.set()
    assert run(engine, ran=ran).tokens["tuned"] == expected
    assert len(ran.tokens["hangs"]) == 40


def test_a_slow_disk_is_progress_and_one_that_does_not_answer_is_none(
    llama: Path, adapters: list[Path], monkeypatch
) -> None:
    """Sequences that all wait for an adapter take no steps. An engine without progress counts as hung."""
    answers, read = threading.Semaphore(0), vars(WeightReader)["_read_some"]

    def slow(self: WeightReader, into: memoryview, at: int) -> int:
        assert answers.acquire(timeout=60)
        return read(self, into, at)

    monkeypatch.setattr(WeightReader, "_read_some", slow)
    monkeypatch.setattr("motet_runner.adapters.weight_reader.MAX_BYTES_A_READ", 4096)
    engine = make_engine(llama)
    load(engine, A, adapters[0])
    ran = run(engine, ask("tuned", adapter=A), steps=5)
    seen = []
    for _ in range(3):
        before = engine.report().progress
        run(engine, ran=ran, steps=5)
        assert engine.report().progress == before, "nothing was read"
        answers.release()
        deadline = time.monotonic() + 20
        while engine.report().progress == before and time.monotonic() < deadline:
            ran.take(engine)
        seen.append(engine.report().progress > before)
    assert seen == [True, True, True]
    assert engine.report().steps == 0
    answers.release(1000)
    assert len(run(engine, ran=ran).tokens["tuned"]) == 40


@pytest.mark.parametrize(("most", "together"), [(1, 1), (1 << 30, 2)])
def test_adapters_with_large_runs_load_one_after_the_other(
    llama: Path, tmp_path: Path, monkeypatch, most: int, together: int
) -> None:
    """A run has places for all linears, also if the file has few."""
    monkeypatch.setattr("motet_runner.execute.adapters.load_pace.SLICE_BYTES", 4096)
    monkeypatch.setattr("motet_runner.engine.MAX_BYTES_BESIDE", most)
    engine = make_engine(llama)
    ran = run(engine, ask("base", max_tokens=200), steps=1)
    for digest in (A, B):
        folder = tmp_path / digest
        load(engine, digest, save_adapter(llama, "llama", RandomAdapter(8, 8, targets=("q_proj",)), folder, seed=9))
        engine.add(ask(digest, adapter=digest))
    loading = []
    launch = engine.launch
    monkeypatch.setattr(engine, "launch", lambda plan: (loading.append(len(plan.loading)), launch(plan)))
    while on_device(engine) != {A, B}:
        step_beside_load(engine, ran)
    assert max(loading) == together


def test_an_adapter_is_read_no_faster_than_iterations_allow(llama: Path, adapters: list[Path], monkeypatch) -> None:
    """Its thread and the engine's share a processor."""
    monkeypatch.setattr("motet_runner.execute.adapters.load_pace.SLICE_BYTES", 1)
    monkeypatch.setattr("motet_runner.adapters.host_load.PACE_SECONDS", 60.0)
    reads = []
    read = WeightReader.read_into
    monkeypatch.setattr(
        WeightReader, "read_into", lambda self, into, matrix: (reads.append(matrix), read(self, into, matrix))
    )
    engine = make_engine(llama)
    ran = run(engine, ask("base"), steps=1)
    load(engine, A, adapters[0])
    for steps in range(1, 4):
        run(engine, ran=ran, steps=1)
        while len(reads) < 2 * steps:
            time.sleep(0.001)
        time.sleep(0.02)
        assert len(reads) == 2 * steps, "one linear in each"
    run(engine, ran=ran)
    assert on_device(engine) == {A}


def test_a_machine_without_threads_to_give_fails_the_adapter_and_not_the_engine(
    llama: Path, adapters: list[Path], monkeypatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    engine = make_engine(llama)
    load(engine, A, adapters[0])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr("motet_runner.adapters.host_load.THREADS", LoadThreads())
    ran = run(engine, ask("tuned", adapter=A), ask("base"))
    assert ran.last["tuned"].finish is Finish.FAILED
    assert len(ran.tokens["base"]) == 40


def test_a_step_parses_nothing_of_an_adapter_and_matches_none_of_its_patterns(
    llama: Path, adapters: list[Path], tmp_path: Path, monkeypatch
) -> None:
    """A slow pattern and a header of a megabyte cost the check; the iterations of all others only copy."""
    costly = Path(shutil.copytree(adapters[0], tmp_path / "costly"))
    config = json.loads((costly / CONFIG_NAME).read_text())
    pattern = "(?:" + "|".join(f"(?:.*){name}" for name in config["target_modules"]) + ")"
    (costly / CONFIG_NAME).write_text(json.dumps(config | {"target_modules": pattern}))
    save_file(load_file(costly / WEIGHTS_NAME), costly / WEIGHTS_NAME, metadata={"notes": "x" * 1_000_000})
    engine = make_engine(llama)
    load(engine, A, costly)
    ran = run(engine, ask("base"), steps=1)
    calls: list[str] = []
    for owner, name in ((json, "loads"), (regex, "match"), (regex, "compile"), (Path, "read_bytes"), (Path, "open")):
        monkeypatch.setattr(owner, name, _noted(getattr(owner, name), name, calls))
    run(engine, ask("tuned", adapter=A), ran=ran)
    monkeypatch.undo()
    assert len(ran.tokens["tuned"]) == 40
    assert calls == []


def test_waiting_for_an_adapter_does_not_read_its_layout(llama: Path, adapters: list[Path], monkeypatch) -> None:
    """The service says with every waiting request where the adapter lies, and every report says how large it is."""
    engine = make_engine(llama)
    layout = certify(adapters[0], engine.info).layout
    layout_module.unpacked.cache_clear()  # the check has read it in this process
    calls: list[str] = []
    monkeypatch.setattr(layout_module.orjson, "loads", _noted(orjson.loads, "loads", calls))
    for index in range(20):
        engine.load_adapter(A, layout)
        engine.add(ask(f"r{index}", adapter=A))
        assert engine.report().adapters[0].bytes == layout.size
    assert calls == []
    run(engine)
    assert len(calls) == 1


@pytest.mark.parametrize("holds", ["nothing", "another adapter's", "what was checked"])
def test_a_layout_is_read_from_its_file_and_only_as_it_was_written(
    llama: Path, adapters: list[Path], tmp_path: Path, holds: str
) -> None:
    engine = make_engine(llama)
    folder = shutil.copytree(adapters[0], tmp_path / "a")
    layout = certify(folder, engine.info).layout
    if holds != "nothing":
        of = layout if holds == "what was checked" else certify(adapters[1], engine.info).layout
        (folder / layout.linears_file).write_bytes(of.packed)
    engine.load_adapter(A, layout.stored())
    load(engine, B, adapters[1])
    ran = run(engine, ask("a", adapter=A), ask("b", adapter=B))
    assert len(ran.tokens["b"]) == 40
    assert [event.digest for event in ran.of(AdapterFailed)] == ([A] if holds != "what was checked" else [])
    if holds == "what was checked":
        whole = make_engine(llama)
        whole.load_adapter(A, layout)
        assert ran.tokens["a"] == run(whole, ask("a", adapter=A)).tokens["a"]
    else:
        assert isinstance(ran.last["a"].error, AdapterFetchFailed)


def _noted(call, name: str, calls: list[str]):
    def noted(*arguments, **named):
        calls.append(name)
        return call(*arguments, **named)

    return noted


def test_a_dropped_adapter_stays_until_its_last_sequence_has_finished(llama: Path, adapters: list[Path]) -> None:
    engine = make_engine(llama)
    load(engine, A, adapters[0])
    ran = run(engine, ask("a", adapter=A), steps=4)
    engine.drop_adapter(A)
    assert on_device(engine) == {A}
    run(engine, ran=ran)
    assert len(ran.tokens["a"]) == 40
    assert not engine.report().adapters
    assert [event.digest for event in ran.of(AdapterEvicted)] == [A]


def test_a_slot_keeps_no_values_of_its_last_adapter(llama: Path, adapters: list[Path], tmp_path: Path) -> None:
    """An adapter of fewer modules and a smaller rank moves into a slot that was full."""
    small = save_adapter(llama, "llama", RandomAdapter(2, 4, targets=("q_proj",)), tmp_path / "small", seed=9)
    fresh = make_engine(llama)
    load(fresh, B, small)
    expected = run(fresh, ask("q", adapter=B)).tokens
    engine = make_engine(llama, max_resident_adapters=1)
    load(engine, A, adapters[0])
    run(engine, ask("q", adapter=A))
    load(engine, B, small)
    assert run(engine, ask("q", adapter=B)).tokens == expected


def parked_on(adapter: Digest, folder: Path, other: Path, llama: Path) -> tuple[Engine, int]:
    """An engine with one slot, where "parked" was parked in the middle and its adapter has had to make room."""
    engine = make_engine(llama, max_resident_adapters=1)
    load(engine, adapter, folder)
    load(engine, C, other)
    engine.set_supervised(True)
    run(engine, ask("parked", adapter=adapter), steps=5)
    promise = engine.report().sequences[0].promise
    assert engine.park(RequestId("parked"), 1, promise, promise, ParkMethod.SWAP)
    run(engine, ask("between", adapter=C))
    assert on_device(engine) == {C}
    return engine, promise


def test_a_failed_load_does_not_leave_a_parked_sequence_waiting(
    llama: Path, adapters: list[Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(adapters[0], tmp_path / "vanishing"))
    engine, promise = parked_on(A, folder, adapters[1], llama)
    (folder / "adapter_model.safetensors").unlink()
    failed = run(engine, ask("newcomer", adapter=A))
    assert failed.last["newcomer"].finish is Finish.FAILED
    assert engine.resume(RequestId("parked"), 1, promise)
    ran = run(engine)
    assert ran.last["parked"].finish is Finish.FAILED
    assert isinstance(ran.last["parked"].error, AdapterFetchFailed)
    assert engine.report().pages_promised == 0


def test_a_parked_sequence_resumes_when_its_adapter_loads_again(
    llama: Path, adapters: list[Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(adapters[0], tmp_path / "passing"))
    engine, promise = parked_on(A, folder, adapters[1], llama)
    weights = folder / "adapter_model.safetensors"
    weights.rename(tmp_path / "aside")
    assert run(engine, ask("newcomer", adapter=A)).last["newcomer"].finish is Finish.FAILED
    (tmp_path / "aside").rename(weights)
    assert engine.resume(RequestId("parked"), 1, promise)
    assert run(engine).last["parked"].finish is Finish.LENGTH


def test_a_dropped_adapter_stays_known_while_a_parked_sequence_will_need_it(llama: Path, adapters: list[Path]) -> None:
    engine, promise = parked_on(A, adapters[0], adapters[1], llama)
    engine.drop_adapter(A)
    run(engine)
    assert engine.resume(RequestId("parked"), 1, promise)
    ran = run(engine)
    assert ran.last["parked"].finish is Finish.LENGTH
    assert not engine.report().adapters, "A is forgotten, and C waits on the disk"
