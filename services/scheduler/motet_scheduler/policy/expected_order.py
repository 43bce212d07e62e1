"""In which order the waiting requests of one class would be placed, for reports."""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace, merge
from itertools import islice
from math import inf

from motet_scheduler.policy.order import Head
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.shares import Aged, Share, Shares


def expected_order(shares: Shares) -> Iterator[Request]:
    """If all cost what is expected. As they wait when the first is asked for, also if the caller goes on later. What
    it does not ask for costs little, as a hundred thousand may wait."""
    firsts: list[tuple[float, float, int, Request, Iterator[Head]]] = []
    for share in shares:
        if share.flows:
            flows: list[Sequence[Aged]] = [tuple(flow) for flow in share.flows.values()]
            unpaid, turn_at, sequence, request = min(flow[0] for flow in flows)
            others: Iterator[Head] = iter(())
            if len(flows) > 1 or len(flows[0]) > 1:
                others = islice(_of_tenant(flows, share, share.counter, shares), 1, None)
            firsts.append((share.counter if unpaid else -inf, turn_at, sequence, request, others))
    heapify(firsts)
    while firsts:
        *_, request, others = firsts[0]
        yield request
        if (head := next(others, None)) is not None:
            heapreplace(firsts, (*head, others))
        else:
            heappop(firsts)


def _of_tenant(flows: list[Sequence[Aged]], share: Share, counter: float, shares: Shares) -> Iterator[Head]:
    for unpaid, turn_at, sequence, request in flows[0] if len(flows) == 1 else merge(*flows):
        yield (counter if unpaid else -inf, turn_at, sequence, request)
        if unpaid:
            counter += shares.cost(request) / share.weight
