"""An account: what one tenant, adapter or API key has used of its limits, and what a request draws from its accounts.

A request draws from all its accounts or from none. Rates come first: one request, its prompt and the estimated answer.
What the estimate was wrong by is corrected when the request has ended. Then it needs one place of each `concurrency`.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from motet_scheduler.policy.quotas.buckets import Bucket
from motet_scheduler.policy.values import Limits

if TYPE_CHECKING:
    from motet_scheduler.policy.requests import Request

MAX_TURNED = 8
"""How often a request that lacks places of several accounts lets others go first."""

WaitingKey = tuple[int, float, int]
"""Class, and the request's `QueueKey`."""


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
        """Those that wait for this account, the most urgent and then the oldest first."""
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

    def wait_seconds(self, requests: float, tokens: float, now: float, *, patient: bool) -> float:
        """How long its rates keep out one that wants this."""
        longest = 0.0
        if self.requests is not None:
            longest = self.requests.wait(requests, now, patient=patient)
        if self.tokens is not None:
            longest = max(longest, self.tokens.wait(tokens, now, patient=patient))
        return longest

    def over(self, requests: float, tokens: float, now: float, *, patient: bool) -> str:
        """Which rate keeps it out for longest."""
        wants = self._wants(requests, tokens)
        return max(wants, key=lambda one: one[0].wait(one[1], now, patient=patient))[2]

    def claim(self, requests: float, tokens: float, now: float) -> float:
        """Returns when one that is refused should come again."""
        wants = self._wants(requests, tokens)
        return max((one.claim(amount, now) for one, amount, _ in wants if one.wait(amount, now)), default=0.0)

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
        return not self.draws and all(one is None or one.is_full(now) for one in (self.requests, self.tokens))

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

    def position(self, key: WaitingKey) -> int:
        """Of one that waits; 1: it is the next."""
        return bisect_left(self.waiting, key, key=lambda entry: entry[0]) + 1


def _changed(bucket: Bucket | None, grant: int, now: float) -> Bucket | None:
    if not grant:
        return None
    if bucket is None:
        return Bucket(grant, now)
    bucket.change(grant, now)
    return bucket


@dataclass(slots=True, eq=False)
class Draw:
    """What one request has of its accounts."""

    accounts: tuple[Account, ...]
    """Of its tenant, its key and its adapter. The adapter is the last: other tenants need its places, too, so none is
    kept while a request waits for its own tenant or key."""
    requests: int
    """1; of a further choice of a call 0."""
    tokens: int
    """Of the prompt and the estimated answer."""
    taken: tuple[tuple[float, float], ...] = ()
    """Of each account: requests and tokens."""
    token_buckets: tuple[Bucket | None, ...] = ()
    """Of each account, as it was charged. A limit that comes later does not count what ran before it."""
    has_places: bool = False
    placed: bool = False
    """Whether a runner has it, or had it."""
    turned: int = 0
    """How often it was `turned_away`."""
    waits_for: Account | None = None
    waiting_key: WaitingKey = (0, 0.0, 0)

    def __post_init__(self) -> None:
        for one in self.accounts:
            one.draws += 1

    @property
    def charged(self) -> bool:
        return bool(self.taken)

    def told(self, now: float, book: int) -> tuple[AccountLevel, ...]:
        """What clients hear of rates. `concurrency` has none."""
        return tuple(one.told(now, book) for one in self.accounts if one.requests is not None or one.tokens is not None)

    def owing(self, now: float, *, patient: bool) -> Account | None:
        """The account whose rates keep it out for longest. `patient`: it can wait until no other has a claim."""
        seconds = [one.wait_seconds(self.requests, self.tokens, now, patient=patient) for one in self.accounts]
        longest = max(seconds)
        return self.accounts[seconds.index(longest)] if longest else None

    def over(self, account: Account, now: float, *, patient: bool) -> str:
        return account.over(self.requests, self.tokens, now, patient=patient)

    def wait_seconds(self, account: Account, now: float) -> float:
        """How long this account keeps out one that waits."""
        return account.wait_seconds(self.requests, self.tokens, now, patient=True)

    def crowded(self) -> Account | None:
        """An account without a place for it."""
        return next((one for one in self.accounts if not one.has_place(self)), None)

    def charge(self, now: float) -> None:
        taken = []
        for one in self.accounts:
            drawn = _take(one.requests, self.requests, now), _take(one.tokens, self.tokens, now)
            one.charge_unplaced(*drawn)
            taken.append(drawn)
        self.taken, self.token_buckets = tuple(taken), tuple(one.tokens for one in self.accounts)

    def take_places(self) -> None:
        self.has_places = True
        for one in self.accounts:
            one.running += 1
        self._keep_no_places()

    def turned_away(self, by: Account) -> None:
        """It was the first that one account let in, and this other one has no place for it. When that has happened
        often, it keeps a place of those before the other one: else each might be full whenever the other is not. Places
        are kept in the order of accounts, so that nobody waits for one who waits for him."""
        self.turned += 1
        if self.turned < MAX_TURNED:
            return
        for one in self.accounts[: self.accounts.index(by)]:
            if one.kept_for is None:
                one.kept_for = self

    def _keep_no_places(self) -> None:
        for one in self.accounts:
            if one.kept_for is self:
                one.kept_for = None

    def let_in(self, now: float) -> None:
        """It is in a queue already, whatever its accounts have left."""
        self.charge(now)
        self.take_places()

    def adopt(self, *, charged: bool = True) -> None:
        """It runs. If it was not charged here, a scheduler before has done that, up to the bound of debts. Not
        `charged`: it ran before its limits were granted."""
        self.was_placed()
        if not self.charged and not charged:
            self.taken = ((0.0, 0.0),) * len(self.accounts)
            self.token_buckets = (None,) * len(self.accounts)
        elif not self.charged:
            self.taken = tuple(
                (_largest(one.requests, self.requests), _largest(one.tokens, self.tokens)) for one in self.accounts
            )
            self.token_buckets = tuple(one.tokens for one in self.accounts)
        if not self.has_places:
            self.take_places()

    def was_placed(self) -> None:
        if self.charged and not self.placed:
            self._forget_unplaced()
        self.placed = True

    def end(self, computed: int | None, now: float) -> None:
        """It has ended; `computed`: tokens of prompt and answer. None: nobody knows, so the estimate stands."""
        if not self.placed:
            self.give_back(now)
        elif computed is not None:
            for one, (_, tokens), charged in zip(self.accounts, self.taken, self.token_buckets, strict=True):
                if one.tokens is charged:
                    _give(charged, tokens - computed, now)
        self._leave()

    def give_back(self, now: float) -> None:
        """As if it had drawn nothing."""
        for one, (requests, tokens) in zip(self.accounts, self.taken, strict=False):
            _give(one.requests, requests, now)
            _give(one.tokens, tokens, now)
        if self.charged and not self.placed:
            self._forget_unplaced()
        self.taken, self.placed = (), False

    def _leave(self) -> None:
        self.taken = ()
        for one in self.accounts:
            one.draws -= 1
            one.running -= self.has_places
        self.has_places = False
        self._keep_no_places()

    def _forget_unplaced(self) -> None:
        for one, drawn in zip(self.accounts, self.taken, strict=True):
            one.forget_unplaced(*drawn)


def _take(bucket: Bucket | None, amount: float, now: float) -> float:
    return bucket.take(amount, now) if bucket is not None else 0.0


def _largest(bucket: Bucket | None, amount: float) -> float:
    return min(amount, bucket.largest_take) if bucket is not None else 0.0


def _give(bucket: Bucket | None, amount: float, now: float) -> None:
    if bucket is not None:
        bucket.fill(now)
        bucket.give(amount)
