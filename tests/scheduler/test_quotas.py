"""Quotas: who is refused, who waits, what is given back, and what keeps its place."""

from math import ceil

import pytest

from motet.api.v1 import scheduler_pb2
from motet.domain import RequestId
from motet.runner_info import RequestClass
from motet_scheduler import conversion
from motet_scheduler.policy import effects, events, quota_gate
from motet_scheduler.policy.placement import PLACED_AT_ONCE
from motet_scheduler.policy.quota_gate import LET_IN_AT_ONCE
from motet_scheduler.policy.quotas.quotas import MAX_AGE
from motet_scheduler.policy.values import Estimate, KeyAccount, Limits
from tests.scheduler.builders import GROUP, PIRATE, SchedulerDriver, adapter, pool, ready

BATCH = RequestClass.BATCH


def with_limits(*, adapters=(), runner=True, **limits) -> SchedulerDriver:
    """A scheduler whose pool grants each tenant this much, with room for everything."""
    driver = ready()
    grant(driver, *adapters, **limits)
    if runner:
        driver.attach(pages=65_536, max_sequences=2048, adapter_slots=8, max_model_length=65_536)
    return driver


def grant(driver, *adapters, **limits):
    driver.send(events.CatalogReplaced((pool(limits=(("*", Limits(**limits)),)),), adapters))


def account(driver):
    (only,) = driver.scheduler.state.quotas.accounts.values()
    return only


def refusal(driver):
    return [refused.failure for refused in driver.of(effects.SendRefused)]


def placed(driver):
    return [placed.request for placed in driver.of(effects.SendPlaced)]


def test_without_limits_there_are_no_accounts():
    driver = with_limits()
    driver.enqueue("a")
    assert placed(driver) == ["a"]
    assert not driver.scheduler.state.quotas.accounts
    assert driver.scheduler.requests[RequestId("a")].draw is None


def test_ten_seconds_of_requests_come_at_once_and_the_next_is_told_when_to_come():
    driver = with_limits(requests_per_minute=60)
    for number in range(11):  # what is there may be used up, and the next leaves a debt
        driver.enqueue(f"r{number}")
        assert placed(driver)
    driver.enqueue("over")
    (failure,) = refusal(driver)
    assert failure.code == "rate_limit_exceeded"
    assert "enant acme is over its requestsPerMinute 60" in failure.message
    assert failure.retry_after == pytest.approx(1.0)
    driver.clock.advance(failure.retry_after)
    driver.enqueue("again")
    assert placed(driver) == ["again"]


def test_each_that_is_refused_is_told_another_time():
    driver = with_limits(requests_per_minute=60)
    for number in range(11):
        driver.enqueue(f"r{number}")
    hints = []
    for number in range(3):
        driver.enqueue(f"over{number}")
        hints.append(refusal(driver)[0].retry_after)
    assert hints == pytest.approx([1.0, 2.0, 3.0])
    for number in range(3):  # they come when they were told to, and get in
        driver.clock.advance(1.0)
        driver.enqueue(f"again{number}")
        assert placed(driver) == [f"again{number}"]


def test_those_that_never_come_again_make_nobody_wait_longer():
    driver = with_limits(requests_per_minute=60)
    for number in range(11):
        driver.enqueue(f"r{number}")
    for number in range(5):
        driver.enqueue(f"over{number}")
    driver.clock.advance(60)
    for number in range(11):
        driver.enqueue(f"later{number}")
        assert placed(driver)
    driver.enqueue("over")
    assert refusal(driver)[0].retry_after == pytest.approx(1.0)


def test_no_hint_is_longer_than_a_minute():
    driver = with_limits(requests_per_minute=6)
    for number in range(100):
        driver.enqueue(f"r{number}")
    assert refusal(driver)[0].retry_after == 60.0


def test_the_prompt_and_the_estimate_are_taken_and_what_was_not_computed_comes_back():
    driver = with_limits(tokens_per_minute=6000)
    driver.enqueue("a", prompt=200, max_tokens=1000, estimate=Estimate(q90=500))
    assert account(driver).tokens.level == pytest.approx(1000 - 700)
    driver.send(events.RequestFinished("g0", RequestId("a"), 1, output_tokens=100, reason="stop"))
    assert account(driver).tokens.level == pytest.approx(1000 - 300)


def test_an_answer_longer_than_its_estimate_is_charged_later():
    driver = with_limits(tokens_per_minute=6000)
    driver.enqueue("a", prompt=200, max_tokens=4000, estimate=Estimate(q90=100))
    driver.send(events.RequestFinished("g0", RequestId("a"), 1, output_tokens=3000, reason="stop"))
    assert account(driver).tokens.level == pytest.approx(1000 - 3200)
    driver.enqueue("b")
    assert refusal(driver)[0].retry_after == pytest.approx(22.0)


def test_without_an_estimate_max_tokens_is_taken():
    driver = with_limits(tokens_per_minute=6000)
    driver.enqueue("a", prompt=100, max_tokens=400, estimate=Estimate())
    assert account(driver).tokens.level == pytest.approx(1000 - 500)


def test_a_request_that_no_runner_got_costs_nothing():
    driver = with_limits(runner=False, requests_per_minute=60, tokens_per_minute=6000, concurrency=8)
    driver.enqueue("a", prompt=200)
    driver.cancel("a")
    only = account(driver)
    assert only.requests.level == pytest.approx(10)
    assert only.tokens.level == pytest.approx(1000)
    assert only.is_idle(driver.clock())


def test_a_request_whose_end_nobody_tells_keeps_its_estimate_charged():
    driver = with_limits(tokens_per_minute=6000)
    driver.enqueue("a", prompt=200, estimate=Estimate(q90=500), max_tokens=1000)
    driver.gateway()  # it comes back, and has no such request any more
    assert account(driver).tokens.level == pytest.approx(1000 - 700)
    assert account(driver).running == 0


def test_a_prompt_above_a_minutes_grant_is_refused_at_once_with_the_name_of_the_account():
    driver = with_limits(tokens_per_minute=100)
    for request_class in RequestClass:
        driver.enqueue("a", prompt=101, request_class=request_class)
        (failure,) = refusal(driver)
        assert failure.code == "rate_limit_exceeded"
        assert "tenant acme may use 100 in a minute (tokensPerMinute)" in failure.message
        assert failure.retry_after == 0.0
    assert account(driver).tokens.level == account(driver).tokens.depth


def test_over_its_concurrency_a_request_waits_and_is_told_why():
    driver = with_limits(concurrency=1)
    driver.enqueue("a")
    driver.enqueue("b")
    assert not placed(driver)
    (position,) = driver.of(effects.SendPosition)
    assert position.why == "tenant acme is over its concurrency 1"
    driver.enqueue("c")
    driver.finish("a")
    assert placed(driver) == ["b"]
    driver.finish("b")
    assert placed(driver) == ["c"]


def test_of_those_that_wait_the_most_urgent_and_then_the_oldest_comes_first():
    driver = with_limits(concurrency=1)
    driver.enqueue("a")
    driver.enqueue("batch", request_class=BATCH, age=100.0)
    driver.enqueue("young")
    driver.enqueue("old", age=5.0)
    order = []
    for _ in range(4):
        running = [name for name, request in driver.scheduler.requests.items() if not request.waiting]
        driver.finish(running[0])
        order += placed(driver)
    assert order == ["old", "young", "batch"]


def test_one_tenant_over_its_concurrency_delays_no_other():
    driver = with_limits(concurrency=1)
    for number in range(50):
        driver.enqueue(f"r{number}")
    driver.enqueue("other", tenant="zeta")
    assert placed(driver) == ["other"]


def test_a_batch_request_over_a_rate_waits_until_nothing_is_owed():
    driver = with_limits(requests_per_minute=60)
    for number in range(11):
        driver.enqueue(f"r{number}")
    driver.enqueue("batch", request_class=BATCH)
    assert not refusal(driver)
    assert driver.of(effects.SendPosition)[0].why == "tenant acme is over its requestsPerMinute 60"
    due = driver.scheduler.next_due()
    assert due <= driver.clock() + 1.0
    driver.wait(0.9)
    assert not placed(driver)
    driver.wait(0.1)
    assert placed(driver) == ["batch"]


def test_a_batch_request_comes_in_when_the_last_that_was_told_to_come_again_has_come():
    driver = with_limits(runner=False, requests_per_minute=30)
    for number in range(6):
        driver.enqueue(f"r{number}")
    driver.enqueue("over")
    assert refusal(driver)[0].retry_after == pytest.approx(2.0)
    driver.enqueue("batch", request_class=BATCH)
    driver.cancel("r0")  # nothing is owed any more, but one that has a claim may come until 4 s
    driver.wait(2.0)
    assert driver.scheduler.requests[RequestId("batch")].held
    driver.enqueue("again")
    assert not refusal(driver)
    assert not driver.scheduler.requests[RequestId("batch")].held


def test_a_request_that_waits_too_long_for_its_quota_is_told_so():
    driver = with_limits(concurrency=1)
    driver.enqueue("a")
    driver.enqueue("b", deadline=5.0)
    driver.wait(5.1)
    (failure,) = refusal(driver)
    assert failure.code == "deadline_exceeded"
    assert "5 seconds for its quota: tenant acme is over its concurrency 1" in failure.message


def test_a_request_keeps_its_deadline_when_its_quota_lets_it_in():
    driver = with_limits(concurrency=1)
    driver.enqueue("a")
    driver.enqueue("b", deadline=5.0)
    driver.detach()
    driver.clock.advance(3.0)
    driver.finish("a")
    assert driver.scheduler.requests[RequestId("b")].deadline_at == pytest.approx(driver.clock() + 2.0)


def test_more_than_a_bound_may_not_wait_for_one_account(monkeypatch):
    monkeypatch.setattr(quota_gate, "MAX_WAITING", 3)
    driver = with_limits(concurrency=1)
    for number in range(4):
        driver.enqueue(f"r{number}")
    driver.enqueue("too many")
    (failure,) = refusal(driver)
    assert failure.code == "rate_limit_exceeded"
    assert "Tenant acme has 3 requests that wait" in failure.message


def test_choices_of_one_call_are_one_request_and_have_one_prompt():
    driver = with_limits(requests_per_minute=60, tokens_per_minute=60_000)
    driver.enqueue("a", prompt=1000, choices=3, max_tokens=10)
    driver.enqueue("a.1", prompt=1000, choices=3, max_tokens=10, parent=RequestId("a"))
    driver.enqueue("a.2", prompt=1000, choices=3, max_tokens=10, parent=RequestId("a"))
    assert account(driver).requests.level == pytest.approx(9)
    assert account(driver).tokens.level == pytest.approx(10_000 - 1030)
    driver.finish("a")
    driver.finish("a.1")
    driver.finish("a.2")
    assert account(driver).tokens.level == pytest.approx(9_000)


def test_a_call_is_refused_whole_or_not_at_all():
    driver = with_limits(tokens_per_minute=6000)
    driver.enqueue("a", prompt=1500, choices=2, max_tokens=10)
    driver.enqueue("a.1", prompt=1500, choices=2, max_tokens=10, parent=RequestId("a"))
    assert placed(driver) == ["a.1"]


def test_an_adapters_limit_only_lowers_what_its_tenant_has():
    driver = with_limits(adapters=[adapter(limits=Limits(requests_per_minute=6))], requests_per_minute=60)
    how = {"digest": PIRATE, "adapter": "default/pirate"}
    driver.enqueue("a", **how)
    driver.enqueue("b", **how)
    driver.enqueue("over", **how)
    (failure,) = refusal(driver)
    assert "Adapter default/pirate is over its requestsPerMinute 6" in failure.message
    accounts = driver.scheduler.state.quotas.accounts.values()
    assert {str(one.id): one.requests.level for one in accounts} == {
        "tenant acme": pytest.approx(8),  # nothing was drawn for the one that was refused
        "adapter default/pirate": pytest.approx(-1),
    }


def test_no_other_tenant_of_a_shared_adapter_takes_the_time_of_one_that_asked_for_the_same():
    driver = with_limits(adapters=[adapter(limits=Limits(requests_per_minute=60))])
    how = {"digest": PIRATE, "adapter": "default/pirate"}
    for number in range(11):
        driver.enqueue(f"r{number}", **how)
    driver.enqueue("over", **how)
    assert refusal(driver)[0].retry_after == pytest.approx(1.0)
    driver.clock.advance(1.0)
    driver.enqueue("other", tenant="other", **how)
    assert refusal(driver)[0].retry_after == pytest.approx(1.0)
    driver.enqueue("again", **how)
    assert placed(driver) == ["again"]


def test_a_request_that_comes_again_is_charged_once_and_not_refused():
    driver = with_limits(runner=False, requests_per_minute=60)
    for number in range(11):
        driver.enqueue(f"r{number}")
    level = account(driver).requests.level
    driver.gateway()  # its stream broke: it enqueues again what waited
    driver.enqueue("r10")
    assert not refusal(driver)
    assert account(driver).requests.level >= level


def test_a_stream_that_goes_on_is_never_refused_for_its_quota():
    driver = with_limits(requests_per_minute=6)
    for number in range(3):
        driver.enqueue(f"r{number}")
    assert refusal(driver)
    driver.enqueue("stream", delivered=5)
    assert placed(driver) == ["stream"]


def test_a_lost_request_keeps_its_place_and_is_not_charged_again():
    driver = with_limits(requests_per_minute=60, concurrency=1)
    driver.enqueue("a")
    driver.lose("a")
    assert account(driver).requests.level == pytest.approx(9)
    assert account(driver).running == 1


def test_applying_limits_again_refills_nothing():
    driver = with_limits(requests_per_minute=60)
    for number in range(11):
        driver.enqueue(f"r{number}")
    for limit in (600, 6, 60):
        grant(driver, requests_per_minute=limit)
        driver.enqueue("over")
        assert refusal(driver)[0].retry_after >= 1.0


def test_raised_limits_let_those_in_that_wait_some_in_each_event():
    driver = with_limits(concurrency=1)
    for number in range(100):
        driver.enqueue(f"r{number}")
    grant(driver, concurrency=1000)
    count = len(placed(driver))
    some = min(LET_IN_AT_ONCE, PLACED_AT_ONCE)
    assert count == some
    for _ in range(ceil(100 / some)):
        driver.send(events.TryMore())
        count += len(placed(driver))
    assert count == 99
    assert not driver.scheduler.more_to_try


def test_limits_lowered_under_a_thousand_waiting_end_nobody():
    driver = with_limits(concurrency=500)
    for number in range(1000):
        driver.enqueue(f"r{number}")
    grant(driver, concurrency=1)
    assert not refusal(driver)
    for number in range(499):
        driver.finish(f"r{number}")
        assert not placed(driver)
    driver.finish("r499")
    assert placed(driver) == ["r500"]


def test_idle_accounts_are_forgotten():
    driver = with_limits(requests_per_minute=60)
    for number in range(200):
        driver.enqueue(f"r{number}", tenant=f"t{number}")
        driver.finish(f"r{number}")
    driver.clock.advance(60)
    for number in range(150):
        driver.enqueue(f"s{number}", tenant=f"u{number}")
        driver.finish(f"s{number}")
    names = driver.scheduler.state.quotas.accounts
    assert len(names) <= 150


def test_limits_come_with_the_catalog_and_levels_go_with_answers():
    driver = ready()
    limits = {"*": scheduler_pb2.Limits(requests_per_minute=60), "acme": scheduler_pb2.Limits(tokens_per_minute=600)}
    pools = [scheduler_pb2.PoolEntry(pool=GROUP, group=GROUP, limits=limits)]
    driver.send(conversion.sync_event(scheduler_pb2.SyncUp(snapshot=scheduler_pb2.CatalogSnapshot(pools=pools))))
    driver.attach()
    driver.enqueue("a", prompt=20, max_tokens=10)
    (effect,) = driver.of(effects.SendPlaced)
    (told,) = conversion.place(effect, 1).placed.accounts
    assert (told.holder, told.name, told.group) == ("tenant", "acme", GROUP)
    assert (told.requests_per_minute, told.tokens_per_minute) == (0, 600)
    assert told.tokens == pytest.approx(100 - 30)
    driver.enqueue("b", prompt=100, max_tokens=10)
    driver.enqueue("c")
    (effect,) = driver.of(effects.SendRefused)
    (told,) = conversion.refuse(effect, 1).refused.accounts
    assert told.tokens == pytest.approx(100 - 30 - 110)
    driver.enqueue("d", tenant="zeta")
    assert driver.of(effects.SendPlaced)[0].accounts[0].requests_per_minute == 60


def test_a_request_that_a_scheduler_before_has_let_in_is_not_refused():
    driver = with_limits(requests_per_minute=6)
    for number in range(3):
        driver.enqueue(f"r{number}")
    assert refusal(driver)
    driver.enqueue("before", admitted=True)
    assert placed(driver) == ["before"]


def told(driver):
    """What gateways have heard last of each account."""
    return [
        effect.accounts for effect in driver.effects if isinstance(effect, effects.SendPlaced | effects.SendRefused)
    ][-1]


def successor(driver, **limits):
    """A scheduler that starts a second later, and knows nothing."""
    after = SchedulerDriver(now=driver.clock() + 1.0, first_order=1000)
    after.gateway()
    grant(after, **limits)
    after.attach(pages=65_536, max_sequences=2048, adapter_slots=8, max_model_length=65_536)
    return after


def test_a_restart_refills_nothing():
    driver = with_limits(tokens_per_minute=6000)
    driver.enqueue("a", prompt=1800)
    after = successor(driver, tokens_per_minute=6000)
    after.send(events.LevelsTold("g0", tuple((level, 1.0) for level in told(driver))))
    after.enqueue("over")
    assert account(after).tokens.level == pytest.approx(1000 - 1864 + 100)
    assert refusal(after)[0].retry_after == pytest.approx(7.64)


def test_of_what_two_gateways_heard_the_last_counts_in_any_order():
    driver = with_limits(requests_per_minute=60)
    driver.enqueue("a")
    first = told(driver)
    for number in range(10):
        driver.enqueue(f"r{number}")
    last = told(driver)
    for order in ([(first, 3.0), (last, 1.0)], [(last, 1.0), (first, 3.0)]):
        after = successor(driver, requests_per_minute=60)
        for heard, age in order:
            after.send(events.LevelsTold("g0", tuple((level, age) for level in heard)))
        after.enqueue("b")
        after.enqueue("c")
        assert refusal(after)


def test_what_a_new_scheduler_let_in_before_it_heard_stays_used():
    driver = with_limits(requests_per_minute=60)
    for number in range(8):
        driver.enqueue(f"r{number}")
    heard = told(driver)
    after = successor(driver, requests_per_minute=60)
    for number in range(5):
        after.enqueue(f"s{number}")
    after.send(events.LevelsTold("g0", tuple((level, 1.0) for level in heard)))
    assert account(after).requests.level == pytest.approx(10 - 8 + 1 - 5)


def test_what_no_runner_had_is_charged_once_by_the_next_scheduler():
    driver = with_limits(runner=False, requests_per_minute=60)
    for number in range(3):
        driver.enqueue(f"r{number}")
    said = account(driver).told(driver.clock(), 1)
    assert (said.requests, said.unplaced_requests) == pytest.approx((7, 3))
    driver.attach(pages=65_536)
    said = account(driver).told(driver.clock(), 1)
    assert (said.requests, said.unplaced_requests) == pytest.approx((7, 0))
    after = successor(driver, requests_per_minute=60)
    unplaced = said._replace(unplaced_requests=3.0)
    after.send(events.LevelsTold("g0", ((unplaced, 0.0),)))
    for number in range(3):
        after.enqueue(f"r{number}", admitted=True)
    assert account(after).requests.level == pytest.approx(7)


def test_what_a_scheduler_hears_of_its_own_book_changes_nothing():
    driver = with_limits(requests_per_minute=60)
    driver.enqueue("a")
    heard = told(driver)
    for number in range(5):
        driver.enqueue(f"r{number}")
    level = account(driver).requests.level
    driver.send(events.LevelsTold("g0", tuple((one, 0.0) for one in heard)))
    assert account(driver).requests.level == level


def test_what_no_scheduler_before_can_have_said_any_more_keeps_nobody_out():
    """A minute after the start all that was owed then is paid."""
    driver = with_limits(requests_per_minute=600)
    driver.enqueue("a")
    (level,) = told(driver)
    driver.wait(MAX_AGE + 1)
    driver.send(events.LevelsTold("g1", ((level._replace(requests=-1e9, book=12345), 0.0),)))
    driver.enqueue("b")
    assert driver.where("b") == "r0"


def test_levels_that_are_no_numbers_are_left_out():
    good = scheduler_pb2.AccountLevel(holder="tenant", name="acme", tokens_per_minute=60, tokens=1, age_seconds=2)
    levels = scheduler_pb2.AccountLevels(accounts=[good])
    for wrong in ({"tokens": float("nan")}, {"age_seconds": -1.0}, {"requests": float("inf")}, {"holder": "moon"}):
        one = levels.accounts.add()
        one.CopyFrom(good)
        for name, value in wrong.items():
            setattr(one, name, value)
    event = conversion.serve_event("g0", scheduler_pb2.ServeUp(levels=levels))
    assert [(level.name, age) for level, age in event.levels] == [("acme", 2.0)]


def test_a_key_has_an_account_of_its_own_on_all_pools():
    driver = with_limits(requests_per_minute=600)
    key = KeyAccount("abc", Limits(requests_per_minute=6))
    for number in range(2):
        driver.enqueue(f"r{number}", api_key=key)
        assert placed(driver)
    driver.enqueue("over", api_key=key)
    assert "API key abc is over its requestsPerMinute 6" in refusal(driver)[0].message
    driver.enqueue("another key")
    assert placed(driver) == ["another key"]
    driver.enqueue("raised", api_key=KeyAccount("abc", Limits(concurrency=1)))
    assert placed(driver) == [], "two that came with it are running"


def test_a_raised_limit_of_a_key_lets_in_those_that_wait():
    driver = ready()
    driver.attach()
    for number in range(3):
        driver.enqueue(f"r{number}", api_key=KeyAccount("abc", Limits(concurrency=1)))
    driver.enqueue("r3", api_key=KeyAccount("abc", Limits(concurrency=4)))
    assert sorted(placed(driver)) == ["r1", "r2", "r3"]


def test_a_tenant_that_splits_into_a_thousand_keys_has_its_grant_once():
    driver = with_limits(requests_per_minute=60)
    came_in = 0
    for number in range(1000):
        driver.enqueue(f"r{number}", api_key=KeyAccount(f"k{number}", Limits(requests_per_minute=60)))
        came_in += len(placed(driver))
    assert came_in == 11
    assert len(driver.scheduler.state.quotas.accounts) < 50


def test_what_a_gateway_says_of_a_key_reaches_its_account():
    limits = scheduler_pb2.Limits(tokens_per_minute=60, concurrency=2)
    key = scheduler_pb2.KeyAccount(id="abc", limits=limits)
    up = scheduler_pb2.ServeUp(enqueue=scheduler_pb2.Enqueue(request="a", key=key))
    expected = KeyAccount("abc", Limits(tokens_per_minute=60, concurrency=2))
    assert conversion.serve_event("g0", up).api_key == expected
    hello = scheduler_pb2.GatewayHello(live=[scheduler_pb2.LiveRequest(request="a", key=key)])
    assert conversion.gateway_connected(hello).live[0].api_key == expected
