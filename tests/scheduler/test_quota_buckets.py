"""The token bucket under random use: debts are bounded, only time refills it, and no more is let in than granted."""

from copy import deepcopy
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from motet.quotas import BUCKET_SECONDS, MAX_DEBT_SECONDS
from motet_scheduler.policy.quotas.buckets import CLAIM_SECONDS, MAX_CLAIMS, Bucket
from motet_scheduler.policy.quotas.claims import Claim, Claims

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

    @rule(share=st.floats(0.001, 3), content=st.integers(1, 5))
    def somebody_comes(self, share, content):
        amount = share * self.bucket.grant
        owed = self.bucket.owed_seconds(self.now)
        if hint := self.bucket.wait(amount, self.now, content):
            assert owed <= hint
            if hint < MAX_DEBT_SECONDS:  # and if nobody else comes, it comes in when it was told to
                self.bucket.claim(amount, self.now, content, hint)
                assert deepcopy(self.bucket).wait(amount, self.now + hint, content) == 0
        else:
            assert not owed
            before = self.bucket.level
            taken = self.bucket.take(amount, self.now, content)
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
        assert len(bucket.claims) <= MAX_CLAIMS
        claims = bucket.claims.in_order
        assert claims == sorted(claims)
        assert not claims or claims[-1].at <= self.now + MAX_DEBT_SECONDS + 1e-6


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
        if wait := bucket.wait(share * grant, now):
            bucket.claim(share * grant, now, 0, min(wait, MAX_DEBT_SECONDS))
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


SECOND, MINE, OTHERS = 10.0, 1, 2
"""What a minute's grant of 600 gives in a second, and what two clients want."""


def told(bucket, amount, now, content):
    """After how many seconds one that is refused is told to come again."""
    seconds = bucket.wait(amount, now, content)
    assert seconds > 0
    bucket.claim(amount, now, content, seconds)
    return seconds


def test_nobody_takes_the_time_of_one_that_was_told_to_come_then():
    bucket = Bucket(600, 1000.0)
    bucket.take(11 * SECOND, 1000.0)
    assert told(bucket, SECOND, 1000.0, MINE) == pytest.approx(1.0)
    way = 1001.1  # it has a way back
    assert bucket.wait(SECOND, way, OTHERS) > 0
    assert bucket.wait(SECOND, way, MINE) == 0


def test_others_come_in_beside_those_who_were_told_if_there_is_enough_for_all():
    bucket = Bucket(600, 1000.0)
    bucket.take(11 * SECOND, 1000.0)
    told(bucket, SECOND, 1000.0, MINE)
    bucket.give(3 * SECOND, 1000.5)
    assert bucket.wait(SECOND, 1000.5, OTHERS) == 0
    assert bucket.wait(4 * SECOND, 1000.5, OTHERS) > 0, "who was told would be late"


def test_who_finds_more_owed_than_was_known_keeps_its_turn():
    bucket = Bucket(600, 1000.0)
    bucket.take(11 * SECOND, 1000.0)
    told(bucket, SECOND, 1000.0, MINE)
    bucket.give(-SECOND / 2, 1000.9)
    assert told(bucket, SECOND, 1001.0, MINE) == pytest.approx(0.5)
    assert bucket.wait(SECOND, 1001.5, OTHERS) > 0
    assert bucket.wait(SECOND, 1001.5, MINE) == 0


def test_who_does_not_come_keeps_others_out_no_longer_than_it_may_be_late():
    bucket = Bucket(600, 1000.0)
    bucket.take(11 * SECOND, 1000.0)
    told(bucket, SECOND, 1000.0, MINE)
    assert bucket.wait(SECOND, 1001.0 + 0.9 * CLAIM_SECONDS, OTHERS) == 0, "enough for both"
    assert bucket.wait(9 * SECOND, 1001.0 + 0.9 * CLAIM_SECONDS, OTHERS) > 0
    assert bucket.wait(9 * SECOND, 1001.1 + CLAIM_SECONDS, OTHERS) == 0


def test_who_comes_behind_times_that_two_schedulers_promised_is_told_when_all_of_them_are_served():
    """One had not heard of those of the other."""
    bucket = Bucket(600, 1000.0)
    bucket.take(11 * SECOND, 1000.0)
    told(bucket, SECOND, 1000.0, MINE)
    for number in range(3):
        bucket.restore_claim(Claim(1001.0, SECOND, OTHERS, 0.0, number))
    assert bucket.wait(SECOND, 1000.0, 3) == pytest.approx(5.0)


def test_claims_are_bounded():
    bucket = Bucket(6_000_000, 1000.0)
    bucket.take(bucket.depth + 1, 1000.0)
    for content in range(2 * MAX_CLAIMS):
        told(bucket, 1, 1000.0, content)
    assert len(bucket.claims) == MAX_CLAIMS


class Counted(list):
    """Counts how many of its claims are looked at one by one."""

    looked = 0

    def __getitem__(self, at):
        Counted.looked += 1
        return super().__getitem__(at)

    def __iter__(self):
        for claim in super().__iter__():
            Counted.looked += 1
            yield claim


def test_a_look_at_a_bucket_with_many_claims_looks_at_few_of_them():
    bucket = Bucket(600_000, 1000.0)
    bucket.take(bucket.depth + 1_000, 1000.0)
    for content in range(MAX_CLAIMS):
        told(bucket, 10, 1000.0, content)
    bucket.give(bucket.depth, 1000.0)
    bucket.claims.in_order = Counted(bucket.claims.in_order)
    assert len(bucket.claims) == MAX_CLAIMS
    looks, Counted.looked = 100, 0
    for content in range(looks):
        bucket.wait(10, 1000.0, MAX_CLAIMS + content)
        bucket.take(10, 1000.0, MAX_CLAIMS + content)
    assert Counted.looked / looks <= 64


@given(
    steps=st.lists(st.tuples(st.booleans(), st.floats(0, 9), st.floats(0, 30), st.integers(0, 30)), max_size=40),
    looks=st.lists(st.tuples(st.floats(-10, 100), st.floats(0, 12)), min_size=1, max_size=20),
)
def test_what_claims_leave_to_others_is_as_if_all_were_looked_at(steps, looks):
    rate, claims, known = 3.0, Claims(3.0), []
    for number, (drops, at, amount, which) in enumerate(steps):
        if drops and known:
            claims.drop(known.pop(which % len(known)))
        else:
            known.append(Claim(at, amount, number % 3, 0.0))
            claims.add(known[-1])
    assert claims.in_order == sorted(known)
    for left, now in looks:
        least, before = inf, 0.0
        for claim in sorted(known):
            least = min(least, left + max(0.0, claim.at - now) * rate - before)
            before += claim.amount
        if abs(least) > 1e-4:
            assert claims.all_in_time(left, now) == (least >= 0)


def test_who_has_no_claim_as_there_are_too_many_is_told_a_time_of_its_own_too():
    bucket = Bucket(600_000, 1000.0)
    bucket.take(11 * bucket.rate, 1000.0)
    clients = 2 * MAX_CLAIMS
    assert len({told(bucket, 10, 1000.0, content) for content in range(clients)}) == clients


def test_who_asks_for_the_same_before_it_was_told_to_keeps_its_time_and_nobody_else_waits():
    bucket = Bucket(600, 1000.0)
    bucket.take(11 * SECOND, 1000.0)
    for tenth in range(5):
        seconds = told(bucket, SECOND, 1000.0 + tenth / 10, MINE)
        assert seconds == pytest.approx(1.0 - tenth / 10)
    assert len(bucket.claims) == 1
    assert told(bucket, SECOND, 1000.5, OTHERS) == pytest.approx(1.5)


def test_who_asks_too_early_and_finds_more_owed_is_told_a_later_time():
    bucket = Bucket(600, 1000.0)
    bucket.take(11 * SECOND, 1000.0)
    told(bucket, SECOND, 1000.0, MINE)
    bucket.give(-5 * SECOND, 1000.4)
    assert told(bucket, SECOND, 1000.5, MINE) == pytest.approx(5.5)
    assert bucket.wait(SECOND, 1006.0, OTHERS) > 0
    assert bucket.wait(SECOND, 1006.0, MINE) == 0


def test_several_that_ask_for_the_same_at_once_are_told_a_time_each_and_come_in_then():
    bucket, clients = Bucket(600, 1000.0), 20
    bucket.take(11 * SECOND, 1000.0)
    times = [1000.0 + number / 1000 for number in range(clients)]
    times = [now + told(bucket, SECOND, now, MINE) for now in times]
    assert times == pytest.approx([1001.0 + number for number in range(clients)])
    for now in times:
        assert bucket.wait(SECOND, now, MINE) == 0
        bucket.take(SECOND, now, MINE)
    assert not bucket.claims


def test_who_comes_in_before_it_was_told_to_has_no_claim_left():
    bucket = Bucket(600, 1000.0)
    bucket.take(11 * SECOND, 1000.0)
    told(bucket, SECOND, 1000.0, MINE)
    bucket.give(3 * SECOND, 1000.2)
    assert bucket.wait(SECOND, 1000.5, MINE) == 0
    bucket.take(SECOND, 1000.5, MINE)
    assert not bucket.claims
