"""API keys in memory instead of a database."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from motet import keys
from motet.errors import StoreUnavailable
from motet.keys import ApiKey, KeyScope

USER = KeyScope.USER


class MemoryKeySource:
    """A source of keys that a test can make unavailable."""

    def __init__(self) -> None:
        self.keys: dict[str, ApiKey] = {}
        self.away = False
        self.reads = 0
        self.used: list[tuple[str, datetime]] = []

    def make(self, tenant: str, *scopes: KeyScope, expires_in: float | None = None, tenant_uid: str = "") -> str:
        made, now = keys.new_key(), datetime.now(UTC)
        expires = None if expires_in is None else now + timedelta(seconds=expires_in)
        scoped = frozenset(scopes or (USER,))
        self.keys[made.id] = ApiKey(
            id=made.id,
            tenant=tenant,
            tenant_uid=tenant_uid,
            scopes=scoped,
            hash=made.hash,
            created=now,
            expires=expires,
        )
        return str(made)

    def revoke(self, key: str) -> None:
        id_ = id_of(key)
        self.keys[id_] = replace(self.keys[id_], revoked=datetime.now(UTC))

    async def read(self) -> list[ApiKey] | None:
        self.reads += 1
        self._check()
        return list(self.keys.values())

    def applied(self) -> None:
        pass

    async def note_use(self, ids: Iterable[str], *, at: datetime) -> None:
        self._check()
        self.used.extend((id_, at) for id_ in sorted(ids))

    async def close(self) -> None:
        pass

    def _check(self) -> None:
        if self.away:
            raise StoreUnavailable("the store is away")


def id_of(key: str) -> str:
    written = keys.parse_key(key)
    assert written is not None
    return written.id


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
