"""A token bucket: what may be used per minute, and what is owed.

It fills evenly, up to ten seconds of the grant. While nothing is owed, the next may take what it needs, also more than
is there: else nobody could take more than ten seconds of the grant at once. What it takes beyond is a debt of at most a
minute's grant, and as long as there is one, nobody takes anything.

Who is refused is told when to come again. These times are claims: each is for as long as the grant needs for what the
request wants, and the next begins where it ends. Whoever comes when the first is due has it. Others are let in as far
as that makes nobody late who has one.
"""

from math import inf

from motet.quotas import BUCKET_SECONDS, MAX_DEBT_SECONDS

CLAIM_SECONDS = 1.0
"""How much later than told one may come."""

_NOTHING = 1e-6
"""Seconds that are rounding."""


class Bucket:
    __slots__ = ("_at", "_most", "_used", "claims_from", "claims_until", "grant", "level")

    def __init__(self, grant: int, now: float) -> None:
        self.grant = grant
        """Per minute."""
        self.level = self.depth
        """What is there; below 0: what is owed."""
        self.claims_from = self.claims_until = -inf
        """The times that those have who were told to come again and have not come. None, if it ends where it begins."""
        self._at = now
        self._most = self.level
        """What would be there if nothing had been used before this scheduler began."""
        self._used = 0.0
        """What was taken and not given back."""

    @property
    def rate(self) -> float:
        """Per second."""
        return self.grant / 60

    @property
    def depth(self) -> float:
        return self.rate * BUCKET_SECONDS

    @property
    def max_debt(self) -> float:
        return self.rate * MAX_DEBT_SECONDS

    @property
    def largest_take(self) -> float:
        return self.depth + self.max_debt

    def fill(self, now: float) -> None:
        if now > self._at:
            filled = (now - self._at) * self.rate
            self.level, self._most = min(self.level + filled, self.depth), min(self._most + filled, self.depth)
            self._at = now
            if self.level >= 0:  # else nobody could have come in
                self.claims_from = min(self.claims_until, max(self.claims_from, now - CLAIM_SECONDS))

    @property
    def claimed(self) -> bool:
        return self.claims_from < self.claims_until

    def _claim_is_due(self, now: float) -> bool:
        return self.claimed and self.claims_from <= now + _NOTHING

    def owed_seconds(self, now: float) -> float:
        """How long nobody may take anything."""
        self.fill(now)
        owed = -self.level / self.rate
        return owed if owed > _NOTHING else 0.0

    def wait(self, amount: float, now: float, *, patient: bool = False) -> float:
        """After how many seconds one that comes now may take this amount. `patient`: after all that have a claim."""
        owed = self.owed_seconds(now)
        if not self.claimed or (self._claim_is_due(now) and not patient):
            return owed
        if not patient and not owed and self.level + (self.claims_from - now) * self.rate >= amount:
            return 0.0
        return max(owed, self.claims_until - now)

    def take(self, amount: float, now: float) -> float:
        """Returns how much was taken: no debt grows beyond its bound."""
        self.fill(now)
        if self._claim_is_due(now):
            self.claims_from = min(self.claims_until, self.claims_from + amount / self.rate)
        taken = max(0.0, min(amount, self.level + self.max_debt))
        self.level -= taken
        self._most -= taken
        self._used += taken
        return taken

    def give(self, amount: float, now: float) -> None:
        """Give back what was taken and not used. Negative: more was used than taken."""
        self.fill(now)
        before, self.level = self.level, self._within(self.level + amount)
        self._most = self._within(self._most + amount)
        self._used -= amount if amount > 0 else self.level - before

    def claim(self, amount: float, now: float) -> float:
        """Returns after how many seconds one that is refused now should come again."""
        seconds = min(self.wait(amount, now), MAX_DEBT_SECONDS)
        if self._claim_is_due(now):
            return seconds  # it came when it was told to, and more is owed than was known then
        if not self.claimed:
            self.claims_from = self.claims_until = now + seconds
        self.claims_until = min(self.claims_until + amount / self.rate, now + MAX_DEBT_SECONDS)
        return seconds

    def change(self, grant: int, now: float) -> None:
        """What is there stays, and what is owed takes as long as before: another grant refills nothing."""
        self.fill(now)
        self.level, self._most = (one * grant / self.grant if one < 0 else one for one in (self.level, self._most))
        self.claims_from = self.claims_until = -inf  # they were for another grant
        self.grant = grant
        self.level, self._most = min(self.level, self.depth), min(self._most, self.depth)

    def restore(self, level: float, grant: int, age: float) -> None:
        """By the book of a scheduler before, this was there `age` seconds ago, with this grant. `_most` knows what has
        flowed over since then."""
        before = level * self.grant / grant if level < 0 else level
        self.level = self._within(min(self._most, before + age * self.rate - self._used))

    def _within(self, level: float) -> float:
        return min(self.depth, max(-self.max_debt, level))

    def is_full(self, now: float) -> bool:
        self.fill(now)
        return self.level >= self.depth
