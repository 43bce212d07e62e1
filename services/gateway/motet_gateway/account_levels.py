"""What is left of the accounts of quotas, as schedulers said last: a new scheduler begins with it. Pure."""

from collections.abc import Iterable, Iterator

from motet.api.v1 import scheduler_pb2
from motet.clock import Clock
from motet.quotas import full_in

MAX_ACCOUNTS = 10_000
"""Of more, those are kept that were heard of last."""

ACCOUNTS_OF_ONE_MESSAGE = 500

Name = tuple[str, str, str]


class AccountLevels:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._levels: dict[Name, tuple[float, scheduler_pb2.AccountLevel]] = {}
        """With the time at which it was heard; the last one comes last."""

    def __len__(self) -> int:
        return len(self._levels)

    def note(self, accounts: Iterable[scheduler_pb2.AccountLevel]) -> None:
        for level in accounts:
            name = (level.holder, level.name, level.group)
            self._levels.pop(name, None)
            self._levels[name] = (self._clock(), level)
        while len(self._levels) > MAX_ACCOUNTS:
            del self._levels[next(iter(self._levels))]

    def messages(self) -> Iterator[scheduler_pb2.ServeUp]:
        """Of those that are not full again."""
        now = self._clock()
        self._levels = {name: entry for name, entry in self._levels.items() if not _is_full(entry[1], now - entry[0])}
        known = list(self._levels.values())
        for first in range(0, len(known), ACCOUNTS_OF_ONE_MESSAGE):
            levels = scheduler_pb2.AccountLevels()
            for heard_at, level in known[first : first + ACCOUNTS_OF_ONE_MESSAGE]:
                told = levels.accounts.add()
                told.CopyFrom(level)
                told.age_seconds = now - heard_at
            yield scheduler_pb2.ServeUp(levels=levels)


def _is_full(level: scheduler_pb2.AccountLevel, seconds: float) -> bool:
    rates = ((level.requests, level.requests_per_minute), (level.tokens, level.tokens_per_minute))
    return all(not limit or full_in(left, limit) <= seconds for left, limit in rates)
