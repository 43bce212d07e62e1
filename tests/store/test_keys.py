"""Keys in the database: a change is there whole or not at all, for whoever looks at the mark of it and at the rows."""

import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event, update

from motet import keys
from motet.errors import StoreUnavailable
from motet.keys import ApiKey, KeyScope
from motet.store import Store, migrate, open_store
from motet.store import keys as kept
from motet.store.tables import ApiKeyRow
from tests.support.older_schema import take_back

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


def key(made: keys.PresentedKey, **more: Any) -> ApiKey:
    return ApiKey(id=made.id, tenant="acme", scopes=frozenset({KeyScope.USER}), hash=made.hash, created=NOW, **more)


def new_key_in_another_part(than: ApiKey) -> keys.PresentedKey:
    return next(one for one in iter(keys.new_key, None) if kept.part_of(one.id) != kept.part_of(than.id))


async def seen(store: Store) -> tuple[object, object, object]:
    """What a gateway goes by."""
    return await kept.change_mark(store), await kept.marks(store), await kept.all_keys(store)


@pytest.mark.parametrize("overlap", [timedelta(), timedelta(hours=1)])
async def test_a_rotation_that_breaks_off_between_its_keys_changes_nothing(url: str, overlap: timedelta) -> None:
    await migrate(url)
    old, new = key(keys.new_key(), expires=NOW + timedelta(days=90)), key(keys.new_key())
    async with open_store(url) as store:
        await kept.add(store, old)
        before = await seen(store)

        def break_off(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if statement.startswith("UPDATE keys"):
                raise ConnectionError("the line is cut")

        event.listen(store.engine.sync_engine, "before_cursor_execute", break_off)
        with pytest.raises(StoreUnavailable):
            await kept.rotate(store, old, new, at=NOW + overlap)
        event.remove(store.engine.sync_engine, "before_cursor_execute", break_off)
        assert await seen(store) == before
        await kept.rotate(store, old, new, at=NOW + overlap)  # nothing of it is in the way
        mark, marks, found = await seen(store)
        assert mark != before[0]
        assert marks != before[1]
        assert isinstance(found, list)
        assert {one.id for one, _ in found} == {old.id, new.id}


async def test_a_change_of_keys_and_its_version_become_visible_together(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another process, which looks at any time."""
    await migrate(url)
    old, new = key(keys.new_key()), key(keys.new_key())
    async with open_store(url) as store, open_store(url) as other:
        await kept.add(store, old)
        before, between = await seen(other), list[object]()
        add = kept.insert_key

        async def looked_at(connection: Any, one: ApiKey) -> None:
            await add(connection, one)
            between.append(await seen(other))

        monkeypatch.setattr(kept, "insert_key", looked_at)
        await kept.rotate(store, old, new, at=NOW + timedelta(hours=1))
        assert between == [before]
        assert all(now != then for now, then in zip(await seen(other), before, strict=True))


async def test_every_change_of_keys_changes_only_the_version_of_its_part(url: str) -> None:
    await migrate(url)
    first, second = (key(keys.PresentedKey(id_, keys.new_key().secret)) for id_ in ("00" * 8, "ff" * 8))
    async with open_store(url) as store:

        async def changed(parts: Iterable[str], change: Any) -> None:
            before, marks = await kept.change_mark(store), await kept.marks(store)
            await change
            now = await kept.marks(store)
            assert {part for part in now if now[part] != marks.get(part)} == set(parts)
            assert (await kept.change_mark(store) != before) == bool(parts)

        await changed(["00"], kept.add(store, first))
        await changed(["ff"], kept.add(store, second))
        third = key(keys.PresentedKey("ab" * 8, keys.new_key().secret))
        await changed(["00", "ab"], kept.rotate(store, first, third, at=NOW + timedelta(hours=1)))
        await changed(["00"], kept.revoke(store, first.id, tenant="acme", at=NOW))
        await changed([], kept.revoke(store, first.id, tenant="acme", at=NOW + timedelta(hours=1)))
        await changed([], kept.note_use(store, [second.id], at=NOW))


UID = "00000000-0000-4000-8000-000000000001"


async def test_the_namespace_that_a_key_is_bound_to_is_stored(url: str) -> None:
    await migrate(url)
    bound = key(keys.new_key(), tenant_uid=UID)
    unbound = key(new_key_in_another_part(bound))
    async with open_store(url) as store:
        for one in (bound, unbound):
            await kept.add(store, one)
            assert await kept.find(store, one.id) == one
            assert await kept.keys_in(store, [kept.part_of(one.id)]) == [one]
        assert {one.id: one.tenant_uid for one, _ in await kept.all_keys(store)} == {bound.id: UID, unbound.id: ""}


async def test_the_limits_of_a_key_are_stored(url: str) -> None:
    await migrate(url)
    limited = key(keys.new_key(), limits=keys.KeyLimits(requests_per_minute=60, concurrency=2))
    async with open_store(url) as store:
        await kept.add(store, limited)
        assert await kept.find(store, limited.id) == limited
        await kept.rotate(store, limited, replace(limited, id=keys.successor_key(limited.id).id), at=NOW)
        assert {one.limits for one, _ in await kept.all_keys(store)} == {limited.limits}


async def test_a_limit_of_a_newer_version_shuts_nobody_out(url: str) -> None:
    await migrate(url)
    limited = key(keys.new_key(), limits=keys.KeyLimits(requests_per_minute=60))
    async with open_store(url) as store:
        await kept.add(store, limited)
        await kept.add(store, key(keys.new_key()))
        newer = update(ApiKeyRow).where(ApiKeyRow.id == limited.id)
        async with store.write() as connection:
            more = {"requests_per_minute": 60, "concurrency": 10**9, "images_per_minute": 3}
            await connection.execute(newer.values(limits=json.dumps(more)))
        read = keys.KeyLimits(requests_per_minute=60, concurrency=keys.MAX_KEY_LIMITS.concurrency)
        assert {one.limits for one, _ in await kept.all_keys(store)} == {read, keys.NO_LIMITS}


async def test_a_database_of_a_version_without_bound_keys_is_read_and_changed_before_it_is_upgraded(url: str) -> None:
    await migrate(url)
    first, third = (key(keys.new_key()) for _ in range(2))
    second = key(new_key_in_another_part(first))
    async with open_store(url) as store:
        await take_back(store, "0003")
        await kept.add(store, first)
        await kept.rotate(store, first, second, at=NOW + timedelta(hours=1))
        assert await kept.revoke(store, first.id, tenant="acme", at=NOW)
        assert await kept.find(store, second.id) == second
        assert await kept.keys_in(store, [kept.part_of(second.id)]) == [second]
        await migrate(url)
        assert await kept.find(store, second.id) == second, "bound to the name only, as before"
        bound = replace(third, tenant_uid=UID)
        await kept.add(store, bound)
        assert await kept.find(store, third.id) == bound


async def test_all_keys_of_one_tenant_are_revoked_together(url: str) -> None:
    await migrate(url)
    before, ours, theirs = key(keys.new_key(), revoked=NOW), key(keys.new_key()), key(keys.new_key())
    theirs = replace(theirs, tenant="acme-2")
    later = NOW + timedelta(hours=1)
    async with open_store(url) as store:
        for one in (before, ours, theirs):
            await kept.add(store, one)
        mark = await kept.change_mark(store)
        assert await kept.revoke_all(store, tenant="acme", at=later) == (2, 1)
        assert await kept.change_mark(store) != mark, "gateways read it"
        revoked = {one.id: one.revoked for one, _ in await kept.all_keys(store)}
        assert revoked == {before.id: NOW, ours.id: later, theirs.id: None}
        assert await kept.revoke_all(store, tenant="acme", at=later) == (2, 0)
        assert await kept.revoke_all(store, tenant="nobody", at=later) == (0, 0)
