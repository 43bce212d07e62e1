"""The PostgreSQL permissions of a gateway that reads keys there."""

from datetime import UTC, datetime

import pytest
from sqlalchemy import make_url, text

from motet import keys
from motet.clock import monotonic
from motet.errors import StoreUnavailable
from motet.keys import ApiKey, KeyScope
from motet.store import keys as kept
from motet.store import migrate, open_store
from motet_gateway.identity.key_sources import DatabaseKeys
from tests.support.postgresql import PostgreSQL

GRANTS = """
CREATE ROLE a_gateway LOGIN PASSWORD 'its-own';
GRANT SELECT, UPDATE (used) ON keys TO a_gateway;
"""
"""The permissions that docs/security.md lists."""


async def test_a_gateway_needs_only_permission_to_read_keys_and_note_their_use(postgresql: PostgreSQL) -> None:
    owners = await postgresql.new_database()
    await migrate(owners)
    made, now = keys.new_key(), datetime.now(UTC)
    key = ApiKey(id=made.id, tenant="acme", scopes=frozenset({KeyScope.USER}), hash=made.hash, created=now)
    async with open_store(owners) as store:
        await kept.add(store, key)
        async with store.write() as connection:
            for grant in GRANTS.strip().split("\n"):
                await connection.execute(text(grant))
    url = make_url(owners).set(username="a_gateway", password="its-own").render_as_string(hide_password=False)
    source = DatabaseKeys(url, clock=monotonic)
    try:
        assert await source.read() == [key]
        source.applied()
        assert await source.read() is None
        await source.note_use([key.id], at=now)
    finally:
        await source.close()
    async with open_store(url) as store:
        ((_, used),) = await kept.all_keys(store)
        assert used == now.replace(minute=0, second=0, microsecond=0)
        with pytest.raises(StoreUnavailable, match="refuses a permission"):
            await kept.revoke(store, key.id, tenant="acme", at=now)
