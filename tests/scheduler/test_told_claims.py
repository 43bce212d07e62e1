"""Who was told to come again by a scheduler that ended since: gateways tell the next one."""

import subprocess
import sys
from dataclasses import replace

import pytest

from motet.api.v1 import scheduler_pb2
from motet.quotas import CLAIM_SECONDS, MAX_CLAIMS_IN_MESSAGE, MAX_DEBT_SECONDS
from motet_scheduler import conversion
from motet_scheduler.policy import effects, events, quota_gate, request_lifecycle
from motet_scheduler.policy.quotas import quotas
from motet_scheduler.policy.quotas.buckets import MAX_CLAIMS
from motet_scheduler.policy.quotas.quotas import LISTEN_SECONDS
from motet_scheduler.policy.values import KeyAccount, Limits
from tests.scheduler.test_quotas import account, placed, refusal, successor, with_limits

GRANT = 600
"""Requests a minute: ten a second."""

MINE, OTHERS = {"prefix_hints": (1,)}, {"prefix_hints": (2,)}


def used_up():
    """All that is there at once, and who comes next is told to come a tenth of a second later than the one before."""
    driver = with_limits(requests_per_minute=GRANT)
    for number in range(101):
        driver.enqueue(f"r{number}")
    return driver


def told(driver, **what):
    """What its gateway keeps of one that is refused now."""
    driver.enqueue("over", **what)
    (refused,) = driver.of(effects.SendRefused)
    return refused


def told_others(driver, count):
    """The claims of others that come before."""
    return [told(driver, prefix_hints=(100 + number,)).claim for number in range(count)]


def after_a_second(driver, refused, *claims):
    """A new scheduler, which has heard of these claims, and what is left by what was said last."""
    after = successor(driver, requests_per_minute=GRANT)
    after.send(events.LevelsTold("g0", tuple((level, 1.0) for level in refused.accounts)))
    hear(after, *claims)
    return after


def hear(driver, *claims, seconds=1.0, gateway="g0"):
    """`seconds`: since a gateway has heard of these."""
    told = tuple(claim._replace(seconds=claim.seconds - seconds) for claim in claims)
    driver.send(events.LevelsTold(gateway, (), told))


def listened(driver):
    driver.wait(LISTEN_SECONDS + 0.01)


def test_who_was_told_by_a_scheduler_before_is_let_in_then_and_nobody_else():
    driver = used_up()
    others = told_others(driver, 40)
    mine = told(driver, **MINE)
    assert mine.failure.retry_after == pytest.approx(4.1)
    after = after_a_second(driver, mine, *others, mine.claim)
    after.wait(1.1)
    assert told(after, **OTHERS).failure.retry_after == pytest.approx(2.1), "behind all of them"
    for number in range(40):
        if number == 21:
            after.wait(2.0)  # later the first of them would be too late
        after.enqueue(f"r{number}", prefix_hints=(100 + number,))
        assert placed(after)
    after.enqueue("new", prefix_hints=(3,))
    assert refusal(after)
    after.enqueue("mine", **MINE)
    assert placed(after) == ["mine"]


def test_a_claim_that_two_gateways_tell_counts_once():
    driver = used_up()
    refused = told(driver, **MINE)
    after = after_a_second(driver, refused, refused.claim)
    after.enqueue("a")
    hear(after, refused.claim, gateway="g1")
    bucket = account(after).requests
    assert (len(bucket.claims), bucket.claims.amount) == (1, 1)


def test_who_asks_again_too_early_has_one_claim_in_all_schedulers():
    driver = used_up()
    others = told_others(driver, 40)
    first = told(driver, **MINE).claim
    driver.clock.advance(0.5)
    again = told(driver, **MINE)
    assert again.claim == first._replace(seconds=pytest.approx(first.seconds - 0.5))
    after = after_a_second(driver, again, again.claim)
    hear(after, *others, seconds=1.5)
    after.wait(0.5)
    hear(after, first, seconds=2.0, gateway="g1")
    assert told(after, **MINE).claim == first._replace(seconds=pytest.approx(first.seconds - 2.0))
    assert len(account(after).requests.claims) == 41


@pytest.mark.parametrize("over_first", [False, True])
@pytest.mark.parametrize("drawn_from", [False, True])
def test_a_claim_that_was_used_up_is_over_for_the_next_scheduler(over_first, drawn_from):
    """One gateway has heard of the claim, and another one that its client came in."""
    driver = used_up()
    refused = told(driver, **MINE)
    driver.clock.advance(refused.failure.retry_after)
    driver.enqueue("mine", **MINE)
    (place,) = driver.of(effects.SendPlaced)
    assert place.claims == (refused.claim.number,)
    over = refused.claim._replace(accounts=(), seconds=MAX_DEBT_SECONDS)
    after = successor(driver, requests_per_minute=GRANT)
    if drawn_from:
        after.enqueue("a")
    for claim in (over, refused.claim) if over_first else (refused.claim, over):
        hear(after, claim)
    after.enqueue("b")
    assert not account(after).requests.claims


def test_who_is_over_its_rate_waits_until_other_gateways_have_told():
    driver = used_up()
    others = told_others(driver, 14)
    mine = told(driver, **MINE)
    after = after_a_second(driver, mine, *others)
    after.enqueue("mine", gateway="g0", **MINE)
    after.enqueue("new", gateway="g0", **OTHERS)
    assert not refusal(after)
    after.clock.advance(LISTEN_SECONDS / 2)
    hear(after, mine.claim, gateway="g1", seconds=1.0 + LISTEN_SECONDS / 2)
    assert not placed(after)
    after.wait(LISTEN_SECONDS / 2)
    assert placed(after) == ["mine"]
    (refused,) = after.of(effects.SendRefused)
    assert refused.request == "new"
    assert refused.claim is not None
    assert refused.accounts


def test_those_that_wait_until_gateways_have_told_are_bounded(monkeypatch):
    monkeypatch.setattr(quota_gate, "MAX_WAITING", 5)
    monkeypatch.setattr(quota_gate, "DECIDED_AT_ONCE", 2)
    driver = used_up()
    refused = told(driver, **MINE)
    (level,) = refused.accounts
    after = after_a_second(driver, replace(refused, accounts=(level._replace(requests=-500),)), refused.claim)
    for number in range(8):
        after.enqueue(f"r{number}", prefix_hints=(number + 10,))
        assert len(refusal(after)) == (number >= 5)
    decided = []
    while after.scheduler.state.quotas.waiting:
        listened(after)
        decided.append(len(refusal(after)))
    assert decided == [2, 2, 1]


def test_those_that_have_ended_take_nobodys_turn_when_gateways_have_told(monkeypatch):
    monkeypatch.setattr(quota_gate, "DECIDED_AT_ONCE", 2)
    driver = used_up()
    refused = told(driver, **MINE)
    (level,) = refused.accounts
    after = after_a_second(driver, replace(refused, accounts=(level._replace(requests=-500),)), refused.claim)
    for number in range(8):
        after.enqueue(f"r{number}", prefix_hints=(number + 10,))
    for number in range(6):
        after.cancel(f"r{number}")
    listened(after)
    assert [refused.request for refused in after.of(effects.SendRefused)] == ["r6", "r7"]


def test_nothing_is_kept_for_those_whose_gateway_has_gone_meanwhile(monkeypatch):
    driver = used_up()
    refused = told(driver, **MINE)
    (level,) = refused.accounts
    after = after_a_second(driver, replace(refused, accounts=(level._replace(requests=-500),)), refused.claim)
    after.gateway("g1")
    for number in range(3):
        after.enqueue(f"r{number}", gateway="g1", prefix_hints=(number + 10,))
    monkeypatch.setattr(request_lifecycle, "ENDED_AT_ONCE", 0)
    after.send(events.GatewayDisconnected("g1"))
    listened(after)
    assert not refusal(after)
    assert len(account(after).requests.claims) == 1
    assert not after.scheduler.state.quotas.waiting


@pytest.mark.parametrize("drawn_from", [False, True])
def test_a_claim_that_is_over_leaves_nothing(drawn_from):
    driver = used_up()
    claim = told(driver, **MINE).claim
    after = successor(driver, requests_per_minute=GRANT)
    if drawn_from:
        after.enqueue("a")
    hear(after, claim)
    hear(after, claim._replace(accounts=(), seconds=60.0))
    assert not after.scheduler.state.quotas.told_claims


def test_what_others_were_told_is_kept_while_the_account_is_full():
    driver = used_up()
    told_others(driver, 200)
    for number in range(101):
        driver.finish(f"r{number}")
    driver.wait(12.0)
    for number in range(20):  # a few accounts are looked at with each
        driver.enqueue(f"s{number}", tenant=f"t{number}")
    came = 0
    while not refusal(driver):
        driver.enqueue(f"n{came}", **OTHERS)
        came += 1
    assert 60 < came < 90, "all but what the others were promised"


def test_what_gateways_say_of_its_own_claims_changes_nothing():
    driver = used_up()
    refused = told(driver, **MINE)
    hear(driver, refused.claim, seconds=0.0)
    assert len(account(driver).requests.claims) == 1
    assert told(driver, **OTHERS), "and it waits for nobody"


@pytest.mark.parametrize("drawn_from", [False, True])
def test_times_that_were_told_by_another_limit_keep_nobody_out(drawn_from):
    driver = used_up()
    others = told_others(driver, 40)
    after = successor(driver, requests_per_minute=GRANT // 10)
    if drawn_from:
        after.enqueue("a")
    hear(after, *others, seconds=0.0)
    after.enqueue("new", **OTHERS)
    assert placed(after) == ["new"]


def test_claims_of_a_key_are_known_before_anybody_comes_with_it():
    key = KeyAccount("abc", Limits(requests_per_minute=60))
    driver = with_limits()
    for number in range(11):
        driver.enqueue(f"r{number}", api_key=key)
    claim = told(driver, api_key=key, **MINE).claim
    after = successor(driver)
    hear(after, claim, seconds=0.5)
    after.enqueue("another", api_key=key, **OTHERS)
    assert [one.number for one in account(after).requests.claims.in_order] == [claim.number]


def test_claims_that_are_told_are_bounded(monkeypatch):
    driver = used_up()
    claim = told(driver, **MINE).claim
    after = successor(driver, requests_per_minute=GRANT)
    many = [claim._replace(number=number, content=number, requests=1e9) for number in range(MAX_CLAIMS + 10)]
    hear(after, *many, seconds=0.0)
    after.enqueue("a", **OTHERS)
    bucket = account(after).requests
    assert len(bucket.claims) == MAX_CLAIMS
    assert bucket.claims.amount == pytest.approx(MAX_CLAIMS * bucket.largest_take)
    monkeypatch.setattr(quotas, "MAX_TOLD_CLAIMS", 3)
    anew = successor(driver, requests_per_minute=GRANT)
    hear(anew, *many, seconds=0.0)
    anew.enqueue("a", **OTHERS)
    assert len(account(anew).requests.claims) == 3


def test_claims_that_no_scheduler_has_told_are_left_out():
    name = scheduler_pb2.AccountName(holder="tenant", name="acme")
    good = scheduler_pb2.Claim(number=7, content=1, seconds=2.0, requests=1, tokens=100, accounts=[name])
    levels = scheduler_pb2.AccountLevels(claims=[good])
    for wrong in (
        {"seconds": float("nan")},
        {"seconds": MAX_DEBT_SECONDS + 1},
        {"seconds": -CLAIM_SECONDS - 1},
        {"requests": -1.0},
        {"tokens": float("inf")},
        {"tokens": float("nan")},
        {"accounts": [scheduler_pb2.AccountName(holder="moon")]},
        {"accounts": 2 * [name]},
    ):
        one = levels.claims.add()
        one.CopyFrom(good)
        one.MergeFrom(scheduler_pb2.Claim(**wrong))
        if "accounts" in wrong:
            del one.accounts[0]
    event = conversion.serve_event("g0", scheduler_pb2.ServeUp(levels=levels))
    assert [claim.number for claim in event.claims] == [7]
    levels = scheduler_pb2.AccountLevels(claims=[good] * (MAX_CLAIMS_IN_MESSAGE + 1))
    event = conversion.serve_event("g0", scheduler_pb2.ServeUp(levels=levels))
    assert len(event.claims) == MAX_CLAIMS_IN_MESSAGE


def test_a_claim_is_the_same_when_a_gateway_has_kept_it():
    driver = used_up()
    refused = told(driver, **MINE)
    message = conversion.refuse(refused, 1).refused
    levels = scheduler_pb2.AccountLevels(claims=[message.claim])
    event = conversion.serve_event("g0", scheduler_pb2.ServeUp(levels=levels))
    assert event.claims == (refused.claim,)


def test_claims_that_everybody_is_too_late_for_keep_nobody_out_who_comes_first_after_a_start():
    driver = used_up()
    others = told_others(driver, 40)
    after = successor(driver, requests_per_minute=GRANT)
    hear(after, *others)
    after.wait(4.0 + CLAIM_SECONDS + 10.0)
    for number in range(90):
        after.enqueue(f"r{number}")
        assert placed(after), number


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("drawn_from", [False, True])
def test_who_was_told_a_later_time_has_only_that_one_in_all_schedulers(drawn_from, last_first):
    driver = used_up()
    first = told(driver, **MINE)
    account(driver).requests.give(-50, driver.clock())
    driver.clock.advance(first.failure.retry_after)
    last = told(driver, **MINE)
    assert last.claim == first.claim._replace(seconds=pytest.approx(5.0))
    after = successor(driver, requests_per_minute=GRANT)
    if drawn_from:
        after.enqueue("a")
    for claim in (last.claim, first.claim) if last_first else (first.claim, last.claim):
        hear(after, claim, seconds=0.0 if claim is last.claim else first.failure.retry_after)
    after.enqueue("b")
    (kept,) = account(after).requests.claims.in_order
    assert kept.at == pytest.approx(after.clock() + 5.0)
    after.enqueue("mine", **MINE)
    hear(after, last.claim, seconds=-5.0, gateway="g1")
    assert not account(after).requests.claims, "it has come in"


def test_claims_that_were_used_up_are_over_also_if_no_more_are_taken_in(monkeypatch):
    monkeypatch.setattr(quotas, "MAX_TOLD_CLAIMS", 1)
    driver = used_up()
    claim = told(driver, **MINE).claim
    after = successor(driver, requests_per_minute=GRANT)
    hear(after, claim)
    hear(after, claim._replace(accounts=(), seconds=MAX_DEBT_SECONDS), gateway="g1")
    after.enqueue("b")
    assert not account(after).requests.claims


CONTENT = """
from motet_scheduler.policy.quotas.quotas import content_of
from tests.scheduler.test_told_claims import used_up
driver = used_up()
print(content_of(next(iter(driver.scheduler.requests.values()))))
"""


def test_what_a_claim_is_for_is_the_same_in_all_processes():
    found = {
        subprocess.run(
            [sys.executable, "-c", CONTENT], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
