"""API keys: how one is made, written, found again and told from a wrong one. Pure, but for chance.

A key is shown once, as `motet_<id>_<secret>`. Only the hash of its secret is kept. The secret holds 32 random bytes, so
a plain SHA-256 is enough: there is nothing to guess from a dictionary, and a slow hash would cost each request.
"""

import hashlib
import hmac
import json
import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

PREFIX = "motet"
SECRET_BYTES = 32
ID_BYTES = 8

KEYS_MADE_FILE = "keys-were-made"
"""A file in the state directory, from when the first key was made: gateways there then ask for one, also when the
database is lost."""

CALLERS_VARIABLE = "MOTET_API_KEY"
"""Where a person keeps the key that `motet chat` sends. It is for no process of a stack."""

_WRITTEN = re.compile(rf"{PREFIX}_([0-9a-f]{{{2 * ID_BYTES}}})_([A-Za-z0-9_-]{{43}})")
MAX_KEY_LENGTH = len(PREFIX) + 2 * ID_BYTES + 43 + 2
"""Characters of a key: what is longer is none, and is not looked at."""


class KeyScope(StrEnum):
    """What a key allows. Each stands for itself: `admin` does not include `user`."""

    USER = "user"
    """Call models."""
    ADMIN = "admin"
    """Load and unload the tenant's own adapters."""
    MONITOR = "monitor"
    """Read the gateway's figures."""


class PresentedKey(NamedTuple):
    """A key as its owner sends it."""

    id: str
    secret: str

    def __str__(self) -> str:
        return f"{PREFIX}_{self.id}_{self.secret}"

    @property
    def hash(self) -> bytes:
        return hashlib.sha256(self.secret.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """What is kept of one."""

    id: str
    tenant: str
    scopes: frozenset[KeyScope]
    hash: bytes
    created: datetime
    expires: datetime | None = None
    """None: never."""
    revoked: datetime | None = None
    """When it was. It counts from when it is read, also where the clock is behind that of whoever revoked it."""

    def refusal_reason(self, now: datetime) -> str:
        """Why it is not taken at that time; empty: it is."""
        if self.revoked is not None:
            return "revoked"
        if self.expires is not None and self.expires <= now:
            return "expired"
        return ""


def new_key() -> PresentedKey:
    """A new one."""
    return PresentedKey(secrets.token_hex(ID_BYTES), secrets.token_urlsafe(SECRET_BYTES))


def successor_key(id_: str) -> PresentedKey:
    """A new one to follow the key of that id. Its own id follows from that: so a key that has a successor can be told,
    and which it is. Ids are no secret."""
    return PresentedKey(hashlib.sha256(f"follows {id_}".encode()).hexdigest()[: 2 * ID_BYTES], new_key().secret)


def parse_key(text: str) -> PresentedKey | None:
    """None: it has not the form of a key."""
    if len(text) > MAX_KEY_LENGTH or (match := _WRITTEN.fullmatch(text)) is None:
        return None
    return PresentedKey(*match.groups())


def to_line(key: ApiKey) -> str:
    """One line of JSON: how keys are kept in a file, which a Secret may hold. No secret is in it."""
    line: dict[str, Any] = {
        "id": key.id,
        "tenant": key.tenant,
        "scopes": sorted(key.scopes),
        "hash": key.hash.hex(),
        "created": key.created.isoformat(),
    }
    for name, at in (("expires", key.expires), ("revoked", key.revoked)):
        if at is not None:
            line[name] = at.isoformat()
    return json.dumps(line)


def from_line(line: str) -> ApiKey:
    """Raises ValueError with what is wrong in it. The message never holds the line: it may be a key by mistake."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON object, as `motet key hash` prints it") from None
    if not isinstance(said, dict):
        raise ValueError("it is no JSON object, as `motet key hash` prints it")  # noqa: TRY004 - of what it says
    id_, hash_ = _text(said, "id", _ID), _text(said, "hash", _HASH)
    tenant = _text(said, "tenant", _TENANT)
    scopes = said.get("scopes")
    if not isinstance(scopes, list) or not all(isinstance(one, str) for one in scopes):
        raise ValueError(f"its 'scopes' have to be a list, of {', '.join(KeyScope)}")
    created = _time(said, "created")
    if created is None:
        raise ValueError("it has no 'created'")
    return ApiKey(
        id=id_,
        tenant=tenant,
        # One of a newer version means nothing here, and takes nothing away.
        scopes=frozenset(KeyScope(one) for one in scopes if one in set(KeyScope)),
        hash=bytes.fromhex(hash_),
        created=created,
        expires=_time(said, "expires"),
        revoked=_time(said, "revoked"),
    )


_ID = re.compile(rf"[0-9a-f]{{{2 * ID_BYTES}}}")
_HASH = re.compile(r"[0-9a-f]{64}")
_TENANT = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""A namespace's name."""


def _text(said: dict[str, Any], name: str, form: re.Pattern[str]) -> str:
    value = said.get(name)
    if not isinstance(value, str) or form.fullmatch(value) is None:
        raise ValueError(f"its '{name}' is missing or has not the form {form.pattern}")
    return value


def _time(said: dict[str, Any], name: str) -> datetime | None:
    value = said.get(name)
    if value is None:
        return None
    try:
        at = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError(f"its '{name}' is no time, such as 2026-05-01T12:00:00+00:00") from None
    if at.tzinfo is None:
        raise ValueError(f"its '{name}' has no time zone")
    return at


_NOBODYS = secrets.token_bytes(hashlib.sha256().digest_size)


def matches(key: ApiKey | None, sent: PresentedKey) -> bool:
    """Whether that is the key. Takes the same time for one that nobody has: ids are no secret, but who may learn which
    exist by asking learns how many customers there are."""
    same = hmac.compare_digest(sent.hash, key.hash if key is not None else _NOBODYS)
    return same and key is not None
