"""The API keys in memory, and which are valid. Pure: the caller passes what was read and when.

No request waits for the store. While the store is down, known keys stay valid for a while. An unknown key gets 503 and
not 401, since it may have been created meanwhile.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from heapq import heapify, heappop, heappush

from motet.errors import NotAuthenticated, StoreUnavailable
from motet.keys import ApiKey, matches, parse_key
from motet_gateway.identity.caller import Caller

UNKNOWN = "This gateway does not know this API key. Check that it is complete, or ask for a new one."
DELETED = "deleted with its namespace"
"""Why a key ends that is bound to a namespace. Only answers in progress say so."""


class Keyring:
    def __init__(
        self, *, trusted_seconds: float, between_seconds: float, gone: Callable[[Mapping[str, str]], None]
    ) -> None:
        """`between_seconds` is the longest normal time between two readings. `gone` is called with the ids of keys that
        were valid until now, each with the reason why it no longer is."""
        self._trusted_seconds, self._between_seconds = trusted_seconds, between_seconds
        self._gone = gone
        self.keys: dict[str, ApiKey] = {}
        self.callers: dict[str, Caller] = {}
        """One per key, valid or not. A key whose rights or limits change gets a new one."""
        self.opened: set[str] = set()
        """Ids of keys that were valid at the last check."""
        self._namespaces: dict[str, str] | None = None
        """The uids of all namespaces, by name; None before the operator has said them."""
        self._ends: list[tuple[datetime, str]] = []
        """A heap of future expiry times, each with the key's id."""
        self._checked_at = datetime.min.replace(tzinfo=UTC)
        """The time of the last check."""
        self.used: set[str] = set()
        self._read_at = float("-inf")
        """On the monotonic clock."""
        self._store_is_down = True

    @property
    def has_keys(self) -> bool:
        """Whether there is any key, also a revoked one: after the first key, every caller needs one."""
        return bool(self.keys)

    @property
    def store_is_down(self) -> bool:
        """Whether the store did not answer the last reading."""
        return self._store_is_down

    @property
    def read_at(self) -> float:
        """When keys were last read; before the first time, minus infinity."""
        return self._read_at

    def replace(self, keys: Iterable[ApiKey], *, now: datetime, at: float) -> None:
        """Set all keys."""
        before, self.keys = self.keys, {key.id: key for key in keys}
        self.callers = {id_: self._caller(key, before.get(id_)) for id_, key in self.keys.items()}
        self._read_at, self._store_is_down = at, False
        self._check_all(now, before)

    def change(self, keys: Collection[ApiKey], gone: Iterable[str], *, now: datetime, at: float) -> None:
        """Set new and changed keys, and remove `gone`. The same change may come twice, and a key may be gone that was
        never here: it came and went between two readings."""
        before: dict[str, ApiKey] = {}
        for id_ in gone:
            if (known := self.keys.pop(id_, None)) is not None:
                before[id_] = known
                del self.callers[id_]
        for key in keys:
            if (known := self.keys.get(key.id)) is not None:
                before[key.id] = known
            self.keys[key.id], self.callers[key.id] = key, self._caller(key, known)
            if key.expires is not None:
                heappush(self._ends, (key.expires, key.id))
        self._read_at, self._store_is_down = at, False
        self._check(now, before, {*before, *(key.id for key in keys)})

    def namespaces_are(self, uids: Mapping[str, str], *, now: datetime) -> None:
        """All namespaces that exist. From now on keys that are bound to another uid count as unknown."""
        before, self._namespaces = self._namespaces or {}, dict(uids)
        changed = {name for name, _ in before.items() ^ self._namespaces.items()}
        if changed:
            self._check(now, {}, [key.id for key in self.keys.values() if key.tenant_uid and key.tenant in changed])

    def namespace_uid(self, name: str) -> str:
        """Empty: the operator does not say it, or the tenant is no namespace."""
        return (self._namespaces or {}).get(name, "")

    def unchanged(self, *, now: datetime, at: float) -> None:
        """A reading found no change."""
        self._read_at, self._store_is_down = at, False
        self._check(now, {})

    def not_read(self, now: datetime) -> None:
        """A reading failed."""
        self._store_is_down = True
        self._check(now, {})

    def _check(self, now: datetime, before: Mapping[str, ApiKey], changed: Iterable[str] = ()) -> None:
        """Check changed keys and those that have expired, not all: there may be very many, and requests wait meanwhile.
        `before`: the keys before their change."""
        if now < self._checked_at:  # the clock was set back: expired keys may be valid again
            self._check_all(now, {**self.keys, **before})
            return
        ids = set(changed)
        while self._ends and self._ends[0][0] <= now:
            ids.add(heappop(self._ends)[1])
        self._checked_at = now
        self._report_gone(ids, now, before)

    def _check_all(self, now: datetime, before: Mapping[str, ApiKey]) -> None:
        self._ends = [(key.expires, id_) for id_, key in self.keys.items() if key.expires is not None]
        heapify(self._ends)
        self._checked_at = now
        self._report_gone(before.keys() | self.keys.keys(), now, before)

    def _report_gone(self, ids: Iterable[str], now: datetime, before: Mapping[str, ApiKey]) -> None:
        """Call `gone` with those that were valid and no longer are, or whose rights have changed."""
        gone = {}
        for id_ in ids:
            if why := self.refusal_reason(id_, now):
                if id_ in self.opened:
                    gone[id_] = why
                    self.opened.discard(id_)
                continue
            if id_ in self.opened and id_ in before and _rights(self.keys[id_]) != _rights(before[id_]):
                gone[id_] = "changed"
            self.opened.add(id_)
        if gone:
            self._gone(gone)

    def refusal_reason(self, id_: str, now: datetime) -> str:
        """Why the key isn't valid at that time; empty: it is. A removed key counts as revoked."""
        key = self.keys.get(id_)
        if key is None:
            return "revoked"
        return DELETED if self._namespace_is_gone(key) else key.refusal_reason(now)

    def _namespace_is_gone(self, key: ApiKey) -> bool:
        """Whether the only namespace that the key is for is known to exist no longer. There may be a new one with its
        name."""
        if not key.tenant_uid or self._namespaces is None:
            return False
        return self._namespaces.get(key.tenant) != key.tenant_uid

    def ended_reason(self, caller: Caller, now: datetime) -> str:
        """Why requests of that caller must end; empty: they go on."""
        why = self.refusal_reason(caller.key_id, now)
        return why or ("" if self.callers[caller.key_id].rights is caller.rights else "changed")

    def take_used(self) -> set[str]:
        """Ids of keys that were used since the last call."""
        used, self.used = self.used, set()
        return used

    def open(self, credential: str, *, now: datetime, at: float) -> Caller:
        """The caller with this key. Raises NotAuthenticated, or StoreUnavailable if the key can't be checked."""
        # The age counts even if no reading has failed: a reading may hang.
        trusted = self._trusted_seconds + (0 if self._store_is_down else self._between_seconds)
        if at - self._read_at > trusted:
            raise StoreUnavailable(
                "The gateway cannot check API keys now, because the key store does not answer. Try again soon."
            )
        sent = parse_key(credential)
        if sent is None:
            raise NotAuthenticated("This isn't a Motet API key. Keys have the form motet_<id>_<secret>.")
        key = self.keys.get(sent.id)
        if not matches(key, sent) or key is None or self._namespace_is_gone(key):
            if self._store_is_down:  # the same answer for each unknown key, so that nobody can find out which ids exist
                raise StoreUnavailable(
                    "The gateway cannot check this API key now, because the key store does not answer. Try again soon."
                )
            raise NotAuthenticated(UNKNOWN)
        if key.tenant_uid and self._namespaces is None:
            raise StoreUnavailable(
                "The gateway cannot check this API key now: the key is for one namespace only, and the gateway has not "
                "heard yet which namespaces exist. Try again soon."
            )
        if why := key.refusal_reason(now):
            raise NotAuthenticated(f"This API key is {why}. Ask for a new key.")
        self.used.add(key.id)
        return self.callers[key.id]

    def _caller(self, key: ApiKey, before: ApiKey | None) -> Caller:
        if before is None or _rights(before) != _rights(key):
            return Caller(key.tenant, key.id, key.scopes, key.limits, tenant_uid=key.tenant_uid, rights=object())
        known = self.callers[key.id]
        return known if known.limits == key.limits else replace(known, limits=key.limits)


def _rights(key: ApiKey) -> tuple[object, ...]:
    """What the key allows, and to whom."""
    return key.tenant, key.tenant_uid, key.scopes, key.hash
