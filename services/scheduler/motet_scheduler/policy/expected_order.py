"""In which order the waiting requests of one class would be placed, for reports."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import inf

from motet_scheduler.policy.order import Head
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.shares import Aged, Share, Shares

AT_ONCE = 16
"""Of a flow, up to this number are looked at as it is then."""


def expected_order(shares: Shares) -> Iterator[Request]:
    """If all cost what is expected. The caller may go on later, when some have left and others have come. What it does
    not ask for costs next to nothing, as a hundred thousand may wait."""
    firsts: list[tuple[float, float, int, Request, Iterator[Head]]] = []
    for share in shares:
        if share.flows:
            first = min(flow[0] for flow in share.flows.values())
            unpaid, turn_at, sequence, request = first
            others = _behind(first, share, share.counter, shares)
            firsts.append((share.counter if unpaid else -inf, turn_at, sequence, request, others))
    heapify(firsts)
    while firsts:
        *_, request, others = firsts[0]
        yield request
        if (head := next(others, None)) is not None:
            heapreplace(firsts, (*head, others))
        else:
            heappop(firsts)


def _behind(first: Aged, share: Share, counter: float, shares: Shares) -> Iterator[Head]:
    """The others of a tenant."""
    unpaid, _, _, request = first
    for aged in _in_order(first, share.flows.values()):
        if unpaid:
            counter += shares.cost(request) / share.weight
        unpaid, turn_at, sequence, request = aged
        yield (counter if unpaid else -inf, turn_at, sequence, request)


def _in_order(last: Aged, flows: Iterable[list[Aged]]) -> Iterator[Aged]:
    """Those behind this one. A tenant may have thousands of adapters: what is behind the first of a flow is looked at
    when that one's turn has come."""
    begins = ((bisect_right(flow, last), flow) for flow in flows)
    later: list[tuple[Aged, Iterator[Aged]]] = []
    for first, flow in sorted((flow[at], flow) for at, flow in begins if at < len(flow)):
        while later and later[0][0] < first:
            yield from _next_of(later)
        yield first
        behind = _after(first, flow)
        if (aged := next(behind, None)) is not None:
            heappush(later, (aged, behind))
    while later:
        yield from _next_of(later)


def _next_of(later: list[tuple[Aged, Iterator[Aged]]]) -> Iterator[Aged]:
    first, behind = later[0]
    yield first
    if (aged := next(behind, None)) is not None:
        heapreplace(later, (aged, behind))
    else:
        heappop(later)


def _after(last: Aged, flow: Sequence[Aged]) -> Iterator[Aged]:
    """Those behind this one, also while the flow changes. Not those that come meanwhile: a tenant that sends faster
    than this is read would have no end."""
    end = flow[-1] if flow else last
    while some := flow[(begin := bisect_right(flow, last)) : min(begin + AT_ONCE, bisect_right(flow, end))]:
        yield from some
        last = some[-1]
