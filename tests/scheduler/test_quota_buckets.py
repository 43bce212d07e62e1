"""The token bucket under random use: debts are bounded, only time refills it, and no more is let in than granted."""

from copy import copy

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
        owed = self.bucket.owed_seconds(self.now)
        if self.bucket.wait(amount, self.now):
            hint = self.bucket.claim(amount, self.now)
            assert min(owed, MAX_DEBT_SECONDS) <= hint <= MAX_DEBT_SECONDS
            if hint < MAX_DEBT_SECONDS:  # and if nobody else comes, it comes in when it was told to
                assert copy(self.bucket).wait(amount, self.now + hint) == 0
        else:
            assert not owed
            before = self.bucket.level
            taken = self.bucket.take(amount, self.now)
            assert taken == pytest.approx(min(amount, before + self.bucket.grant))
            self.open.append(taken)

    @precondition(lambda self: self.open)
    @rule(used=st.floats(0, 4))
    def somebody_ends(self, used):
        taken = self.open.pop()
        self.bucket.give(taken * (1 - used), self.now)

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
        assert bucket.claims_from <= bucket.claims_until <= self.now + MAX_DEBT_SECONDS + 1e-6


TestRandomUse = RandomUse.TestCase


@given(
    first=st.lists(st.tuples(st.floats(0, 20), st.floats(0.0001, 1)), max_size=20),
    then=st.lists(st.tuples(st.floats(0, 20), st.floats(0.0001, 1)), max_size=20),
)
def test_a_restart_changes_nothing_however_late_it_is_heard_what_was_there(first, then):
    grant, now = 600, 1000.0
    stays = Bucket(grant, now)
    for seconds, share in first:
        now += seconds
        if not stays.wait(share * grant, now):
            stays.take(share * grant, now)
    told, told_at = stays.level, now
    anew = Bucket(grant, now)
    for seconds, share in then:
        now += seconds
        if not stays.wait(share * grant, now) and not anew.wait(share * grant, now):
            stays.take(share * grant, now)
            anew.take(share * grant, now)
    for bucket in (stays, anew):
        bucket.fill(now)
    anew.restore(told, grant, now - told_at)
    assert anew.level == pytest.approx(stays.level, abs=1e-3)


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
        if bucket.wait(share * grant, now):
            bucket.claim(share * grant, now)
        else:
            taken += bucket.take(share * grant, now)
        elapsed = now - start
        assert taken <= grant / 60 * (elapsed + BUCKET_SECONDS + MAX_DEBT_SECONDS) * (1 + 1e-9)


@given(
    grant=GRANTS,
    used=st.floats(0, 70),
    steps=st.lists(st.tuples(st.floats(0, 20), st.floats(0, 10)), max_size=30),
    late=st.integers(0, 30),
)
def test_what_was_there_before_may_be_told_late(grant, used, steps, late):
    """As if there had been no other scheduler: what has flowed over since then is not counted as used."""
    now = 1000.0
    first = Bucket(grant, now)
    first.take(used * first.rate, now)
    told, told_at = first.level, now
    after = Bucket(grant, now)
    for number, (seconds, amount) in enumerate(steps):
        if number == late:
            after.restore(told, grant, now - told_at)
        now += seconds
        for bucket in (first, after):
            bucket.fill(now)
        if not first.owed_seconds(now):  # what it lets in, the other one does, too
            first.take(amount * first.rate, now)
            after.take(amount * after.rate, now)
    after.restore(told, grant, now - told_at)
    assert after.level == pytest.approx(first.level, abs=1e-6 * grant)


def test_a_later_word_about_what_was_there_replaces_an_earlier_one():
    """Between them something was given back."""
    bucket = Bucket(600, 1000.0)
    bucket.restore(-400, 600, 2.0)
    bucket.restore(50, 600, 1.0)
    assert bucket.level == pytest.approx(60)
