"""Iterations of rows that only decode are made from the one before, and bring what others would."""

from pathlib import Path

import pytest
import torch

from motet.domain import PAGE_TOKENS, Digest, RequestId
from motet.errors import NotFinite
from motet_runner.engine import Engine
from motet_runner.execute.batch.flat_batch import FlatBatch
from motet_runner.plan import StepPlan
from testbed.compiled_kernels import compiled_library
from tests.runner.engines import EngineRun, ask, load, make_engine, run

X, Y = Digest("sha256:x"), Digest("sha256:y")


def compiled_engine(base: Path, adapters: list[Path], **settings) -> Engine:
    compiled_library()
    engine = make_engine(base, kernels="cpp", **settings)
    for digest, folder in zip((X, Y), adapters, strict=False):
        load(engine, digest, folder)
    run(engine, *(ask(f"warm {digest}", adapter=digest, max_tokens=2) for digest in (X, Y)))
    return engine


def never_again(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Engine:
    """The reference: each of its batches is laid out."""
    monkeypatch.setattr(engine.diagnostics.worker, "_may_go_on", lambda *_: False)
    return engine


def laid_out(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[StepPlan]:
    """Gets the plans whose batches are laid out."""
    builder, plans = engine.diagnostics.worker.builder, []
    build = builder.build

    def noted(plan: StepPlan) -> FlatBatch:
        plans.append(plan)
        return build(plan)

    monkeypatch.setattr(builder, "build", noted)
    return plans


def mixed(engine: Engine) -> EngineRun:
    """Adapters in another order than the requests, ends, a prompt in between, a row that draws and one with
    penalties."""
    ran = run(
        engine,
        ask("base", prompt=30, max_tokens=70),
        ask("y", prompt=3, adapter=Y, max_tokens=50),
        ask("x", prompt=17, adapter=X, max_tokens=44),
        steps=25,
    )
    run(engine, ask("late", prompt=40, adapter=X, max_tokens=60), steps=20, ran=ran)
    run(engine, ask("drawn", prompt=5, temperature=1.0, seed=3, max_tokens=10), steps=8, ran=ran)
    return run(engine, ask("tuned", prompt=5, presence_penalty=2.0, max_tokens=12), ran=ran)


@pytest.mark.parametrize("ahead", [0, 1])
def test_tokens_are_those_of_batches_that_are_laid_out(
    llama: Path, adapters: list[Path], ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = never_again(monkeypatch, compiled_engine(llama, adapters, plan_ahead=ahead))
    engine = compiled_engine(llama, adapters, plan_ahead=ahead)
    plans = laid_out(monkeypatch, engine)
    before = engine.report().steps
    ran = mixed(engine)
    assert ran.tokens == mixed(reference).tokens
    assert len(plans) < 0.6 * (engine.report().steps - before)


def test_rows_know_their_tokens_when_another_iteration_comes(
    llama: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = compiled_engine(llama, adapters)
    plans = laid_out(monkeypatch, engine)
    first = ask("first", prompt=5, max_tokens=60)
    ran = run(engine, first, steps=40)
    assert len(plans) == 3, "the prompt, the first decode, and the first of the round"
    run(engine, ask("second", prompt=5), steps=1, ran=ran)
    (row,) = (row for row in engine.diagnostics.worker.table._rows.values() if row.request == "first")  # noqa: SLF001
    assert row.tokens == [*first.prompt, *ran.tokens["first"]]


def test_what_memory_cannot_hold_any_more_is_computed_in_parts(
    llama: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [ask(name, prompt=14, max_tokens=40) for name in "abc"]
    expected = run(compiled_engine(llama, adapters), *asked).tokens
    engine = compiled_engine(llama, adapters)
    ran = run(engine, *asked, steps=18)
    again = engine.diagnostics.worker.again
    assert again is not None
    fused, failed = engine.diagnostics.loaded.fused, []

    def fails_once(batch: FlatBatch) -> torch.Tensor:
        if not failed:
            failed.append(batch.tokens)
            raise torch.OutOfMemoryError("out of memory")
        return fused(batch)

    monkeypatch.setattr(engine.diagnostics.loaded, "fused", fails_once)
    run(engine, steps=1, ran=ran)
    assert failed == [3]
    assert engine.diagnostics.worker.again is not again
    assert run(engine, ran=ran).tokens == expected


def test_a_row_that_is_not_finite_goes_and_the_others_stay(
    llama: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [ask(name, prompt=14, max_tokens=40) for name in "abc"]
    expected = run(compiled_engine(llama, adapters, plan_ahead=1), *asked).tokens
    engine = compiled_engine(llama, adapters, plan_ahead=1)
    ran = run(engine, *asked, steps=18)
    fused = engine.diagnostics.loaded.fused
    broken = [True]

    def broken_once(batch: FlatBatch) -> torch.Tensor:
        logits = fused(batch)
        if broken.pop():
            batch.chosen.numpy()[1] = -1
        broken.append(False)
        return logits

    monkeypatch.setattr(engine.diagnostics.loaded, "fused", broken_once)
    run(engine, ran=ran)
    assert isinstance(ran.last[RequestId("b")].error, NotFinite)
    assert (ran.tokens["a"], ran.tokens["c"]) == (expected["a"], expected["c"])


def test_a_page_table_that_has_to_grow_is_laid_out_anew(
    llama: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = ask("long", prompt=200, max_tokens=120)
    expected = run(never_again(monkeypatch, compiled_engine(llama, adapters)), long).tokens
    engine = compiled_engine(llama, adapters)
    pages = engine.diagnostics.worker.table.pages.shape[1]
    assert run(engine, long).tokens == expected
    assert engine.diagnostics.worker.table.pages.shape[1] > pages
    assert PAGE_TOKENS * pages > len(long.prompt), "it grew while only decodes ran"


def test_pages_are_cleared_before_their_first_token(llama: Path, adapters: list[Path]) -> None:
    engine = compiled_engine(llama, adapters)
    run(engine, ask("a", prompt=10), ask("b", prompt=14), steps=2)
    (count,) = {int(number) for number in engine.diagnostics.worker.table.counts[:2]}
    table = engine.diagnostics.worker.table
    others = set(range(engine.info.pages)) - set(table.pages[:2, :count].reshape(-1).tolist())
    with torch.inference_mode():
        engine.diagnostics.store.data[list(others)] = float("nan")
    run(engine, steps=36)
    assert engine.diagnostics.worker.again is not None
    for row in (0, 1):
        assert len(table.pages_of(row)) > 2
        assert engine.diagnostics.store.data[table.pages_of(row).tolist()].isfinite().all()
