"""The token bucket under random use: debts are bounded, only time refills it, and no more is let in than granted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from motet.quotas import BUCKET_SECONDS, MAX_DEBT_SECONDS
from motet_scheduler.policy.quotas.buckets import Bucket

GRANTS = st.integers(1, 100_000)
SECONDS = st.floats(0, 200, allow_nan=False)


class RandomUse(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now = 1000.0
        self.bucket = Bucket(600, self.now)
        self.open = []
        """What was taken and may be given back."""

    @rule(seconds=SECONDS)
    def time_passes(self, seconds):
        before = self.bucket.owed_seconds(self.now)
        self.now += seconds
        assert self.bucket.owed_seconds(self.now) == pytest.approx(max(0.0, before - seconds), abs=1e-5)

    @rule(share=st.floats(0.001, 3))
    def somebody_comes(self, share):
        amount = share * self.bucket.grant
        if not self.bucket.owed_seconds(self.now):
            before = self.bucket.level
            taken = self.bucket.take(amount)
            assert taken == pytest.approx(min(amount, before + self.bucket.grant))
            self.open.append(taken)
        else:
            hint = self.bucket.claim(amount)
            assert self.bucket.owed_seconds(self.now) <= hint + 1e-6 <= MAX_DEBT_SECONDS + 1e-5

    @precondition(lambda self: self.open)
    @rule(used=st.floats(0, 4))
    def somebody_ends(self, used):
        taken = self.open.pop()
        self.bucket.fill(self.now)
        self.bucket.give(taken * (1 - used))

    @rule(grant=GRANTS)
    def limits_are_applied(self, grant):
        owed = self.bucket.owed_seconds(self.now)
        level = self.bucket.level
        self.bucket.change(grant, self.now)
        assert self.bucket.owed_seconds(self.now) == pytest.approx(owed, abs=1e-5)
        if level > 0:
            assert self.bucket.level <= level

    @invariant()
    def nothing_is_beyond_its_bounds(self):
        bucket = self.bucket
        assert bucket.level <= bucket.depth + 1e-6
        assert bucket.level >= -bucket.max_debt - 1e-6 * bucket.grant
        assert 0 <= bucket.claimed <= 2 * bucket.grant


TestRandomUse = RandomUse.TestCase


@given(
    grant=GRANTS,
    steps=st.lists(st.tuples(st.floats(0, 5), st.floats(0.0001, 1)), min_size=1, max_size=200),
)
def test_in_any_time_no_more_is_taken_than_granted_then_and_the_bounds_allow(grant, steps):
    now = start = 1000.0
    bucket = Bucket(grant, now)
    taken = 0.0
    for seconds, share in steps:
        now += seconds
        if not bucket.owed_seconds(now):
            taken += bucket.take(share * grant)
        elapsed = now - start
        assert taken <= grant / 60 * (elapsed + BUCKET_SECONDS + MAX_DEBT_SECONDS) * (1 + 1e-9)
