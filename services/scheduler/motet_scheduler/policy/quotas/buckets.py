"""A token bucket: what may be used per minute, and what is owed.

It fills evenly, up to ten seconds of the grant. While nothing is owed, the next may take what it needs, also more than
is there: else nobody could take more than ten seconds of the grant at once. What it takes beyond is a debt of at most a
minute's grant, and as long as there is one, nobody takes anything.

Who is refused is told when to come again. Those that were told before come first, so the bucket counts what they want.
"""

from motet.quotas import BUCKET_SECONDS, MAX_DEBT_SECONDS

_NOTHING = 1e-9
"""Seconds of the grant that rounding may leave owed."""


class Bucket:
    __slots__ = ("_at", "claimed", "grant", "level")

    def __init__(self, grant: int, now: float) -> None:
        self.grant = grant
        """Per minute."""
        self.level = self.depth
        """What is there; below 0: what is owed."""
        self.claimed = 0.0
        """What those want who were told to come again and have not come."""
        self._at = now

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

    def fill(self, now: float) -> None:
        if now <= self._at:
            return
        level = self.level + (now - self._at) * self.rate
        # Who was told to come when it is filled so far could have come.
        self.claimed = max(0.0, self.claimed - max(0.0, level - max(0.0, self.level)))
        self.level = min(level, self.depth)
        self._at = now

    def owed_seconds(self, now: float) -> float:
        """How long nobody may take anything."""
        self.fill(now)
        owed = -self.level / self.rate
        return owed if owed > _NOTHING else 0.0

    def take(self, amount: float) -> float:
        """Returns how much was taken: no debt grows beyond its bound."""
        taken = max(0.0, min(amount, self.level + self.max_debt))
        self.level -= taken
        self.claimed = max(0.0, self.claimed - amount)
        return taken

    def give(self, amount: float) -> None:
        """Give back what was taken and not used. Negative: more was used than taken."""
        self.level = min(self.depth, max(-self.max_debt, self.level + amount))

    def claim(self, amount: float) -> float:
        """Returns after how many seconds one that was refused, and wants this amount, may take it."""
        seconds = (self.claimed - self.level) / self.rate
        self.claimed = max(0.0, min(self.claimed + amount, self.max_debt + self.level))
        return min(max(seconds, 0.0), MAX_DEBT_SECONDS)

    def change(self, grant: int, now: float) -> None:
        """What is there stays, and what is owed takes as long as before: another grant refills nothing."""
        self.fill(now)
        if self.level < 0:
            self.level *= grant / self.grant
        self.claimed *= grant / self.grant
        self.grant = grant
        self.level = min(self.level, self.depth)

    def restore(self, level: float) -> None:
        """As it was, by another scheduler's book."""
        self.level = min(self.depth, max(-self.max_debt, level))

    def is_full(self, now: float) -> bool:
        self.fill(now)
        return self.level >= self.depth
