"""Records which API keys a test reads from the database."""

from typing import Any

import pytest

from motet.keys import ApiKey
from motet.store import keys


def record_read_key_ids(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The id of each key whose row is read from now on, in order."""
    read: list[str] = []
    key_of_row = keys.key_of

    def record(row: Any) -> ApiKey:
        read.append(row.id)
        return key_of_row(row)

    monkeypatch.setattr(keys, "key_of", record)
    return read
