"""A refit: a real process reads real samples, and the predictor installs what it has made, or goes on without."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from motet.clock import Clock, FakeClock, monotonic
from motet.store import length_samples, migrate, open_store
from motet_predictor import refits as refits_module
from motet_predictor import sample_features
from motet_predictor.fitted_file import read_fitted, write_fitted
from motet_predictor.fitting import fit
from motet_predictor.length_model import LengthModel
from motet_predictor.metrics import Metrics
from motet_predictor.prompt_model import Fitted, PromptModel
from motet_predictor.refit import NOTHING_TO_FIT
from motet_predictor.refits import Refits
from tests.predictor.test_prompt_model import LONG, SHORT, SPACE, answers, features


def url(folder: Path) -> str:
    return f"sqlite+aiosqlite:///{folder}/motet.db"


async def keep_samples(folder: Path, count: int, *, space: int = SPACE, tenant: str = "acme") -> None:
    rows = [
        length_samples.LengthSample(
            request="r",
            tenant=tenant,
            adapter="a",
            prompt_tokens=9,
            output_tokens=one.tokens,
            censored=False,
            estimated_q50=0,
            estimated_q95=0,
            estimate_source="",
            features=sample_features.to_bytes(space, one.features),
        )
        for one in answers(count, seed=3)
    ]
    async with open_store(url(folder)) as store:
        await length_samples.activate_version(store, "v")
        await length_samples.save(store, "v", [], rows, keep_samples=100_000)


def refits_of(
    folder: Path,
    model: PromptModel,
    registry: CollectorRegistry,
    *,
    max_seconds: float = 60.0,
    clock: Clock | None = None,
) -> Refits:
    model.observe("acme", "a", 30)
    return Refits(
        model,
        Metrics(registry),
        folder / "weights.npz",
        after_answers=1,
        max_seconds=max_seconds,
        clock=monotonic if clock is None else clock,
    )


def outcomes(registry: CollectorRegistry) -> dict[str, float]:
    return {
        outcome: count
        for outcome in ("done", "nothing", "failed")
        if (count := registry.get_sample_value("motet_predictor_refits_total", {"outcome": outcome}) or 0.0)
    }


@pytest.fixture(autouse=True)
def _own_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_DATABASE_URL", url(tmp_path))


async def test_a_refit_installs_weights_and_the_next_process_reads_them(tmp_path: Path) -> None:
    await migrate(url(tmp_path))
    await keep_samples(tmp_path, 400)
    model, registry = PromptModel(LengthModel()), CollectorRegistry()
    refits = refits_of(tmp_path, model, registry)
    await refits.refit_if_due()
    assert outcomes(registry) == {"done": 1}
    assert model.weights is not None
    assert model.weights.space == SPACE
    short, long = (model.estimate("acme", "a", 4096, features(kind)).q50 for kind in (SHORT, LONG))
    assert short < long
    await refits.refit_if_due()  # no new answers
    assert outcomes(registry) == {"done": 1}
    later = PromptModel(LengthModel())
    await refits_of(tmp_path, later, CollectorRegistry()).load()
    assert later.weights is not None
    assert (later.weights.table == model.weights.table).all()


async def test_a_process_without_weights_fits_them_to_the_samples_that_it_finds(tmp_path: Path) -> None:
    """Its volume may be new, and 500 answers may take days."""
    await migrate(url(tmp_path))
    await keep_samples(tmp_path, 50)
    model = PromptModel(LengthModel())
    refits = Refits(
        model,
        Metrics(CollectorRegistry()),
        tmp_path / "weights.npz",
        after_answers=500,
        max_seconds=60.0,
        clock=monotonic,
    )
    await refits.refit_if_due()
    assert model.weights is None
    await refits.load()
    await refits.refit_if_due()
    assert model.weights is not None


async def test_refits_take_at_most_a_tenth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, model, registry = FakeClock(), PromptModel(LengthModel()), CollectorRegistry()
    refits = refits_of(tmp_path, model, registry, clock=clock)

    async def ten_seconds(_: Refits) -> int:
        clock.advance(10)
        return NOTHING_TO_FIT

    monkeypatch.setattr(Refits, "_run", ten_seconds)
    found = []
    for _ in range(5):
        model.observe("acme", "a", 30)
        await refits.refit_if_due()
        found.append(outcomes(registry)["nothing"])
        clock.advance(30)
    assert found == [1, 1, 1, 2, 2]


async def test_a_refit_ends_if_its_predictor_has_ended() -> None:
    """Otherwise two of them would write one file."""
    child = await asyncio.create_subprocess_exec(*refits_module.COMMAND, "weights", "1")
    assert await child.wait() == 1


async def test_a_refit_without_a_database_says_so_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, registry = PromptModel(LengthModel()), CollectorRegistry()
    await refits_of(tmp_path, model, registry).refit_if_due()
    assert outcomes(registry) == {"failed": 1}
    said = [line for line in capfd.readouterr().err.splitlines() if "refit_stopped" in line or "Traceback" in line]
    assert len(said) == 1
    assert "refit_stopped" in said[0]


async def test_samples_of_another_key_do_not_teach_the_weights(tmp_path: Path) -> None:
    await migrate(url(tmp_path))
    await keep_samples(tmp_path, 50, space=99, tenant="old")
    for tenant in ("one", "two"):
        await keep_samples(tmp_path, 50, tenant=tenant)
    model, registry = PromptModel(LengthModel()), CollectorRegistry()
    await refits_of(tmp_path, model, registry).refit_if_due()
    assert model.weights is not None
    assert model.weights.space == SPACE


async def test_without_features_there_is_nothing_to_fit(tmp_path: Path) -> None:
    await migrate(url(tmp_path))
    await keep_samples(tmp_path, 50, space=0)
    model, registry = PromptModel(LengthModel()), CollectorRegistry()
    await refits_of(tmp_path, model, registry).refit_if_due()
    assert outcomes(registry) == {"nothing": 1}
    assert model.weights is None


@pytest.mark.parametrize(
    "program",
    [
        "import os; os.kill(os.getpid(), 9)",
        "import time; time.sleep(60)",
        "import sys; open(sys.argv[1], 'wb').write(b'PK no weights')",
        "",
    ],
    ids=["dies", "hangs", "writes something else", "writes nothing"],
)
async def test_a_refit_that_fails_leaves_the_weights_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(refits_module, "COMMAND", (sys.executable, "-c", program))
    fitted = fit(list(answers(50, seed=1)), SPACE)
    model, registry = PromptModel(LengthModel()), CollectorRegistry()
    model.install(fitted)
    await refits_of(tmp_path, model, registry, max_seconds=1.0).refit_if_due()
    assert outcomes(registry) == {"failed": 1}
    assert model.weights is fitted.weights


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    made = fit(list(answers(50, seed=1)), SPACE)
    made.adapters["a\nb\0c", "é"] = made.adapters["acme", "a"]  # any name comes back as it was
    return made


def test_what_is_written_is_read_again(tmp_path: Path, fitted: Fitted) -> None:
    write_fitted(tmp_path / "f", fitted)
    read = read_fitted(tmp_path / "f")
    assert read.weights.space == SPACE
    assert (read.weights.table == fitted.weights.table).all()
    assert list(read.adapters) == list(fitted.adapters)
    assert [state.trust for state in read.adapters.values()] == [state.trust for state in fitted.adapters.values()]
    assert (tmp_path / "f").stat().st_size < 16 * 2**20


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, fitted: Fitted, value: float) -> None:
    table = fitted.weights.table.copy()
    table[5, 5] = value
    write_fitted(tmp_path / "f", Fitted(type(fitted.weights)(SPACE, table), fitted.adapters))
    with pytest.raises(ValueError, match="damaged"):
        read_fitted(tmp_path / "f")


@pytest.mark.parametrize("value", [np.nan, -1.0])
def test_a_calibration_that_falls_or_is_no_number_is_refused(tmp_path: Path, value: float) -> None:
    made = fit(list(answers(50, seed=1)), SPACE)
    made.adapters["acme", "a"].calibration.below[30] = value
    write_fitted(tmp_path / "f", made)
    with pytest.raises(ValueError, match="damaged"):
        read_fitted(tmp_path / "f")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, fitted: Fitted) -> None:
    write_fitted(tmp_path / "f", fitted)
    size = (tmp_path / "f").stat().st_size
    for left in (0, 10, 1000, size // 2, size - 10):
        os.truncate(tmp_path / "f", left)
        with pytest.raises(ValueError, match="damaged"):
            read_fitted(tmp_path / "f")
        write_fitted(tmp_path / "f", fitted)


def test_a_file_with_any_damage_is_read_as_it_was_or_refused(tmp_path: Path, fitted: Fitted) -> None:
    write_fitted(tmp_path / "f", fitted)
    whole = (tmp_path / "f").read_bytes()
    for at in (*range(0, 240, 7), *range(len(whole) - 500, len(whole), 11)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x15
        (tmp_path / "f").write_bytes(damaged)
        with contextlib.suppress(ValueError):
            assert (read_fitted(tmp_path / "f").weights.table == fitted.weights.table).all()
