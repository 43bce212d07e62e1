"""API keys in the database: what `motet key` writes and gateways read. Their secrets are never here."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, extract, func, insert, inspect, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from motet.errors import SetupError
from motet.keys import Key, KeyScope
from motet.store.engine import Store
from motet.store.tables import ApiKey


async def add(store: Store, key: Key) -> None:
    async with store.write() as connection:
        await _add(connection, key)


async def _add(connection: AsyncConnection, key: Key) -> None:
    row = {
        "id": key.id,
        "tenant": key.tenant,
        "scopes": ",".join(sorted(key.scopes)),
        "hash": key.hash,
        "created": key.created,
        "expires": key.expires,
        "revoked": key.revoked,
    }
    await connection.execute(insert(ApiKey).values(row))


async def all_keys(store: Store) -> list[tuple[Key, datetime | None]]:
    """Each with the time it was last used, to the hour. The oldest comes first."""
    found: list[tuple[Key, datetime | None]] = []
    async with store.read() as connection:
        # A few at a time: whoever reads many of them has other things to do in between.
        answer = await connection.stream(select(ApiKey).order_by(ApiKey.created, ApiKey.id))
        async for rows in answer.mappings().partitions(200):
            found.extend((_key(row), _aware(row["used"])) for row in rows)
    return found


async def are_kept(store: Store) -> bool:
    """Whether there is a table for them: in a database of an older version there is none, nor any key."""
    async with store.read() as connection:
        return await connection.run_sync(lambda bare: inspect(bare).has_table(ApiKey.__tablename__))


async def mark(store: Store) -> tuple[Any, ...]:
    """Another one after every change of which keys open that a command of ours makes: so that only changes have to be
    read whole."""
    # A key is made, which counts; it is revoked, which counts; its end is moved, and no other one goes the other way.
    revoked, expires = (func.sum(extract("epoch", at)) for at in (ApiKey.revoked, ApiKey.expires))
    query = select(func.count(), func.max(ApiKey.created), func.count(ApiKey.revoked), revoked, expires)
    async with store.read() as connection:
        return tuple((await connection.execute(query)).one())


async def end(store: Store, id_: str, *, tenant: str, at: datetime) -> bool:
    """Let it open nothing any more, whatever time it is elsewhere. `at` is kept, of the first time. False: that tenant
    has no such key."""
    async with store.write() as connection:
        return await _end(connection, id_, tenant=tenant, at=at)


async def succeed(store: Store, old: Key, new: Key, *, at: datetime) -> None:
    """Add `new`, and let `old` expire at that time, if not earlier: both, or neither.

    Raises SetupError when `old` opens nothing any more, or `new` is there: somebody may have revoked or rotated it
    since it was read. Its end is then that of its overlap, which says nothing of how long a successor should last.
    """
    async with store.write() as connection:
        ours = _is(old.id, old.tenant)
        row = (await connection.execute(select(ApiKey).where(ours).with_for_update())).mappings().one_or_none()
        there = (await connection.execute(select(ApiKey).where(ApiKey.id == new.id))).mappings().one_or_none()
        if there is not None:
            next_ = f". Rotate that one: motet key rotate {new.id}"
            if why := _key(there).refused_because(new.created):
                next_ = f", and is {why}. Make a new one: motet key create --tenant {old.tenant}"
            raise SetupError(f"key {old.id} was rotated before: {new.id} follows it{next_}")
        if why := _key(row).refused_because(new.created) if row is not None else "gone":
            raise SetupError(
                f"key {old.id} is {why}, so there is nothing to carry on. "
                f"Make a new one: motet key create --tenant {old.tenant}"
            )
        await _add(connection, new)
        if at <= new.created:  # now: no clock has a say in that
            await _end(connection, old.id, tenant=old.tenant, at=at)
        else:
            later = (ApiKey.expires.is_(None)) | (ApiKey.expires > at)
            await connection.execute(update(ApiKey).where(ours & later).values(expires=at))


async def _end(connection: AsyncConnection, id_: str, *, tenant: str, at: datetime) -> bool:
    found = await connection.scalar(select(ApiKey.id).where(_is(id_, tenant)))
    await connection.execute(update(ApiKey).where(_is(id_, tenant) & ApiKey.revoked.is_(None)).values(revoked=at))
    return found is not None


def _is(id_: str, tenant: str) -> ColumnElement[bool]:
    return (ApiKey.id == id_) & (ApiKey.tenant == tenant)


async def note_use(store: Store, ids: Iterable[str], *, at: datetime) -> None:
    """To the hour, so that a key that is used all day is written a few times."""
    hour = at.replace(minute=0, second=0, microsecond=0)
    before = (ApiKey.used.is_(None)) | (ApiKey.used < hour)
    async with store.write() as connection:
        await connection.execute(update(ApiKey).where(ApiKey.id.in_(sorted(ids)) & before).values(used=hour))


def _key(row: Any) -> Key:
    return Key(
        id=row["id"],
        tenant=row["tenant"],
        # One of a newer version means nothing here, and takes nothing away.
        scopes=frozenset(KeyScope(one) for one in row["scopes"].split(",") if one in set(KeyScope)),
        hash=bytes(row["hash"]),
        created=_aware(row["created"]) or datetime.fromtimestamp(0, UTC),
        expires=_aware(row["expires"]),
        revoked=_aware(row["revoked"]),
    )


def _aware(at: datetime | None) -> datetime | None:
    """SQLite forgets the zone."""
    return at.replace(tzinfo=UTC) if at is not None and at.tzinfo is None else at
