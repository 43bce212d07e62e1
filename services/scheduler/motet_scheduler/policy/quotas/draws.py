"""What one request draws from its accounts: from all of them, or from none.

Rates come first: one request, its prompt and the estimated answer. What the estimate was wrong by is corrected when the
request has ended. Then it needs one place of each `concurrency`.
"""

from dataclasses import dataclass

from motet.quotas import MAX_DEBT_SECONDS
from motet_scheduler.policy.quotas.accounts import Account, AccountLevel, ToldClaim, WaitingKey
from motet_scheduler.policy.quotas.buckets import Bucket

MAX_TURNED = 8
"""How often a request that lacks places of several accounts lets others go first."""


@dataclass(frozen=True, slots=True)
class Charge:
    """What one account was charged for one request, and the buckets that gave it. An account whose limit was taken away
    and set again has another bucket: to that one nothing is given back, and nothing is charged later."""

    account: Account
    requests: float = 0.0
    tokens: float = 0.0
    request_bucket: Bucket | None = None
    token_bucket: Bucket | None = None

    @classmethod
    def take(cls, account: Account, requests: float, tokens: float, now: float, content: int) -> "Charge":
        of_requests, of_tokens = account.requests, account.tokens
        return cls(
            account,
            of_requests.take(requests, now, content) if of_requests is not None else 0.0,
            of_tokens.take(tokens, now, content) if of_tokens is not None else 0.0,
            of_requests,
            of_tokens,
        )

    @classmethod
    def taken_before(cls, account: Account, requests: float, tokens: float) -> "Charge":
        """By another scheduler, up to the bound of debts."""
        of_requests, of_tokens = account.requests, account.tokens
        return cls(
            account,
            min(requests, of_requests.largest_take) if of_requests is not None else 0.0,
            min(tokens, of_tokens.largest_take) if of_tokens is not None else 0.0,
            of_requests,
            of_tokens,
        )

    def settle(self, computed: int, now: float) -> None:
        """It has computed this many tokens."""
        if self.token_bucket is not None and self.token_bucket is self.account.tokens:
            self.token_bucket.give(self.tokens - computed, now)

    def give_back(self, now: float) -> None:
        if self.request_bucket is not None and self.request_bucket is self.account.requests:
            self.request_bucket.give(self.requests, now)
        if self.token_bucket is not None and self.token_bucket is self.account.tokens:
            self.token_bucket.give(self.tokens, now)


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
    content: int = 0
    """The same when it is sent again."""
    charges: tuple[Charge, ...] = ()
    """Of each account. None: its rates have not let it in."""
    has_places: bool = False
    placed: bool = False
    """Whether a runner has it, or had it."""
    turned: int = 0
    """How often it was `turned_away`."""
    waits_for: Account | None = None
    waiting_key: WaitingKey = (False, 0, 0.0, 0)
    claimed: ToldClaim | None = None
    """Of one that is refused."""
    used_up: tuple[int, ...] = ()
    """The claims of one that was let in."""

    def __post_init__(self) -> None:
        for one in self.accounts:
            one.draws += 1

    @property
    def charged(self) -> bool:
        return bool(self.charges)

    def told(self, now: float, book: int) -> tuple[AccountLevel, ...]:
        """What clients hear of rates. `concurrency` has none."""
        return tuple(one.told(now, book) for one in self.accounts if one.requests is not None or one.tokens is not None)

    def owing(self, now: float, *, patient: bool) -> Account | None:
        """The account whose rates keep it out for longest. `patient`: it can wait until no other has a claim."""
        seconds = [self.wait_seconds(one, now, patient=patient) for one in self.accounts]
        longest = max(seconds)
        return self.accounts[seconds.index(longest)] if longest else None

    def claim(self, account: Account, now: float, number: int) -> float:
        """Returns after how many seconds it should come again: when the account lets it in that keeps it out for
        longest. The others let it in then, too. If that is later than anybody is told, it has no claim."""
        seconds = self.wait_seconds(account, now, patient=False)
        if seconds >= MAX_DEBT_SECONDS:
            return MAX_DEBT_SECONDS
        names, grants = tuple(one.id for one in self.accounts), tuple(one.grants for one in self.accounts)
        claim = ToldClaim(number, self.content, seconds, self.requests, self.tokens, names, grants)
        if numbers := {one for account in self.accounts for one in account.claim(claim, now)} - {0}:
            before = numbers - {number}  # it was told the same
            self.claimed = claim._replace(number=min(before, default=number))
        return seconds

    def over(self, account: Account, now: float, *, patient: bool) -> str:
        return account.over(self.requests, self.tokens, now, self.content, patient=patient)

    def wait_seconds(self, account: Account, now: float, *, patient: bool) -> float:
        """How long this account keeps it out."""
        return account.wait_seconds(self.requests, self.tokens, now, self.content, patient=patient)

    def crowded(self) -> Account | None:
        """An account without a place for it."""
        return next((one for one in self.accounts if not one.has_place(self)), None)

    def charge(self, now: float) -> None:
        self.used_up = tuple({number for one in self.accounts for number in one.claims_of(self.content, now)})
        self.charges = tuple(Charge.take(one, self.requests, self.tokens, now, self.content) for one in self.accounts)
        for charge in self.charges:
            charge.account.charge_unplaced(charge.requests, charge.tokens)

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
        """It runs. If it was not charged here, a scheduler before has done that. Not `charged`: it ran before its
        limits were granted."""
        self.was_placed()
        if not self.charged:
            self.charges = tuple(
                Charge.taken_before(one, self.requests, self.tokens) if charged else Charge(one)
                for one in self.accounts
            )
        if not self.has_places:
            self.take_places()

    def was_placed(self) -> None:
        if not self.placed:
            self._forget_unplaced()
        self.placed = True

    def end(self, computed: int | None, now: float) -> None:
        """It has ended; `computed`: tokens of prompt and answer. None: nobody knows, so the estimate stands."""
        if not self.placed:
            self.give_back(now)
        elif computed is not None:
            for charge in self.charges:
                charge.settle(computed, now)
        self._leave()

    def give_back(self, now: float) -> None:
        """As if it had drawn nothing."""
        for charge in self.charges:
            charge.give_back(now)
        if not self.placed:
            self._forget_unplaced()
        self.charges, self.placed = (), False

    def _leave(self) -> None:
        self.charges = ()
        for one in self.accounts:
            one.draws -= 1
            one.running -= self.has_places
        self.has_places = False
        self._keep_no_places()

    def _forget_unplaced(self) -> None:
        for charge in self.charges:
            charge.account.forget_unplaced(charge.requests, charge.tokens)
