"""What schedulers said last of quotas: a new scheduler begins with it. What is left of accounts, and who was told to
come again. Pure."""

from collections.abc import Iterable, Iterator

from motet.api.v1 import scheduler_pb2
from motet.clock import Clock
from motet.quotas import CLAIM_SECONDS, MAX_CLAIMS_IN_MESSAGE, MAX_DEBT_SECONDS, full_in

MAX_ACCOUNTS = 10_000
"""Of more, those are kept that were heard of last."""

MAX_CLAIMS = 10_000
"""Of more, those are kept that were heard of last."""

ACCOUNTS_OF_ONE_MESSAGE = 500

Name = tuple[str, str, str]


class AccountLevels:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._levels: dict[Name, tuple[float, scheduler_pb2.AccountLevel]] = {}
        """With the time at which it was heard; the last one comes last."""

        self._claims: dict[int, tuple[float, scheduler_pb2.Claim]] = {}
        """By number, with the time at which it is due; the one that was heard of last comes last."""

    def __len__(self) -> int:
        return len(self._levels) + len(self._claims)

    def note_refused(self, refused: scheduler_pb2.Refused) -> None:
        self.note(refused.accounts)
        if refused.HasField("claim"):
            self._note_claim(refused.claim)

    def note_placed(self, placed: scheduler_pb2.Placed) -> None:
        self.note(placed.accounts)
        for number in placed.claims:  # another gateway may have heard of it as one that is left
            self._note_claim(scheduler_pb2.Claim(number=number, seconds=MAX_DEBT_SECONDS))

    def _note_claim(self, claim: scheduler_pb2.Claim) -> None:
        self._claims.pop(claim.number, None)
        self._claims[claim.number] = (self._clock() + claim.seconds, claim)
        while len(self._claims) > MAX_CLAIMS:
            del self._claims[next(iter(self._claims))]

    def note(self, accounts: Iterable[scheduler_pb2.AccountLevel]) -> None:
        for level in accounts:
            name = (level.holder, level.name, level.group)
            self._levels.pop(name, None)
            self._levels[name] = (self._clock(), level)
        while len(self._levels) > MAX_ACCOUNTS:
            del self._levels[next(iter(self._levels))]

    def messages(self) -> Iterator[scheduler_pb2.ServeUp]:
        """Of accounts that are not full again, and of claims that nobody is too late for."""
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
        self._claims = {number: entry for number, entry in self._claims.items() if entry[0] + CLAIM_SECONDS >= now}
        claims = list(self._claims.values())
        for first in range(0, len(claims), MAX_CLAIMS_IN_MESSAGE):
            levels = scheduler_pb2.AccountLevels()
            for due, claim in claims[first : first + MAX_CLAIMS_IN_MESSAGE]:
                levels.claims.add().CopyFrom(claim)
                levels.claims[-1].seconds = due - now
            yield scheduler_pb2.ServeUp(levels=levels)


def _is_full(level: scheduler_pb2.AccountLevel, seconds: float) -> bool:
    rates = ((level.requests, level.requests_per_minute), (level.tokens, level.tokens_per_minute))
    return all(not limit or full_in(left, limit) <= seconds for left, limit in rates)
