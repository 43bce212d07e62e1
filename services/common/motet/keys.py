"""API keys: make, parse and compare them, and write them as lines of JSON. Pure, except for random numbers.

A key is shown once, as `motet_<id>_<secret>`. Motet stores only the hash of its secret. The secret has 32 random bytes,
so nobody can guess it from a dictionary, and a plain SHA-256 is enough. A slow hash would make each request slower.
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
"""A file in the state directory, written when the first key is made. While it exists, gateways of this stack ask for a
key, even if the database is lost."""

CALLERS_VARIABLE = "MOTET_API_KEY"
"""The environment variable with the key that `motet chat` sends. Processes of a stack do not get it."""

_WRITTEN = re.compile(rf"{PREFIX}_([0-9a-f]{{{2 * ID_BYTES}}})_([A-Za-z0-9_-]{{43}})")
MAX_KEY_LENGTH = len(PREFIX) + 2 * ID_BYTES + 43 + 2
"""The number of characters of a key. A longer text is not a key and is not parsed."""


class KeyScope(StrEnum):
    """What a key allows. No scope includes another one: `admin` does not include `user`."""

    USER = "user"
    """Call models."""
    ADMIN = "admin"
    """Load and unload the tenant's own adapters."""
    MONITOR = "monitor"
    """Read the gateway's metrics."""


class KeyLimits(NamedTuple):
    """What may be used with one key at most. 0: as much as its tenant may."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrency: int = 0

    @property
    def document(self) -> dict[str, int]:
        return {name: limit for name, limit in self._asdict().items() if limit}


NO_LIMITS = KeyLimits()
MAX_KEY_LIMITS = KeyLimits(10_000_000, 1_000_000_000_000, 1_000_000)


class PresentedKey(NamedTuple):
    """A key as its owner sends it, with the secret."""

    id: str
    secret: str

    def __str__(self) -> str:
        return f"{PREFIX}_{self.id}_{self.secret}"

    @property
    def hash(self) -> bytes:
        return hashlib.sha256(self.secret.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """What Motet stores about a key: everything but the secret."""

    id: str
    tenant: str
    tenant_uid: str = ""
    """The uid of the only namespace that the key is for. Empty: it is for every namespace with that name."""
    scopes: frozenset[KeyScope]
    limits: KeyLimits = NO_LIMITS
    hash: bytes
    created: datetime
    expires: datetime | None = None
    """None: never."""
    revoked: datetime | None = None
    """When it was revoked; None if it was not. A gateway refuses a revoked key as soon as it reads this, even if the
    gateway's clock is behind this time."""

    def refusal_reason(self, now: datetime) -> str:
        """Why the key is refused at the time `now`; empty if it is accepted."""
        if self.revoked is not None:
            return "revoked"
        if self.expires is not None and self.expires <= now:
            return "expired"
        return ""


def new_key() -> PresentedKey:
    """Make a new key."""
    return PresentedKey(secrets.token_hex(ID_BYTES), secrets.token_urlsafe(SECRET_BYTES))


def successor_key(id_: str) -> PresentedKey:
    """Make a new key that replaces the key with the id `id_`. Its id is computed from `id_`, so that we can see whether
    a key has a successor, and which one. Ids are not secret."""
    return PresentedKey(hashlib.sha256(f"follows {id_}".encode()).hexdigest()[: 2 * ID_BYTES], new_key().secret)


def parse_key(text: str) -> PresentedKey | None:
    """The key that `text` contains; None if it does not have the form of a key."""
    if len(text) > MAX_KEY_LENGTH or (match := _WRITTEN.fullmatch(text)) is None:
        return None
    return PresentedKey(*match.groups())


def to_line(key: ApiKey) -> str:
    """One line of JSON for a file of keys, which may be in a Secret. It has the hash of the key, not the key."""
    line: dict[str, Any] = {
        "id": key.id,
        "tenant": key.tenant,
        "scopes": sorted(key.scopes),
        "hash": key.hash.hex(),
        "created": key.created.isoformat(),
    }
    if key.tenant_uid:
        line["tenant_uid"] = key.tenant_uid
    if any(key.limits):
        line["limits"] = key.limits.document
    for name, at in (("expires", key.expires), ("revoked", key.revoked)):
        if at is not None:
            line[name] = at.isoformat()
    return json.dumps(line)


def from_line(line: str) -> ApiKey:
    """Raises ValueError that says what is wrong. The message never repeats the line, which may be a key by mistake."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(_NOT_A_LINE) from None
    if not isinstance(entry, dict):
        raise ValueError(_NOT_A_LINE)  # noqa: TRY004 - the value of the text is wrong, not its type
    id_, hash_ = _text(entry, "id", _ID), _text(entry, "hash", _HASH)
    tenant = _text(entry, "tenant", _TENANT)
    tenant_uid = _text(entry, "tenant_uid", NAMESPACE_UID) if "tenant_uid" in entry else ""
    scopes = entry.get("scopes")
    if not isinstance(scopes, list) or not all(isinstance(one, str) for one in scopes):
        raise ValueError(f"'scopes' must be a list of {', '.join(KeyScope)}")
    created = _time(entry, "created")
    if created is None:
        raise ValueError("'created' is missing")
    return ApiKey(
        id=id_,
        tenant=tenant,
        tenant_uid=tenant_uid,
        # Scopes that this version does not know are ignored; the others still count.
        scopes=frozenset(KeyScope(one) for one in scopes if one in set(KeyScope)),
        limits=limits_of(entry.get("limits", {})),
        hash=bytes.fromhex(hash_),
        created=created,
        expires=_time(entry, "expires"),
        revoked=_time(entry, "revoked"),
    )


def limits_of(entry: object) -> KeyLimits:
    """The limits in a JSON object. Raises ValueError that says what is wrong."""
    if not isinstance(entry, dict) or not set(entry) <= set(KeyLimits._fields):
        raise ValueError(f"'limits' must be an object with some of {', '.join(KeyLimits._fields)}")
    for name, limit in entry.items():
        most = getattr(MAX_KEY_LIMITS, name)
        if type(limit) is not int or not 1 <= limit <= most:  # 0 is no limit here, and would be read as nothing allowed
            raise ValueError(f"'limits.{name}' must be a whole number from 1 to {most}")
    return KeyLimits(**entry)


_NOT_A_LINE = "it is not a JSON object, as `motet key hash` prints it"
_ID = re.compile(rf"[0-9a-f]{{{2 * ID_BYTES}}}")
_HASH = re.compile(r"[0-9a-f]{64}")
_TENANT = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""The name of a namespace."""
NAMESPACE_UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _text(entry: dict[str, Any], name: str, form: re.Pattern[str]) -> str:
    value = entry.get(name)
    if not isinstance(value, str) or form.fullmatch(value) is None:
        raise ValueError(f"'{name}' is missing, or does not match {form.pattern}")
    return value


def _time(entry: dict[str, Any], name: str) -> datetime | None:
    value = entry.get(name)
    if value is None:
        return None
    try:
        at = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError(f"'{name}' is not a time, such as 2026-05-01T12:00:00+00:00") from None
    if at.tzinfo is None:
        raise ValueError(f"'{name}' has no time zone, such as +00:00 at its end")
    return at


_HASH_OF_NO_KEY = secrets.token_bytes(hashlib.sha256().digest_size)


def matches(key: ApiKey | None, sent: PresentedKey) -> bool:
    """Whether `sent` is the key `key`. It takes the same time when there is no such key. Otherwise callers could
    measure which ids exist, and learn how many keys there are."""
    same = hmac.compare_digest(sent.hash, key.hash if key is not None else _HASH_OF_NO_KEY)
    return same and key is not None
