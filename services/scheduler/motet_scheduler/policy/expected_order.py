"""In which order the waiting requests of one class would be placed, for reports."""

from bisect import bisect_right
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from math import inf

from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.shares import Aged, Share, Shares

FLOWS_AT_ONCE = 16
"""To look at the first of this number of flows takes about as long as to tell one request its place."""

Next = tuple[Aged, Aged, list[Aged]]
"""Of a flow: the next one, the one that was the last, and the flow."""

First = tuple[float, float, int, Request, float, Share, list[Next]]
"""Of a tenant: the next one behind its expected order, what it will have been given, and of each flow the next one, as
a heap."""


def expected_order(shares: Shares) -> Iterator[Request | None]:
    """If all cost what is expected. A hundred thousand may wait, so the caller may go on later, when some have left and
    others have come. It is not told of these: a tenant that sends faster than this is read would have no end. None:
    it has looked at some flows, of which a tenant may have thousands, and does not know yet who is the first."""
    firsts: list[First] = []
    looked = 0
    for share in list(shares):
        flows: list[Next] = []
        for flow in list(share.flows.values()):
            if looked == FLOWS_AT_ONCE:
                looked = 0
                yield None
            looked += 1
            if flow:
                heappush(flows, (flow[0], flow[-1], flow))
        if flows:
            heappush(firsts, _first(share.counter, share, flows))
    while firsts:
        *_, request, counter, share, flows = firsts[0]
        yield request
        aged, last, flow = flows[0]
        if aged[0]:
            counter += shares.cost(request) / share.weight
        at = bisect_right(flow, aged)
        if at < len(flow) and flow[at] <= last:
            heapreplace(flows, (flow[at], last, flow))
        else:
            heappop(flows)
        if flows:
            heapreplace(firsts, _first(counter, share, flows))
        else:
            heappop(firsts)


def _first(counter: float, share: Share, flows: list[Next]) -> First:
    unpaid, turn_at, sequence, request = flows[0][0]
    return (counter if unpaid else -inf, turn_at, sequence, request, counter, share, flows)
