"""What each tenant of a group was given, by which its next request of one class has its turn.

A tenant's counter grows when one of its requests is placed, by the cost of the request over the tenant's weight. The
smallest counter goes first. So tenants that always wait get shares like their weights, however many requests, adapters
or keys each has. The cost is the prompt and the expected answer, each token by what it takes (`token_costs.py`).
Pages that the runner has in its prefix cache are free, and so is what is computed again after a move. A wrong
expectation is corrected with the tenant's next charge.

A tenant without requests is not active. When it comes back, its counter is no lower than the lowest active one: time
in which it asked for nothing gives it nothing. One that is active and asks for less than its share falls behind by
`MAX_LAG` at most, so it can't save up for a flood.
"""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from motet.domain import Tenant
from motet_scheduler.policy.token_costs import TokenCosts

if TYPE_CHECKING:
    from motet_scheduler.policy.requests import Request

Turn = tuple[bool, float, int]
"""Whether its tenant has not paid for it, then its age. Unique; in a flow the smallest is first."""

Aged = tuple[bool, float, int, "Request"]
"""A request behind its `Request.turn`."""

Flow = tuple[str, str, int]
"""Base model, the adapter or the replaced revision, and the size: where the largest go first, smaller ones take the
room that is left (S3-05)."""

MAX_LAG = 32_000.0
"""Cost, by which a tenant may be behind those that are served: some thirty requests of usual size."""

MAX_RESTING = 10_000
"""Tenants without requests whose counter is kept, as they were given more than others."""

SLACK = 64
"""Entries of tenants that have gone, which the heap may have beside as many as there are tenants."""

FIRST_MEAN = 128.0
"""Expected tokens of an answer without an estimate, before any has ended."""

OF_MEAN = 1 / 16
"""The part of each answer in the mean of the next ones."""


class Charge:
    """What a tenant was charged for a request."""

    __slots__ = ("answer", "each")

    def __init__(self, answer: float, each: float) -> None:
        self.answer = answer
        """Tokens that were expected."""
        self.each = each
        """The cost of a token then, over the weight of the tenant then: a correction by other ones would give it more
        than it was charged."""


CHARGED_BEFORE = Charge(0.0, 0.0)
"""By a scheduler before, nobody knows how much: nothing is charged or given back."""


class Share:
    """Of one tenant in one class."""

    __slots__ = ("active", "counter", "entry", "flows", "owed", "tenant", "waiting", "weight")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.weight = 1.0
        self.counter = 0.0
        self.owed = 0.0
        """What ended requests cost more than they were charged: added to the next charge. Negative: less, within the
        lag, or who expects too much and gives up would save up."""
        self.active = 0
        """How many of its requests wait or run."""
        self.waiting = 0
        """How many wait."""
        self.flows: dict[Flow, list[Aged]] = {}
        """Those that wait. In a flow nothing passes one before it."""
        self.entry = 0
        """The number of its entry in the heap that counts."""


class Shares:
    """The counters of one group and class."""

    def __init__(self, costs: TokenCosts) -> None:
        self._costs = costs
        self._shares: dict[Tenant, Share] = {}
        self.resting: OrderedDict[Tenant, Share] = OrderedDict()
        """Of tenants without requests, for as long as they were given more than the active ones."""
        self.heap: list[tuple[float, int, Share]] = []
        """One entry of each active share, with a counter that it has or had."""
        self._numbers = count(1)
        self._reached = 0.0
        """The highest counter at which a request was placed."""
        self._mean = FIRST_MEAN

    def __len__(self) -> int:
        """How many tenants are active."""
        return len(self._shares)

    def __iter__(self) -> Iterator[Share]:
        return iter(self._shares.values())

    def waiting(self, tenant: Tenant) -> int:
        """How many of its requests wait."""
        share = self._shares.get(tenant)
        return share.waiting if share is not None else 0

    def begin(self, tenant: Tenant, weight: float) -> Share:
        """One more request of a tenant waits or runs."""
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = self.resting.pop(tenant) if tenant in self.resting else Share(tenant)
            share.counter, share.owed = max(share.counter + share.owed, self.lowest(0.0)), 0.0
            share.entry = next(self._numbers)
            heappush(self.heap, (share.counter, share.entry, share))
        share.weight = weight
        share.active += 1
        return share

    def end(self, share: Share) -> None:
        """One of its requests has ended."""
        share.active -= 1
        if share.active:
            return
        del self._shares[share.tenant]
        if not self._shares:  # nobody is in the way of anybody
            self.resting.clear()
            self.heap.clear()
            self._reached = 0.0
            return
        if len(self.heap) > 2 * len(self._shares) + SLACK:
            self.heap = [(one.counter, one.entry, one) for one in self._shares.values()]
            heapify(self.heap)
        self.resting[share.tenant] = share
        lowest = self.lowest()
        for _ in range(2):  # those that are forgotten keep pace with those that come
            if not self.resting:
                return
            tenant, first = self.resting.popitem(last=False)
            if first.counter + first.owed > lowest and len(self.resting) < MAX_RESTING:
                self.resting[tenant] = first

    def lowest(self, default: float = inf) -> float:
        """The lowest counter of an active tenant."""
        heap = self.heap
        while heap:
            counter, entry, share = heap[0]
            if not share.active or entry != share.entry:
                heappop(heap)
            elif counter != share.counter:
                heapreplace(heap, (share.counter, entry, share))
            else:
                return counter
        return default

    def cost(self, request: "Request") -> float:
        """Of its prompt, if nothing of that is cached, and its expected answer."""
        return self._costs.prompt * request.own_prompt_tokens + self._costs.answer * self._expected(request)

    def charge(self, request: "Request", share: Share, cached: int) -> float:
        """It is placed, on a runner that has `cached` tokens of its prompt. Returns what its tenant was charged, over
        its weight."""
        expected = self._expected(request)
        costs = self._costs
        request.charge = Charge(expected, costs.answer / share.weight)
        self._reached = max(self._reached, share.counter)
        prompt = max(0, request.prompt_tokens - cached)
        due = (costs.prompt * prompt + costs.answer * expected) / share.weight + share.owed
        share.owed = min(0.0, due)
        share.counter = max(share.counter, self._reached - MAX_LAG / share.weight) + max(0.0, due)
        return max(0.0, due)

    def of(self, tenant: Tenant) -> Share | None:
        """None: it has no requests."""
        return self._shares.get(tenant)

    def charged_elsewhere(self, share: Share, given: float) -> None:
        """A request of its tenant in another class was placed.

        It falls back by `MAX_LAG` at most: a more urgent class may get far more than this one, and when the tenant asks
        for no more there, it need not wait until others in this one were given as much."""
        share.counter = max(share.counter, min(share.counter + given, self._reached + MAX_LAG / share.weight))

    def settle(self, request: "Request", share: Share) -> None:
        """It has ended, and all that was computed of its answer is known."""
        if (charge := request.charge) is not None:
            more = charge.each * (request.delivered - charge.answer)
            share.owed = max(share.owed + more, -MAX_LAG / share.weight)
            self._mean += OF_MEAN * (request.delivered - self._mean)

    def _expected(self, request: "Request") -> float:
        """By the mean, if it is known: a tenant whose answers are mostly short and sometimes very long would be charged
        too little by the median, again and again, until they have ended."""
        of = request.estimate
        return max(1.0, min(request.max_tokens, of.mean or of.q50 or self._mean), request.delivered)
