"""Which of two waiting requests of one class goes first: the one whose tenant was given less by its weight, then the
older one."""

from math import inf

from motet_scheduler.policy.requests import Request

Order = tuple[float, float, int]
"""What its tenant was given, then `Request.key`. Unique; the smallest has its turn first."""

Head = tuple[float, float, int, Request]
"""A request behind its order: flat, as they are compared very often."""


def order_of(request: Request) -> Order:
    """One that had a place before goes before those that had none: its tenant has paid for it."""
    given = request.share.counter if request.share is not None else 0.0
    return (given if request.charge is None else -inf, request.turn_at, request.sequence)


def head_of(request: Request) -> Head:
    given = request.share.counter if request.share is not None else 0.0  # `order_of`, but this is asked very often
    return (given if request.charge is None else -inf, request.turn_at, request.sequence, request)
