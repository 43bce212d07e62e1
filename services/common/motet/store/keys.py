"""API keys in the database: what `motet key` writes and gateways read. Their secrets are never here."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import extract, func, insert, inspect, select, update
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
    """Another one after every change of which keys open: so that only changes have to be read whole."""
    # A key is made, which counts; it is revoked, which counts; its end is moved to an earlier time, and then no other
    # one goes the other way.
    ends = func.sum(extract("epoch", ApiKey.revoked))
    query = select(func.count(), func.max(ApiKey.created), func.count(ApiKey.revoked), ends)
    async with store.read() as connection:
        return tuple((await connection.execute(query)).one())


async def end(store: Store, id_: str, *, tenant: str, at: datetime) -> bool:
    """Let it open nothing from then on, if not from earlier on. False: that tenant has no such key."""
    async with store.write() as connection:
        return await _end(connection, id_, tenant=tenant, at=at)


async def succeed(store: Store, old: Key, new: Key, *, at: datetime) -> None:
    """Add `new`, and let `old` open nothing from `at` on: both, or neither.

    Raises SetupError when `old` opens nothing any more: somebody may have revoked it since it was read.
    """
    async with store.write() as connection:
        ours = (ApiKey.id == old.id) & (ApiKey.tenant == old.tenant)
        row = (await connection.execute(select(ApiKey).where(ours).with_for_update())).mappings().one_or_none()
        if why := _key(row).refused_because(new.created) if row is not None else "gone":
            raise SetupError(
                f"key {old.id} is {why}, so there is nothing to carry on. "
                f"Make a new one: motet key create --tenant {old.tenant}"
            )
        await _add(connection, new)
        await _end(connection, old.id, tenant=old.tenant, at=at)


async def _end(connection: AsyncConnection, id_: str, *, tenant: str, at: datetime) -> bool:
    ours = (ApiKey.id == id_) & (ApiKey.tenant == tenant)
    found = await connection.scalar(select(ApiKey.id).where(ours))
    later = (ApiKey.revoked.is_(None)) | (ApiKey.revoked > at)
    await connection.execute(update(ApiKey).where(ours & later).values(revoked=at))
    return found is not None


async def note_use(store: Store, ids: Iterable[str], *, at: datetime) -> None:
    """To the hour, so that a key that is used all day is written a few times."""
    hour = at.replace(minute=0, second=0, microsecond=0)
    before = (ApiKey.used.is_(None)) | (ApiKey.used < hour)
    async with store.write() as connection:
        await connection.execute(update(ApiKey).where(ApiKey.id.in_(list(ids)) & before).values(used=hour))


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
