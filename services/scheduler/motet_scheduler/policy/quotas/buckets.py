"""A token bucket: what may be used per minute, and what is owed.

It fills evenly, up to ten seconds of the grant. While nothing is owed, the next may take what it needs, also more than
is there: else nobody could take more than ten seconds of the grant at once. What it takes beyond is a debt of at most a
minute's grant, and as long as there is one, nobody takes anything.

Who is refused is told when to come again. These times are claims: the next is as much later as the grant needs for
what this one wants. A claim is for the same content, as who comes again asks for the same. Others are let in as far as
that makes nobody late who has one. If more is owed when it is due than was known, as an answer was longer than its
estimate, it moves to when nothing is. A new scheduler hears of claims from gateways.
"""

from math import inf

from motet.quotas import BUCKET_SECONDS, CLAIM_SECONDS, MAX_DEBT_SECONDS
from motet_scheduler.policy.quotas.claims import NOTHING, Claim, Claims

MAX_CLAIMS = 1_000
"""Who is told to come again after as many others has none."""


class Bucket:
    __slots__ = ("_at", "_most", "_used", "claims", "claims_until", "grant", "level")

    def __init__(self, grant: int, now: float) -> None:
        self.grant = grant
        """Per minute."""
        self.level = self.depth
        """What is there; below 0: what is owed."""
        self.claims = Claims(self.rate)
        """Of those who were told to come again and have not come."""
        self.claims_until = -inf
        """When the next one begins, as long as there are any."""
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
        if self.claims and self.level >= 0:  # else nobody could have come in
            self.claims.drop_before(now - CLAIM_SECONDS)

    def owed_seconds(self, now: float) -> float:
        """How long nobody may take anything."""
        self.fill(now)
        owed = -self.level / self.rate
        return owed if owed > NOTHING else 0.0

    def wait(self, amount: float, now: float, content: int = 0, *, patient: bool = False) -> float:
        """After how many seconds one that comes now may take this amount. `patient`: after all that have a claim."""
        owed = self.owed_seconds(now)
        if not self.claims:
            return owed
        # Those who have one may come late, as they are on their way.
        all_gone = self.claims.in_order[-1].at + CLAIM_SECONDS - now
        if patient:
            return max(owed, all_gone)
        own = self.claims.own(content, now)
        if own is not None and own.at <= now + NOTHING:
            return owed
        if not owed and self.claims.all_in_time(self.level - amount, now):
            return 0.0
        if own is not None:
            return max(owed, own.at - now)
        # What they want comes first: two schedulers may have promised the same time.
        all_served = (self.claims.amount - self.level) / self.rate
        return max(owed, self.claims_until - now, all_served) or all_gone

    def take(self, amount: float, now: float, content: int = 0) -> float:
        """Returns how much was taken: no debt grows beyond its bound."""
        self.fill(now)
        if (own := self.claim_of(content, now)) is not None:
            self.claims.drop(own)
        taken = max(0.0, min(amount, self.level + self.max_debt))
        self.level -= taken
        self._most -= taken
        self._used += taken
        return taken

    def claim_of(self, content: int, now: float) -> Claim | None:
        """That one for this content uses up, if it is let in."""
        alike = self.claims.of(content)
        return (alike[0] if alike[0].at <= now + NOTHING else alike[-1]) if alike else None

    def give(self, amount: float, now: float) -> None:
        """Give back what was taken and not used. Negative: more was used than taken."""
        self.fill(now)
        before, self.level = self.level, self._within(self.level + amount)
        self._most = self._within(self._most + amount)
        self._used -= amount if amount > 0 else self.level - before

    def claim(self, amount: float, now: float, content: int, seconds: float, number: int = 0) -> int:
        """One that is refused now should come again after this time. That is longer than it has to `wait` here, if it
        has to for another account. Returns the number of its claim. 0: it has none."""
        at = now + seconds
        if (own := self.claims.own(content, now)) is not None:
            if abs(at - own.at) <= NOTHING:
                return own.number  # it was told its time again
            self.claims.drop(own)
            since, number = own.since, own.number  # gateways forget its former time
        else:
            wait = self.wait(amount, now, content)
            if not (wait or self.claims):
                return 0  # it will hardly have to wait here
            after = max(now + wait, self.claims_until) if self.claims else now + wait
            self.claims_until = after + amount / self.rate
            if len(self.claims) >= MAX_CLAIMS:
                return 0
            alike = self.claims.of(content)
            since = alike[0].since if alike else now
        self.claims.add(Claim(at, amount, content, since, number))
        return number

    def restore_claim(self, claim: Claim) -> None:
        """A scheduler before has told it."""
        if len(self.claims) < MAX_CLAIMS:
            claim = claim._replace(amount=min(claim.amount, self.largest_take))
            begins = claim.at + claim.amount / self.rate
            self.claims_until = max(self.claims_until, begins) if self.claims else begins
            self.claims.add(claim)

    def postpone_claim(self, content: int, number: int, at: float) -> None:
        """It was told a later time, too. If it may come as late in any case, nothing changes."""
        for one in self.claims.of(content):
            if one.number == number and one.at + CLAIM_SECONDS < at:
                self.claims.drop(one)
                self.restore_claim(one._replace(at=at))
                return

    def drop_claim(self, content: int, number: int) -> None:
        for one in self.claims.of(content):
            if one.number == number:
                self.claims.drop(one)
                return

    def change(self, grant: int, now: float) -> None:
        """What is there stays, and what is owed takes as long as before: another grant refills nothing."""
        self.fill(now)
        self.level, self._most = (one * grant / self.grant if one < 0 else one for one in (self.level, self._most))
        self.grant = grant
        self.claims = Claims(self.rate)  # those that are left were for another grant
        self.level, self._most = min(self.level, self.depth), min(self._most, self.depth)

    def restore(self, level: float, grant: int, age: float) -> None:
        """By the book of a scheduler before, this was there `age` seconds ago, with this grant. `_most` knows what has
        flowed over since then."""
        before = level * self.grant / grant if level < 0 else level
        self.level = self._within(min(self._most, before + age * self.rate - self._used))

    def _within(self, level: float) -> float:
        return min(self.depth, max(-self.max_debt, level))

    def is_idle(self, now: float) -> bool:
        """Whether a new one would be the same."""
        self.fill(now)
        return self.level >= self.depth and not self.claims
