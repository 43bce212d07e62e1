"""Versions in a real database: what is written is what the next process serves, and damage changes nothing."""

import asyncio
import itertools
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.clock import FakeClock
from motet.errors import StoreUnavailable
from motet.store import length_samples, migrate, open_store, predictor_versions
from motet.store.predictor_versions import PART_BYTES
from motet_predictor import kept_versions
from motet_predictor.calibration import Calibration
from motet_predictor.fitted_bytes import MAX_FITTED_BYTES, from_bytes, to_bytes
from motet_predictor.fitting import fit
from motet_predictor.kept_corrections import CORRECTIONS_AT_ONCE, ChangedCorrections, read_corrections
from motet_predictor.kept_versions import FIGURES_SECONDS, MAX_VERSIONS, KeptVersions
from motet_predictor.length_model import VERSION as STATISTICS
from motet_predictor.length_model import LengthModel
from motet_predictor.prompt_model import VERSION, PromptModel
from motet_predictor.prompt_version import TRUST_AFTER_CHANGE, Correction, Fitted, PromptVersion
from motet_predictor.prompt_weights import PromptWeights
from tests.predictor.test_prompt_model import SPACE, answers
from tests.support.postgresql import PostgreSQL


class Kept:
    def __init__(self, model: PromptModel, versions: KeptVersions, clock: FakeClock) -> None:
        self.model, self.versions, self.clock = model, versions, clock

    async def flush(self, at_most: int = MAX_FITTED_BYTES) -> None:
        self.clock.advance(FIGURES_SECONDS)
        await self.versions.flush(at_most)

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.model.versions]


@asynccontextmanager
async def running(folder: Path, url: str = "") -> AsyncIterator[Kept]:
    async with open_store(url or f"sqlite+aiosqlite:///{folder}/motet.db", busy_seconds=0.05) as store:
        model, clock = PromptModel(LengthModel()), FakeClock()
        await length_samples.activate_version(store, model.lengths.version)
        kept = Kept(model, KeptVersions(store, model, clock), clock)
        await kept.flush()
        yield kept
        await kept.flush()


def rows(folder: Path, statement: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(folder / "motet.db") as connection:
        found = connection.execute(statement).fetchall()
    connection.close()
    return found


@pytest.fixture(scope="module")
def data() -> bytes:
    return to_bytes(fit(list(answers(50, seed=1)), SPACE))


@pytest.fixture(scope="module")
def large() -> bytes:
    """Of many parts"""
    weights = PromptWeights.zero(SPACE)
    weights.table[:] = np.random.default_rng(1).uniform(-3, 3, weights.table.shape)
    return to_bytes(Fitted(weights, {}))


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    await migrate(f"sqlite+aiosqlite:///{tmp_path}/motet.db")
    return tmp_path


async def test_the_next_process_goes_on_with_all_three_and_their_figures(folder: Path, data: bytes) -> None:
    async with running(folder) as kept:
        await kept.versions.offer(data)
        assert kept.names == [STATISTICS, f"{VERSION}.1"]
        candidate = kept.model.versions.candidate
        assert candidate is not None
        kept.model.versions.serve(candidate)
        await kept.versions.offer(data)
        for one in answers(20, seed=2):
            kept.model.observe(one.tenant, one.adapter, one.tokens, features=one.features)
        loss, made = kept.model.serving.judged.loss, candidate.made
    async with running(folder) as later:
        assert later.names == [f"{VERSION}.1", STATISTICS, f"{VERSION}.2"]
        assert later.model.serving.judged.answers == 20
        assert later.model.serving.made == pytest.approx(made, abs=1e-3) != 0.0, "its age goes on"
        assert later.model.serving.judged.loss == pytest.approx(loss, abs=1e-3)
        assert later.model.serving.weights is not None
        await later.versions.offer(data)
        assert later.names[-1] == f"{VERSION}.3"


async def test_weights_are_written_no_faster_than_allowed(folder: Path, large: bytes) -> None:
    async with running(folder) as kept:
        await kept.versions.offer(large)
        written = []
        for _ in range(10):
            await kept.flush(at_most=3 * PART_BYTES // 2)
            written.append(rows(folder, "SELECT count(*) FROM predictor_weights")[0][0])
        assert written == [2, 3, 5, 6, 8, 9, 11, 12, 14, 15]
    assert rows(folder, "SELECT sum(length(data)) FROM predictor_weights") == [(len(large),)]


DAMAGE = {
    "other bytes": "UPDATE predictor_weights SET data = zeroblob(length(data)) WHERE part = 0",
    "a part is missing": "DELETE FROM predictor_weights WHERE part = 0",
    "another digest": "UPDATE predictor_versions SET digest = 'x'",
    "another size": "UPDATE predictor_versions SET figures = '{\"answers\": 1e999}', size = 7 WHERE size > 0",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("role", ["serving", "candidate"])
async def test_a_damaged_version_is_named_and_the_others_go_on(
    folder: Path, data: bytes, damage: str, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(folder) as kept:
        await kept.versions.offer(data)
        if role == "serving":
            assert kept.model.versions.candidate is not None
            kept.model.versions.serve(kept.model.versions.candidate)
    rows(folder, damage)
    async with running(folder) as later:
        assert later.names == [STATISTICS]
        assert later.model.estimate("acme", "a", 100).q95 == 100
    said = [line for line in capsys.readouterr().out.splitlines() if "version_unreadable" in line]
    assert len(said) == 1
    assert f"{VERSION}.1" in said[0]
    assert "bytes are there, or they were changed" in said[0]


DAMAGED_ROWS = {
    "time": "UPDATE predictor_versions SET created = 'yesterday' WHERE size > 0",
    "order": "UPDATE predictor_versions SET ordered = 'x' WHERE size > 0",
    "figures": f"UPDATE predictor_versions SET figures = '{3900 * '['}' WHERE size > 0",
}


@pytest.mark.parametrize("damage", DAMAGED_ROWS.values(), ids=DAMAGED_ROWS)
async def test_weights_are_read_although_what_is_beside_them_is_damaged(folder: Path, data: bytes, damage: str) -> None:
    async with running(folder) as kept:
        await kept.versions.offer(data)
    rows(folder, damage)
    async with running(folder) as later:
        assert later.names == [STATISTICS, f"{VERSION}.1"]
        await later.versions.take_order()
        assert later.names == [STATISTICS, f"{VERSION}.1"]


async def test_weights_of_another_type_change_nothing(
    folder: Path, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(folder) as kept:
        await kept.versions.offer(data)
    rows(folder, "UPDATE predictor_weights SET data = 'text' WHERE part = 0")
    async with running(folder) as later:
        assert later.names == [STATISTICS]
        assert later.versions.loaded
    assert capsys.readouterr().out.count("version_unreadable") == 1


async def test_any_error_of_the_database_is_one_line_and_the_predictor_goes_on(
    folder: Path, data: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(folder) as kept:
        monkeypatch.setattr(predictor_versions, "set_roles", broken)
        await kept.versions.offer(data)
        for _ in range(3):
            await kept.flush()
            await kept.versions.take_order()
        monkeypatch.undo()
        await kept.flush()
        assert capsys.readouterr().out.count("versions_not_written") == 1
    async with running(folder) as later:
        assert later.names == [STATISTICS, f"{VERSION}.1"]


async def broken(*_: object) -> None:
    raise TypeError("a row that nobody expects")


async def test_a_stop_loses_no_figures(folder: Path) -> None:
    async with running(folder) as kept:
        for one in answers(20, seed=2):
            kept.model.observe(one.tenant, one.adapter, one.tokens, features=one.features)
        await kept.versions.flush(0, last=True)
        async with running(folder) as later:
            assert later.model.serving.judged.answers == 20


@pytest.mark.parametrize("lost", ["add", "add_part"])
async def test_weights_are_there_although_the_answer_to_a_write_was_lost(
    folder: Path, large: bytes, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """The database has stored it, and the connection broke before it said so."""
    write = getattr(predictor_versions, lost)

    async def unanswered(*what: object) -> None:
        await write(*what)
        raise StoreUnavailable("the connection is gone")

    async with running(folder) as kept:
        monkeypatch.setattr(predictor_versions, lost, unanswered)
        await kept.versions.offer(large)
        await kept.flush()
        await kept.flush()
        monkeypatch.undo()
        await kept.flush()
    async with running(folder) as later:
        assert later.names == [STATISTICS, f"{VERSION}.1"]


async def test_weights_that_a_full_database_refuses_are_packed_once(
    folder: Path, large: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[Fitted] = []
    monkeypatch.setattr(kept_versions, "to_bytes", lambda fitted: packed.append(fitted) or to_bytes(fitted))
    async with running(folder) as kept:
        rows(folder, "CREATE TRIGGER full BEFORE INSERT ON predictor_versions BEGIN SELECT RAISE(FAIL, 'full'); END")
        await kept.versions.offer(large)
        for _ in range(5):
            await kept.flush()
        assert packed == []
        rows(folder, "DROP TRIGGER full")
        await kept.flush()
    async with running(folder) as later:
        assert later.names == [STATISTICS, f"{VERSION}.1"]


async def test_a_stop_in_the_middle_of_a_write_leaves_no_damaged_version(
    folder: Path, large: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = predictor_versions.add_part

    async def stopped(*what: Any) -> bool:
        await write(*what)
        raise asyncio.CancelledError

    async with running(folder) as kept:
        await kept.versions.offer(large)
        monkeypatch.setattr(predictor_versions, "add_part", stopped)
        with pytest.raises(asyncio.CancelledError):
            await kept.flush()
        monkeypatch.undo()
    async with running(folder) as later:
        assert later.names == [STATISTICS, f"{VERSION}.1"]


@pytest.mark.parametrize("table", ["predictor_weights", "predictor_versions"])
async def test_what_was_deleted_while_it_was_written_is_written_again(folder: Path, large: bytes, table: str) -> None:
    async with running(folder) as kept:
        await kept.versions.offer(large)
        await kept.flush(at_most=PART_BYTES)
        rows(folder, "DELETE FROM predictor_weights")
        rows(folder, f"DELETE FROM {table} WHERE version != '{STATISTICS}'")
        await kept.flush()
        if table == "predictor_weights":
            holder = sqlite3.connect(folder / "motet.db", isolation_level=None)
            holder.execute("BEGIN IMMEDIATE")
            await kept.flush()  # it is away: afterwards everything is compared
            holder.close()
        await kept.flush()
    async with running(folder) as later:
        assert len(later.names) == 2


async def test_a_name_that_another_predictor_has_used_is_not_used_again(folder: Path, data: bytes) -> None:
    """Two of them are a mistake. What serves after a restart was compared nevertheless."""
    other = fit(list(answers(50, seed=2)), SPACE)
    async with running(folder) as first, running(folder) as second:
        await first.versions.offer(data)
        await first.flush()
        await second.versions.offer(to_bytes(other))
        await second.flush()
        candidate = second.model.versions.candidate
        assert candidate is not None
        assert candidate.name == f"{VERSION}.2"
        second.model.versions.serve(candidate)
        await second.flush()
        async with running(folder) as later:
            assert later.names == [f"{VERSION}.2", STATISTICS]
            assert later.model.serving.weights is not None
            assert (later.model.serving.weights.table == other.weights.table.astype(np.float16)).all()


async def test_corrections_outlive_a_restart_and_a_damaged_one_is_left_out(folder: Path, data: bytes) -> None:
    async with running(folder) as kept:
        await kept.versions.offer(data)
        for one in answers(20, seed=2):
            kept.model.observe(one.tenant, one.adapter, 3000, features=one.features)
        before = {version.name: dict(version.corrections) for version in kept.model.versions}
    async with running(folder) as later:
        for version in later.model.versions:
            for adapter, correction in before[version.name].items():
                assert version.corrections[adapter].to_bytes() == correction.to_bytes()
        assert len(before) == 2
    rows(folder, "UPDATE predictor_state SET statistics = x'00000000' WHERE level = 'correction'")
    async with running(folder) as damaged:
        assert not damaged.model.serving.corrections


async def test_corrections_are_written_no_faster_than_allowed(folder: Path) -> None:
    def written() -> object:
        return rows(folder, "SELECT count(*) FROM predictor_state WHERE level = 'correction'")[0][0]

    async with running(folder) as kept:
        for number in range(3 * CORRECTIONS_AT_ONCE):
            kept.model.observe("acme", f"acme/{number:03}", 20)
        await kept.flush(at_most=1)
        found = [written()]
        for _ in range(3):
            await kept.versions.flush(at_most=40_000)  # a hundred have 53,600 bytes
            found.append(written())
        assert found == [CORRECTIONS_AT_ONCE * batches for batches in (1, 1, 2, 3)]
        kept.model.observe("acme", "acme/000", 20)
        await kept.versions.flush(at_most=40_000)
        assert list(kept.model.serving.unsaved) == [("acme", "acme/000")], "it waits for the next time"


async def test_a_comparison_outlives_a_restart_and_a_damaged_one_begins_again(folder: Path, data: bytes) -> None:
    async with running(folder) as kept:
        await kept.versions.offer(data)
        for number, one in enumerate(answers(300, seed=2)):
            kept.model.observe(f"t{number % 3}", one.adapter, one.tokens, features=one.features)
        candidate = kept.model.versions.candidate
        assert candidate is not None
        before = kept.model.versions.comparison_of(candidate)
        assert before is not None
    for damage, expected in (
        ("", 300),
        ("UPDATE predictor_state SET statistics = x'00' WHERE level = 'comparison'", 0),
    ):
        rows(folder, damage)
        async with running(folder) as later:
            candidate = later.model.versions.candidate
            assert candidate is not None
            comparison = later.model.versions.comparison_of(candidate)
            assert comparison is not None
            assert comparison.answers == expected
            if expected:
                assert comparison.gain() == before.gain()


async def test_others_have_a_turn_while_many_corrections_are_read(folder: Path) -> None:
    """An ordered version is read while others wait for estimates."""
    async with open_store(f"sqlite+aiosqlite:///{folder}/motet.db") as store:
        await length_samples.activate_version(store, STATISTICS)
        written, read = PromptVersion(STATISTICS), PromptVersion(STATISTICS)
        for number in range(2 * CORRECTIONS_AT_ONCE + 1):
            written.correction("acme", f"acme/{number}")
        changed = ChangedCorrections()
        changed.are_due([written])
        await changed.write(store, MAX_FITTED_BYTES)
        reading = asyncio.create_task(read_corrections(store, read, limit=1000))
        seen = set()
        while not reading.done():
            seen.add(len(read.corrections))
            await asyncio.sleep(0)
        await reading
        assert {CORRECTIONS_AT_ONCE, 2 * CORRECTIONS_AT_ONCE} <= seen
        assert len(read.corrections) == len(written.corrections)


async def test_another_version_of_the_same_name_does_not_get_its_role(folder: Path, data: bytes) -> None:
    async with running(folder) as kept:
        await kept.versions.offer(data)
        await kept.flush()
        rows(folder, "UPDATE predictor_versions SET digest = 'of another', role = 'retired' WHERE size > 0")
        candidate = kept.model.versions.candidate
        assert candidate is not None
        kept.model.versions.serve(candidate)
        await kept.flush()
        assert rows(folder, "SELECT role FROM predictor_versions WHERE size > 0") == [("retired",)]


async def test_a_version_of_another_layout_does_not_serve(
    folder: Path, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(folder) as kept:
        await kept.versions.offer(data)
        await kept.flush()
    rows(folder, "PRAGMA foreign_keys = OFF")
    rows(folder, "UPDATE predictor_versions SET version = 'prompts-1.9', role = 'serving' WHERE size > 0")
    async with running(folder) as later:
        assert later.names == [STATISTICS]
    assert "another layout" in capsys.readouterr().out


async def test_an_order_is_carried_out_once_also_of_a_version_that_is_retired(folder: Path, data: bytes) -> None:
    async with running(folder) as kept, open_store(f"sqlite+aiosqlite:///{folder}/motet.db") as store:
        await kept.versions.offer(data)
        await kept.flush()
        kept.model.versions.candidate = None
        await kept.flush()
        assert [one.role for one in await predictor_versions.all_versions(store)] == ["retired", "serving"]
        await predictor_versions.order(store, f"{VERSION}.1")
        await kept.versions.take_order()
        assert kept.names == [f"{VERSION}.1", STATISTICS]
        assert kept.model.serving.decision == "ordered"
        await predictor_versions.order(store, STATISTICS)
        await kept.versions.take_order()
        assert kept.names == [STATISTICS, f"{VERSION}.1"]
        await kept.versions.take_order()
        assert kept.names == [STATISTICS, f"{VERSION}.1"]
        await kept.flush()
        roles = {one.version: one.role for one in await predictor_versions.all_versions(store)}
        assert roles == {STATISTICS: "serving", f"{VERSION}.1": "former"}


@pytest.mark.parametrize("restarted", [False, True], ids=["a refit has begun since", "another process"])
async def test_an_ordered_version_does_not_trust_what_it_knew_of_an_adapter_that_has_changed(
    folder: Path, data: bytes, restarted: bool
) -> None:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(f"sqlite+aiosqlite:///{folder}/motet.db"))
        before = AsyncExitStack()
        kept = await before.enter_async_context(running(folder))
        changed, other, again, silent = (("acme", f"acme/{name}") for name in ("changed", "other", "again", "silent"))
        fitted = from_bytes(data).weights
        await kept.versions.offer(to_bytes(Fitted(fitted, {silent: Correction(trust=0.95)})))
        candidate = kept.model.versions.candidate
        assert candidate is not None
        for adapter in (changed, other, again):
            candidate.correction(*adapter).trust = 0.95
        change(kept.model, again)
        candidate.correction(*again).trust = 0.9  # it has learned since the change
        await kept.flush()
        kept.model.versions.candidate = None
        change(kept.model, changed)
        change(kept.model, silent)
        kept.model.refit_begins()
        if restarted:
            await before.aclose()
            kept = await stack.enter_async_context(running(folder))
        else:
            stack.push_async_exit(before)
        await predictor_versions.order(store, candidate.name)
        await kept.versions.take_order()
        assert kept.model.serving.name == candidate.name
        known = kept.model.serving.corrections
        assert known[changed].trust <= TRUST_AFTER_CHANGE
        assert known[silent].trust <= TRUST_AFTER_CHANGE, "it has answered nothing since the refit"
        assert (known[changed].calibration.below == Calibration().below).all()
        assert known[other].trust == pytest.approx(0.95)
        assert known[again].trust == pytest.approx(0.9)


def change(model: PromptModel, adapter: tuple[str, str]) -> None:
    """Let its lengths change."""
    for tokens in (*[20] * 40, *[4000] * 16):
        model.observe(*adapter, tokens)
    assert adapter in model.changed


async def test_an_order_outlives_an_outage_and_is_there_after_a_crash(folder: Path, data: bytes) -> None:
    async with running(folder) as kept, open_store(f"sqlite+aiosqlite:///{folder}/motet.db") as store:
        await kept.versions.offer(data)
        await kept.flush()
        await predictor_versions.order(store, f"{VERSION}.1")
        holder = sqlite3.connect(folder / "motet.db", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        await kept.versions.take_order()
        assert await predictor_versions.ordered_version(store) is not None
        holder.close()
        await kept.versions.take_order()
        assert kept.names == [f"{VERSION}.1", STATISTICS]
        assert await predictor_versions.ordered_version(store) is None
        async with running(folder) as later:  # as if the first one had ended without another write
            assert later.names == [f"{VERSION}.1", STATISTICS]


async def test_an_order_of_a_damaged_version_changes_nothing(
    folder: Path, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(folder) as kept, open_store(f"sqlite+aiosqlite:///{folder}/motet.db") as store:
        await kept.versions.offer(data)
        await kept.flush()
        kept.model.versions.candidate = None
        await kept.flush()
        rows(folder, "DELETE FROM predictor_weights")
        assert await predictor_versions.order(store, f"{VERSION}.1")
        await kept.versions.take_order()
        assert kept.names == [STATISTICS]
        ordered = (await predictor_versions.all_versions(store))[0]
        assert json.loads(ordered.figures)["answers"] == 0
        assert "does not serve: 0 of " in json.loads(ordered.figures)["decision"]
        assert not await predictor_versions.order(store, f"{VERSION}.9")
    assert "version_unreadable" in capsys.readouterr().out


async def test_only_some_versions_are_kept(folder: Path, data: bytes) -> None:
    async with running(folder) as kept:
        for _ in range(MAX_VERSIONS + 3):
            await kept.versions.offer(data)
            await kept.flush()
    assert rows(folder, "SELECT count(*) FROM predictor_versions") == [(MAX_VERSIONS,)]
    assert rows(folder, "SELECT count(DISTINCT version) FROM predictor_weights") == [(MAX_VERSIONS - 1,)]
    async with running(folder) as later:
        assert later.names == [STATISTICS, f"{VERSION}.{MAX_VERSIONS + 3}"]


async def test_a_database_that_was_replaced_gets_the_versions_again(folder: Path, data: bytes) -> None:
    async with running(folder) as kept:
        await kept.versions.offer(data)
        await kept.flush()
        holder = sqlite3.connect(folder / "motet.db", isolation_level=None)
        holder.execute("DELETE FROM predictor_weights")
        holder.execute("DELETE FROM predictor_versions WHERE size > 0")
        holder.execute("BEGIN IMMEDIATE")
        await kept.flush()  # it is away
        holder.close()
        await kept.flush()
    async with running(folder) as later:
        assert later.names == [STATISTICS, f"{VERSION}.1"]


async def test_damaged_bytes_of_a_refit_are_no_version(folder: Path) -> None:
    async with running(folder) as kept:
        with pytest.raises(ValueError, match="damaged"):
            await kept.versions.offer(b"PK no weights")
        assert kept.names == [STATISTICS]


async def test_postgresql_keeps_versions_and_orders_too(postgresql: PostgreSQL, tmp_path: Path, data: bytes) -> None:
    url = await postgresql.new_database()
    await migrate(url)
    async with running(tmp_path, url) as kept:
        for _ in range(MAX_VERSIONS + 1):
            await kept.versions.offer(data)
            await kept.flush()
    async with running(tmp_path, url) as later, open_store(url) as store:
        assert later.names == [STATISTICS, f"{VERSION}.{MAX_VERSIONS + 1}"]
        assert len(await predictor_versions.all_versions(store)) == MAX_VERSIONS
        await predictor_versions.order(store, f"{VERSION}.{MAX_VERSIONS}")
        await later.versions.take_order()
        assert later.names == [f"{VERSION}.{MAX_VERSIONS}", STATISTICS, f"{VERSION}.{MAX_VERSIONS + 1}"]
        assert await predictor_versions.ordered_version(store) is None


async def test_a_change_that_is_noticed_while_a_version_is_read_counts_in_it(folder, data, monkeypatch):
    async with running(folder) as kept, open_store(f"sqlite+aiosqlite:///{folder}/motet.db") as store:
        adapter = "acme", "acme/changed"
        await kept.versions.offer(data)
        candidate = kept.model.versions.candidate
        candidate.correction(*adapter).trust = 0.95
        await kept.flush()
        kept.model.versions.candidate = None
        await kept.flush()
        load = predictor_versions.load_weights

        async def load_weights(*which, **how):
            loaded = await load(*which, **how)
            change(kept.model, adapter)
            return loaded

        monkeypatch.setattr(predictor_versions, "load_weights", load_weights)
        await predictor_versions.order(store, candidate.name)
        await kept.versions.take_order()
        assert kept.model.serving.name == candidate.name
        assert kept.model.serving.corrections[adapter].trust <= TRUST_AFTER_CHANGE


@pytest.mark.parametrize(("last", "times"), [("read_corrections", 1), ("read_corrections", 3), ("read_comparisons", 1)])
async def test_a_change_that_is_noticed_at_the_start_counts_in_all_versions(folder, data, monkeypatch, last, times):
    """They are read one after the other, then the comparisons. `times`: of `last`, until the change comes."""
    adapter = "acme", "acme/changed"
    async with running(folder) as kept:
        for serves in (True, False):
            await kept.versions.offer(data)
            candidate = kept.model.versions.candidate
            candidate.correction(*adapter).trust = 0.95
            if serves:
                kept.model.versions.serve(candidate)
            await kept.flush()
        await kept.flush()
        names = kept.names
    model, left, read = PromptModel(LengthModel()), itertools.count(times - 1, -1), getattr(kept_versions, last)

    async def read_then_change(*which, **how):
        await read(*which, **how)
        if next(left) == 0:
            change(model, adapter)

    monkeypatch.setattr(kept_versions, last, read_then_change)
    async with open_store(f"sqlite+aiosqlite:///{folder}/motet.db") as store:
        await KeptVersions(store, model, FakeClock()).flush(MAX_FITTED_BYTES)
    assert [one.name for one in model.versions] == names
    assert len(names) == 3
    for version in model.versions:
        assert version.correction(*adapter).trust <= TRUST_AFTER_CHANGE, version.name
