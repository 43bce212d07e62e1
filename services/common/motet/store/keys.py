"""API keys in the database: what `motet key` writes and gateways read. Their secrets are never here."""

from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, extract, func, insert, inspect, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from motet.errors import SetupError
from motet.keys import ApiKey, KeyScope
from motet.store.database import Store
from motet.store.tables import ApiKeyRow


async def add(store: Store, key: ApiKey) -> None:
    async with store.write() as connection:
        await _add(connection, key)


async def _add(connection: AsyncConnection, key: ApiKey) -> None:
    row = {
        "id": key.id,
        "tenant": key.tenant,
        "scopes": ",".join(sorted(key.scopes)),
        "hash": key.hash,
        "created": key.created,
        "expires": key.expires,
        "revoked": key.revoked,
    }
    await connection.execute(insert(ApiKeyRow).values(row))


async def all_keys(store: Store) -> list[tuple[ApiKey, datetime | None]]:
    """Each with the time it was last used, to the hour. The oldest comes first."""
    found: list[tuple[ApiKey, datetime | None]] = []
    async for rows in _read(store, select(*_COLUMNS, ApiKeyRow.used).order_by(ApiKeyRow.created, ApiKeyRow.id)):
        found.extend((_key(row), _aware(row.used)) for row in rows)
    return found


async def find(store: Store, id_: str) -> ApiKey | None:
    async with store.read() as connection:
        row = (await connection.execute(select(*_COLUMNS).where(ApiKeyRow.id == id_))).one_or_none()
        return _key(row) if row is not None else None


async def any_was_made(store: Store) -> bool:
    async with store.read() as connection:
        return await connection.scalar(select(ApiKeyRow.id).limit(1)) is not None


async def keys_in(store: Store, parts: Collection[str]) -> list[ApiKey]:
    """All in these parts."""
    found: list[ApiKey] = []
    theirs: ColumnElement[bool] = _PART.in_(parts)
    if store.dialect == "sqlite":  # it has an index of ids, in the order of their bytes, and uses it for ranges alone
        theirs = or_(*(ApiKeyRow.id.between(part, part + "\x7f") for part in parts))
    async for rows in _read(store, select(*_COLUMNS).where(theirs)):
        found.extend(map(_key, rows))
    return found


async def _read(store: Store, query: Select[*tuple[Any, ...]]) -> AsyncIterator[Sequence[Row[Any]]]:
    """A few at a time: whoever reads many of them has other things to do in between."""
    async with store.read() as connection:
        answer = await connection.stream(query)
        async for rows in answer.partitions(200):
            yield rows


def part_of(id_: str) -> str:
    """What a key is read with, once it has changed: of many keys one in 256."""
    return id_[:_PART_LENGTH]


_PART_LENGTH = 2
_PART = func.substr(ApiKeyRow.id, 1, _PART_LENGTH)
_COLUMNS = (
    ApiKeyRow.id,
    ApiKeyRow.tenant,
    ApiKeyRow.scopes,
    ApiKeyRow.hash,
    ApiKeyRow.created,
    ApiKeyRow.expires,
    ApiKeyRow.revoked,
)


async def table_exists(store: Store) -> bool:
    """Whether there is a table for them: in a database of an older version there is none, nor any key."""
    async with store.read() as connection:
        return await connection.run_sync(lambda bare: inspect(bare).has_table(ApiKeyRow.__tablename__))


async def change_mark(store: Store) -> tuple[Any, ...]:
    """Another one after every change of which keys open that a command of ours makes: so that only changes have to be
    read. It is of the rows themselves, so both change at once."""
    async with store.read() as connection:
        return tuple((await connection.execute(select(*_mark()))).one())


async def marks(store: Store) -> dict[str, tuple[Any, ...]]:
    """That of each part."""
    query = select(_PART.label("part"), *_mark()).group_by("part")
    async with store.read() as connection:
        return {row.part: tuple(row[1:]) for row in await connection.execute(query)}


def _mark() -> tuple[ColumnElement[Any], ...]:
    # A key is made, which counts; it is revoked, which counts; its end is moved, and no other one goes the other way.
    revoked, expires = (func.sum(extract("epoch", at)) for at in (ApiKeyRow.revoked, ApiKeyRow.expires))
    return func.count(), func.max(ApiKeyRow.created), func.count(ApiKeyRow.revoked), revoked, expires


async def revoke(store: Store, id_: str, *, tenant: str, at: datetime) -> bool:
    """Let it open nothing any more, whatever time it is elsewhere. `at` is kept, of the first time. False: that tenant
    has no such key."""
    async with store.write() as connection:
        return await _end(connection, id_, tenant=tenant, at=at)


async def rotate(store: Store, old: ApiKey, new: ApiKey, *, at: datetime) -> None:
    """Add `new`, and let `old` expire at that time, if not earlier: both, or neither.

    Raises SetupError when `old` opens nothing any more, or `new` is there: somebody may have revoked or rotated it
    since it was read. Its end is then that of its overlap, which says nothing of how long a successor should last.
    """
    async with store.write() as connection:
        ours = _is(old.id, old.tenant)
        row = (await connection.execute(select(*_COLUMNS).where(ours).with_for_update())).one_or_none()
        there = (await connection.execute(select(*_COLUMNS).where(ApiKeyRow.id == new.id))).one_or_none()
        if there is not None:
            next_ = f". Rotate that one: motet key rotate {new.id}"
            if why := _key(there).refusal_reason(new.created):
                next_ = f", and is {why}. Make a new one: motet key create --tenant {old.tenant}"
            raise SetupError(f"key {old.id} was rotated before: {new.id} follows it{next_}")
        if why := _key(row).refusal_reason(new.created) if row is not None else "gone":
            raise SetupError(
                f"key {old.id} is {why}, so there is nothing to carry on. "
                f"Make a new one: motet key create --tenant {old.tenant}"
            )
        await _add(connection, new)
        if at <= new.created:  # now: no clock has a say in that
            await _end(connection, old.id, tenant=old.tenant, at=at)
        else:
            later = (ApiKeyRow.expires.is_(None)) | (ApiKeyRow.expires > at)
            await connection.execute(update(ApiKeyRow).where(ours & later).values(expires=at))


async def _end(connection: AsyncConnection, id_: str, *, tenant: str, at: datetime) -> bool:
    found = await connection.scalar(select(ApiKeyRow.id).where(_is(id_, tenant)))
    await connection.execute(update(ApiKeyRow).where(_is(id_, tenant) & ApiKeyRow.revoked.is_(None)).values(revoked=at))
    return found is not None


def _is(id_: str, tenant: str) -> ColumnElement[bool]:
    return (ApiKeyRow.id == id_) & (ApiKeyRow.tenant == tenant)


async def note_use(store: Store, ids: Iterable[str], *, at: datetime) -> None:
    """To the hour, so that a key that is used all day is written a few times."""
    hour = at.replace(minute=0, second=0, microsecond=0)
    before = (ApiKeyRow.used.is_(None)) | (ApiKeyRow.used < hour)
    async with store.write() as connection:
        await connection.execute(update(ApiKeyRow).where(ApiKeyRow.id.in_(sorted(ids)) & before).values(used=hour))


def _key(row: Any) -> ApiKey:
    return ApiKey(
        id=row.id,
        tenant=row.tenant,
        scopes=_scopes(row.scopes),
        hash=bytes(row.hash),
        created=_aware(row.created) or datetime.fromtimestamp(0, UTC),
        expires=_aware(row.expires),
        revoked=_aware(row.revoked),
    )


@lru_cache(64)
def _scopes(said: str) -> frozenset[KeyScope]:
    # One of a newer version means nothing here, and takes nothing away.
    return frozenset(KeyScope(one) for one in said.split(",") if one in set(KeyScope))


def _aware(at: datetime | None) -> datetime | None:
    """SQLite forgets the zone."""
    return at.replace(tzinfo=UTC) if at is not None and at.tzinfo is None else at
