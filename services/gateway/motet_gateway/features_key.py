"""The key of the prompts' features: a small file that all gateways of one predictor share, and that no database has."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

import structlog

from motet.errors import SetupError

log = structlog.get_logger(__name__)

FEATURES_KEY_FILE = "features.key"
KEY_BYTES = 32
MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 4096


def read_key(path: Path, *, named: str) -> bytes:
    """The key in a file, which is made if it is missing. `named`: the setting that names the file, for the error."""
    try:
        _make(path)
        with path.open("rb") as file:
            key = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        log.warning(
            "features_key_unreadable",
            path=str(path),
            reason=error.strerror or str(error),
            hint=f"This process uses a key of its own until it ends. Name a file that it may read in {named}.",
        )
        return secrets.token_bytes(KEY_BYTES)
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise SetupError(
            f"{path}, named by {named}, has {'more than ' * (len(key) > MAX_KEY_BYTES)}{min(len(key), MAX_KEY_BYTES)} "
            f"bytes: a key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES}. Remove the file, and a new key is made."
        )
    return key


def _make(path: Path) -> None:
    """Make the file as a whole, so that a second gateway never reads a part of a key."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with suppress(FileExistsError):  # another gateway was faster
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)
