"""The sources of API keys: a database, a file, a folder."""

import asyncio
import errno
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, text, update

from motet import keys
from motet.clock import Clock, FakeClock, monotonic
from motet.errors import StoreUnavailable
from motet.keys import ApiKey, KeyScope
from motet.store import Store, migrate, open_store
from motet.store import keys as stored
from motet.store.tables import ApiKeyRow
from motet_gateway.identity import key_sources
from motet_gateway.identity.bounded_call import BoundedCall
from motet_gateway.identity.key_sources import Change, DatabaseKeys, FileKeys, KeySource
from motet_gateway.identity.keyring import Keyring
from tests.common.waiting import PATIENCE_S
from tests.support.key_rows import record_read_key_ids
from tests.support.postgresql import PostgreSQL

NOW = datetime(2026, 5, 1, 12, 30, tzinfo=UTC)


def key(tenant: str = "acme") -> ApiKey:
    made = keys.new_key()
    return ApiKey(id=made.id, tenant=tenant, scopes=frozenset({KeyScope.USER}), hash=made.hash, created=NOW)


@pytest.fixture(params=["sqlite", "postgresql"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/motet.db"
    server: PostgreSQL = request.getfixturevalue("postgresql")
    return await server.new_database()


class Reader:
    """Reads a source as a gateway does."""

    def __init__(self, source: KeySource) -> None:
        self._source, self._known = source, dict[str, ApiKey]()

    async def read(self) -> list[ApiKey] | None:
        """All keys that are known now; None if they are the same as before."""
        answer = await self._source.read()
        if isinstance(answer, Change):
            for id_ in answer.gone:
                self._known.pop(id_, None)
            self._known |= {one.id: one for one in answer.keys}
        elif answer is not None:
            self._known = {one.id: one for one in answer}
        if answer is not None:
            self._source.applied()
        return list(self._known.values()) if answer is not None else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def stored_keys(url: str, clock: Clock = monotonic) -> Reader:
    return Reader(DatabaseKeys(url, clock=clock))


async def test_keys_in_a_database_are_read_only_after_a_change(url: str) -> None:
    source = stored_keys(url)
    assert await source.read() == []  # before the schema exists
    await migrate(url)
    assert await source.read() == []
    first, second = key(), key("zeta")
    async with open_store(url) as store:
        await stored.add(store, first)
        assert await source.read() == [first]
        assert await source.read() is None
        await stored.add(store, second)
        read = await source.read()
        assert read is not None
        assert {one.id for one in read} == {first.id, second.id}
        follower, later = key(), NOW + timedelta(hours=1)
        await stored.rotate(store, first, follower, at=later)
        assert await ends(source) == {first.id: (later, None), second.id: (None, None), follower.id: (None, None)}
        assert await stored.revoke(store, first.id, tenant="acme", at=NOW)  # its owner cannot wait
        assert (await ends(source))[first.id] == (later, NOW)
        assert await stored.revoke(store, second.id, tenant="zeta", at=later)
        assert (await ends(source))[second.id] == (None, later)
        await source.note_use([first.id], at=NOW)
        assert await source.read() is None
        assert {one.id: used for one, used in await stored.all_keys(store)}[first.id] == NOW.replace(minute=0)
    await source.close()


async def ends(source: Reader) -> dict[str, tuple[datetime | None, datetime | None]]:
    """When each key expires and when it was revoked, after a change."""
    read = await source.read()
    assert read is not None
    return {one.id: (one.expires, one.revoked) for one in read}


async def test_every_change_of_when_keys_end_is_read(url: str) -> None:
    await migrate(url)
    source, made = stored_keys(url), [key() for _ in range(2)]
    later, sooner = NOW + timedelta(hours=2), NOW + timedelta(hours=1)
    async with open_store(url) as store:
        for one in made:
            await stored.add(store, one)
        assert await source.read()
        for change in (
            update(ApiKeyRow).where(ApiKeyRow.id == made[0].id).values(expires=later),
            update(ApiKeyRow).where(ApiKeyRow.id == made[0].id).values(expires=sooner),
            update(ApiKeyRow).where(ApiKeyRow.id == made[1].id).values(revoked=later),
            update(ApiKeyRow).where(ApiKeyRow.id == made[1].id).values(revoked=sooner),
        ):
            async with store.write() as connection:
                await connection.execute(change)
            assert await source.read() is not None
            assert await source.read() is None
    await source.close()


MANY = 10_000

MANY_ROWS = {
    "sqlite": "INSERT INTO keys (id, tenant, scopes, hash, created, expires) WITH RECURSIVE n(n) AS (SELECT 1 UNION "
    f"ALL SELECT n + 1 FROM n WHERE n < {MANY}) SELECT lower(hex(randomblob(8))), 'acme', 'user', randomblob(32), "
    "'2026-05-01 12:00:00.000000', '2026-08-01 12:00:00.000000' FROM n",
    "postgresql": "INSERT INTO keys (id, tenant, scopes, hash, created, expires) SELECT substr(md5(n::text), 1, 16), "
    "'acme', 'user', sha256(n::text::bytea), '2026-05-01 12:00:00Z', '2026-08-01 12:00:00Z' "
    f"FROM generate_series(1, {MANY}) AS n",
}


async def make_many(url: str) -> None:
    await migrate(url)
    async with open_store(url) as store, store.write() as connection:
        await connection.execute(text(MANY_ROWS[store.dialect]))


async def test_every_minute_all_keys_are_read_again(tmp_path: Path) -> None:
    """Like a change by hand that leaves all sums equal. Not all keys at once: that would take long."""
    url, clock = f"sqlite+aiosqlite:///{tmp_path}/motet.db", FakeClock()
    await make_many(url)
    source = stored_keys(url, clock=clock)
    assert await source.read()
    async with open_store(url) as store, store.write() as connection:
        await connection.execute(update(ApiKeyRow).values(tenant="zeta"))
    seen = [0]
    for _ in range(30):
        clock.advance(2)
        read = await source.read()
        seen.append(sum(each.tenant == "zeta" for each in read) if read is not None else seen[-1])
        assert await source.read() is None  # no time has passed
    assert seen[-1] == MANY
    assert max(later - before for before, later in itertools.pairwise(seen)) < MANY / 10
    clock.advance(60)
    assert await source.read() is None
    await source.close()


async def test_after_a_change_only_changed_keys_are_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read_key_ids = record_read_key_ids(monkeypatch)
    await make_many(url)
    source = stored_keys(url, clock=FakeClock())
    found = await source.read()
    assert found is not None
    assert len(found) == len(set(read_key_ids)) == len(read_key_ids) == MANY
    async with open_store(url) as store:
        for change in (
            stored.add(store, key()),
            stored.rotate(store, found[0], key(), at=NOW),
            stored.revoke(store, found[1].id, tenant="acme", at=NOW),
        ):
            await change
            read_key_ids.clear()
            assert await source.read() is not None
            assert 1 <= len(read_key_ids) < MANY / 50
        read_key_ids.clear()
        assert await source.read() is None
        assert read_key_ids == []
    await source.close()


async def test_reading_many_keys_continues_where_it_was_interrupted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be more than one read has time for; half of them must not count as all."""
    read_key_ids = record_read_key_ids(monkeypatch)
    await make_many(url)
    source, left, keys_in = stored_keys(url, clock=FakeClock()), 0, stored.keys_in

    async def breaks_off(*arguments: Any) -> list[ApiKey]:
        nonlocal left
        if not left:
            raise StoreUnavailable("it is away")
        left -= 1
        return await keys_in(*arguments)

    with monkeypatch.context() as broken:
        broken.setattr(stored, "keys_in", breaks_off)
        for _ in range(3):
            left = 2
            with pytest.raises(StoreUnavailable):
                await source.read()
    assert MANY / 10 < len(read_key_ids) < MANY
    found = await source.read()
    assert found is not None
    assert len(found) == len(set(read_key_ids)) == len(read_key_ids) == MANY
    await source.close()


async def test_a_change_in_a_late_answer_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a driver that cleans up when it is cancelled, and then continues."""
    url, first, second = f"sqlite+aiosqlite:///{tmp_path}/motet.db", key(), key()
    await migrate(url)
    source, patience = stored_keys(url), BoundedCall(0.5)
    keys_in = stored.keys_in

    async def late(*arguments: Any) -> list[ApiKey]:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return await keys_in(*arguments)

    async with open_store(url) as store:
        for one in (first, second):
            await stored.add(store, one)
            with monkeypatch.context() as slow:
                slow.setattr(stored, "keys_in", late)
                with pytest.raises(StoreUnavailable, match="no answer within"):
                    await patience.ask(source.read)
            while not await patience.stop():  # it would read beside the next one
                pass
            assert one in (await BoundedCall(PATIENCE_S).ask(source.read) or [])  # a busy machine needs longer
    await source.close()


@asynccontextmanager
async def no_thread_free() -> AsyncIterator[None]:
    """As while tenants' requests use all threads of the event loop to count tokens."""
    free, loop = threading.Event(), asyncio.get_running_loop()
    threads = ThreadPoolExecutor(2)
    loop.set_default_executor(threads)
    blocked = [loop.run_in_executor(None, free.wait) for _ in range(4)]
    try:
        yield
    finally:
        free.set()
        await asyncio.gather(*blocked)


async def test_tenants_cannot_delay_the_reading_of_keys(tmp_path: Path) -> None:
    file, url, one = tmp_path / "keys", f"sqlite+aiosqlite:///{tmp_path}/motet.db", key()
    file.write_text(keys.to_line(one))
    await migrate(url)
    async with open_store(url) as store:
        await stored.add(store, one)
    in_file, in_database = Reader(FileKeys(file)), stored_keys(url)
    async with no_thread_free(), asyncio.timeout(5):
        assert await in_file.read() == [one]
        assert await in_database.read() == [one]
        assert await in_database.read() is None
        await in_database.note_use([one.id], at=NOW)
        for source in (in_file, in_database):
            await source.close()


async def test_looking_for_keys_creates_no_database(tmp_path: Path) -> None:
    source = stored_keys(f"sqlite+aiosqlite:///{tmp_path}/motet.db")
    assert await source.read() == []
    assert list(tmp_path.iterdir()) == []
    await source.close()


async def test_a_missing_database_counts_as_unavailable_and_not_as_empty(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/motet.db"
    await migrate(url)
    source = stored_keys(url)
    async with open_store(url) as store:
        await stored.add(store, key())
    assert await source.read()
    (tmp_path / "motet.db").unlink()
    with pytest.raises(StoreUnavailable, match="gone"):
        await source.read()
    await source.close()


async def test_a_file_that_is_not_a_database_counts_as_unavailable(tmp_path: Path) -> None:
    (tmp_path / "motet.db").write_bytes(b"something else" * 1000)
    source = stored_keys(f"sqlite+aiosqlite:///{tmp_path}/motet.db")
    with pytest.raises(StoreUnavailable, match="not a database"):
        await source.read()
    await source.close()


async def test_keys_in_a_file_are_read_again_when_it_changes(tmp_path: Path) -> None:
    file, first, second = tmp_path / "keys", key(), key("zeta")
    source = Reader(FileKeys(file))
    with pytest.raises(StoreUnavailable, match="keys"):
        await source.read()
    file.write_text(f"# ours\n\n{keys.to_line(first)}\n")
    assert await source.read() == [first]
    assert await source.read() is None
    file.write_text(f"{keys.to_line(first)}\n{keys.to_line(second)}")
    assert await source.read() == [first, second]
    file.write_text("")
    assert await source.read() == []


async def test_a_wrong_line_takes_no_other_key_away_and_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, good, pasted = tmp_path / "keys", key(), str(keys.new_key())
    file.write_bytes(f"{pasted}\n{keys.to_line(good)}\n".encode() + b"\xff\xfe\n{}\n")
    assert await Reader(FileKeys(file)).read() == [good]
    log = capsys.readouterr().out
    assert "api_key_line_invalid" in log
    assert "line=1" in log
    assert pasted not in log


async def test_a_mounted_secret_is_read_as_a_folder(tmp_path: Path) -> None:
    """As a kubelet does it: all files at once, by a link to another folder."""
    mount, first, second = tmp_path / "mount", key(), key("zeta")
    for version, lines in (("..1", {"ours": first}), ("..2", {"ours": first, "theirs": second})):
        (mount / version).mkdir(parents=True)
        for name, one in lines.items():
            (mount / version / name).write_text(keys.to_line(one))
    (mount / "..data").symlink_to("..1")
    (mount / "ours").symlink_to("..data/ours")
    source = Reader(FileKeys(mount))
    assert await source.read() == [first]
    (mount / "theirs").symlink_to("..data/theirs")
    (mount / "..new").symlink_to("..2")
    (mount / "..new").replace(mount / "..data")
    assert await source.read() == [first, second]
    assert await source.read() is None


async def test_a_too_large_file_counts_as_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_sources, "MAX_BYTES", 100)
    file = tmp_path / "keys"
    file.write_text(keys.to_line(key()))
    with pytest.raises(StoreUnavailable, match="more than 100 bytes"):
        await Reader(FileKeys(file)).read()


async def test_a_line_that_breaks_the_reader_of_lines_takes_no_other_key_away(tmp_path: Path) -> None:
    file, good = tmp_path / "keys", key()
    file.write_text("[" * 200_000 + f"\n{keys.to_line(good)}")
    assert await Reader(FileKeys(file)).read() == [good]


async def test_an_unreadable_file_does_not_count_as_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, one = tmp_path / "keys", key()
    file.write_text(keys.to_line(one))
    source = Reader(FileKeys(file))

    def break_down(_line: str) -> ApiKey:
        raise RuntimeError("a mistake of ours")

    with monkeypatch.context() as broken:
        broken.setattr(keys, "from_line", break_down)
        with pytest.raises(RuntimeError):
            await source.read()
    assert await source.read() == [one]


@pytest.mark.parametrize("turned", [False, True])
async def test_of_two_lines_with_one_id_the_stricter_one_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, turned: bool
) -> None:
    loose = key()
    soon, later = (replace(loose, expires=NOW + timedelta(hours=hours)) for hours in (1, 2))
    revoked = replace(loose, revoked=NOW)
    bound = replace(loose, tenant_uid="00000000-0000-4000-8000-000000000001")
    for strict, other in ((soon, loose), (soon, later), (revoked, soon), (bound, loose), (revoked, bound)):
        lines = [keys.to_line(one) for one in (strict, other)]
        file = tmp_path / "keys"
        file.write_text("\n".join(reversed(lines) if turned else lines))
        assert await Reader(FileKeys(file)).read() == [strict]
        log = capsys.readouterr().out
        assert "api_key_duplicate" in log
        assert strict.id in log


@pytest.mark.parametrize("turned", [False, True])
async def test_two_lines_with_one_id_allow_what_both_allow(tmp_path: Path, *, turned: bool) -> None:
    first = replace(key(), scopes=frozenset({KeyScope.USER, KeyScope.ADMIN}), limits=keys.KeyLimits(60, 0, 4))
    second = replace(first, scopes=frozenset({KeyScope.USER}), limits=keys.KeyLimits(6, 900, 0))
    lines = [keys.to_line(one) for one in (first, second)]
    file = tmp_path / "keys"
    file.write_text("\n".join(reversed(lines) if turned else lines))
    (read,) = await Reader(FileKeys(file)).read()
    assert read == replace(second, limits=keys.KeyLimits(6, 900, 4))


async def test_a_mounted_secret_that_changes_while_it_is_read_is_read_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount, before, after = tmp_path / "mount", key(), key("zeta")
    for version, one in (("..1", before), ("..2", after)):
        (mount / version).mkdir(parents=True)
        for name in ("a", "b"):
            (mount / version / name).write_text(keys.to_line(one) if name == "a" or one is after else "")
    (mount / "..data").symlink_to("..1")
    for name in ("a", "b"):
        (mount / name).symlink_to(f"..data/{name}")
    opened: list[Path] = []
    open_file = Path.open

    def changing(self: Path, mode: str = "r") -> IO[Any]:
        if not opened:
            (mount / "..new").symlink_to("..2")
            (mount / "..new").replace(mount / "..data")
        opened.append(self)
        return open_file(self, mode)

    monkeypatch.setattr(Path, "open", changing)
    source = Reader(FileKeys(mount))
    assert await source.read() == [before]
    assert await source.read() == [after]
    assert len(opened) == 4


@pytest.mark.parametrize("form", ["{0}/motet.db", "{0}/folder"])
async def test_an_unreadable_folder_counts_as_unavailable_and_not_as_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    path = Path(form.format(tmp_path))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    sources_ = [stored_keys(f"sqlite+aiosqlite:///{path}"), Reader(FileKeys(path))]
    for source in sources_:
        with pytest.raises(StoreUnavailable, match="Permission denied"):
            await source.read()


STEPS = ("add", "revoke", "delete", "copy", "restore", "read", "read fails", "applying fails")


@settings(max_examples=12, deadline=None)
@given(steps=st.lists(st.sampled_from(STEPS), max_size=12))
@example(steps=["read", "add", "read fails", "delete", "read"])
@example(steps=["read", "copy", "add", "read fails", "restore"])
@example(steps=["add", "add", "read", "restore"])
@example(steps=["add", "read", "revoke", "restore"])
@example(steps=["add", "read", "revoke", "applying fails"])
@example(steps=["add", "copy", "read", "revoke", "read", "restore", "read fails"])
def test_after_anything_one_good_reading_makes_the_ring_equal_the_store(steps: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(ring_equals_store_after(steps, Path(folder)))


async def ring_equals_store_after(steps: list[str], folder: Path) -> None:
    file, copy = folder / "motet.db", folder / "copy.db"
    url = f"sqlite+aiosqlite:///{file}"
    await migrate(url)
    shutil.copyfile(file, copy)
    source, ends = DatabaseKeys(url, clock=monotonic), Failing()
    ring = Keyring(trusted_seconds=600, between_seconds=60, gone=ends)
    for number, step in enumerate([*steps, "read"]):
        match step:
            case "read":
                await learn(source, ring)
            case "read fails":  # after it has read some keys
                with pytest.MonkeyPatch.context() as broken, suppress(StoreUnavailable):
                    broken.setattr(DatabaseKeys, "_due", fails)
                    await learn(source, ring)
            case "applying fails":
                ends.failing = True
                with suppress(RuntimeError):
                    await learn(source, ring)
                ends.failing = False
            case "copy":
                shutil.copyfile(file, copy)
            case "restore":
                # What SQLite has not written back yet belongs to the file that goes.
                for rest in folder.glob("motet.db-*"):
                    rest.unlink()
                shutil.copyfile(copy, folder / "restored.db")
                (folder / "restored.db").replace(file)
            case _:
                async with open_store(url) as store:
                    await change(store, step, NOW + timedelta(seconds=number))
    async with open_store(url) as store:
        wanted = {one.id: one for one, _ in await stored.all_keys(store)}
    assert ring.keys == wanted
    assert ring.callers.keys() == wanted.keys()
    assert ring.opened == {id_ for id_, one in wanted.items() if one.revoked is None}
    await source.close()


class Failing:
    def __init__(self) -> None:
        self.failing = False

    def __call__(self, _: Mapping[str, str]) -> None:
        if self.failing:
            raise RuntimeError("the requests of a key cannot be ended")


def fails(*_: object) -> list[str]:
    raise StoreUnavailable("it is away")


async def learn(source: DatabaseKeys, ring: Keyring) -> None:
    found = await source.read()
    if isinstance(found, Change):
        ring.change(found.keys, found.gone, now=NOW, at=0)
    elif found is not None:
        ring.replace(found, now=NOW, at=0)
    source.applied()


async def change(store: Store, how: str, at: datetime) -> None:
    known = [one for one, _ in await stored.all_keys(store)]
    if how == "add":
        await stored.add(store, replace(key(), created=at))
    elif known and how == "revoke":
        await stored.revoke(store, known[-1].id, tenant="acme", at=at)
    elif known and how == "delete":
        async with store.write() as connection:
            await connection.execute(delete(ApiKeyRow).where(ApiKeyRow.id == known[-1].id))


async def test_a_replaced_database_is_read(tmp_path: Path) -> None:
    """As after the database was restored."""
    file, restored = tmp_path / "motet.db", tmp_path / "restored.db"
    before, after = key(), key("zeta")
    for path, one in ((file, before), (restored, after)):
        await migrate(f"sqlite+aiosqlite:///{path}")
        async with open_store(f"sqlite+aiosqlite:///{path}") as store:
            await stored.add(store, one)
    source = stored_keys(f"sqlite+aiosqlite:///{file}")
    assert await source.read() == [before]
    assert await source.read() is None
    restored.replace(file)
    assert await source.read() == [after]
    await source.note_use([after.id], at=NOW)
    async with open_store(f"sqlite+aiosqlite:///{file}") as store:
        assert [used for _, used in await stored.all_keys(store)] == [NOW.replace(minute=0)]
    await source.close()
