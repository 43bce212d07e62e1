"""Which keys open the gateway. Pure: who reads them from where they are kept says what was found, and when.

No request waits for the store: all keys are in memory. While the store does not answer those that are known are
trusted for a while; one that is not known may have been made meanwhile, so it is not called wrong.
"""

from collections.abc import Callable, Container, Iterable
from datetime import datetime

from motet.errors import NotAuthenticated, StoreUnavailable
from motet.keys import Key, is_of, written
from motet_gateway.identity.caller import Caller

UNKNOWN = "This API key is not valid here."


class Keyring:
    def __init__(self, *, trusted_seconds: float, gone: Callable[[str, str], None]) -> None:
        """`gone` is called with the id of each key that opened until now, and why it does not any more."""
        self._trusted_seconds = trusted_seconds
        self._gone = gone
        self._keys: dict[str, Key] = {}
        self._callers: dict[str, Caller] = {}
        """Of those that opened when they were last looked at."""
        self._used: set[str] = set()
        self._read_at = float("-inf")
        """On a clock that is never set."""
        self._away = True

    @property
    def knows_any(self) -> bool:
        """Also one that is revoked: once a key was made, nobody comes in without one."""
        return bool(self._keys)

    @property
    def away(self) -> bool:
        """The store did not answer when it was last asked."""
        return self._away

    def replace(self, keys: Iterable[Key], *, now: datetime, at: float) -> None:
        """All that there are."""
        self._keys = {key.id: key for key in keys}
        before, self._callers = self._callers, {id_: _caller(key) for id_, key in self._keys.items()}
        for id_ in before.keys() - self._callers.keys():
            self._gone(id_, "revoked")
        self._shut(now, before)
        self._read_at, self._away = at, False

    def unchanged(self, *, now: datetime, at: float) -> None:
        """There are those that there were."""
        self._read_at, self._away = at, False
        self._shut(now)

    def not_read(self, now: datetime) -> None:
        """The store did not answer."""
        self._away = True
        self._shut(now)

    def _shut(self, now: datetime, opened: Container[str] | None = None) -> None:
        """Forget the callers whose keys open no more, and name those that did: time alone ends some."""
        ended = [(id_, why) for id_ in self._callers if (why := self._keys[id_].refused_because(now))]
        for id_, why in ended:
            del self._callers[id_]
            if opened is None or id_ in opened:
                self._gone(id_, why)

    def opens(self, id_: str) -> bool:
        """Whether it did when the keys were last looked at."""
        return id_ in self._callers

    def take_used(self) -> set[str]:
        """The ids of those that opened since this was last asked."""
        used, self._used = self._used, set()
        return used

    def open(self, credential: str, *, now: datetime, at: float) -> Caller:
        """Whose key that is. Raises NotAuthenticated, or StoreUnavailable when nobody can say."""
        if self._away and at - self._read_at > self._trusted_seconds:
            raise StoreUnavailable("API keys cannot be checked now: their store does not answer.")
        sent = written(credential)
        if sent is None:
            raise NotAuthenticated("This is no API key of Motet: they read motet_<id>_<secret>.")
        key = self._keys.get(sent.id)
        if not is_of(key, sent):
            if key is None and self._away:
                raise StoreUnavailable("This API key cannot be checked now: the store of keys does not answer.")
            raise NotAuthenticated(UNKNOWN)
        assert key is not None
        if why := key.refused_because(now):
            raise NotAuthenticated(f"This API key is {why}. Ask for a new one.")
        self._used.add(key.id)
        return self._callers.get(key.id) or _caller(key)


def _caller(key: Key) -> Caller:
    return Caller(key.tenant, key.id, key.scopes)
