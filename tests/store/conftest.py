from pathlib import Path

import pytest

from tests.support.postgresql import PostgreSQL


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite+aiosqlite:///{tmp_path}/state/motet.db"


@pytest.fixture(params=["sqlite", "postgresql"])
async def url(request: pytest.FixtureRequest, sqlite_url: str) -> str:
    if request.param == "sqlite":
        return sqlite_url
    server: PostgreSQL = request.getfixturevalue("postgresql")
    return await server.new_database()
