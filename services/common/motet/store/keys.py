"""API keys in the database: `motet key` writes them and gateways read them. The database never has their secrets."""

import json
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, extract, func, insert, inspect, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import InstrumentedAttribute

from motet.errors import SetupError
from motet.keys import MAX_KEY_LIMITS, ApiKey, KeyLimits, KeyScope, limits_of
from motet.store.database import Store
from motet.store.tables import ApiKeyRow


async def add(store: Store, key: ApiKey) -> None:
    async with store.write() as connection:
        await insert_key(connection, key)


async def insert_key(connection: AsyncConnection, key: ApiKey) -> None:
    row = {
        "id": key.id,
        "tenant": key.tenant,
        **({"tenant_uid": key.tenant_uid} if key.tenant_uid else {}),
        **({"limits": json.dumps(key.limits.document)} if any(key.limits) else {}),
        "scopes": ",".join(sorted(key.scopes)),
        "hash": key.hash,
        "created": key.created,
        "expires": key.expires,
        "revoked": key.revoked,
    }
    await connection.execute(insert(ApiKeyRow).values(row))


async def all_keys(store: Store) -> list[tuple[ApiKey, datetime | None]]:
    """All keys, the oldest first, each with the hour in which it was last used."""
    found: list[tuple[ApiKey, datetime | None]] = []

    def query(columns: _Columns) -> _Query:
        return select(*columns, ApiKeyRow.used).order_by(ApiKeyRow.created, ApiKeyRow.id)

    async for rows in _read(store, query):
        found.extend((key_of(row), _aware(row.used)) for row in rows)
    return found


async def find(store: Store, id_: str) -> ApiKey | None:
    async with store.read() as connection:
        columns = await _columns(connection)
        row = (await connection.execute(select(*columns).where(ApiKeyRow.id == id_))).one_or_none()
        return key_of(row) if row is not None else None


async def any_was_made(store: Store) -> bool:
    async with store.read() as connection:
        return await connection.scalar(select(ApiKeyRow.id).limit(1)) is not None


async def keys_in(store: Store, parts: Collection[str]) -> list[ApiKey]:
    """All keys whose ids are in these parts (see `part_of`)."""
    found: list[ApiKey] = []
    in_parts: ColumnElement[bool] = _PART.in_(parts)
    if store.dialect == "sqlite":  # SQLite uses its index of ids only for ranges
        in_parts = or_(*(ApiKeyRow.id.between(part, part + "\x7f") for part in parts))
    async for rows in _read(store, lambda columns: select(*columns).where(in_parts)):
        found.extend(map(key_of, rows))
    return found


async def _read(store: Store, query: "Callable[[_Columns], _Query]") -> AsyncIterator[Sequence[Row[Any]]]:
    """The rows in groups of 200, so that the caller's event loop can do other work in between."""
    async with store.read() as connection:
        answer = await connection.stream(query(await _columns(connection)))
        async for rows in answer.partitions(200):
            yield rows


def part_of(id_: str) -> str:
    """The part of an id by which gateways read keys again after a change. There are 256 parts."""
    return id_[:_PART_LENGTH]


_PART_LENGTH = 2
_PART = func.substr(ApiKeyRow.id, 1, _PART_LENGTH)
_Columns = tuple[ColumnElement[Any] | InstrumentedAttribute[Any], ...]
_Query = Select[*tuple[Any, ...]]
_COLUMNS: _Columns = (
    ApiKeyRow.id,
    ApiKeyRow.tenant,
    ApiKeyRow.scopes,
    ApiKeyRow.hash,
    ApiKeyRow.created,
    ApiKeyRow.expires,
    ApiKeyRow.revoked,
)


async def _columns(connection: AsyncConnection) -> _Columns:
    """What a key is read from. A database that an older version made lacks the newest before it is upgraded."""
    found = await connection.run_sync(lambda bare: inspect(bare).get_columns(ApiKeyRow.__tablename__))
    names = {each["name"] for each in found}
    return (*_COLUMNS, *(one for one in (ApiKeyRow.tenant_uid, ApiKeyRow.limits) if one.key in names))


async def table_exists(store: Store) -> bool:
    """Whether the database has a table of keys. A database of an older version has none."""
    async with store.read() as connection:
        return await connection.run_sync(lambda bare: inspect(bare).has_table(ApiKeyRow.__tablename__))


async def change_mark(store: Store) -> tuple[Any, ...]:
    """A value that changes whenever a command changes which keys are accepted. So gateways read keys only after a
    change. It is computed from the rows themselves, so it changes in the same transaction."""
    async with store.read() as connection:
        return tuple((await connection.execute(select(*_mark()))).one())


async def marks(store: Store) -> dict[str, tuple[Any, ...]]:
    """The change mark of each part."""
    query = select(_PART.label("part"), *_mark()).group_by("part")
    async with store.read() as connection:
        return {row.part: tuple(row[1:]) for row in await connection.execute(query)}


def _mark() -> tuple[ColumnElement[Any], ...]:
    # Making and revoking a key change the counts. Another expiry of a key changes the sum.
    revoked, expires = (func.sum(extract("epoch", at)) for at in (ApiKeyRow.revoked, ApiKeyRow.expires))
    return func.count(), func.max(ApiKeyRow.created), func.count(ApiKeyRow.revoked), revoked, expires


async def revoke(store: Store, id_: str, *, tenant: str, at: datetime) -> bool:
    """Revoke a key. It counts at once, whatever the clocks of gateways say. If a key is revoked twice, the row has the
    first time. Returns False if the tenant has no such key."""
    async with store.write() as connection:
        return await _revoke(connection, id_, tenant=tenant, at=at)


async def revoke_all(store: Store, *, tenant: str, at: datetime) -> tuple[int, int]:
    """Revoke all keys of a tenant, also expired ones. Returns how many keys it has, and how many were not revoked
    before."""
    of_tenant = ApiKeyRow.tenant == tenant
    async with store.write() as connection:
        held = await connection.scalar(select(func.count()).where(of_tenant))
        done = await connection.execute(
            update(ApiKeyRow).where(of_tenant & ApiKeyRow.revoked.is_(None)).values(revoked=at)
        )
        return held or 0, done.rowcount


async def rotate(store: Store, old: ApiKey, new: ApiKey, *, at: datetime) -> None:
    """Add `new`, and let `old` expire at the time `at`, if it does not expire earlier. Either both are stored or none.

    Raises SetupError if `old` is no longer accepted, or `new` exists already: another command may have revoked or
    rotated `old` since the caller read it. `old` then expires at the end of its overlap, so its lifetime does not say
    how long a successor should last.
    """
    async with store.write() as connection:
        old_row = _row_of(old.id, old.tenant)
        columns = await _columns(connection)
        row = (await connection.execute(select(*columns).where(old_row).with_for_update())).one_or_none()
        existing = (await connection.execute(select(*columns).where(ApiKeyRow.id == new.id))).one_or_none()
        if existing is not None:
            next_ = f". Rotate {new.id}: motet key rotate {new.id}"
            if why := key_of(existing).refusal_reason(new.created):
                next_ = f", which is {why}. Make a new one: motet key create --tenant {old.tenant}"
            raise SetupError(f"key {old.id} was already replaced by {new.id}{next_}")
        if why := key_of(row).refusal_reason(new.created) if row is not None else "deleted":
            raise SetupError(
                f"key {old.id} is {why} and cannot be rotated. Make a new one: motet key create --tenant {old.tenant}"
            )
        await insert_key(connection, new)
        if at <= new.created:  # at once: a revoked key is refused whatever the clocks say
            await _revoke(connection, old.id, tenant=old.tenant, at=at)
        else:
            later = (ApiKeyRow.expires.is_(None)) | (ApiKeyRow.expires > at)
            await connection.execute(update(ApiKeyRow).where(old_row & later).values(expires=at))


async def _revoke(connection: AsyncConnection, id_: str, *, tenant: str, at: datetime) -> bool:
    found = await connection.scalar(select(ApiKeyRow.id).where(_row_of(id_, tenant)))
    await connection.execute(
        update(ApiKeyRow).where(_row_of(id_, tenant) & ApiKeyRow.revoked.is_(None)).values(revoked=at)
    )
    return found is not None


def _row_of(id_: str, tenant: str) -> ColumnElement[bool]:
    return (ApiKeyRow.id == id_) & (ApiKeyRow.tenant == tenant)


async def note_use(store: Store, ids: Iterable[str], *, at: datetime) -> None:
    """Store when keys were last used. Only the hour is stored, so that a key that is always used is written rarely."""
    hour = at.replace(minute=0, second=0, microsecond=0)
    before = (ApiKeyRow.used.is_(None)) | (ApiKeyRow.used < hour)
    async with store.write() as connection:
        await connection.execute(update(ApiKeyRow).where(ApiKeyRow.id.in_(sorted(ids)) & before).values(used=hour))


def key_of(row: Any) -> ApiKey:
    return ApiKey(
        id=row.id,
        tenant=row.tenant,
        tenant_uid=getattr(row, "tenant_uid", None) or "",
        scopes=_scopes(row.scopes),
        limits=_limits(getattr(row, "limits", None) or "{}"),
        hash=bytes(row.hash),
        created=_aware(row.created) or datetime.fromtimestamp(0, UTC),
        expires=_aware(row.expires),
        revoked=_aware(row.revoked),
    )


@lru_cache(64)
def _limits(text: str) -> KeyLimits:
    # As with scopes: an error here would keep every key from being read. A limit above the largest counts as that.
    known = {name: limit for name, limit in json.loads(text).items() if name in KeyLimits._fields}
    return limits_of({name: min(limit, getattr(MAX_KEY_LIMITS, name)) for name, limit in known.items()})


@lru_cache(64)
def _scopes(text: str) -> frozenset[KeyScope]:
    # Scopes that this version does not know are ignored; the others still count.
    return frozenset(KeyScope(one) for one in text.split(",") if one in set(KeyScope))


def _aware(at: datetime | None) -> datetime | None:
    """Add the time zone, which SQLite does not store."""
    return at.replace(tzinfo=UTC) if at is not None and at.tzinfo is None else at
