"""Which keys open the gateway. Pure: who reads them from where they are kept says what was found, and when.

No request waits for the store: all keys are in memory. While the store does not answer those that are known are
trusted for a while; one that is not known may have been made meanwhile, so it is not called wrong.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from heapq import heapify, heappop, heappush

from motet.errors import NotAuthenticated, StoreUnavailable
from motet.keys import ApiKey, matches, parse_key
from motet_gateway.identity.caller import Caller

UNKNOWN = "This API key is not valid here."


class Keyring:
    def __init__(
        self, *, trusted_seconds: float, between_seconds: float, gone: Callable[[Mapping[str, str]], None]
    ) -> None:
        """`between_seconds` may pass from one reading to the next while all is well. `gone` is called with the ids of
        keys that opened until now, each with why it does not any more."""
        self._trusted_seconds, self._between_seconds = trusted_seconds, between_seconds
        self._gone = gone
        self._keys: dict[str, ApiKey] = {}
        self._callers: dict[str, Caller] = {}
        """One for each key, whether it opens or not; another one once the key means something else."""
        self._opened: set[str] = set()
        """The ids of those that opened when they were last looked at."""
        self._ends: list[tuple[datetime, str]] = []
        """A heap of when keys expire that have not yet, each with the key's id."""
        self._checked_at = datetime.min.replace(tzinfo=UTC)
        """What time it was when they were."""
        self._used: set[str] = set()
        self._read_at = float("-inf")
        """On a clock that is never set."""
        self._store_is_down = True

    @property
    def has_keys(self) -> bool:
        """Also one that is revoked: once a key was made, nobody comes in without one."""
        return bool(self._keys)

    @property
    def store_is_down(self) -> bool:
        """The store did not answer when it was last asked."""
        return self._store_is_down

    @property
    def read_at(self) -> float:
        """When it was last known which keys there are; before the first time, infinitely long ago."""
        return self._read_at

    def replace(self, keys: Iterable[ApiKey], *, now: datetime, at: float) -> None:
        """All that there are."""
        before, self._keys = self._keys, {key.id: key for key in keys}
        self._callers = {id_: self._caller(key, before.get(id_)) for id_, key in self._keys.items()}
        self._read_at, self._store_is_down = at, False
        self._check_all(now, before)

    def change(self, keys: Collection[ApiKey], gone: Iterable[str], *, now: datetime, at: float) -> None:
        """These are new or say something else, and those are gone; others are as they were."""
        before: dict[str, ApiKey] = {}
        for id_ in gone:
            before[id_] = self._keys.pop(id_)
            del self._callers[id_]
        for key in keys:
            if (known := self._keys.get(key.id)) is not None:
                before[key.id] = known
            self._keys[key.id], self._callers[key.id] = key, self._caller(key, known)
            if key.expires is not None:
                heappush(self._ends, (key.expires, key.id))
        self._read_at, self._store_is_down = at, False
        self._check(now, before, {*before, *(key.id for key in keys)})

    def unchanged(self, *, now: datetime, at: float) -> None:
        """There are those that there were."""
        self._read_at, self._store_is_down = at, False
        self._check(now, {})

    def not_read(self, now: datetime) -> None:
        """The store did not answer."""
        self._store_is_down = True
        self._check(now, {})

    def _check(self, now: datetime, before: Mapping[str, ApiKey], changed: Iterable[str] = ()) -> None:
        """At those that have changed, and at those that time alone ends. There may be very many others, and requests
        wait meanwhile. `before`: what they were."""
        if now < self._checked_at:  # a clock was set back: some open again
            self._check_all(now, {**self._keys, **before})
            return
        ids = set(changed)
        while self._ends and self._ends[0][0] <= now:
            ids.add(heappop(self._ends)[1])
        self._checked_at = now
        self._report_gone(ids, now, before)

    def _check_all(self, now: datetime, before: Mapping[str, ApiKey]) -> None:
        self._ends = [(key.expires, id_) for id_, key in self._keys.items() if key.expires is not None]
        heapify(self._ends)
        self._checked_at = now
        self._report_gone(before.keys() | self._keys.keys(), now, before)

    def _report_gone(self, ids: Iterable[str], now: datetime, before: Mapping[str, ApiKey]) -> None:
        """Name those of these that opened and do not any more, or for somebody else."""
        gone = {}
        for id_ in ids:
            if why := self.refused_because(id_, now):
                if id_ in self._opened:
                    gone[id_] = why
                    self._opened.discard(id_)
                continue
            if id_ in self._opened and id_ in before and _rights(self._keys[id_]) != _rights(before[id_]):
                gone[id_] = "changed"
            self._opened.add(id_)
        if gone:
            self._gone(gone)

    def refused_because(self, id_: str, now: datetime) -> str:
        """Why that key does not open at that time; empty: it does. One that is there no more counts as revoked."""
        key = self._keys.get(id_)
        return key.refused_because(now) if key is not None else "revoked"

    def ended_reason(self, caller: Caller, now: datetime) -> str:
        """Why what that caller has begun does not go on; empty: it does."""
        why = self.refused_because(caller.key_id, now)
        return why or ("" if self._callers[caller.key_id] is caller else "changed")

    def take_used(self) -> set[str]:
        """The ids of those that opened since this was last asked."""
        used, self._used = self._used, set()
        return used

    def open(self, credential: str, *, now: datetime, at: float) -> Caller:
        """Whose key that is. Raises NotAuthenticated, or StoreUnavailable when nobody can say."""
        # Also when nobody says that the store is away: whoever should say so may hang.
        trusted = self._trusted_seconds + (0 if self._store_is_down else self._between_seconds)
        if at - self._read_at > trusted:
            raise StoreUnavailable("The gateway can't check API keys now: the key store does not answer.")
        sent = parse_key(credential)
        if sent is None:
            raise NotAuthenticated("This isn't a Motet API key. Keys have the form motet_<id>_<secret>.")
        key = self._keys.get(sent.id)
        if not matches(key, sent):
            if self._store_is_down:  # the same for each, so that nobody learns which ids there are
                raise StoreUnavailable("The gateway can't check this API key now: the key store does not answer.")
            raise NotAuthenticated(UNKNOWN)
        assert key is not None
        if why := key.refused_because(now):
            raise NotAuthenticated(f"This API key is {why}. Ask for a new key.")
        self._used.add(key.id)
        return self._callers[key.id]

    def _caller(self, key: ApiKey, before: ApiKey | None) -> Caller:
        if before is not None and _rights(before) == _rights(key):
            return self._callers[key.id]
        return Caller(key.tenant, key.id, key.scopes)


def _rights(key: ApiKey) -> tuple[object, ...]:
    """Who may do what with it."""
    return key.tenant, key.scopes, key.hash
