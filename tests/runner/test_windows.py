"""Pages that a sliding window has left belong to others, and nothing depends on what they hold."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from motet.domain import PAGE_TOKENS, ParkMethod, RequestId, pages_for
from motet_runner import mask_threads
from motet_runner.engine import Engine
from motet_runner.row_mask import RowMask
from testbed.compiled_kernels import needs_a_compiler
from tests.runner.engines import EngineRun, ask, make_engine, run
from tests.runner.families import BY_NAME, WINDOW
from tests.runner.random_models import save_base

MOST_PAGES = pages_for(WINDOW, PAGE_TOKENS) + 1
ASKED = [ask(f"r{i}", prompt=10 + 30 * i, max_tokens=60) for i in range(3)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = BY_NAME["Mistral, sliding window"].config
    return save_base("mistral", tmp_path_factory.mktemp("base") / "base", config=config)


def run_with_nan_in_free_pages(engine: Engine, ran: EngineRun, steps: int = -1) -> None:
    while engine.has_work() and steps != 0:
        with torch.inference_mode():
            engine.diagnostics.store.data[list(engine.diagnostics.planner.memory.pages.empty_pages)] = float("nan")
        ran.take(engine)
        steps -= 1


def test_a_long_answer_holds_only_the_pages_of_its_window(base: Path) -> None:
    engine = make_engine(base)
    run(engine, ASKED[0], steps=55)
    (entry,) = engine.report().sequences
    assert entry.pages_used <= MOST_PAGES < pages_for(entry.prompt_tokens + entry.output_tokens, PAGE_TOKENS)


@pytest.mark.parametrize("kernels", ["torch", "cpp"])
@pytest.mark.parametrize("method", ParkMethod)
def test_answers_do_not_depend_on_pages_that_were_left_nor_on_parking(
    base: Path, method: ParkMethod, kernels: str
) -> None:
    if kernels == "cpp":
        needs_a_compiler()
    expected = run(make_engine(base), *ASKED).tokens
    engine = make_engine(base, host_kv_mib=1, prefill_chunk_tokens=20, kernels=kernels)
    engine.set_supervised(True)
    ran = run(engine, *ASKED, steps=0)
    run_with_nan_in_free_pages(engine, ran, steps=30)
    for entry in engine.report().sequences:
        assert engine.park(entry.request, 1, entry.promise, 9, method)
    run(engine, ran=ran, steps=1)  # what is swapped out has left the device now
    run_with_nan_in_free_pages(engine, ran, steps=2)
    for one in ASKED:
        assert engine.resume(RequestId(one.request), 1, 9)
    run_with_nan_in_free_pages(engine, ran)
    assert ran.tokens == expected


class EveryThird:
    """Refuses most tokens, so that nearly each one waits for its mask."""

    failure = None

    def __init__(self) -> None:
        self._place = 0

    def take(self, token: int, place: int) -> bool:
        self._place = place
        return (token + place) % 3 == 0

    def allowed(self) -> bytes:
        bits = [(token + self._place) % 3 == 0 for token in range(512)]
        return np.packbits(bits, bitorder="little").tobytes()


@pytest.mark.parametrize("kernels", ["torch", "cpp"])
def test_a_token_that_is_computed_again_finds_its_window(
    base: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mask came late. Mutation: `Sequence.to_keep` does not count the newest token."""
    if kernels == "cpp":
        needs_a_compiler()

    def tokens(seconds: float) -> dict[str, list[int]]:
        monkeypatch.setattr(mask_threads, "MAX_WAIT_SECONDS", seconds)
        monkeypatch.setattr(mask_threads, "MAX_WAITS_SECONDS", seconds)
        engine, ran = make_engine(base, kernels=kernels), EngineRun()
        for one in ASKED:
            engine.add(replace(one, mask=RowMask(EveryThird())))
        run_with_nan_in_free_pages(engine, ran)
        return ran.tokens

    monkeypatch.setattr(mask_threads, "MAX_WAIT_SHARE", 0.0)
    assert tokens(0.0) == tokens(60.0)
