"""The digest of a file that has arrived."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from motet.digest import CHUNK_BYTES


def sha256_of(path: Path, on_checked: Callable[[int], None]) -> str:
    """In hex. `on_checked`: see `Opening`."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            found.update(chunk)
            on_checked(len(chunk))
    return found.hexdigest()
