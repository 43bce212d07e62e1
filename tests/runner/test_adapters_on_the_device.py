"""Slots: shared loads, bounded places, nobody evicted under live sequences, failures that stay at home (PU-07)."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from motet.errors import AdapterIncompatible
from motet.model import Digest
from motet_runner.interface import AdapterEvicted, AdapterFailed, AdapterLoaded, Finish, State
from tests.runner.engines import ask, make_engine, run

A, B, C = map(Digest, "ABC")


def on_device(engine) -> set[str]:
    return {entry.digest for entry in engine.report().adapters if entry.on_device}


def test_a_known_adapter_is_loaded_ahead_while_there_is_room(llama: Path, adapters: list[Path]) -> None:
    engine = make_engine(llama, max_resident_adapters=2)
    for digest, folder in zip((A, B, C), adapters, strict=False):
        engine.load_adapter(digest, folder)
    run(engine)
    assert on_device(engine) == {A, B}
    assert not engine.has_work()


def test_the_least_recently_used_makes_room_and_never_a_live_one(llama: Path, adapters: list[Path]) -> None:
    engine = make_engine(llama, max_resident_adapters=2)
    for digest, folder in zip((A, B, C), adapters, strict=False):
        engine.load_adapter(digest, folder)
    run(engine)
    alone = {d: run(engine, ask("q", adapter=d)).tokens["q"] for d in (A, B, C)}
    assert on_device(engine) == {B, C}
    ran = run(engine, ask("b", adapter=B, prompt=ask("q").prompt), ask("c", adapter=C, prompt=ask("q").prompt), steps=2)
    engine.add(ask("a", adapter=A, prompt=ask("q").prompt))
    while len(engine.report().book) == 3:
        assert on_device(engine) == {B, C}
        assert {e.request: e.state for e in engine.report().book}["a"] is State.LOADING
        ran.take(engine)
    run(engine, ran=ran)
    assert ran.tokens == {"a": alone[A], "b": alone[B], "c": alone[C]}


def test_all_who_wait_share_one_load(llama: Path, adapters: list[Path]) -> None:
    engine = make_engine(llama)
    for index in range(5):
        engine.add(ask(f"r{index}", adapter=A))
    run(engine)
    assert not engine.has_work()
    assert engine.report().waiting == 5
    engine.load_adapter(A, adapters[0])
    engine.load_adapter(A, adapters[0])
    ran = run(engine)
    assert len(ran.of(AdapterLoaded)) == 1
    assert len(ran.tokens) == 5


def test_others_go_on_while_an_adapter_loads_in_slices(llama: Path, adapters: list[Path], monkeypatch) -> None:
    monkeypatch.setattr("motet_runner.adapters.slots.BYTES_A_SLICE", 1)
    engine = make_engine(llama)
    ran = run(engine, ask("base", max_tokens=60), steps=1)
    engine.load_adapter(A, adapters[0])
    engine.add(ask("tuned", adapter=A))
    while "tuned" not in ran.tokens:
        before = len(ran.tokens["base"])
        ran.take(engine)
        assert len(ran.tokens["base"]) == before + 1
    assert len(ran.tokens["base"]) > 10


def test_a_load_that_fails_fails_its_own_sequences_only(llama: Path, adapters: list[Path], tmp_path: Path) -> None:
    broken = Path(shutil.copytree(adapters[0], tmp_path / "broken"))
    tensors = load_file(broken / "adapter_model.safetensors")
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] * float("nan")}, broken / "adapter_model.safetensors")
    engine = make_engine(llama)
    engine.load_adapter(A, broken)
    engine.load_adapter(B, adapters[1])
    ran = run(engine, ask("a", adapter=A), ask("b", adapter=B), ask("base"))
    assert ran.last["a"].finish is Finish.FAILED
    assert isinstance(ran.last["a"].error, AdapterIncompatible)
    assert [event.digest for event in ran.of(AdapterFailed)] == [A]
    assert {name: len(tokens) for name, tokens in ran.tokens.items()} == {"a": 0, "b": 40, "base": 40}
    engine.load_adapter(A, adapters[0])
    assert len(run(engine, ask("again", adapter=A)).tokens["again"]) == 40


def test_bytes_that_changed_after_the_check_are_noticed(llama: Path, adapters: list[Path], tmp_path: Path) -> None:
    changed = Path(shutil.copytree(adapters[0], tmp_path / "changed"))
    config = json.loads((changed / "adapter_config.json").read_text())
    (changed / "adapter_config.json").write_text(json.dumps(config | {"r": 5}))
    engine = make_engine(llama)
    engine.load_adapter(A, changed)
    assert [event.error.reason for event in run(engine).of(AdapterFailed)] == ["ShapeMismatch"]


def test_a_dropped_adapter_stays_until_its_last_sequence_has_finished(llama: Path, adapters: list[Path]) -> None:
    engine = make_engine(llama)
    engine.load_adapter(A, adapters[0])
    ran = run(engine, ask("a", adapter=A), steps=4)
    engine.drop_adapter(A)
    assert on_device(engine) == {A}
    run(engine, ran=ran)
    assert len(ran.tokens["a"]) == 40
    assert not engine.report().adapters
    assert [event.digest for event in ran.of(AdapterEvicted)] == [A]


def test_a_slot_keeps_nothing_of_its_last_owner(llama: Path, adapters: list[Path], tmp_path: Path) -> None:
    """An adapter of fewer modules and a smaller rank moves into a slot that was full."""
    from tests.runner.random_models import AdapterSpec, save_adapter

    small = save_adapter(llama, "llama", AdapterSpec(2, 4, targets=("q_proj",)), tmp_path / "small", seed=9)
    fresh = make_engine(llama)
    fresh.load_adapter(B, small)
    expected = run(fresh, ask("q", adapter=B)).tokens
    engine = make_engine(llama, max_resident_adapters=1)
    engine.load_adapter(A, adapters[0])
    run(engine, ask("q", adapter=A))
    engine.load_adapter(B, small)
    assert run(engine, ask("q", adapter=B)).tokens == expected
