"""An account: what one tenant, adapter or API key has used of its limits, and who waits for it."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from motet_scheduler.policy.quotas.buckets import Bucket
from motet_scheduler.policy.quotas.claims import Claim
from motet_scheduler.policy.values import Limits

if TYPE_CHECKING:
    from motet_scheduler.policy.quotas.draws import Draw
    from motet_scheduler.policy.requests import Request

WaitingKey = tuple[bool, int, float, float]
"""Whether rates keep it out, class, and the request's `QueueKey`: who only lacks a place waits for nobody's rates."""

OWING = (True,)
"""The key where those begin that rates keep out"""


class Holder(StrEnum):
    TENANT = "tenant"
    ADAPTER = "adapter"
    KEY = "API key"


class AccountId(NamedTuple):
    holder: Holder
    name: str
    group: str = ""
    """Of a tenant: each pool group grants by itself."""

    def __str__(self) -> str:
        return f"{self.holder} {self.name}"


class AccountLevel(NamedTuple):
    """What is left of the rates of an account, as gateways are told. They tell it a new scheduler."""

    holder: Holder
    name: str
    group: str
    requests_per_minute: int = 0
    requests: float = 0.0
    tokens_per_minute: int = 0
    tokens: float = 0.0
    unplaced_requests: float = 0.0
    unplaced_tokens: float = 0.0
    book: int = 0
    """Of which scheduler: each start makes a new one."""

    @property
    def account(self) -> AccountId:
        return AccountId(self.holder, self.name, self.group)


class ToldClaim(NamedTuple):
    """Of one that was told to come again. Gateways tell it a new scheduler."""

    number: int
    content: int
    seconds: float
    """From now on; below 0: it was due."""
    requests: float
    tokens: float
    accounts: tuple[AccountId, ...]
    """None: who had it has come in."""
    grants: tuple[tuple[int, int], ...] = ()
    """By which it was told: requests and tokens per minute of each account. (0, 0): that is not known."""


class Account:
    __slots__ = (
        "draws",
        "due_at",
        "id",
        "kept_for",
        "limits",
        "requests",
        "running",
        "tokens",
        "unplaced",
        "unplaced_requests",
        "unplaced_tokens",
        "waiting",
    )

    def __init__(self, name: AccountId, limits: Limits, now: float) -> None:
        self.id = name
        self.draws = 0
        """Requests that draw from it, or want to."""
        self.running = 0
        """Those that have one of its places."""
        self.kept_for: Draw | None = None
        """Whom a place is kept for, beside those, while it waits for another account."""
        self.waiting: list[tuple[WaitingKey, Request]] = []
        """Those that wait for this account: two lines, in each the most urgent and then the oldest first."""
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.unplaced = 0
        """Requests that have drawn from it and that no runner has had yet."""
        self.unplaced_requests = self.unplaced_tokens = 0.0
        """What these have taken. A new scheduler hears of them as of new ones."""
        self.due_at = inf
        """When those that wait for its rates are tried next."""
        self.limits = Limits()
        self.limit(limits, now)

    def limit(self, limits: Limits, now: float) -> None:
        if limits != self.limits:
            self.limits = limits
            self.requests = _changed(self.requests, limits.requests_per_minute, now)
            self.tokens = _changed(self.tokens, limits.tokens_per_minute, now)

    def has_place(self, draw: "Draw") -> bool:
        taken = self.running + (self.kept_for not in (None, draw))
        return not self.limits.concurrency or taken < self.limits.concurrency

    def _wants(self, requests: float, tokens: float) -> Iterator[tuple[Bucket, float, str]]:
        if self.requests is not None:
            yield self.requests, requests, f"requestsPerMinute {self.requests.grant}"
        if self.tokens is not None:
            yield self.tokens, tokens, f"tokensPerMinute {self.tokens.grant}"

    def wait_seconds(self, requests: float, tokens: float, now: float, content: int, *, patient: bool) -> float:
        """How long its rates keep out one that wants this."""
        longest = 0.0
        if self.requests is not None:
            longest = self.requests.wait(requests, now, content, patient=patient)
        if self.tokens is not None:
            longest = max(longest, self.tokens.wait(tokens, now, content, patient=patient))
        return longest

    def over(self, requests: float, tokens: float, now: float, content: int, *, patient: bool) -> str:
        """Which rate keeps it out for longest."""
        wants = self._wants(requests, tokens)
        over = {what: one.wait(amount, now, content, patient=patient) for one, amount, what in wants}
        return max(over, key=over.__getitem__, default="rates")  # these were just taken away, and others go first

    def claim(self, claim: ToldClaim, now: float) -> Iterator[int]:
        """One that is refused should come again then. The numbers that this has in its buckets: others, if it was told
        the same before, and 0 where it has none."""
        for one, amount, _ in self._wants(claim.requests, claim.tokens):
            yield one.claim(amount, now, claim.content, claim.seconds, claim.number)

    def claims_of(self, content: int, now: float) -> Iterator[int]:
        """The numbers of those that one for this content uses up, if it is let in."""
        for bucket in (self.requests, self.tokens):
            if bucket is not None and (claim := bucket.claim_of(content, now)) is not None:
                yield claim.number

    @property
    def grants(self) -> tuple[int, int]:
        return self.limits.requests_per_minute, self.limits.tokens_per_minute

    def restore_claim(self, at: float, told: ToldClaim) -> None:
        """One for other grants is over, as if they had changed here: it may keep out all others and never be in
        time."""
        if dict(zip(told.accounts, told.grants, strict=False)).get(self.id, (0, 0)) not in ((0, 0), self.grants):
            return
        for one, amount, _ in self._wants(told.requests, told.tokens):
            one.restore_claim(Claim(at, amount, told.content, -inf, told.number))

    def postpone_claim(self, at: float, told: ToldClaim) -> None:
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                bucket.postpone_claim(told.content, told.number, at)

    def drop_claim(self, content: int, number: int) -> None:
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                bucket.drop_claim(content, number)

    def restore(self, told: AccountLevel, age: float, now: float) -> None:
        """What runs is here already, or comes with its gateway's greeting. What no runner had comes again."""
        for bucket, grant, left in (
            (self.requests, told.requests_per_minute, told.requests + told.unplaced_requests),
            (self.tokens, told.tokens_per_minute, told.tokens + told.unplaced_tokens),
        ):
            if bucket is not None and grant:
                bucket.fill(now)
                bucket.restore(left, grant, age)

    def told(self, now: float, book: int) -> AccountLevel:
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                bucket.fill(now)
        requests, tokens = self.requests, self.tokens
        return AccountLevel(
            *self.id,
            requests.grant if requests is not None else 0,
            requests.level if requests is not None else 0.0,
            tokens.grant if tokens is not None else 0,
            tokens.level if tokens is not None else 0.0,
            self.unplaced_requests,
            self.unplaced_tokens,
            book,
        )

    def is_idle(self, now: float) -> bool:
        """Whether a new one would be the same."""
        return not self.draws and all(one is None or one.is_idle(now) for one in (self.requests, self.tokens))

    def charge_unplaced(self, requests: float, tokens: float) -> None:
        self.unplaced += 1
        self.unplaced_requests += requests
        self.unplaced_tokens += tokens

    def forget_unplaced(self, requests: float, tokens: float) -> None:
        self.unplaced -= 1
        self.unplaced_requests = self.unplaced_requests - requests if self.unplaced else 0.0  # not what rounding left
        self.unplaced_tokens = self.unplaced_tokens - tokens if self.unplaced else 0.0

    def enter(self, key: WaitingKey, request: "Request") -> None:
        insort(self.waiting, (key, request), key=lambda entry: entry[0])

    def leave(self, key: WaitingKey) -> None:
        at = self.position(key) - 1
        assert self.waiting[at][0] == key, f"{key} does not wait for {self.id}"
        del self.waiting[at]

    def __iter__(self) -> "Iterator[Request]":
        """Those that wait now."""
        return iter([request for _, request in self.waiting])

    def heads(self) -> list["Request"]:
        """The first that lacks only a place, and the first that rates keep out."""
        places = sorted({0, self.position(OWING) - 1})
        return [self.waiting[at][1] for at in places if at < len(self.waiting)]

    def owes_before(self, key: WaitingKey) -> bool:
        """Whether rates keep out one that is before the one with this key, which they keep out, too."""
        return self.position(key) > self.position(OWING)

    def position(self, key: WaitingKey | tuple[bool]) -> int:
        """Of one that waits; 1: it is the next."""
        return bisect_left(self.waiting, key, key=lambda entry: entry[0]) + 1


def _changed(bucket: Bucket | None, grant: int, now: float) -> Bucket | None:
    if not grant:
        return None
    if bucket is None:
        return Bucket(grant, now)
    bucket.change(grant, now)
    return bucket
