"""Tenants get shares by their weights, and no trick gets more."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count, repeat
from math import inf, nan
from random import Random

import pytest

from motet.domain import Digest, InstanceName, RequestId
from motet.runner_info import RequestClass
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.class_turns import ClassTurns
from motet_scheduler.policy.shares import MAX_LAG, MAX_RESTING, SLACK, Shares
from motet_scheduler.policy.token_costs import TokenCosts
from motet_scheduler.policy.values import Estimate, KeyAccount, Limits
from tests.scheduler.builders import GROUP, PIRATE, adapter, entry, pool, ready
from tests.scheduler.load import Ask, Load


def ordinary() -> Iterator[Ask]:
    return repeat(Ask())


BATCH = {"request_class": RequestClass.BATCH}


def counters(driver) -> dict[str, float]:
    (shares,) = [one.shares for one in driver.scheduler.queues[GROUP].class_queues.values() if len(one.shares)]
    return {share.tenant: share.counter + share.owed for share in shares}


@pytest.mark.parametrize("lengths", ["equal", "random"])
def test_tenants_get_shares_by_their_weights(lengths):
    load, chance = Load(max_sequences=32), Random(1)
    load.driver.state(pools=(pool(weights=(("b", 2), ("c", 5))),))

    def asks() -> Iterator[Ask]:
        while True:
            answer = 20 if lengths == "equal" else 1 + int(chance.expovariate(1 / 20))
            yield Ask(prompt=chance.randrange(10, 50), answer=answer, max_tokens=1000)

    for tenant in "abc":
        load.tenant(tenant, asks, backlog=60)
    load.run(300)  # until the mean of answers is known
    load.spent.clear()
    load.run(2000)
    assert [load.share(tenant) for tenant in "abc"] == pytest.approx([1 / 8, 2 / 8, 5 / 8], rel=0.03)


def test_other_weights_hold_for_tenants_that_wait_already():
    load = Load(max_sequences=32)
    for tenant in "ab":
        load.tenant(tenant, ordinary, backlog=60)
    load.run(100)
    load.driver.state(pools=(pool(weights=(("b", 3),)),))
    load.spent.clear()
    load.run(1000)
    assert load.share("b") == pytest.approx(3 / 4, rel=0.03)


def test_a_tenant_with_many_old_requests_does_not_delay_one_with_a_single_younger_one():
    driver = ready()
    driver.attach(max_sequences=1)
    driver.enqueue("runs", tenant="many")
    for n in range(9):
        driver.enqueue(f"many{n}", tenant="many")
    driver.enqueue("single", tenant="single")
    driver.finish("runs")
    driver.finish("many0")
    assert driver.where("single") == "r0"


def test_a_longer_answer_than_expected_is_paid_with_the_next_charge_and_a_shorter_one_is_given_back():
    driver = ready()
    driver.attach()
    for tenant in ("longer", "shorter", "as expected"):
        driver.enqueue(f"{tenant} runs", tenant=tenant)
        driver.enqueue(tenant, tenant=tenant, prompt=10, max_tokens=100, estimate=Estimate(q50=50))
    before = counters(driver)
    for tenant, tokens in (("longer", 100), ("shorter", 1), ("as expected", 50)):
        driver.send(events.RequestFinished("g0", RequestId(tenant), 1, tokens))
    after = counters(driver)
    assert {tenant: after[tenant] - before[tenant] for tenant in before} == {
        "longer": 100.0,
        "shorter": -98.0,
        "as expected": 0.0,
    }
    driver.enqueue("next", tenant="shorter", prompt=10, max_tokens=1)
    assert counters(driver)["shorter"] == before["shorter"] - 98 + 12


@pytest.mark.parametrize(
    ("mean", "charged"), [(0.0, 20), (30.5, 30.5), (1e9, 100), (inf, 100), (nan, 100), (-5.0, 1), (1e-9, 1)]
)
def test_an_answer_is_charged_by_its_expected_length_and_at_most_by_what_it_may_have(mean, charged):
    driver = ready()
    driver.attach()
    driver.enqueue("a", prompt=10, max_tokens=100, estimate=Estimate(q50=20, mean=mean))
    assert counters(driver)["acme"] == 10 + 2 * charged


def test_cached_pages_of_a_prompt_and_the_prompt_of_further_choices_are_free():
    driver = ready()
    driver.attach()
    driver.report(cached=(1, 2))
    driver.enqueue("first", prompt=100, max_tokens=1, prefix_hints=(1, 2, 3), choices=2)
    assert counters(driver) == {"acme": 100 - 32 + 2}
    driver.enqueue("second", prompt=100, max_tokens=1, parent=RequestId("first"), choices=2)
    assert counters(driver) == {"acme": 100 - 32 + 2 + 2}


def test_a_hint_of_a_larger_page_counts_the_blocks_before_it():
    """The runner's pages have 32 tokens: it knows the hints of every second block."""
    driver = ready()
    driver.attach(page_tokens=32)
    driver.report(cached=(2, 4))
    driver.enqueue("first", prompt=100, max_tokens=1, prefix_hints=(1, 2, 3))
    assert counters(driver) == {"acme": 100 - 32 + 2}


def test_the_prompt_of_a_further_choice_is_charged_where_none_ran():
    driver = ready()
    for name in ("r0", "r1"):
        driver.attach(name, max_sequences=1)
    driver.enqueue("first", prompt=100, max_tokens=1, choices=2)
    driver.enqueue("second", prompt=100, max_tokens=1, parent=RequestId("first"), choices=2)
    assert counters(driver) == {"acme": 2 * (100 + 2)}


def test_a_request_that_loses_its_runner_is_charged_once_and_keeps_its_turn():
    driver = ready()
    driver.attach("r0", max_sequences=1)
    driver.enqueue("first", tenant="a")
    for n in range(3):
        driver.enqueue(f"b{n}", tenant="b")
    before = counters(driver)
    driver.lose("first", delivered=7)
    assert driver.where("b0") == "r0", "the request leaves its runner alone for a moment"
    driver.wait(1)
    driver.finish("b0")
    assert driver.where("first") == "r0"
    assert counters(driver)["a"] == before["a"]


def test_of_one_tenant_what_lost_its_runner_goes_before_an_older_one_that_had_no_place():
    """A client reads it. The older one came late, as its quota held it, and is too large for the room."""
    driver = ready()
    driver.attach("r0", pages=20)
    driver.enqueue("runs", tenant="u", prompt=150, max_tokens=10)
    driver.enqueue("read", tenant="t", prompt=16, max_tokens=16)
    driver.enqueue("older", tenant="t", prompt=200, max_tokens=10, age=60)
    driver.lose("read", delivered=7)
    driver.wait(1)
    assert not driver.where("older")
    assert driver.where("read") == "r0"


def test_who_comes_back_starts_at_the_lowest_counter_of_those_that_are_there():
    load = Load()
    load.tenant("b", ordinary)
    load.tenant("a", lambda: iter([Ask()]))
    load.run(1000)
    load.ask("a", Ask())
    there = counters(load.driver)
    assert there["a"] == pytest.approx(there["b"], abs=100)


def test_who_was_given_more_does_not_lose_that_by_going_away_for_a_moment():
    driver = ready()
    driver.attach(max_sequences=2)
    driver.enqueue("b", tenant="b")
    driver.enqueue("a", tenant="a", prompt=500)
    driver.finish("a")
    driver.enqueue("b too", tenant="b")
    driver.enqueue("a again", tenant="a")
    driver.enqueue("b at last", tenant="b", prompt=1)
    driver.finish("b")
    assert driver.where("b at last") == "r0"


def test_who_asks_for_less_than_his_share_does_not_save_up_without_end():
    """A tenant that always has a small request can't take everything for as long as others did."""
    load = Load(runners=2)
    load.tenant("b", lambda: repeat(Ask(prompt=160, answer=160, max_tokens=640)))
    for _ in range(100):
        load.ask("a", Ask(prompt=1, answer=100, max_tokens=100))
        load.run(100)
    load.ask("a", Ask())
    behind = counters(load.driver)
    assert 0 < behind["b"] - behind["a"] < MAX_LAG + 10_000
    load.spent.clear()
    load.tenant("a", ordinary)
    load.run(5_000)
    assert load.spent["a"] - load.spent["b"] < MAX_LAG + 10_000


def test_what_is_given_back_for_answers_that_are_given_up_is_no_fortune():
    load = Load(pages=100_000, max_sequences=256)
    for tenant in "ab":
        load.ask(tenant, Ask(answer=5000, max_tokens=5000))  # both stay active
    for _ in range(200):
        load.ask("a", Ask(answer=1, max_tokens=2000, how={"estimate": Estimate(q50=2000)}))
    load.run(2)
    for tenant in "ab":
        load.tenant(tenant, ordinary, backlog=50)
    load.run(300)
    assert abs(load.spent["a"] - load.spent["b"]) < MAX_LAG + 20_000


def test_what_was_charged_by_one_weight_is_given_back_by_the_same():
    driver = ready()
    driver.state(pools=(pool(weights=(("a", 100),)),))
    driver.attach(pages=10_000)
    driver.enqueue("stays", tenant="a", max_tokens=1)
    driver.enqueue("half", tenant="a", max_tokens=1000, estimate=Estimate(q50=1000))
    before = counters(driver)["a"]
    driver.state(pools=(pool(weights=(("a", 1),)),))
    driver.send(events.RequestFinished("g0", RequestId("half"), 1, 500))
    assert counters(driver)["a"] == pytest.approx(before - 2 * 500 / 100)


def test_one_request_that_can_not_run_saves_nothing_up():
    """It waits for the only runner of its adapter, while others use the other ones."""
    load = Load(pages=40, max_sequences=1)
    driver = load.driver
    driver.state(adapter("pirate", max_replicas=1))
    driver.certify("pirate", PIRATE)
    pirate = {"digest": PIRATE, "adapter": "default/pirate"}
    load.ask("b", Ask(answer=100_000, how=pirate))
    driver.attach("r1", pages=10_000, max_sequences=8)
    load.ask("b", Ask(how=pirate))
    load.tenant("a", lambda: repeat(Ask(prompt=500, answer=500, max_tokens=2000)))
    load.run(5_000)
    load.spent.clear()
    load.tenant("a", ordinary)
    load.tenant("b", ordinary)
    load.run(5_000)
    assert load.spent["b"] - load.spent["a"] < MAX_LAG + 10_000


def test_tenants_that_have_gone_leave_nothing():
    shares = Shares(TokenCosts(2.0))
    stays = shares.begin("stays", 1.0)
    for n in range(2 * MAX_RESTING):
        shares.end(shares.begin(f"t{n}", 1.0))
    assert not shares.resting
    for n in range(2 * MAX_RESTING):
        gone = shares.begin(f"t{n}", 1.0)
        gone.counter = 10.0
        shares.end(gone)
    assert len(shares.resting) <= MAX_RESTING
    assert len(shares.heap) <= SLACK + 4
    shares.end(stays)
    assert not shares.resting
    assert not shares.heap


def test_after_a_restart_all_counters_are_equal_and_what_runs_is_not_charged_again():
    driver = ready()
    driver.attach(live=(entry("q0", 2), entry("q1", 2)))
    driver.gateway("g0", driver.live("q0", tenant="a"), driver.live("q1", tenant="b"))
    assert counters(driver) == {"a": 0.0, "b": 0.0}
    driver.send(events.RequestFinished("g0", RequestId("q0"), 1, 64))
    driver.enqueue("next", tenant="a")
    assert counters(driver)["a"] == 16 + 2 * 64


def test_what_runs_at_a_restart_is_not_charged_again_when_it_moves():
    driver = ready()
    driver.attach(live=(entry("q0", 2),))
    driver.attach("r1")
    driver.gateway("g0", driver.live("q0", tenant="a"))
    driver.lose("q0", delivered=7)
    driver.wait(1)
    driver.enqueue("q1", epoch=1, delivered=7, tenant="b")  # its runner was lost, too
    assert driver.where("q0")
    assert driver.where("q1")
    assert counters(driver) == {"a": 0.0, "b": 0.0}


# ----------------------------------------------------------------------------------------- tricks


def many_adapters() -> Iterator[Ask]:
    for n in count():
        digest = Digest(f"sha256:{n % 1000:064}")
        yield Ask(how={"digest": digest, "adapter": f"default/a{n % 1000}"})


def many_keys() -> Iterator[Ask]:
    for n in count():
        yield Ask(how={"api_key": KeyAccount(f"k{n % 1000}", Limits(concurrency=100))})


def as_large_as_a_runner() -> Iterator[Ask]:
    return repeat(Ask(prompt=16, answer=500, max_tokens=1600 - 16))


def many_choices() -> Iterator[Ask]:
    return repeat(Ask(choices=128))


def cancelled_after_the_prompt() -> Iterator[Ask]:
    return repeat(Ask(prompt=500, answer=1, max_tokens=1000, how={"estimate": Estimate(q50=1)}))


def one_token() -> Iterator[Ask]:
    return repeat(Ask(prompt=16, answer=1, max_tokens=1))


def a_million_tokens() -> Iterator[Ask]:
    return repeat(Ask(prompt=16, answer=16, max_tokens=1_000_000))


def wrong_estimates() -> Iterator[Ask]:
    return repeat(Ask(prompt=16, answer=200, max_tokens=1000, how={"estimate": Estimate(q50=1)}))


@pytest.mark.parametrize(
    "trick",
    [
        many_adapters,
        many_keys,
        as_large_as_a_runner,
        many_choices,
        cancelled_after_the_prompt,
        one_token,
        a_million_tokens,
        wrong_estimates,
    ],
)
def test_no_trick_gets_a_larger_share(trick: Callable[[], Iterator[Ask]]):
    load = Load(pages=100, adapter_slots=8, max_model_length=1 << 21)
    if trick is many_adapters:
        load.driver.state(*(adapter(f"a{n}", max_replicas=n % 3) for n in range(1000)))
    load.tenant("cheats", trick, backlog=100)
    load.tenant("honest", ordinary, backlog=20)
    load.run(3_000)
    assert load.spent["honest"] > 0.95 * load.spent["cheats"]


# ----------------------------------------------------------------------------------------- large requests


@pytest.mark.parametrize("runners", [1, 2])
@pytest.mark.parametrize("others", [("t",), ("t", "u"), ("u",)])
def test_a_large_request_does_not_starve_behind_small_ones_that_always_wait(others, runners):
    """Also not behind those of its own tenant, which is charged for each of them."""
    load = Load(pages=100, max_sequences=64, runners=runners)
    for tenant in others:
        load.tenant(tenant, lambda: repeat(Ask(prompt=16, answer=30, max_tokens=40, how=BATCH)))
    load.run(1)
    load.ask("t", Ask(prompt=1500, answer=10, max_tokens=64, how=BATCH))
    load.run(500)
    assert load.largest["t"] == 1500


# ----------------------------------------------------------------------------------------- classes


def of(request_class: RequestClass) -> Callable[[], Iterator[Ask]]:
    return lambda: repeat(Ask(how={"request_class": request_class}))


def test_a_tenant_with_requests_in_several_classes_gets_no_larger_share():
    load = Load()
    load.tenant("a", of(RequestClass.INTERACTIVE))
    load.tenant("a too", of(RequestClass.STANDARD), of="a")
    load.tenant("b", of(RequestClass.INTERACTIVE))
    load.run(3_000)
    assert load.spent["b"] == pytest.approx(load.spent["a"] + load.spent["a too"], rel=0.05)


def test_who_was_given_much_in_a_more_urgent_class_gets_places_in_another_soon_after():
    load = Load()
    load.tenant("a", lambda: repeat(Ask(how={"request_class": RequestClass.INTERACTIVE}), 2000))
    load.tenant("a too", of(RequestClass.STANDARD), of="a")
    load.tenant("c", of(RequestClass.STANDARD))
    load.run(4_500)
    assert load.placed["a"] == 2000
    load.run(3_000)
    assert load.placed["a too"] > 200


@pytest.mark.parametrize("max_sequences", [8, 32])
def test_each_class_gets_its_floor_while_more_urgent_requests_wait(max_sequences):
    """Also where runners keep last places, which the most urgent class may always have: its tenant is alone in it."""
    load = Load(max_sequences=max_sequences)
    load.tenant("interactive", of(RequestClass.INTERACTIVE))
    load.tenant("standard", of(RequestClass.STANDARD))
    load.tenant("batch", of(RequestClass.BATCH))
    load.run(3_000)
    parts = {tenant: placed / load.placed.total() for tenant, placed in load.placed.items()}
    assert parts == pytest.approx({"interactive": 0.87, "standard": 0.1, "batch": 0.03}, abs=0.005)


def test_a_large_request_gets_a_floor_of_no_more_than_one_place():
    """It could not use its class's floor for long."""
    turns = ClassTurns({RequestClass.BATCH: 0.03})
    for _ in range(200):
        turns.placed(RequestClass.INTERACTIVE, {RequestClass.BATCH})
    assert turns.early() == [RequestClass.BATCH]
    turns.placed(RequestClass.BATCH, {RequestClass.BATCH})
    assert turns.early() == []


def test_a_class_gets_its_floor_beside_requests_that_come_whenever_a_place_is_free():
    """Where none of them waits, when it is decided about the place."""
    driver = ready()
    driver.attach(pages=1000, max_sequences=32)
    for n in range(32):
        driver.enqueue(f"i{n}", tenant="a", request_class=RequestClass.INTERACTIVE)
    for n in range(40):
        driver.enqueue(f"s{n}", tenant="b")
    placed = 0
    for n in range(200):
        driver.finish(next(one.id for one in driver.scheduler.requests.values() if not one.waiting))
        placed += any(one.request.startswith("s") for one in driver.of(effects.SendPlaced))
        driver.enqueue(f"i{n + 32}", tenant="a", request_class=RequestClass.INTERACTIVE)
        placed += any(one.request.startswith("s") for one in driver.of(effects.SendPlaced))
    assert 18 <= placed <= 20


@pytest.mark.parametrize("together", [1, 16])
def test_each_class_gets_its_floor_where_many_requests_end_together(together):
    driver = ready()
    driver.scheduler.check = lambda: None  # it counts all requests
    driver.attach(pages=4000, max_sequences=256)
    numbers, placed = count(), Counter[str]()

    def note() -> None:
        placed.update(one.request[0] for one in driver.of(effects.SendPlaced))

    def ask(tenant: str, request_class: RequestClass, times: int) -> None:
        for _ in range(times):
            how = {"request_class": request_class, "prompt": 16, "max_tokens": 16}
            driver.enqueue(f"{tenant}{next(numbers)}", tenant=tenant, **how)
            note()

    ask("i", RequestClass.INTERACTIVE, 316)
    ask("j", RequestClass.INTERACTIVE, 60)
    ask("s", RequestClass.STANDARD, 80)
    placed.clear()
    for _ in range(640 // together):
        running = [(one.id, one.epoch) for one in driver.scheduler.requests.values() if not one.waiting][:together]
        driver.send(events.SequencesEnded(InstanceName("r0"), "1", tuple(running)))
        note()
        while driver.scheduler.more_to_try:
            driver.send(events.TryMore())
            note()
        for request, epoch in running:
            driver.finish(request, epoch)
            note()
        for tenant in "ij":
            ask(tenant, RequestClass.INTERACTIVE, together - together // 2)
    assert placed["s"] / placed.total() > 0.09, placed


def test_a_class_of_which_nobody_waits_any_more_is_not_late():
    driver = ready()
    driver.attach("r0", pages=1000, max_sequences=32, max_model_length=32768)
    for n in range(60):
        driver.enqueue(f"i{n}", tenant="a", request_class=RequestClass.INTERACTIVE)
    driver.enqueue("large", tenant="b", prompt=1, max_tokens=990 * 16)
    headroom = driver.scheduler.queues[GROUP].headroom
    for n in range(20):
        driver.finish(f"i{n}")
    assert headroom.standing().late == (RequestClass.STANDARD,)
    driver.cancel("large")
    driver.enqueue("runs", tenant="b", request_class=RequestClass.INTERACTIVE)
    assert headroom.standing().late == ()


def test_a_class_whose_turn_it_is_may_have_the_last_places_once_it_was_passed():
    turns = ClassTurns({RequestClass.STANDARD: 0.5})
    for late in ((), (), (RequestClass.STANDARD,), (RequestClass.STANDARD,)):
        turns.placed(RequestClass.INTERACTIVE, {RequestClass.STANDARD})
        assert turns.late() == late
    turns.placed(RequestClass.STANDARD, {RequestClass.STANDARD})
    assert (turns.early(), turns.late()) == ([RequestClass.STANDARD], ())


def test_a_class_that_nobody_waits_in_is_owed_nothing():
    turns = ClassTurns({RequestClass.STANDARD: 0.5})
    turns.placed(RequestClass.INTERACTIVE, {RequestClass.STANDARD})
    turns.placed(RequestClass.INTERACTIVE, ())
    turns.placed(RequestClass.INTERACTIVE, {RequestClass.STANDARD})
    assert turns.early() == []
