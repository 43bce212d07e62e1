"""In which order the waiting requests of one class would be placed, for reports."""

from collections.abc import Iterator
from heapq import merge
from math import inf

from motet_scheduler.policy.order import Head
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.shares import Share, Shares


def expected_order(shares: Shares) -> Iterator[Request]:
    """If all cost what is expected. As they wait when the first is asked for, also if the caller goes on later. What
    it does not ask for costs little, as a hundred thousand may wait."""
    for head in merge(*(_of_tenant(share, shares) for share in shares)):
        yield head[3]


def _of_tenant(share: Share, shares: Shares) -> Iterator[Head]:
    counter, weight = share.counter, share.weight
    flows = [tuple(flow) for flow in share.flows.values()]
    for unpaid, turn_at, sequence, request in flows[0] if len(flows) == 1 else merge(*flows):
        yield (counter if unpaid else -inf, turn_at, sequence, request)
        if unpaid:
            counter += shares.cost(request) / weight
