"""Versions of the predictor: their roles and figures, and the weights that refits have made. The predictor writes them;
`motet predict` reads them, and orders that one of them serves."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from sqlalchemy import String, delete, func, insert, select, type_coerce, update
from sqlalchemy.dialects import postgresql, sqlite

from motet.store.database import Store
from motet.store.tables import PredictorStateRow, PredictorVersionRow, PredictorWeightsRow, now

_UNKNOWN = datetime(1970, 1, 1, tzinfo=UTC)

PART_BYTES = 64 * 1024
"""Of the weights, in one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """`tables` explains the columns."""

    version: str
    role: str
    created: datetime
    size: int = 0
    digest: str = ""
    figures: str = ""
    ordered: datetime | None = None


async def all_versions(store: Store) -> list[VersionRecord]:
    """Those that have or had a role, the newest first. A time that cannot be read does not hide the other rows."""
    columns = {name: getattr(PredictorVersionRow, name) for name in VersionRecord.__dataclass_fields__}
    times = {name: type_coerce(columns[name], String).label(name) for name in ("created", "ordered")}
    query = (
        select(*(columns | times).values())
        .where(PredictorVersionRow.role != "")
        .order_by(PredictorVersionRow.created.desc(), PredictorVersionRow.version.desc())
    )
    async with store.read() as connection:
        rows = (await connection.execute(query)).mappings().all()
    return [
        VersionRecord(**dict(row) | {"created": _time(row["created"]) or _UNKNOWN, "ordered": _time(row["ordered"])})
        for row in rows
    ]


def _time(stored: object) -> datetime | None:
    """Of a column that was read as it is: SQLite keeps text, which may be damaged."""
    try:
        time = stored if isinstance(stored, datetime) else datetime.fromisoformat(str(stored))
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


async def add(store: Store, record: VersionRecord) -> None:
    """Add a version, whose weights follow in parts. Raises StoreUnavailable if there is one with its name."""
    async with store.write() as connection:
        await connection.execute(insert(PredictorVersionRow).values(**asdict(record), active=False))


async def add_part(store: Store, version: str, part: int, data: bytes) -> bool:
    """Add a part, also if it is there already: whoever writes may not have learned that. False if the version is
    gone."""
    statement = (postgresql if store.dialect == "postgresql" else sqlite).insert(PredictorWeightsRow)
    async with store.write() as connection:
        found = await connection.scalar(
            select(PredictorVersionRow.version).where(PredictorVersionRow.version == version)
        )
        if found is not None:
            await connection.execute(
                statement.values(version=version, part=part, data=data).on_conflict_do_update(
                    index_elements=["version", "part"], set_={"data": statement.excluded.data}
                )
            )
    return found is not None


async def stored_bytes(store: Store) -> dict[str, int]:
    """How many bytes of each version's weights are there."""
    size = func.sum(func.length(PredictorWeightsRow.data))
    async with store.read() as connection:
        rows = await connection.execute(select(PredictorWeightsRow.version, size).group_by(PredictorWeightsRow.version))
        return {version: int(count) for version, count in rows}


async def load_weights(store: Store, version: str, *, most: int) -> bytes:
    """All parts that are there, in order, or no bytes if they have more than `most` bytes."""
    own = PredictorWeightsRow.version == version
    async with store.read() as connection:
        size = await connection.scalar(select(func.sum(func.length(PredictorWeightsRow.data))).where(own))
        if not 0 < (size or 0) <= most:
            return b""
        rows = await connection.execute(select(PredictorWeightsRow.data).where(own).order_by(PredictorWeightsRow.part))
        return b"".join(rows.scalars())


async def set_roles(store: Store, roles: Mapping[tuple[str, str], tuple[str, str]]) -> None:
    """Set role and figures of some versions, by name and digest: another predictor may have used the name. Any other
    one is retired."""
    async with store.write() as connection:
        await connection.execute(
            update(PredictorVersionRow)
            .where(
                PredictorVersionRow.role.not_in(("", "retired")),
                PredictorVersionRow.version.not_in([version for version, _ in roles]),
            )
            .values(role="retired")
        )
        for (version, digest), (role, figures) in roles.items():
            await connection.execute(
                update(PredictorVersionRow)
                .where(PredictorVersionRow.version == version, PredictorVersionRow.digest == digest)
                .values(role=role, figures=figures)
            )


async def set_figures(store: Store, version: str, figures: str) -> None:
    async with store.write() as connection:
        await connection.execute(
            update(PredictorVersionRow).where(PredictorVersionRow.version == version).values(figures=figures)
        )


async def order(store: Store, version: str) -> bool:
    """Order that a version serves. A later order replaces an earlier one. False if there is no such version."""
    async with store.write() as connection:
        await connection.execute(update(PredictorVersionRow).values(ordered=None))
        done = await connection.execute(
            update(PredictorVersionRow).where(PredictorVersionRow.version == version).values(ordered=now())
        )
    return bool(done.rowcount)


async def ordered_version(store: Store) -> VersionRecord | None:
    """The version that was ordered last, until `end_order`."""
    return next((one for one in await all_versions(store) if one.ordered is not None), None)


async def end_order(store: Store, record: VersionRecord) -> None:
    """It is carried out, or cannot be. A later order of the same version stays."""
    async with store.write() as connection:
        await connection.execute(
            update(PredictorVersionRow)
            .where(PredictorVersionRow.version == record.version, PredictorVersionRow.ordered == record.ordered)
            .values(ordered=None)
        )


async def forget_retired(store: Store, *, keep: int) -> None:
    """Delete the oldest of those that have no role any more, so that `keep` are left with the others."""
    records = await all_versions(store)
    retired = [one.version for one in records if one.role == "retired" and one.size]
    gone = retired[max(0, keep - (len(records) - len(retired))) :]
    if gone:
        async with store.write() as connection:
            for table in (PredictorWeightsRow, PredictorStateRow, PredictorVersionRow):
                await connection.execute(delete(table).where(table.version.in_(gone)))
