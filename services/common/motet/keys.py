"""API keys: how one is made, written, found again and told from a wrong one. Pure, but for chance.

A key is shown once, as `motet_<id>_<secret>`. Only the hash of its secret is kept. The secret holds 32 random bytes, so
a plain SHA-256 is enough: there is nothing to guess from a dictionary, and a slow hash would cost each request.
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

PREFIX = "motet"
SECRET_BYTES = 32
ID_BYTES = 8

_WRITTEN = re.compile(rf"{PREFIX}_([0-9a-f]{{{2 * ID_BYTES}}})_([A-Za-z0-9_-]{{43}})")
LONGEST = len(PREFIX) + 2 * ID_BYTES + 43 + 2
"""Characters of a key: what is longer is none, and is not looked at."""


class KeyScope(StrEnum):
    """What a key allows. Each stands for itself: `admin` does not include `user`."""

    USER = "user"
    """Call models."""
    ADMIN = "admin"
    """Load and unload the tenant's own adapters."""
    MONITOR = "monitor"
    """Read the gateway's figures."""


class Written(NamedTuple):
    """A key as its owner sends it."""

    id: str
    secret: str

    def __str__(self) -> str:
        return f"{PREFIX}_{self.id}_{self.secret}"

    @property
    def hash(self) -> bytes:
        return hashlib.sha256(self.secret.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What is kept of one."""

    id: str
    tenant: str
    scopes: frozenset[KeyScope]
    hash: bytes
    created: datetime
    expires: datetime | None = None
    """None: never."""
    revoked: datetime | None = None

    def refused_because(self, now: datetime) -> str:
        """Why it is not taken at that time; empty: it is."""
        if self.revoked is not None and self.revoked <= now:
            return "revoked"
        if self.expires is not None and self.expires <= now:
            return "expired"
        return ""


def made() -> Written:
    """A new one."""
    return Written(secrets.token_hex(ID_BYTES), secrets.token_urlsafe(SECRET_BYTES))


def written(text: str) -> Written | None:
    """None: it has not the form of a key."""
    if len(text) > LONGEST or (match := _WRITTEN.fullmatch(text)) is None:
        return None
    return Written(*match.groups())


_NOBODYS = secrets.token_bytes(hashlib.sha256().digest_size)


def is_of(key: Key | None, sent: Written) -> bool:
    """Whether that is the key. Takes the same time for one that nobody has: ids are no secret, but who may learn which
    exist by asking learns how many customers there are."""
    same = hmac.compare_digest(sent.hash, key.hash if key is not None else _NOBODYS)
    return same and key is not None
