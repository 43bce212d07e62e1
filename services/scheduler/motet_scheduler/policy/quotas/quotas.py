"""Which limits apply to a request, and the accounts of those who have limits.

An account that is full and that nobody uses or has a claim on is forgotten: a new one would be the same.
"""

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import count
from math import inf

from motet.quotas import BUCKET_SECONDS, MAX_DEBT_SECONDS
from motet.runner_info import RequestClass
from motet_scheduler.policy.quotas.accounts import Account, AccountId, AccountLevel, Holder, ToldClaim
from motet_scheduler.policy.quotas.buckets import MAX_CLAIMS
from motet_scheduler.policy.quotas.draws import Draw
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.values import EVERYBODY, AdapterSpec, GroupName, Limits, PoolSpec

MAX_AGE = MAX_DEBT_SECONDS + BUCKET_SECONDS
"""Seconds after which an account is full again, whatever it owed."""

LISTEN_SECONDS = 0.5
"""After the first gateway that knows of claims, most others have come, too."""

MAX_TOLD = 100_000
"""Accounts that schedulers before have told gateways of."""

MAX_TOLD_CLAIMS = 100_000
"""Claims that schedulers before have told gateways of."""

MUCH_EARLIER = 0.001
"""Seconds. A time that is earlier by less is none of its own."""

SWEPT_AT_ONCE = 100
"""Accounts that are looked at in one tick, whether they can be forgotten."""

SWEPT_WITH_EACH = 4
"""And with each request, which has fewer accounts: so they are never many more than are in use."""


class Quotas:
    def __init__(self, book: int, began: float) -> None:
        """`book`: no two schedulers have the same one. `began`: when this one did."""
        self._book = book
        self.listens_until = -inf
        """Until then, further gateways may come that know of claims."""
        self._hears_until = began + MAX_AGE
        """Later nothing counts that a scheduler before has said."""
        self._told: dict[AccountId, tuple[float, AccountLevel]] = {}
        """What schedulers before have said last, and when. Until all would be full again."""
        self._told_until = -inf
        self.told_claims: dict[AccountId, dict[int, tuple[float, ToldClaim]]] = {}
        """Of accounts that nobody has drawn from yet: when each is due."""
        self._claims_heard: dict[int, ToldClaim] = {}
        """Also those that are over, and those on other accounts."""
        self._claims_told = 0
        """By this scheduler: their numbers begin with its book."""
        self._grants: dict[GroupName, dict[str, Limits]] = {}
        self._of_adapters: dict[str, Limits] = {}
        self.accounts: OrderedDict[AccountId, Account] = OrderedDict()
        """The one that was used last comes last."""
        self.ready: dict[Account, None] = {}
        """Those that may let somebody in who waits. In order, as a set would differ from process to process."""
        self._due: list[tuple[float, int, Account]] = []
        self._numbers = count()
        self.lines: dict[Account, None] = {}
        """Accounts that requests wait for."""
        self.waiting = 0
        """How many requests wait for an account."""
        self.undecided: dict[Request, None] = {}
        """Those that would be refused for a rate if all gateways had told of claims."""

    def state(self, pools: Iterable[PoolSpec], adapters: Iterable[AdapterSpec], now: float) -> bool:
        """Replace the limits. What was used stays used. Returns whether they changed."""
        grants = {pool.group: dict(pool.limits) for pool in pools if pool.limits}  # the same in all pools of a group
        of_adapters = {str(spec.ref.object): spec.limits for spec in adapters if spec.limits}
        if (grants, of_adapters) == (self._grants, self._of_adapters):
            return False
        self._grants, self._of_adapters = grants, of_adapters
        for name, account in self.accounts.items():
            if name.holder is Holder.TENANT:
                account.limit(self._granted(GroupName(name.group), name.name), now)
            elif name.holder is Holder.ADAPTER:
                account.limit(of_adapters.get(name.name, Limits()), now)
            if account.waiting:
                self.ready[account] = None
        return True

    def adopt(self, requests: Iterable[Request], now: float, *, charged: bool) -> None:
        """Requests that came before the limits go on, and count. `charged`: of those that run, a scheduler before has
        taken what they need."""
        for request in requests if self._grants or self._of_adapters else ():
            if request.draw is None and not request.forgotten:
                request.draw = self.draw(request, now)
                if request.draw is None:
                    continue
                if request.waiting:
                    request.draw.let_in(now)
                else:
                    request.draw.adopt(charged=charged)

    def _granted(self, group: GroupName, tenant: str) -> Limits:
        grants = self._grants.get(group)
        if grants is None:
            return Limits()
        return grants.get(tenant) or grants.get(EVERYBODY) or Limits()

    def draw(self, request: Request, now: float) -> Draw | None:
        """What a request needs of its accounts; None: nothing limits it."""
        if not (self._grants or self._of_adapters or request.api_key):
            return None
        self._forget_idle(SWEPT_WITH_EACH, now)  # before one is found that no request draws from yet
        accounts = []
        if limits := self._granted(request.group, request.tenant):
            accounts.append(self.account(AccountId(Holder.TENANT, request.tenant, request.group), limits, now))
        if (key := request.api_key) is not None:  # its gateway says its limits each time
            accounts.append(self.account(AccountId(Holder.KEY, key.id), key.limits, now))
        if own := self._of_adapters.get(request.adapter):
            accounts.append(self.account(AccountId(Holder.ADAPTER, request.adapter), own, now))
        if not accounts:
            return None
        first = request.parent is None
        answer = min(request.estimate.q90 or request.max_tokens, request.max_tokens)
        tokens = (request.prompt_tokens if first else 0) + max(answer, request.delivered)
        return Draw(tuple(accounts), requests=int(first), tokens=tokens, content=content_of(request))

    def account(self, name: AccountId, limits: Limits, now: float) -> Account:
        account = self.accounts.get(name)
        if account is None:
            account = self.accounts[name] = Account(name, limits, now)
            if name in self._told:
                told_at, level = self._told[name]
                account.restore(level, now - told_at, now)
            for at, claim in sorted(self.told_claims.pop(name, {}).values()):
                account.restore_claim(at, claim)
        else:
            self.accounts.move_to_end(name)
            if limits != account.limits:  # of a key: those of others come with the catalog
                account.limit(limits, now)
                if account.waiting:
                    self.ready[account] = None
        return account

    def told(self, request: Request, now: float) -> tuple[AccountLevel, ...]:
        """What is left of the accounts of a request."""
        return request.draw.told(now, self._book) if request.draw is not None else ()

    def hear(self, levels: Iterable[tuple[AccountLevel, float]], now: float) -> None:
        """What schedulers before have said, and how long ago. The last that was said of an account counts."""
        for level, age in levels if now <= self._hears_until else ():
            name, told_at = level.account, now - age
            known = self._told.get(name)
            if level.book == self._book or age > MAX_AGE or (known is not None and told_at <= known[0]):
                continue
            if known is None and len(self._told) >= MAX_TOLD:
                continue
            self._told[name] = (told_at, level)
            self._told_until = max(self._told_until, told_at + MAX_AGE)
            if (account := self.accounts.get(name)) is not None:
                account.restore(level, age, now)
                if account.waiting:
                    self.ready[account] = None

    def listens(self, now: float) -> bool:
        return now < self.listens_until

    def claim(self, draw: Draw, account: Account, now: float) -> float:
        """After how many seconds one should come again that this account keeps out. Others leave it what it wants."""
        self._claims_told += 1
        return draw.claim(account, now, self._book + self._claims_told)

    def hear_claims(self, claims: Iterable[ToldClaim], now: float) -> None:
        """What schedulers before have told those whom they refused. Two gateways may have heard of the same: who was
        told several times has the last one."""
        for claim in claims if now <= self._hears_until else ():
            known, at = self._claims_heard.get(claim.number), now + claim.seconds
            if self._book < claim.number <= self._book + self._claims_told:
                continue  # its own
            if known is not None and not known.accounts:
                continue  # it is over
            if known is not None and claim.accounts:
                self._postpone_claim(at, claim)
                continue
            if known is not None:
                self._drop_claim(known)
            elif len(self._claims_heard) >= MAX_TOLD_CLAIMS:
                continue
            if not self._claims_heard:
                self.listens_until = now + LISTEN_SECONDS
            self._claims_heard[claim.number] = claim
            for name in claim.accounts:
                if (account := self.accounts.get(name)) is not None:
                    account.restore_claim(at, claim)
                elif len(told := self.told_claims.setdefault(name, {})) < MAX_CLAIMS:
                    told[claim.number] = (at, claim)

    def _postpone_claim(self, at: float, claim: ToldClaim) -> None:
        for name in claim.accounts:
            if (account := self.accounts.get(name)) is not None:
                account.postpone_claim(at, claim)
            elif claim.number in (told := self.told_claims.get(name, {})):
                told[claim.number] = max(told[claim.number], (at, claim))

    def _drop_claim(self, claim: ToldClaim) -> None:
        for name in claim.accounts:
            told = self.told_claims.get(name, {})
            if told.pop(claim.number, None) is not None and not told:
                del self.told_claims[name]
            if (account := self.accounts.get(name)) is not None:
                account.drop_claim(claim.content, claim.number)

    # ------------------------------------------------------------------------------------------------------- waiting

    def wait(self, request: Request, draw: Draw, account: Account, now: float) -> None:
        """It waits for this account."""
        self.waiting += 1
        draw.waits_for = account
        draw.waiting_key = (not draw.charged, int(request.request_class), *request.key)
        account.enter(draw.waiting_key, request)
        self.lines[account] = None
        if not draw.charged and request.request_class is not RequestClass.BATCH:
            self.undecided[request] = None
        self.look_again(account, draw, now)

    def look_again(self, account: Account, draw: Draw, now: float) -> None:
        """Try those that wait for this account when its rates let in the one with this draw. That may be earlier than
        was known before: what is given back is owed no more."""
        seconds = draw.wait_seconds(account, now, patient=True) if not draw.charged else 0.0
        if seconds and now + seconds < account.due_at - MUCH_EARLIER:
            account.due_at = now + seconds
            heappush(self._due, (account.due_at, next(self._numbers), account))

    def leave(self, request: Request) -> None:
        """It waits for no account any more."""
        draw = request.draw
        assert draw is not None
        assert draw.waits_for is not None
        self.waiting -= 1
        self.undecided.pop(request, None)
        draw.waits_for.leave(draw.waiting_key)
        if not draw.waits_for.waiting:
            del self.lines[draw.waits_for]
        draw.waits_for = None

    def end(self, request: Request, now: float) -> None:
        """It has ended."""
        draw = request.draw
        if draw is None:
            return
        request.draw = None
        known = not request.forgotten
        prompt = request.prompt_tokens if request.parent is None else 0
        draw.end(prompt + request.delivered if known else None, now)
        self._freed(draw)

    def undo(self, request: Request, now: float) -> bool:
        """It comes again, as a new one. Returns whether it was charged before."""
        draw = request.draw
        if draw is None or not draw.charged:
            return False
        draw.give_back(now)
        return True

    def charge(self, draw: Draw, now: float) -> None:
        """Take what its rates give. It may have had the last claim: those that waited for that are tried."""
        draw.charge(now)
        self._freed(draw)

    def _freed(self, draw: Draw) -> None:
        for account in draw.accounts:
            if account.waiting:
                self.ready[account] = None

    def next_due(self) -> float:
        return self._due[0][0] if self._due else inf

    def tick(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            at, _, account = heappop(self._due)
            if at != account.due_at:
                continue  # there was an earlier time
            account.due_at = inf
            if account.waiting:
                self.ready[account] = None
        self._forget_idle(SWEPT_AT_ONCE, now)
        if self._told and now > self._told_until:
            self._told.clear()
        if self._claims_heard and now > self._hears_until:
            self._claims_heard.clear()
            self.told_claims.clear()

    def _forget_idle(self, most: int, now: float) -> None:
        for _ in range(min(most, len(self.accounts))):
            name, account = next(iter(self.accounts.items()))
            if account.is_idle(now):
                del self.accounts[name]
                if name in self._told:
                    self._told[name] = now, AccountLevel(*name)  # full: what was told before holds no more
            else:
                self.accounts.move_to_end(name)

    def check(self, requests: Iterable[Request]) -> None:
        """Recount (in tests)."""
        requests = list(requests)
        for request in requests:
            if request.draw is None and not request.forgotten:
                assert not self._granted(request.group, request.tenant), f"{request.id} has no account of its tenant"
                assert request.adapter not in self._of_adapters, f"{request.id} has no account of its adapter"
        draws = [request.draw for request in requests if request.draw is not None]
        for account in self.accounts.values():
            own = [draw for draw in draws if account in draw.accounts]
            assert account.draws == len(own), f"{account.id} has draws of requests that have ended"
            assert account.running == sum(draw.has_places for draw in own), f"{account.id} miscounts what runs"
            assert account.unplaced == sum(draw.charged and not draw.placed for draw in own), "unplaced was miscounted"
            for bucket in (account.requests, account.tokens):
                assert bucket is None or -bucket.max_debt - 1e-6 <= bucket.level <= bucket.depth, f"{account.id}: level"
        waiting = [draw for draw in draws if draw.waits_for is not None]
        assert set(self.lines) == {draw.waits_for for draw in waiting}, "lines"
        owing = {one for one in requests if one.held and one.draw is not None and not one.draw.charged}
        assert self.undecided.keys() == {one for one in owing if one.request_class is not RequestClass.BATCH}
        assert self.waiting == len(waiting) == sum(len(one.waiting) for one in self.accounts.values()), "waiting"
        assert all(self.accounts.get(one.id) is one for draw in draws for one in draw.accounts), "an account was lost"


def content_of(request: Request) -> int:
    """What a claim is for. The same in all schedulers, as a new one hears of it."""
    key = request.api_key
    whole = (
        request.tenant,
        key and key.id,
        request.digest,
        request.prefix_hints,
        request.prompt_tokens,
        request.max_tokens,
    )
    return int.from_bytes(blake2b(repr(whole).encode(), digest_size=8).digest())
