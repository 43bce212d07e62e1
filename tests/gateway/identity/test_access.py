"""Which requests need an API key, before and after the first key is made."""

import asyncio
import math
import os
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path, PosixPath
from typing import Any

import pytest

from motet.clock import FakeClock
from motet.errors import NotAuthenticated, SetupError, StoreUnavailable
from motet_gateway.identity import access as access_module
from motet_gateway.identity import bounded_call
from motet_gateway.identity.access import KeyAccess
from motet_gateway.settings import Settings
from tests.common.waiting import PATIENCE_S, until
from tests.gateway.identity.memory_keys import MemoryKeySource, id_of
from tests.gateway.identity.test_sources import no_thread_free

ELSEWHERE = "0.0.0.0"


class SettableTime:
    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now


def access(
    kept: MemoryKeySource, *, memory: Path | None = None, today: SettableTime | None = None, **settings: Any
) -> KeyAccess:
    return KeyAccess(
        Settings(**settings),
        kept,
        gone=lambda _: None,
        memory=memory,
        clock=FakeClock(),
        today=today or SettableTime(),
    )


def needs_key(one: KeyAccess) -> bool:
    return one.needs_key()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
async def test_on_loopback_no_key_is_needed_before_the_first(host: str) -> None:
    kept = MemoryKeySource()
    one = access(kept, host=host)
    with pytest.raises(StoreUnavailable):  # before the gateway has read anything
        needs_key(one)
    await one.begin()
    assert not needs_key(one)
    key = kept.make("acme")
    await one.read()
    assert needs_key(one)
    kept.revoke(key)
    await one.read()
    assert needs_key(one)


@pytest.mark.parametrize("host", [ELSEWHERE, "192.0.2.1", "::", "", "gateway.example"])
async def test_elsewhere_a_gateway_without_keys_does_not_start(host: str) -> None:
    with pytest.raises(SetupError, match="motet key create --tenant default") as caught:
        await access(MemoryKeySource(), host=host).begin()
    assert "MOTET_GATEWAY_AUTH=none" in caught.value.message


async def test_elsewhere_the_gateway_starts_with_keys_also_if_none_is_valid() -> None:
    kept = MemoryKeySource()
    kept.revoke(kept.make("acme"))
    one = access(kept, host=ELSEWHERE)
    await one.begin()
    assert needs_key(one)


async def test_elsewhere_the_gateway_starts_and_refuses_all_while_the_keys_are_unknown() -> None:
    kept = MemoryKeySource()
    key = kept.make("acme")
    kept.away = True
    one = access(kept, host=ELSEWHERE)
    await one.begin()
    with pytest.raises(StoreUnavailable):
        one.open(key)
    kept.away = False
    await one.read()
    assert one.open(key).tenant == "acme"


@pytest.mark.parametrize("host", ["127.0.0.1", ELSEWHERE])
async def test_a_gateway_that_needs_keys_starts_without_one(host: str) -> None:
    kept = MemoryKeySource()
    one = access(kept, host=host, auth="keys")
    await one.begin()
    assert needs_key(one)
    with pytest.raises(NotAuthenticated):
        one.open("anything")


@pytest.mark.parametrize("host", ["127.0.0.1", ELSEWHERE])
async def test_with_auth_none_no_key_is_needed_and_none_is_read(host: str) -> None:
    kept = MemoryKeySource()
    kept.make("acme")
    one = access(kept, host=host, auth="none")
    await one.begin()
    assert not needs_key(one)
    assert kept.reads == 0


@pytest.mark.parametrize("host", ["127.0.0.1", ELSEWHERE])
async def test_a_file_of_keys_asks_for_keys(host: str, tmp_path: Path) -> None:
    one = access(MemoryKeySource(), host=host, keys_file=tmp_path / "keys")
    await one.begin()
    assert needs_key(one)


async def test_on_loopback_an_outage_at_the_start_refuses_all_requests() -> None:
    kept = MemoryKeySource()
    kept.away = True
    one = access(kept)
    await one.begin()
    with pytest.raises(StoreUnavailable):
        needs_key(one)
    kept.away = False
    await one.read()
    assert not needs_key(one)


async def test_on_loopback_all_requests_are_refused_while_it_is_unknown_whether_keys_exist() -> None:
    kept = MemoryKeySource()
    one = access(kept)
    await one.begin()
    assert not needs_key(one)
    kept.away = True
    await one.read()
    with pytest.raises(StoreUnavailable):
        needs_key(one)
    kept.away = False
    await one.read()
    assert not needs_key(one)
    kept.make("acme")
    await one.read()
    kept.away = True
    await one.read()
    assert needs_key(one)


async def test_tenants_cannot_delay_the_decision_whether_keys_are_needed(tmp_path: Path) -> None:
    one = access(MemoryKeySource(), memory=tmp_path / "keys-were-made")
    async with no_thread_free(), asyncio.timeout(5):
        await one.begin()
        assert not needs_key(one)


class HangingPath(PosixPath):
    """A file in a folder that does not answer, like a network folder."""

    free = threading.Event()

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        self.free.wait()
        return super().stat(follow_symlinks=follow_symlinks)

    def touch(self, mode: int = 0o666, exist_ok: bool = True) -> None:
        self.free.wait()
        super().touch(mode, exist_ok)


async def test_with_a_hanging_state_directory_requests_are_refused_without_delay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet_gateway.identity.access.STORE_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(HangingPath, "free", threading.Event())
    kept, memory = MemoryKeySource(), HangingPath(tmp_path / "keys-were-made")
    one, other = access(kept, memory=memory), access(MemoryKeySource(), memory=memory)
    try:
        async with asyncio.timeout(PATIENCE_S):
            for each in (one, other):
                await each.begin()
                assert needs_key(each)
            key = kept.make("acme")
            await one.read()
            assert one.open(key)
    finally:
        memory.free.set()
    kept.revoke(key)
    async with asyncio.timeout(PATIENCE_S):
        while needs_key(other):  # the read that hung before ends first
            await other.read()
        await one.read()
    assert needs_key(one)


async def test_the_note_that_keys_exist_survives_a_restart_and_a_lost_database(tmp_path: Path) -> None:
    kept, memory = MemoryKeySource(), tmp_path / "keys-were-made"
    one = access(kept, memory=memory)
    await one.begin()
    assert not memory.exists()
    kept.make("acme")
    await one.read()
    lost = MemoryKeySource()
    again = access(lost, memory=memory)
    await again.begin()
    assert needs_key(again)
    allowed = access(lost, memory=memory, auth="none")
    await allowed.begin()
    assert not needs_key(allowed)


@pytest.mark.parametrize("settings", [{}, {"auth": "keys"}, {"auth": "keys", "host": ELSEWHERE}])
async def test_a_gateway_that_needs_keys_is_not_ready_before_it_has_read_them(settings: dict[str, str]) -> None:
    kept = MemoryKeySource()
    kept.away = True
    one = access(kept, **settings)
    await one.begin()
    assert "API keys" in one.unready_reason()
    kept.away = False
    await one.read()
    assert one.unready_reason() == ""  # there are no keys, and the gateway knows that
    kept.away = True
    await one.read()
    assert one.unready_reason() == ""  # known keys stay valid for a while


async def test_a_metric_shows_the_age_of_the_keys() -> None:
    kept, clock = MemoryKeySource(), FakeClock()
    one = KeyAccess(Settings(auth="keys"), kept, gone=lambda _: None, clock=clock, today=SettableTime())
    assert one.read_age() == math.inf
    await one.begin()
    assert one.read_age() == 0
    kept.away = True
    clock.advance(5)
    await one.read()
    assert one.read_age() == 5
    assert access(kept, auth="none").read_age() == 0


async def test_each_outage_is_logged_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Failures of the store, of its notifications, and of the file that says whether keys exist; each is retried."""
    kept, today, memory = MemoryKeySource(), SettableTime(), tmp_path / "state" / "keys-were-made"
    key = kept.make("acme")
    one, other = access(kept, auth="keys", today=today), access(MemoryKeySource(), memory=memory)
    await one.begin()

    async def turns() -> str:
        capsys.readouterr()
        for _ in range(3):
            today.now += timedelta(hours=1)
            one.open(key)
            for do in (one.read, one.note_use, other.read):
                await do()
        return capsys.readouterr().out

    events = ("api_keys_unreadable", "key_use_write_failed", "keys_made_note_unreadable")
    for _ in range(2):
        kept.away = True
        memory.parent.write_text("a file in the place of the folder")
        log = await turns()
        assert [log.count(event) for event in events] == [1, 1, 1]
        assert needs_key(other)
        kept.away = False
        memory.parent.unlink()
        log = await turns()
        assert not any(event in log for event in events)
        assert not needs_key(other)


async def test_a_gateway_that_needs_no_keys_is_ready_without_them() -> None:
    one = access(MemoryKeySource(), auth="none")
    await one.begin()
    assert one.unready_reason() == ""


async def test_an_unexpected_error_of_the_store_counts_as_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, clock = MemoryKeySource(), FakeClock()
    key = kept.make("acme")
    one = KeyAccess(Settings(auth="keys"), kept, gone=lambda _: None, clock=clock, today=SettableTime())
    await one.begin()

    async def break_down() -> None:
        raise RuntimeError("no row like this was ever seen")

    monkeypatch.setattr(kept, "read", break_down)
    clock.advance(500)
    await one.read()
    assert one.open(key)
    clock.advance(101)
    await one.read()
    with pytest.raises(StoreUnavailable):
        one.open(key)
    monkeypatch.undo()
    await one.read()
    assert one.open(key)


async def test_a_hanging_store_counts_as_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motet_gateway.identity.access.STORE_TIMEOUT_SECONDS", 0.05)
    kept = MemoryKeySource()
    one = access(kept, auth="keys")
    monkeypatch.setattr(kept, "read", asyncio.Event().wait)
    await one.begin()
    assert one.keyring.store_is_down


async def test_a_driver_that_cancels_its_own_work_does_not_end_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = MemoryKeySource()
    one = access(kept, auth="keys", keys_read_seconds=0.01)
    await one.begin()

    async def give_up(*_: Any, **__: Any) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(kept, "read", give_up)
    monkeypatch.setattr(kept, "note_use", give_up)
    one.keyring.used.add("one")
    await one.note_use()
    reading = asyncio.create_task(one.run())
    await until(lambda: one.keyring.store_is_down)
    monkeypatch.undo()
    key = kept.make("acme")
    await until(lambda: not one.keyring.store_is_down)
    assert one.open(key)
    reading.cancel()
    await asyncio.wait({reading})


async def test_known_keys_expire_when_they_are_no_longer_read() -> None:
    kept, clock = MemoryKeySource(), FakeClock()
    key = kept.make("acme")
    one = KeyAccess(
        Settings(auth="keys", keys_trusted_seconds=0), kept, gone=lambda _: None, clock=clock, today=SettableTime()
    )
    await one.begin()
    clock.advance(12)  # the next read may begin in two seconds and take ten
    assert one.open(key)
    clock.advance(1)
    with pytest.raises(StoreUnavailable):
        one.open(key)


async def test_use_is_written_once_an_hour_for_each_key() -> None:
    kept, today = MemoryKeySource(), SettableTime()
    today.now = today.now.replace(minute=5)
    used, unused = kept.make("acme"), kept.make("acme")
    one = access(kept, auth="keys", today=today)
    await one.begin()
    for minutes in (0, 1, 1, 60):
        today.now += timedelta(minutes=minutes)
        one.open(used)
        await one.note_use()
    assert [id_ for id_, _ in kept.used] == [id_of(used)] * 2
    assert id_of(unused) not in dict(kept.used)


async def test_a_store_that_cannot_note_the_use_stops_nothing() -> None:
    kept = MemoryKeySource()
    key = kept.make("acme")
    one = access(kept, auth="keys")
    await one.begin()
    kept.away = True
    one.open(key)
    await one.note_use()
    kept.away = False
    one.open(key)
    await one.note_use()
    assert [id_ for id_, _ in kept.used] == [id_of(key)]


async def test_the_gateway_ends_although_its_key_store_does_not_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_module, "STORE_CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(bounded_call, "CLEAN_UP_SECONDS", 0.05)
    kept = MemoryKeySource()

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(2)

    monkeypatch.setattr(kept, "close", never)
    one = access(kept, auth="keys")
    running = asyncio.create_task(one.run())
    await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=1)
    assert done == {running}
