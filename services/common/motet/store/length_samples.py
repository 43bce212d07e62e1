"""Length samples and the state of the predictor. The predictor writes them in batches, and reads them at its start."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import and_, case, delete, func, insert, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from motet.store.database import Store
from motet.store.tables import LengthSampleRow, PredictorStateRow, PredictorVersionRow, now

COUNTED_IN_PARTS = 100
"""Samples are counted each time that a hundredth of those that are kept is new: that takes some milliseconds."""


DELETED_AT_ONCE = 500
"""Rows in one transaction. SQLite has one writer at a time: a process of low priority that holds the lock for
seconds would let the writes of all others fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSample:
    """A finished answer. `tables` explains the columns."""

    request: str
    tenant: str
    adapter: str
    prompt_tokens: int
    output_tokens: int
    censored: bool
    estimated_q50: int
    estimated_q95: int
    estimate_source: str
    features: bytes
    estimated_q80: int = 0
    estimated_q90: int = 0
    promised_tokens: int = 0
    parks: int = 0
    finish: str = ""


@dataclass(frozen=True, slots=True)
class PredictorState:
    level: str
    tenant: str
    adapter: str
    statistics: bytes


def name_of(row: LengthSample | PredictorState) -> str:
    """The name of the row's table."""
    return (LengthSampleRow if isinstance(row, LengthSample) else PredictorStateRow).__tablename__


async def activate_version(store: Store, version: str) -> None:
    """Make `version` the one in use."""
    async with store.write() as connection:
        await connection.execute(update(PredictorVersionRow).values(active=PredictorVersionRow.version == version))
        known = await connection.scalar(
            select(func.count()).select_from(PredictorVersionRow).where(PredictorVersionRow.version == version)
        )
        if not known:
            await connection.execute(insert(PredictorVersionRow).values(version=version, active=True, created=now()))


STATISTICS_LEVELS = "tenant", "adapter"
CORRECTION_LEVEL = "correction"
COMPARISON_LEVEL = "comparison"
CHANGE_LEVEL = "change"


async def load_states(
    store: Store, version: str, *, limit: int, levels: Sequence[str] = STATISTICS_LEVELS
) -> list[PredictorState]:
    """What `version` has learned: the `limit` last changed scopes, oldest change first."""
    query = (
        select(
            PredictorStateRow.level, PredictorStateRow.tenant, PredictorStateRow.adapter, PredictorStateRow.statistics
        )
        .where(PredictorStateRow.version == version, PredictorStateRow.level.in_(levels))
        .order_by(PredictorStateRow.updated.desc())
        .limit(limit)
    )
    async with store.read() as connection:
        rows = (await connection.execute(query)).all()
    return [PredictorState(*row) for row in reversed(rows)]


async def changed_since(store: Store, version: str, moment: datetime) -> set[tuple[str, str]]:
    """The adapters whose lengths have changed since then, as `version` has noted."""
    row = PredictorStateRow
    query = select(row.tenant, row.adapter).where(
        row.version == version, row.level == CHANGE_LEVEL, row.updated >= moment
    )
    async with store.read() as connection:
        return {(tenant, adapter) for tenant, adapter in await connection.execute(query)}


async def corrected_before_change(store: Store, version: str, *, noted_by: str) -> set[tuple[str, str]]:
    """The adapters of which `version` has a correction from before their lengths changed."""
    own, change = aliased(PredictorStateRow), aliased(PredictorStateRow)
    query = (
        select(own.tenant, own.adapter)
        .join(change, and_(change.tenant == own.tenant, change.adapter == own.adapter))
        .where(own.version == version, own.level == CORRECTION_LEVEL)
        .where(change.version == noted_by, change.level == CHANGE_LEVEL, change.updated > own.updated)
    )
    async with store.read() as connection:
        return {(tenant, adapter) for tenant, adapter in await connection.execute(query)}


async def forget_states(store: Store, *, keep: int) -> None:
    """Of each version all but the newest `keep` rows of statistics are deleted, and of other levels as many. Otherwise
    adapters that are made for one run would stay for ever."""
    row = PredictorStateRow
    kind = case((row.level.in_(STATISTICS_LEVELS), ""), else_=row.level)
    rank = func.row_number().over(partition_by=(row.version, kind), order_by=row.updated.desc())
    key = row.version, row.level, row.tenant, row.adapter
    ranked = select(*key, rank.label("rank")).subquery()
    async with store.read() as connection:
        old = (await connection.execute(select(*ranked.c[:4]).where(ranked.c.rank > keep))).all()
    for start in range(0, len(old), DELETED_AT_ONCE):
        some = [tuple(one) for one in old[start : start + DELETED_AT_ONCE]]
        async with store.write() as connection:
            await connection.execute(delete(row).where(tuple_(*key).in_(some)))


async def save(
    store: Store, version: str, states: Iterable[PredictorState], samples: Sequence[LengthSample], *, keep_samples: int
) -> None:
    """Write what the predictor has learned, and the samples, in one transaction.

    `keep_samples` samples are kept, or a hundredth more: the newest of each tenant, and most of those with fewest.
    """
    moment = now()
    rows = [
        {
            "version": version,
            "level": state.level,
            "tenant": state.tenant,
            "adapter": state.adapter,
            "statistics": state.statistics,
            "updated": moment,
        }
        for state in states
    ]
    async with store.write() as connection:
        if rows:
            dialect = postgresql if store.dialect == "postgresql" else sqlite
            statement = dialect.insert(PredictorStateRow)
            await connection.execute(
                statement.on_conflict_do_update(
                    index_elements=["version", "level", "tenant", "adapter"],
                    set_={"statistics": statement.excluded.statistics, "updated": statement.excluded.updated},
                ),
                rows,
            )
        if samples:
            # Several times faster than dataclasses.asdict, which copies each value: the predictor must also answer.
            columns = tuple(LengthSample.__dataclass_fields__)
            await connection.execute(
                insert(LengthSampleRow),
                [{name: getattr(sample, name) for name in columns} | {"created": moment} for sample in samples],
            )
            newest = await connection.scalar(select(func.max(LengthSampleRow.id))) or 0
            if newest % max(1, keep_samples // COUNTED_IN_PARTS) < len(samples):
                await _delete_surplus(connection, keep_samples)


async def _delete_surplus(connection: AsyncConnection, keep_samples: int) -> None:
    """The oldest of the tenants that have most. A tenant with many answers pushes out none of the others' samples, also
    before the next refit limits each tenant."""
    of_each = select(LengthSampleRow.tenant, func.count()).group_by(LengthSampleRow.tenant)
    counts = [(tenant, count) for tenant, count in await connection.execute(of_each)]
    room = room_of_each([count for _, count in counts], keep_samples)
    for tenant, count in counts:
        if count > room:  # a tenth of the time that it takes to rank all samples
            oldest = select(LengthSampleRow.id).where(LengthSampleRow.tenant == tenant).order_by(LengthSampleRow.id)
            surplus = LengthSampleRow.id.in_(oldest.limit(count - room))
            await connection.execute(delete(LengthSampleRow).where(surplus))


def room_of_each(counts: Iterable[int], most: int) -> int:
    """How many each tenant may keep, so that all together keep at most `most`; at least one."""
    left, ordered = most, sorted(counts)
    for at, count in enumerate(ordered):
        room = left // (len(ordered) - at)
        if count > room:
            return max(1, room)
        left -= count
    return most


async def samples_of_all_tenants(store: Store, *, of_each: int, limit: int) -> list[LengthSample]:
    """The newest samples, oldest first: `of_each` of a tenant, and of all tenants equally many where there are more
    than `limit`. Others of the tenants are deleted, so that no tenant takes the room of the others."""
    rank = func.row_number().over(partition_by=LengthSampleRow.tenant, order_by=LengthSampleRow.id.desc())
    ranked = select(LengthSampleRow.id.label("id"), rank.label("rank")).subquery()
    async with store.read() as connection:
        surplus = (await connection.scalars(select(ranked.c.id).where(ranked.c.rank > of_each))).all()
    for start in range(0, len(surplus), DELETED_AT_ONCE):
        async with store.write() as connection:
            some = surplus[start : start + DELETED_AT_ONCE]
            await connection.execute(delete(LengthSampleRow).where(LengthSampleRow.id.in_(some)))
    columns = [getattr(LengthSampleRow, name) for name in LengthSample.__dataclass_fields__]
    chosen = select(ranked.c.id).order_by(ranked.c.rank, ranked.c.id.desc()).limit(limit)
    query = select(*columns).where(LengthSampleRow.id.in_(chosen)).order_by(LengthSampleRow.id)
    async with store.read() as connection:
        return [LengthSample(**row) for row in (await connection.execute(query)).mappings()]


async def count_samples(store: Store) -> int:
    async with store.read() as connection:
        return await connection.scalar(select(func.count()).select_from(LengthSampleRow)) or 0


async def newest_requests(store: Store, limit: int) -> list[str]:
    """Of which there are samples, the oldest first."""
    query = select(LengthSampleRow.request).order_by(LengthSampleRow.id.desc()).limit(limit)
    async with store.read() as connection:
        return [str(request) for request in reversed((await connection.scalars(query)).all())]


async def newest_samples(store: Store, limit: int) -> list[LengthSample]:
    columns = [getattr(LengthSampleRow, name) for name in LengthSample.__dataclass_fields__]
    query = select(*columns).order_by(LengthSampleRow.id.desc()).limit(limit)
    async with store.read() as connection:
        return [LengthSample(**row) for row in (await connection.execute(query)).mappings()]
