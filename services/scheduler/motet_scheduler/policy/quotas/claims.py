"""The claims on a bucket: who was told to come again, when, and how much they leave to others.

A look takes a bisection, whatever their number: each knows how much must be there now, so that it and all later ones
are in time. To add one at the end, or to drop one of the first, takes few steps, too.

Nothing says which client a request is from, and several may ask for the same. Those that are refused within
`AT_ONCE_SECONDS` of the first of them are as many clients, with a claim each. One that is refused later, while one of
these claims is left, is taken for a client that comes too early: it is told the last of their times again, so who asks
ten times a second has one claim. Whoever is let in uses up one of the claims for its content. A further client that
comes later than the others thus shares the last one's time, and gets a time of its own when both come then.
"""

from bisect import bisect_left, bisect_right
from math import inf
from typing import NamedTuple

AT_ONCE_SECONDS = 0.05
"""Within which requests for the same are those of several clients."""

NOTHING = 1e-6
"""Seconds that are rounding."""


class Claim(NamedTuple):
    at: float
    amount: float
    content: int
    """What it is for: nobody else who comes meanwhile takes it."""
    since: float
    """When the first was refused of those that asked for this at once."""
    number: int = 0
    """No other client's has it."""


class Claims:
    __slots__ = ("_before", "_end", "_needs", "_of", "_rate", "in_order")

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self.in_order: list[Claim] = []
        self._of: dict[int, list[Claim]] = {}
        """The same, by what they are for."""
        self._before: list[float] = []
        """The amounts of those before each, and a number that is the same for all."""
        self._end = 0.0
        """This, for the next one at the end."""
        self._needs: list[float] = []
        """The most of each and all later ones: what goes before it, less what flows in until then."""

    def __len__(self) -> int:
        return len(self.in_order)

    @property
    def amount(self) -> float:
        """Of all."""
        return self._end - self._before[0] if self._before else 0.0

    def of(self, content: int) -> list[Claim]:
        return self._of.get(content, [])

    def own(self, content: int, now: float) -> Claim | None:
        """That of a request that comes now: one that is due, or the last. None: it is another client's first."""
        alike = self._of.get(content)
        if alike is None:
            return None
        if alike[0].at <= now + NOTHING:
            return alike[0]
        return alike[-1] if now - alike[0].since > AT_ONCE_SECONDS else None

    def all_in_time(self, left: float, now: float) -> bool:
        """Whether nobody who has one is late, if this is left now."""
        if not self.in_order:
            return True
        due = bisect_right(self.in_order, (now, inf))
        left += self._before[0] + NOTHING * self._rate
        if due and left < self._before[due - 1]:
            return False
        return due == len(self.in_order) or left - now * self._rate >= self._needs[due]

    def add(self, claim: Claim) -> None:
        at = bisect_left(self.in_order, claim)
        self.in_order.insert(at, claim)
        alike = self._of.setdefault(claim.content, [])
        alike.insert(bisect_left(alike, claim), claim)
        if at == len(self._before):
            self._before.append(self._end)
            self._end += claim.amount
            more = 0.0
        else:
            self._before.insert(at, self._before[at] - claim.amount)
            more = -claim.amount
        self._needs.insert(at, -inf)
        self._change(at, 0.0)
        self._change(at - 1, more)

    def drop(self, claim: Claim) -> None:
        at = bisect_left(self.in_order, claim)
        del self.in_order[at], self._before[at], self._needs[at]
        alike = self._of[claim.content]
        del alike[bisect_left(alike, claim)]
        if not alike:
            del self._of[claim.content]
        if not self.in_order:
            self._end = 0.0  # nor what rounding left
        self._change(at - 1, claim.amount)

    def drop_before(self, at: float) -> None:
        for claim in self.in_order[: bisect_left(self.in_order, (at,))]:
            self.drop(claim)

    def _change(self, last: int, more: float) -> None:
        """Up to this one so much more goes before each, as far as others see, or the next one has changed."""
        needs = self._needs[last + 1] if last + 1 < len(self._needs) else -inf
        for at in range(last, -1, -1):
            self._before[at] += more
            needs = max(needs, self._before[at] - self.in_order[at].at * self._rate)
            if not more and needs == self._needs[at]:
                return
            self._needs[at] = needs
