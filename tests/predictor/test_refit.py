"""A refit: a real process reads real samples, and the predictor installs what it has made, or goes on without."""

import asyncio
import contextlib
import io
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from motet.clock import Clock, FakeClock, monotonic
from motet.store import length_samples, migrate, open_store
from motet_predictor import refits as refits_module
from motet_predictor import sample_features
from motet_predictor.fitted_bytes import MAX_ADAPTERS, MAX_FITTED_BYTES, from_bytes, take_file, to_bytes, write_file
from motet_predictor.fitting import Sample, fit, since_last_change
from motet_predictor.kept_versions import FIGURES_SECONDS, KeptVersions
from motet_predictor.length_model import LengthModel
from motet_predictor.metrics import Metrics
from motet_predictor.prompt_model import PromptModel
from motet_predictor.prompt_version import FIRST_TRUST, Correction, Fitted
from motet_predictor.prompt_weights import PromptWeights
from motet_predictor.refit import NOTHING_TO_FIT, usable
from motet_predictor.refits import Refits
from tests.predictor.test_prompt_model import LONG, SHORT, SPACE, answers, features


def url(folder: Path) -> str:
    return f"sqlite+aiosqlite:///{folder}/motet.db"


def row(one: Sample, space: int, tenant: str = "acme") -> length_samples.LengthSample:
    return length_samples.LengthSample(
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


async def keep_samples(folder: Path, count: int, *, space: int = SPACE, tenant: str = "acme") -> None:
    rows = [row(one, space, tenant) for one in answers(count, seed=3)]
    async with open_store(url(folder)) as store:
        await length_samples.activate_version(store, "v")
        await length_samples.save(store, "v", [], rows, keep_samples=100_000)


@asynccontextmanager
async def refitting(
    folder: Path,
    model: PromptModel,
    registry: CollectorRegistry,
    *,
    after: int = 1,
    max_seconds: float = 240.0,  # at idle priority, on a busy machine
    pause: float = 0.0,
    clock: Clock = monotonic,
) -> AsyncIterator[Refits]:
    async with open_store(url(folder)) as store:
        versions = KeptVersions(store, model, clock)
        await versions.flush(MAX_FITTED_BYTES)
        yield Refits(
            model,
            versions,
            Metrics(registry),
            folder / "weights.npz",
            after_answers=after,
            max_seconds=max_seconds,
            pause_after_start=pause,
            clock=clock,
        )
        await versions.flush(MAX_FITTED_BYTES)


def outcomes(registry: CollectorRegistry) -> dict[str, float]:
    return {
        outcome: count
        for outcome in ("done", "nothing", "failed")
        if (count := registry.get_sample_value("motet_predictor_refits_total", {"outcome": outcome}) or 0.0)
    }


@pytest.fixture(autouse=True)
def _own_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_DATABASE_URL", url(tmp_path))


async def test_what_a_refit_makes_estimates_in_shadow_and_the_next_process_goes_on_with_it(tmp_path: Path) -> None:
    await migrate(url(tmp_path))
    await keep_samples(tmp_path, 400)
    model, registry = PromptModel(LengthModel()), CollectorRegistry()
    async with refitting(tmp_path, model, registry) as refits:
        await refits.refit_if_due()
        assert outcomes(registry) == {"done": 1}
        candidate = model.versions.candidate
        assert model.serving.weights is None
        assert candidate is not None
        assert candidate.weights is not None
        assert candidate.weights.space == SPACE
        model.observe("acme", "a", 30)
        await refits.refit_if_due()  # there is a candidate
        assert outcomes(registry) == {"done": 1}
    later = PromptModel(LengthModel())
    async with refitting(tmp_path, later, CollectorRegistry()):
        read = later.versions.candidate
        assert read is not None
        assert read.weights is not None
        assert read.name == candidate.name
        assert (read.weights.table == candidate.weights.table).all()
        later.versions.serve(read)
        short, long = (later.estimate("acme", "a", 4096, features(kind)).q50 for kind in (SHORT, LONG))
        assert short < long
    assert not (tmp_path / "weights.npz").exists()


async def test_only_without_weights_a_process_fits_at_once_to_the_samples_that_it_finds(tmp_path: Path) -> None:
    """500 answers may take days."""
    await migrate(url(tmp_path))
    await keep_samples(tmp_path, 50)
    model, registry = PromptModel(LengthModel()), CollectorRegistry()
    async with refitting(tmp_path, model, registry, after=500) as refits:
        await refits.refit_if_due()
        assert outcomes(registry) == {"done": 1}
        assert model.versions.candidate is not None
        model.versions.serve(model.versions.candidate)
    model, registry = PromptModel(LengthModel()), CollectorRegistry()
    async with refitting(tmp_path, model, registry, after=500) as refits:
        assert model.serving.weights is not None
        await refits.refit_if_due()
        assert outcomes(registry) == {}


async def test_no_refit_begins_soon_after_a_start(tmp_path: Path) -> None:
    """It may be what has ended the process before."""
    await migrate(url(tmp_path))
    await keep_samples(tmp_path, 50)
    model, registry, clock = PromptModel(LengthModel()), CollectorRegistry(), FakeClock()
    async with refitting(tmp_path, model, registry, pause=300.0, clock=clock) as refits:
        clock.advance(299)
        await refits.refit_if_due()
        assert outcomes(registry) == {}
        clock.advance(1)
        await refits.refit_if_due()
        assert outcomes(registry) == {"done": 1}


async def test_answers_before_a_restart_count_for_the_next_refit(tmp_path: Path) -> None:
    await migrate(url(tmp_path))
    await keep_samples(tmp_path, 50)
    for count, done in ((0, {"done": 1}), (30, {}), (19, {}), (1, {"done": 1})):
        clock, model, registry = FakeClock(), PromptModel(LengthModel()), CollectorRegistry()
        async with refitting(tmp_path, model, registry, after=50, clock=clock) as refits:
            for _ in range(count):
                model.observe("acme", "a", 30)
            await refits.refit_if_due()
            clock.advance(FIGURES_SECONDS)
            if model.versions.candidate is not None:
                model.versions.serve(model.versions.candidate)
        assert outcomes(registry) == done


async def test_refits_take_at_most_a_tenth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await migrate(url(tmp_path))
    clock, model, registry = FakeClock(), PromptModel(LengthModel()), CollectorRegistry()

    async def ten_seconds(_: Refits) -> int:
        clock.advance(10)
        return NOTHING_TO_FIT

    monkeypatch.setattr(Refits, "_run", ten_seconds)
    found = []
    async with refitting(tmp_path, model, registry, clock=clock) as refits:
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
    await migrate(url(tmp_path))
    async with refitting(tmp_path, model, registry) as refits:
        with sqlite3.connect(tmp_path / "motet.db") as other:
            other.execute("DROP TABLE length_samples")
        await refits.refit_if_due()
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
    async with refitting(tmp_path, model, registry) as refits:
        await refits.refit_if_due()
    candidate = model.versions.candidate
    assert candidate is not None
    assert candidate.knows(SPACE)


def test_the_newest_features_say_which_key_is_in_use() -> None:
    """Neither tenants that have not come back since it changed, nor one gateway that still has the old one."""
    one = next(answers(1, seed=1))
    gone = [row(one, SPACE, f"gone{at}") for at in range(300)]
    busy = [row(one, SPACE + 1, f"busy{at % 2}") for at in range(300)]
    assert usable([*gone, *busy, *gone[:20]])[0] == SPACE + 1
    assert usable([*gone, *busy[:3], *[row(one, 0)] * 300])[0] == SPACE
    assert usable([gone[0], busy[0]])[0] == usable([busy[0], gone[0]])[0], "of equally many, always the same"


def test_features_of_another_key_tell_prompts_apart() -> None:
    """The choices of one request are no change of lengths. What the features say is not learned."""
    choices = [Sample("acme", "a", 3000, False, features(LONG, 7))] * 40
    rows = [row(one, SPACE + 1) for one in [*answers(400, seed=6), *choices]]
    newer = [row(one, SPACE, f"newer{at % 2}") for at, one in enumerate(answers(300, seed=1))]
    space, samples = usable([*rows, *newer])
    assert space == SPACE
    assert len(since_last_change(samples, space)) == len(rows) + len(newer)
    assert (fit(samples[: len(rows)], space).weights.table == 0).all()
    assert fit(samples, space).corrections["acme", "a"].trust == FIRST_TRUST, "they have tilted no estimate"


async def test_a_candidate_of_another_key_is_not_waited_for(tmp_path: Path) -> None:
    """It could take 4,000 answers until it is rejected."""
    await migrate(url(tmp_path))
    for space in (SPACE, SPACE + 1):
        await keep_samples(tmp_path, 50, space=space)
        if space == SPACE:
            model, registry = PromptModel(LengthModel()), CollectorRegistry()
            async with refitting(tmp_path, model, registry) as refits:
                await refits.refit_if_due()
    registry = CollectorRegistry()
    async with refitting(tmp_path, model, registry) as refits:
        for space, done in ((SPACE, {}), (SPACE + 1, {"done": 1})):
            for one in answers(2, seed=4):
                model.observe("acme", "a", one.tokens, features=one.features, space=space)
            await refits.refit_if_due()
            await refits.refit_if_due()
            assert outcomes(registry) == done
    candidate = model.versions.candidate
    assert candidate is not None
    assert candidate.knows(SPACE + 1)


async def test_without_features_there_is_nothing_to_fit(tmp_path: Path) -> None:
    await migrate(url(tmp_path))
    await keep_samples(tmp_path, 50, space=0)
    model, registry = PromptModel(LengthModel()), CollectorRegistry()
    async with refitting(tmp_path, model, registry) as refits:
        await refits.refit_if_due()
    assert outcomes(registry) == {"nothing": 1}
    assert model.versions.candidate is None


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
    await migrate(url(tmp_path))
    async with refitting(tmp_path, model, registry, max_seconds=1.0) as refits:
        await refits.refit_if_due()  # the first look only counts the answers
        model.observe("acme", "a", 30)
        await refits.refit_if_due()
    assert outcomes(registry) == {"failed": 1}
    assert model.serving.weights is fitted.weights
    assert model.versions.candidate is None


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    made = fit(list(answers(50, seed=1)), SPACE)
    made.corrections["a\nb\0c", "é"] = made.corrections["acme", "a"]  # any name comes back as it was
    return made


def test_what_is_written_is_read_again_with_half_the_digits(tmp_path: Path, fitted: Fitted) -> None:
    write_file(tmp_path / "f", fitted)
    read = from_bytes(take_file(tmp_path / "f"))
    assert read.weights.space == SPACE
    assert (read.weights.table == fitted.weights.table.astype(np.float16)).all()
    assert list(read.corrections) == list(fitted.corrections)
    assert [one.trust for one in read.corrections.values()] == [one.trust for one in fitted.corrections.values()]
    assert to_bytes(read) == to_bytes(fitted)
    assert not (tmp_path / "f").exists()


def test_the_largest_weights_fit_into_their_bound() -> None:
    """No byte can be compressed, and names have the greatest length in JSON."""
    chance = np.random.default_rng(1)
    weights = PromptWeights.zero(SPACE)
    weights.table[:] = chance.uniform(-30, 30, weights.table.shape)
    corrections = {}
    for number in range(MAX_ADAPTERS + 1):
        own = corrections["t" * 253, f"{number:05}" + "a" * 507] = Correction()
        own.calibration.below = np.cumsum(chance.uniform(0, 1, len(own.calibration.below)))
    data = to_bytes(Fitted(weights, corrections))
    assert len(data) <= MAX_FITTED_BYTES
    assert len(from_bytes(data).corrections) == MAX_ADAPTERS


@pytest.mark.parametrize(("letter", "kept"), [("é", MAX_ADAPTERS), ("租", 3655), ("𝄞", 2745)])
def test_names_of_any_script_fit_into_the_bound_and_the_newest_are_kept(letter: str, kept: int) -> None:
    names = [(f"{number:05}" + letter * 248, letter * 512) for number in range(MAX_ADAPTERS)]
    data = to_bytes(Fitted(PromptWeights.zero(SPACE), {name: Correction() for name in names}))
    assert list(from_bytes(data).corrections) == names[-kept:]


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e4])
def test_weights_that_are_no_numbers_are_refused(fitted: Fitted, value: float) -> None:
    table = fitted.weights.table.copy()
    table[5, 5] = value
    with pytest.raises(ValueError, match="damaged"):
        from_bytes(to_bytes(Fitted(PromptWeights(SPACE, table), fitted.corrections)))


@pytest.mark.parametrize("value", [np.nan, -1.0])
def test_a_calibration_that_falls_or_is_no_number_is_refused(value: float) -> None:
    made = fit(list(answers(50, seed=1)), SPACE)
    made.corrections["acme", "a"].calibration.below[30] = value
    with pytest.raises(ValueError, match="damaged"):
        from_bytes(to_bytes(made))


def test_bytes_that_become_too_many_are_refused_before_they_are_made(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, table=np.zeros(MAX_FITTED_BYTES // 2, np.int32))
    with pytest.raises(ValueError, match="more than"):
        from_bytes(file.getvalue())
    (tmp_path / "f").write_bytes(bytes(MAX_FITTED_BYTES + 1))
    with pytest.raises(ValueError, match="should have"):
        take_file(tmp_path / "f")


def test_bytes_cut_anywhere_are_refused(fitted: Fitted) -> None:
    data = to_bytes(fitted)
    for left in (0, 10, 1000, len(data) // 2, len(data) - 10):
        with pytest.raises(ValueError, match="damaged"):
            from_bytes(data[:left])


def test_bytes_with_any_damage_are_read_as_they_were_or_refused(fitted: Fitted) -> None:
    whole = to_bytes(fitted)
    table = fitted.weights.table.astype(np.float16)
    for at in (*range(0, 240, 7), *range(len(whole) - 500, len(whole), 11)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x15
        with contextlib.suppress(ValueError):
            assert (from_bytes(bytes(damaged)).weights.table == table).all()
