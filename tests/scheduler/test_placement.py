"""Which runner takes a request, and the reasons that waiting requests get (PU-12)."""

from itertools import count

import pytest

from motet.domain import BASE, Digest, InstanceName, RequestId
from motet.errors import TOO_FEW_PAGES
from motet.runner_info import Failure, RequestClass, Tier
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.placement import LOOKED_AT_ONCE, PLACED_AT_ONCE, SEARCHED_AT_ONCE
from motet_scheduler.policy.queue import MAX_FREED
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import GroupName
from motet_scheduler.policy.waiting_heads import Waiting
from motet_scheduler.policy.waiting_reasons import REPLACED, explain
from tests.scheduler.builders import (
    GROUP,
    PIRATE,
    POET,
    SchedulerDriver,
    adapter,
    check_order,
    entry,
    pool,
    ready,
    reserved,
    resident,
)


def test_the_fullest_runner_that_fits_takes_it():
    driver = ready()
    driver.attach("r0")
    driver.attach("r1", live=(entry("x", 10),))
    driver.enqueue("a")
    assert driver.where("a") == "r1"


def test_a_full_runner_is_left_for_the_next_fullest():
    driver = ready()
    driver.attach("r0", pages=12, live=(entry("x", 10),))
    driver.attach("r1")
    driver.enqueue("a", max_tokens=64)
    assert driver.where("a") == "r1"


@pytest.mark.parametrize(
    ("there", "elsewhere"), [(Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DISK), (Tier.DISK, Tier.NONE)]
)
def test_of_equally_full_runners_the_one_with_the_adapter_is_chosen(there, elsewhere):
    driver = ready()
    driver.attach("r0", resident=resident(PIRATE, there))
    driver.attach("r9", resident={} if elsewhere is Tier.NONE else resident(PIRATE, elsewhere))
    driver.state(adapter())
    driver.certify()
    driver.enqueue("a", digest=PIRATE)
    assert driver.where("a") == "r0"


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("running", [7, 8])
def test_a_busy_runner_that_has_the_adapter_is_chosen_before_a_fuller_one(running, tier):
    """Busy: one in eight of its places is in use, here 8 of 64. On the host the adapter would be loaded, too."""
    driver = ready()
    driver.attach("r0", resident=resident(PIRATE, tier), live=tuple(entry(f"x{n}", 1) for n in range(running)))
    driver.attach("r1", live=tuple(entry(f"y{n}", 1) for n in range(9)))
    driver.state(adapter())
    driver.certify()
    driver.enqueue("a", digest=PIRATE)
    assert driver.where("a") == ("r0" if running == 8 and tier is Tier.DEVICE else "r1")


def test_a_busy_runner_that_loads_the_adapter_is_chosen_before_a_fuller_one():
    driver = ready()
    driver.attach("r0", max_sequences=8)
    driver.state(adapter())
    driver.certify()
    driver.enqueue("a", digest=PIRATE)
    driver.attach("r1", live=(entry("x", 1), entry("y", 1)))
    driver.enqueue("b", digest=PIRATE)
    assert driver.where("b") == "r0"


@pytest.mark.parametrize(
    ("digest", "running", "chosen"),
    [(POET, 2, "r1"), (PIRATE, 2, "r0"), (BASE, 2, "r0"), (POET, 0, "r0")],
    ids=["another adapter", "its adapter", "none", "no other one is busy"],
)
def test_the_last_place_of_a_busy_runner_is_left_to_those_whose_adapter_it_has(digest, running, chosen):
    driver = ready()
    live = tuple(entry(f"x{n}", 1) for n in range(7))
    driver.attach("r0", max_sequences=8, resident=resident(PIRATE), live=live)
    driver.attach("r1", max_sequences=8, live=tuple(entry(f"y{n}", 1) for n in range(running)))
    driver.state(adapter(), adapter("poet"))
    driver.certify()
    driver.certify("poet", POET)
    driver.enqueue("a", digest=digest)
    assert driver.where("a") == chosen


def test_a_request_without_adapter_goes_to_the_fullest_runner_though_only_another_one_is_busy():
    driver = ready()
    driver.attach("r0", max_sequences=8, live=(entry("w", 1),))
    driver.attach("r1", live=(entry("x", 1), entry("y", 1)))
    driver.enqueue("a")
    assert driver.where("a") == "r1"


def test_a_cached_prefix_counts_before_the_adapter():
    driver = ready()
    driver.attach("r0", max_sequences=8, resident=resident(PIRATE), live=(entry("x", 1), entry("y", 1)))
    driver.attach("r1")
    driver.report("r1", cached=(1, 2))
    driver.state(adapter())
    driver.certify()
    driver.enqueue("a", digest=PIRATE, prefix_hints=(1, 2))
    assert driver.where("a") == "r1"


def test_of_equal_runners_the_highest_name_is_chosen():
    driver = ready()
    for name in ("r0", "r2", "r1"):
        driver.attach(name)
    driver.enqueue("a")
    assert driver.where("a") == "r2"


def test_the_adapter_is_ordered_before_the_request_is_placed():
    driver = ready()
    driver.attach()
    driver.state(adapter())
    driver.certify(bytes=4096)
    driver.enqueue("a", digest=PIRATE)
    order, expect, place = [
        effect
        for effect in driver.effects
        if isinstance(effect, effects.EnsureAdapter | effects.ExpectRequest | effects.SendPlaced)
    ]
    assert (order.expected_digest, order.source) == (PIRATE, "file:///adapters/pirate")
    assert expect.digest == PIRATE
    assert place.promise.adapter_bytes == 4096


def test_an_adapter_that_is_on_its_way_is_not_ordered_twice():
    driver = ready()
    driver.attach()
    driver.state(adapter())
    driver.certify()
    driver.enqueue("a", digest=PIRATE)
    driver.enqueue("b", digest=PIRATE)
    assert not driver.of(effects.EnsureAdapter)


def test_a_request_waits_while_all_adapter_slots_are_in_use():
    driver = ready()
    driver.attach(adapter_slots=1)
    driver.state(adapter(), adapter("poet"))
    driver.certify()
    driver.certify("poet", POET)
    driver.enqueue("a", digest=PIRATE)
    driver.enqueue("b", digest=POET)
    assert [effect.why for effect in driver.of(effects.SendPosition)] == ["all adapter slots are in use"]
    driver.enqueue("base", tenant="other")
    assert driver.where("base") == "r0", "the base model needs no slot"
    driver.finish("a")
    assert driver.where("b") == "r0"


def test_tenants_that_wait_for_an_adapter_slot_hold_back_nobody_behind_them():
    driver = ready(tenants_examined=2)
    driver.attach(adapter_slots=1, max_sequences=2)
    driver.state(adapter(), adapter("poet"))
    driver.certify()
    driver.certify("poet", POET)
    driver.enqueue("a", digest=PIRATE)
    driver.enqueue("busy", tenant="b")
    for n in range(5):
        driver.enqueue(f"poet{n}", digest=POET, tenant=f"t{n}")
    driver.enqueue("pirate", digest=PIRATE, tenant="later")
    driver.enqueue("base", tenant="last")
    driver.finish("busy")
    assert driver.where("pirate") == "r0"
    driver.finish("pirate")
    assert driver.where("base") == "r0", "the base model needs no slot"
    driver.finish("a")
    assert driver.where("poet0") == "r0"


def few_pages_for_many_tenants(driver, *, digest=BASE):
    """Each lacks pages, and a small request is behind them."""
    for n in range(5):
        driver.enqueue(f"large{n}", tenant=f"t{n}", digest=digest, prompt=144, max_tokens=48)
    driver.enqueue("small", tenant="later", digest=digest, prompt=16, max_tokens=48)
    assert driver.where("small") == ""


def test_large_requests_of_many_tenants_hold_back_no_small_one_behind_them():
    driver = ready(tenants_examined=2)
    driver.attach(pages=16)
    for n in range(4):
        driver.enqueue(f"runs{n}", prompt=16, max_tokens=48)
    few_pages_for_many_tenants(driver)
    driver.finish("runs0")
    assert driver.where("small") == "r0"


def test_what_a_request_needs_is_known_for_runners_of_each_size():
    """On the small runner the large requests never fit."""
    driver = ready(tenants_examined=2)
    driver.attach("large", pages=16, live=(entry("x", 16),))
    driver.attach("small", pages=8, live=(entry("y", 8),))
    few_pages_for_many_tenants(driver)
    driver.report("large", entry("x", 4))
    assert driver.where("large0") == "large"
    assert driver.where("small") == ""
    driver.report("small", entry("y", 4))
    assert driver.where("small") == "small"


@pytest.mark.parametrize("digest", [BASE, PIRATE])
def test_where_all_slots_are_in_use_large_requests_hold_back_no_small_one_behind_them(digest):
    driver = ready(tenants_examined=2)
    driver.attach(pages=16, adapter_slots=1)
    driver.state(adapter())
    driver.certify()
    for n in range(4):
        driver.enqueue(f"runs{n}", digest=PIRATE, prompt=16, max_tokens=48)
    few_pages_for_many_tenants(driver, digest=digest)
    driver.finish("runs0")
    assert driver.where("small") == "r0"


@pytest.mark.parametrize("small", [PIRATE, BASE])
def test_requests_that_lack_the_pages_of_their_adapter_hold_back_nobody_behind_them(small):
    """Eight pages are free. The poet would take four of them; the pirate is there already."""
    driver = ready(tenants_examined=2)
    driver.attach(pages=32, adapter_slots=4, adapter_rank_bytes=16, adapter_rank_tile=8, page_bytes=32)
    driver.state(adapter(), adapter("poet"))
    driver.certify()
    driver.certify("poet", POET)
    driver.enqueue("runs", digest=PIRATE, prompt=1, max_tokens=16 * 20 - 1)
    driver.enqueue("runs too", prompt=1, max_tokens=16 * 8 - 1)
    for n in range(5):
        driver.enqueue(f"poet{n}", tenant=f"t{n}", digest=POET, prompt=1, max_tokens=16 * 6 - 1)
    driver.enqueue("small", tenant="later", digest=small, prompt=1, max_tokens=16 * 7 - 1)
    assert driver.where("small") == ""
    driver.finish("runs too")
    assert driver.where("small") == "r0"


def test_a_request_waits_while_the_batch_is_full():
    driver = ready()
    driver.attach(max_sequences=1)
    driver.enqueue("a")
    driver.enqueue("b")
    assert driver.of(effects.SendPosition)[0].why == "every batch is full"
    driver.finish("a")
    assert driver.where("b") == "r0"


def test_a_pool_may_set_a_smaller_batch_than_its_runners_could_take():
    driver = ready()
    driver.attach(max_sequences=8)
    driver.state(pools=(pool(max_sequences=1),))
    driver.enqueue("a")
    driver.enqueue("b")
    assert driver.where("b") == ""


def test_the_reason_of_a_request_that_waits_for_memory_says_how_much():
    driver = ready()
    driver.attach(pages=6)
    driver.enqueue("a", max_tokens=64)
    driver.enqueue("b", max_tokens=64)
    assert driver.of(effects.SendPosition) == [effects.SendPosition("g0", "b", 1, "it needs 5 pages and 1 are free")]


def test_a_request_that_no_runner_can_ever_hold_is_refused():
    driver = ready()
    driver.attach(pages=4)
    driver.enqueue("a", max_tokens=500)
    (refusal,) = driver.of(effects.SendRefused)
    assert refusal.failure.code == "context_length_exceeded"
    assert "lower max_tokens" in refusal.failure.message


def test_a_prompt_longer_than_the_context_is_refused():
    driver = ready()
    driver.attach(max_model_length=64)
    driver.enqueue("a", prompt=64)
    (refusal,) = driver.of(effects.SendRefused)
    assert "context is 64" in refusal.failure.message


def test_a_larger_runner_that_is_away_for_a_moment_is_waited_for():
    driver = ready()
    driver.attach("small", pages=4)
    driver.attach("large", pages=100)
    driver.detach("large")
    driver.enqueue("a", max_tokens=500)
    assert not driver.of(effects.SendRefused)
    driver.attach("large", pages=100)
    assert driver.where("a") == "large"


def test_a_smaller_request_of_another_tenant_may_go_first():
    driver = ready()
    driver.attach(pages=20, live=(entry("x", 10),))
    driver.enqueue("large", max_tokens=300, tenant="a")
    driver.enqueue("small", max_tokens=16, tenant="b")
    assert driver.where("large") == ""
    assert driver.where("small") == "r0"


def test_a_smaller_request_of_the_same_tenant_and_class_never_goes_first():
    driver = ready()
    driver.attach(pages=20, live=(entry("x", 10),))
    driver.enqueue("large", max_tokens=300)
    driver.enqueue("small", max_tokens=16)
    assert driver.where("small") == ""


def test_no_request_is_passed_over_for_ever():
    driver = ready(max_passed_over=2)
    driver.attach(pages=20, live=(entry("x", 10),))
    driver.enqueue("large", max_tokens=300, tenant="a")
    for n in range(4):
        driver.enqueue(f"small{n}", max_tokens=16, tenant=f"b{n}")
    assert [driver.where(f"small{n}") for n in range(4)] == ["r0", "r0", "", ""]


def pages(count):
    """A request that needs this many."""
    return {"prompt": 1, "max_tokens": count * 16 - 1}


def of_two_sizes():
    """The large runner is full, and the small one has a few pages. Both wait first: one that only the large runner
    could hold, and one for any of the two."""
    driver = ready(max_passed_over=2, headroom_one_in=0)
    driver.attach("large", pages=100)
    driver.enqueue("on large", **pages(100))
    driver.attach("small", pages=20)
    driver.enqueue("on small", **pages(4))
    driver.enqueue("only on large", **pages(50), tenant="a")
    return driver


def test_nobody_is_passed_where_he_could_not_run():
    driver = of_two_sizes()
    for n in range(4):
        driver.enqueue(f"small{n}", **pages(1), tenant=f"b{n}")
    assert {driver.where(f"small{n}") for n in range(4)} == {"small"}
    assert reserved(driver) == {}
    driver.enqueue("on any", **pages(18), tenant="c")
    for n in range(4, 6):
        driver.enqueue(f"small{n}", **pages(1), tenant=f"b{n}")
    assert reserved(driver) == {"small": "on any"}, "the one before it has not been passed"


def test_one_that_few_runners_could_hold_is_passed_there():
    driver = of_two_sizes()
    driver.finish("on large")
    assert driver.where("only on large") == "large"
    driver.enqueue("only on large, too", **pages(60), tenant="c")
    for n in range(3):
        driver.enqueue(f"smaller{n}", **pages(21), tenant=f"d{n}")
    assert [driver.where(f"smaller{n}") for n in range(3)] == ["large", "large", ""]
    assert reserved(driver) == {"large": "only on large, too"}


def test_many_batch_requests_that_wait_never_go_before_interactive_ones():
    driver = ready(max_passed_over=4)
    driver.attach(max_sequences=1)
    driver.enqueue("runs")
    for n in range(30):
        driver.enqueue(f"batch{n}", request_class=RequestClass.BATCH)
    placed = "runs"
    for n in range(20):
        driver.enqueue(f"chat{n}", request_class=RequestClass.INTERACTIVE)
        driver.finish(placed)
        (place,) = driver.of(effects.SendPlaced)
        placed = place.request
        assert placed == f"chat{n}"


def test_while_a_large_batch_request_waits_for_pages_interactive_ones_are_placed():
    driver = ready(max_passed_over=2)
    driver.attach(pages=20, live=(entry("x", 10),))
    driver.enqueue("large", max_tokens=300, tenant="a", request_class=RequestClass.BATCH)
    for n in range(3):
        driver.enqueue(f"small{n}", max_tokens=16, tenant=f"b{n}", request_class=RequestClass.BATCH)
    assert [driver.where(f"small{n}") for n in range(3)] == ["r0", "r0", ""], "the large one is overdue"
    driver.enqueue("chat", max_tokens=16, request_class=RequestClass.INTERACTIVE)
    assert driver.where("chat") == "r0"
    assert driver.where("small2") == ""


def overdue_request(driver, *, r1=80):
    """A request that needs a whole runner was passed over twice. On r0 70 pages are in use."""
    driver.attach("r0")
    driver.enqueue("on r0", **pages(70))
    driver.attach("r1")
    driver.enqueue("on r1", **pages(r1 - 2))
    driver.enqueue("large", **pages(99), tenant="large")
    for n in range(2):
        driver.enqueue(f"small{n}", **pages(1), tenant=f"b{n}")
    assert [sum(driver.ledger(name).values()) for name in ("r0", "r1")] == [70, r1]


def test_an_overdue_request_holds_back_others_on_one_runner_only():
    driver = ready(max_passed_over=2)
    overdue_request(driver)
    for n in range(4):
        driver.enqueue(f"later{n}", **pages(1), tenant=f"c{n}")
    assert [driver.where(f"later{n}") for n in range(4)] == ["r1"] * 4, "r0 is reserved: less is missing there"
    driver.finish("on r0")
    assert driver.where("large") == "r0"


def test_the_reason_of_a_request_that_is_held_back_says_so():
    driver = ready(max_passed_over=1)
    driver.attach(pages=20, live=(entry("x", 10),))
    driver.enqueue("large", **pages(20), tenant="a")
    driver.enqueue("small", **pages(1), tenant="b")
    driver.enqueue("later", **pages(1), tenant="c")
    (position,) = driver.of(effects.SendPosition)
    assert position.why == "a runner is reserved for a request that has waited for longer"


def test_a_reserved_runner_still_takes_more_urgent_requests():
    driver = ready(max_passed_over=2)
    overdue_request(driver, r1=100)
    driver.enqueue("later", **pages(1), tenant="c")
    assert driver.where("later") == ""
    driver.enqueue("chat", **pages(1), tenant="d", request_class=RequestClass.INTERACTIVE)
    assert driver.where("chat") == "r0"


@pytest.mark.parametrize("goes", ["drains", "is down", "is unhealthy"])
def test_another_runner_is_reserved_if_the_reserved_one_goes(goes):
    driver = ready(max_passed_over=2)
    overdue_request(driver)
    identity = driver.scheduler.runners[InstanceName("r0")].identity
    match goes:
        case "drains":
            driver.send(events.DrainsDeclared((events.DrainRequested(identity, 10.0),)))
        case "is down":
            driver.detach("r0")
        case _:
            driver.send(events.RunnerUnhealthy(identity, "no heartbeat", hung=False))
    driver.report("r1", entry("on r1", 78))
    driver.enqueue("later", **pages(1), tenant="c")
    assert driver.where("later") == ""
    for request in ("on r1", "small0", "small1"):
        driver.finish(request)
    assert driver.where("large") == "r1"


def test_a_reserved_runner_that_starts_again_stays_reserved_though_nobody_saw_it_go():
    driver = ready(max_passed_over=2)
    overdue_request(driver, r1=100)
    assert reserved(driver) == {"r0": "large"}
    driver.attach("r0", incarnation="2", live=(entry("x", 80),))
    assert reserved(driver) == {"r0": "large"}
    driver.enqueue("later", **pages(1), tenant="c")
    assert driver.where("later") == ""


def test_a_runner_is_tried_at_once_when_it_is_no_longer_reserved():
    driver = ready(max_passed_over=2)
    overdue_request(driver, r1=100)
    driver.enqueue("later", **pages(20), tenant="c")
    driver.finish("on r1")
    assert driver.where("later") == "r0", "more is missing there now than on r1"


@pytest.mark.parametrize("leaves", ["cancelled", "past its deadline", "its gateway is gone"])
def test_when_an_overdue_request_leaves_the_others_are_placed_at_once(leaves):
    driver = ready(max_passed_over=1)
    driver.attach(pages=20, live=(entry("x", 10),))
    driver.gateway("g1")
    driver.enqueue("large", max_tokens=300, tenant="a", gateway="g1", deadline=5.0)
    driver.enqueue("small0", max_tokens=16, tenant="b")
    driver.enqueue("small1", max_tokens=16, tenant="c")
    assert driver.where("small1") == ""
    match leaves:
        case "cancelled":
            driver.cancel("large", gateway="g1")
        case "past its deadline":
            driver.wait(6)
        case _:
            driver.send(events.GatewayDisconnected("g1"))
    assert driver.where("small1") == "r0"


def test_when_an_overdue_request_leaves_the_next_one_is_tried_on_the_runner_that_was_reserved():
    driver = ready(max_passed_over=1)
    driver.attach("r0", pages=20, live=(entry("x", 10),))
    driver.attach("r1", pages=20, live=(entry("y", 8), entry("z", 7)))
    driver.enqueue("large", **pages(20), tenant="a")
    driver.enqueue("small0", **pages(1), tenant="b")
    driver.enqueue("next", **pages(9), tenant="c")
    driver.enqueue("small1", **pages(1), tenant="d")
    assert [driver.where(request) for request in ("small0", "next", "small1")] == ["r1", "", "r1"]
    driver.cancel("large")
    assert driver.where("next") == "r0"


def test_a_request_behind_a_cancelled_one_of_its_tenant_is_placed_at_once():
    driver = ready()
    driver.attach(pages=20, live=(entry("x", 10),))
    driver.enqueue("large", max_tokens=300, tenant="a")
    driver.enqueue("small", max_tokens=16, tenant="a")
    assert driver.where("small") == ""
    driver.cancel("large")
    assert driver.where("small") == "r0"


def test_a_full_queue_refuses_the_next_with_a_retry_time():
    driver = ready(queue_limit=2)
    for name in "abc":
        driver.enqueue(name)
    (refusal,) = driver.of(effects.SendRefused)
    assert (refusal.request, refusal.failure.code) == ("c", "pool_saturated")
    assert refusal.failure.retry_after > 0


def test_a_full_queue_still_takes_a_stream_that_must_continue():
    driver = ready(queue_limit=1)
    driver.enqueue("a")
    driver.enqueue("stream", delivered=500, max_tokens=1000)
    assert not driver.of(effects.SendRefused)
    driver.enqueue("b")
    assert driver.of(effects.SendRefused)


def test_an_adapter_that_is_no_longer_served_is_refused():
    driver = ready()
    driver.attach()
    driver.enqueue("a", digest=Digest("sha256:gone"))
    assert driver.of(effects.SendRefused)[0].failure.code == "model_not_found"


def test_after_a_takeover_the_scheduler_accepts_unknown_digests_until_runners_have_reported_theirs():
    driver = SchedulerDriver()
    driver.gateway()
    driver.state(adapter())
    driver.attach(resident=resident(PIRATE))
    driver.wait(1.0)
    driver.enqueue("a", digest=PIRATE)
    assert driver.where("a") == "r0"
    assert not driver.of(effects.DropAdapter), "its adapters do not count"
    driver.certify(digest=Digest("sha256:newer"))
    driver.enqueue("b", digest=Digest("sha256:gone"))
    assert driver.of(effects.SendRefused)[0].failure.code == "model_not_found"


def test_a_request_for_a_revision_that_turns_out_to_be_replaced_is_not_placed_again_and_again():
    """After a takeover it is accepted, as its adapter is undecided. Then no runner could ever load that revision."""
    driver = SchedulerDriver()
    driver.gateway()
    driver.state(adapter())
    driver.attach("r0")
    driver.attach("r1")
    driver.wait(1.0)
    driver.enqueue("a", digest=PIRATE, adapter="default/pirate")
    assert driver.where("a")
    driver.certify(digest=Digest("sha256:newer"))
    driver.lose("a")
    assert [refused.failure.code for refused in driver.of(effects.SendRefused)] == ["model_not_found"]


def test_a_request_for_a_replaced_revision_still_goes_where_it_is_resident():
    driver = SchedulerDriver()
    driver.gateway()
    driver.state(adapter())
    for instance in ("r0", "r1"):
        driver.attach(instance, resident=resident(PIRATE))
    driver.wait(1.0)
    driver.enqueue("a", digest=PIRATE, adapter="default/pirate")
    first = driver.where("a")
    driver.certify(digest=Digest("sha256:newer"))
    driver.lose("a")
    assert {first, driver.where("a")} == {"r0", "r1"}


def one_stream_of_a_replaced_revision() -> SchedulerDriver:
    """r1 is fuller and is chosen first, but only r0 holds the revision, and has room for one request."""
    driver = SchedulerDriver()
    driver.gateway()
    driver.state(adapter())
    driver.attach("r0", resident=resident(PIRATE, Tier.DISK), max_sequences=1)
    driver.attach("r1", live=(entry("x", 2), entry("y", 2)))
    driver.wait(20.0)
    driver.certify(digest=Digest("sha256:newer"))
    return driver


def test_a_stream_of_a_replaced_revision_goes_on_where_that_is_held():
    driver = one_stream_of_a_replaced_revision()
    driver.enqueue("a", digest=PIRATE, adapter="default/pirate", delivered=89, epoch=1, max_tokens=200)
    assert driver.where("a") == "r0"


def test_a_stream_of_a_replaced_revision_waits_for_room_where_that_is_held():
    """For as long as the runner may come back, too. Nobody reserves another runner for it, where it cannot go."""
    driver = one_stream_of_a_replaced_revision()
    driver.enqueue("before", digest=PIRATE, adapter="default/pirate", delivered=1, epoch=1, max_tokens=200)
    driver.enqueue("a", digest=PIRATE, adapter="default/pirate", delivered=89, epoch=1, max_tokens=200)
    assert (driver.where("before"), driver.where("a"), driver.of(effects.SendRefused)) == ("r0", "", [])
    driver.wait(0.1)
    assert "holds its revision" in driver.scheduler.requests[RequestId("a")].waiting_reason
    for number in range(driver.scheduler.config.max_passed_over + 1):
        driver.enqueue(f"younger{number}")
        driver.finish(f"younger{number}")
    assert set(reserved(driver)) <= {"r0"}
    driver.detach("r0")
    driver.report("r1")
    assert (driver.where("a"), driver.of(effects.SendRefused)) == ("", [])
    driver.attach("r0", resident=resident(PIRATE, Tier.DISK), max_sequences=1)
    driver.finish("before", epoch=2)
    assert driver.where("a") == "r0"


def test_a_stream_of_a_replaced_revision_that_nobody_holds_is_not_said_to_be_refused():
    driver = SchedulerDriver()
    driver.gateway()
    driver.state(adapter(), pools=(pool(replicas=2),))
    driver.attach("r0")
    driver.attach("r1")
    driver.certify(digest=Digest("sha256:newer"))
    driver.detach("r1")
    driver.enqueue("a", digest=PIRATE, adapter="default/pirate", delivered=89, epoch=1, max_tokens=200)
    driver.wait(0.1)
    assert driver.scheduler.requests[RequestId("a")].waiting_reason == REPLACED


def test_others_of_its_tenant_pass_a_stream_of_a_replaced_revision_that_waits():
    driver = one_stream_of_a_replaced_revision()
    driver.enqueue("before", digest=PIRATE, adapter="default/pirate", delivered=1, epoch=1, max_tokens=200)
    driver.enqueue("a", digest=PIRATE, adapter="default/pirate", delivered=89, epoch=1, max_tokens=200)
    driver.enqueue("b")
    assert (driver.where("a"), driver.where("b")) == ("", "r1")
    assert not driver.scheduler.more_to_try


def test_a_stream_of_a_replaced_revision_is_refused_once_nobody_holds_that_and_nobody_comes_back():
    driver = one_stream_of_a_replaced_revision()
    driver.attach("r0", incarnation="2")
    driver.enqueue("a", digest=PIRATE, adapter="default/pirate", delivered=89, epoch=1, max_tokens=200)
    assert [refused.failure.code for refused in driver.of(effects.SendRefused)] == ["model_not_found"]


def test_a_deadlines_message_says_what_the_request_waited_for():
    driver = ready()
    driver.attach(max_sequences=1)
    driver.enqueue("a")
    driver.enqueue("b", deadline=5.0)
    driver.wait(4.9)
    assert not driver.of(effects.SendRefused)
    driver.wait(0.2)
    (refusal,) = driver.of(effects.SendRefused)
    assert refusal.failure.code == "deadline_exceeded"
    assert "every batch is full" in refusal.failure.message


def test_a_deadlines_message_says_that_there_is_no_runner():
    driver = ready()
    driver.enqueue("a", deadline=5.0)
    driver.wait(6)
    assert driver.of(effects.SendRefused)[0].failure.code == "no_runner"


def test_positions_are_reported_again_when_they_change():
    driver = ready()
    driver.attach(max_sequences=1)
    for name in "abc":
        driver.enqueue(name)
    driver.finish("a")
    driver.wait(1.0)
    assert [(effect.request, effect.position) for effect in driver.of(effects.SendPosition)] == [("c", 1)]


def test_a_draining_runner_gets_nothing_new():
    driver = ready()
    driver.attach()
    driver.send(
        events.DrainsDeclared((events.DrainRequested(driver.scheduler.runners[InstanceName("r0")].identity, 10.0),))
    )
    driver.enqueue("a")
    assert driver.of(effects.SendPosition)[0].why == "its runners are draining"


def test_an_empty_runner_is_drained_at_once():
    driver = ready()
    driver.attach()
    driver.send(
        events.DrainsDeclared((events.DrainRequested(driver.scheduler.runners[InstanceName("r0")].identity, 10.0),))
    )
    assert driver.of(effects.ReportDrained)


def test_the_supervisors_overcommit_factor_adds_capacity():
    driver = ready()
    driver.attach(pages=10)
    driver.enqueue("a", max_tokens=140)
    driver.enqueue("b", max_tokens=48)
    assert driver.where("b") == ""
    driver.send(events.OvercommitSet("default/demo", 1.5))
    assert driver.where("b") == "r0"


def test_a_request_is_refused_when_the_only_fitting_runner_is_forgotten():
    driver = ready(forget_runner=30.0)
    driver.attach("large", pages=100)
    driver.attach("small", pages=10)
    driver.detach("large")
    driver.enqueue("a", prompt_tokens=16 * 20)
    assert not driver.of(effects.SendRefused), "it may come back"
    driver.wait(31)
    (refusal,) = driver.of(effects.SendRefused)
    assert refusal.failure.code == "context_length_exceeded"


def test_a_tenant_with_many_requests_is_placed_before_younger_and_less_urgent_ones():
    driver = ready()
    for n in range(60):
        driver.enqueue(f"a{n}", tenant="a", request_class=RequestClass.INTERACTIVE)
    driver.enqueue("b", tenant="b", request_class=RequestClass.INTERACTIVE)
    for n in range(60):
        driver.enqueue(f"c{n}", tenant="c", request_class=RequestClass.BATCH)
    check_order(driver)
    driver.attach(max_sequences=64, pages=1000)
    while driver.scheduler.more_to_try:
        driver.send(events.TryMore())
    placed = [request.id[0] for request in driver.scheduler.requests.values() if not request.waiting]
    assert [placed.count(tenant) for tenant in "abc"] == [60, 1, 1], "two places are kept for the most urgent class"


def test_what_was_not_tried_yet_is_tried_before_anything_younger_or_less_urgent_is_placed():
    driver = ready(tenants_examined=2)
    for n in range(5):
        driver.enqueue(f"large{n}", tenant=f"t{n}", prompt=1, max_tokens=80 * 16)
    driver.enqueue("small", prompt=1, max_tokens=15)
    driver.enqueue("younger", tenant="younger", prompt=1, max_tokens=15)
    driver.enqueue("less urgent", prompt=1, max_tokens=15, request_class=RequestClass.BATCH)
    check_order(driver)
    driver.attach(live=(entry("x", 50),), max_sequences=2)
    for _ in range(3):
        driver.wait(0.01)
    assert [driver.where(name) for name in ("small", "younger", "less urgent")] == ["r0", "", ""]


@pytest.mark.parametrize("there", ["nobody", "a runner of another base model"])
def test_a_request_is_refused_when_the_first_runner_of_its_model_is_too_small_for_it(there):
    driver = ready()
    if there != "nobody":
        driver.attach("other", base="sha256:other")
    driver.enqueue("large", max_tokens=50 * 16, base="sha256:base")
    driver.enqueue("behind", base="sha256:base")
    driver.attach("small", pages=40)
    assert [refused.request for refused in driver.of(effects.SendRefused)] == ["large"]
    assert driver.where("behind") == "small"


def test_what_is_too_large_for_every_runner_is_refused_at_once_also_behind_another_one_of_its_tenant():
    driver = ready()
    driver.attach(live=(entry("x", 50),))
    driver.enqueue("waits", max_tokens=80 * 16)
    driver.enqueue("too large", max_tokens=200 * 16)
    assert [refused.request for refused in driver.of(effects.SendRefused)] == ["too large"]
    driver.enqueue("behind")
    assert driver.where("behind") == "", "it passes no older one of its tenant"


def test_after_a_start_a_large_request_waits_for_the_runners_of_before():
    before = ready()
    before.attach("small", pages=40)
    before.attach("large")
    driver = SchedulerDriver(saved=before.scheduler.catalog_to_save())
    driver.gateway()
    driver.attach("small", pages=40)
    driver.enqueue("first", max_tokens=60 * 16)
    driver.enqueue("second", max_tokens=60 * 16)
    assert not driver.scheduler.more_to_try
    driver.attach("large")
    assert driver.where("first") == "large"
    assert not driver.of(effects.SendRefused)


def test_what_one_event_leaves_untried_is_tried_without_a_tick():
    driver = ready(tenants_examined=2)
    for n in range(6):
        driver.enqueue(f"too large {n}", tenant="a", max_tokens=200 * 16)
    driver.enqueue("small", tenant="b")
    driver.attach()
    rounds = 0
    while driver.scheduler.more_to_try:
        driver.send(events.TryMore())
        rounds += 1
    assert driver.where("small") == "r0"
    assert rounds == 3, "two in each event"


def test_one_event_refuses_few_of_the_overdue_requests_that_no_runner_can_hold_any_more():
    driver = ready(max_passed_over=1, tenants_examined=2)
    driver.attach("large", pages=200, live=(entry("x", 200),))
    driver.attach("small")
    for n in range(6):
        driver.enqueue(f"large{n}", tenant="a", max_tokens=150 * 16)
    driver.enqueue("passes them", tenant="b")
    driver.detach("large")
    driver.wait(31)
    refused = [len(driver.of(effects.SendRefused))]
    while driver.scheduler.more_to_try:
        driver.send(events.TryMore())
        refused.append(len(driver.of(effects.SendRefused)))
    assert refused[:3] == [2, 2, 2]
    assert not driver.scheduler.queued()


def test_a_runner_like_those_before_makes_no_request_untried():
    driver = ready()
    driver.attach("r0", max_sequences=0)
    driver.enqueue("a")
    driver.attach("r1", max_sequences=0)
    driver.attach("r0", max_sequences=0)
    assert not driver.scheduler.queues[GROUP].changed


@pytest.mark.parametrize("digest", [BASE, PIRATE])
def test_where_all_slots_are_in_use_those_that_wait_for_another_model_hold_back_nobody(digest):
    driver = ready(tenants_examined=2)
    driver.attach(adapter_slots=1, max_sequences=2)
    driver.state(adapter())
    driver.certify()
    driver.enqueue("first", digest=PIRATE)
    driver.enqueue("second", digest=PIRATE)
    for n in range(3):
        driver.enqueue(f"w{n}", tenant=f"t{n}", digest=digest, base="sha256:other")
    driver.enqueue("behind", digest=digest, base="sha256:base")
    driver.finish("first")
    assert driver.where("behind") == "r0"


@pytest.mark.parametrize("what", [{"base": "sha256:other"}, {"avoid": ("r0",)}])
def test_an_overdue_request_that_more_room_would_not_help_leaves_the_reservation_to_the_next(what):
    """No runner has its base model, or the only one has just declined it."""
    driver = ready(max_passed_over=1, avoid_after_decline=5.0, max_avoid=5.0)
    driver.attach(live=(entry("x", 50),))
    driver.enqueue("waits for something else", tenant="a", **what)
    driver.enqueue("large", tenant="b", **pages(80))
    driver.enqueue("small", tenant="c", **pages(1))
    assert reserved(driver) == {"r0": "large"}
    driver.enqueue("small too", tenant="d", **pages(1))
    assert driver.where("small too") == ""


def test_a_runner_is_reserved_for_nobody_if_more_room_would_help_nobody():
    driver = ready(max_passed_over=1, avoid_after_decline=5.0, max_avoid=5.0)
    driver.attach(live=(entry("x", 50),))
    driver.enqueue("declined", tenant="a", avoid=("r0",))
    for n in range(4):
        driver.enqueue(f"small{n}", tenant=f"t{n}", **pages(1))
        assert driver.where(f"small{n}") == "r0"


def test_a_request_has_a_reservation_again_when_it_may_try_the_runner_that_declined_it():
    driver = ready(max_passed_over=1, avoid_after_decline=5.0, max_avoid=5.0)
    driver.attach(live=(entry("x", 50),))
    driver.enqueue("large", tenant="a", avoid=("r0",), **pages(80))
    driver.enqueue("small", tenant="b", **pages(1))
    assert reserved(driver) == {}
    driver.wait(6.0)
    assert reserved(driver) == {"r0": "large"}


@pytest.mark.parametrize("again", [False, True])
def test_a_request_that_is_declined_keeps_how_often_it_was_passed_over(again):
    """A runner may decline what its ledger had room for. `again`: also the next time, when it avoids nobody."""
    driver = ready(max_passed_over=3, avoid_after_decline=1.0, max_avoid=1.0)
    x = entry("x", 50)
    driver.attach(live=(x,))
    driver.enqueue("large", tenant="a", **pages(80))

    def pass_over(number):
        driver.enqueue(f"small{number}", tenant=f"t{number}", **pages(1))
        assert driver.where(f"small{number}") == "r0"
        driver.finish(f"small{number}")

    def place_and_decline(epoch):
        driver.report()
        driver.wait(2.1)
        driver.report()
        assert driver.where("large") == "r0"
        failure = Failure("declined", "no room after all")
        driver.send(events.RunnerDeclined(InstanceName("r0"), RequestId("large"), epoch, failure))
        driver.report("r0", x)
        driver.lose("large", epoch)
        assert driver.where("large") == ""

    pass_over(0)
    place_and_decline(1)
    pass_over(1)
    if again:
        place_and_decline(2)
    pass_over(2)
    driver.wait(2.1)
    assert reserved(driver) == {"r0": "large"}


@pytest.mark.parametrize("runners", [1, 2])
def test_who_is_declined_again_and_again_by_a_full_runner_gets_a_place_there(runners):
    """A runner's own forecast may exceed the sum that the scheduler has. Until the request may try again, the runner
    takes nothing new: else others would take what has become free each time."""
    driver = ready(max_passed_over=3)
    room, running, numbers = {}, [], count()
    for number in range(runners):
        driver.attach(f"r{number}")
        room[f"r{number}"] = 100

    def small():
        driver.enqueue(f"small{(number := next(numbers))}", tenant=f"t{number % 7}", **pages(10))

    def carry_out(decided):
        """The runners have too little room for the large one unless sixty pages are free."""
        for placed in [one for one in decided if isinstance(one, effects.SendPlaced)]:
            if placed.request != "large":
                room[placed.instance] -= 10
                running.append((placed.request, placed.instance))
            elif room[placed.instance] < 60:
                failure = Failure("declined", "no room after all", reason=TOO_FEW_PAGES)
                carry_out(driver.send(events.RunnerDeclined(placed.instance, placed.request, placed.epoch, failure)))
                carry_out(driver.lose("large", placed.epoch))
            else:
                return True
        return False

    def later(seconds):
        """Some end, and others come."""
        found = carry_out(driver.wait(seconds))
        for _ in range(runners):
            request, instance = running.pop(0)
            room[instance] += 10
            found |= carry_out(driver.finish(request))
            small()
            found |= carry_out(driver.effects)
        return found

    for _ in range(20 * runners):
        small()
        carry_out(driver.effects)
    driver.enqueue("large", tenant="large", **pages(40))
    assert any(later(0.1) for _ in range(400))


@pytest.mark.parametrize(("reason", "needed"), [(TOO_FEW_PAGES, 45), ("", 15)])
def test_only_who_was_declined_for_lack_of_room_is_tried_with_more_free_pages(reason, needed):
    """An adapter may be fetched for minutes: its request would empty a runner for nothing."""
    driver = ready(avoid_after_decline=1.0, max_avoid=1.0)
    driver.attach()
    driver.enqueue("a", **pages(15))
    for epoch in (1, 2):
        failure = Failure("declined", "a reason", reason=reason)
        driver.send(events.RunnerDeclined(InstanceName("r0"), RequestId("a"), epoch, failure))
        driver.lose("a", epoch)
        if epoch == 1:
            driver.wait(1.1)
            assert driver.where("a") == "r0"
    driver.enqueue("others", tenant="b", **pages(100 - needed + 1))
    driver.wait(1.1)
    assert driver.where("a") == ""
    driver.finish("others")
    driver.enqueue("fewer", tenant="b", **pages(100 - needed))
    driver.wait(1.1)
    assert driver.where("a") == "r0"


@pytest.mark.parametrize("first", ["the runner", "the gateway"])
def test_a_decline_counts_once_and_at_once_whoever_is_heard_first(first):
    driver = ready(avoid_after_decline=1.0, max_avoid=1.0)
    driver.attach()
    driver.enqueue("a", **pages(15))
    failure = Failure("declined", "no room after all", reason=TOO_FEW_PAGES)

    def decline():
        driver.send(events.RunnerDeclined(InstanceName("r0"), RequestId("a"), 1, failure))

    tell = [decline, lambda: driver.lose("a", 1)]
    for one in tell if first == "the runner" else tell[::-1]:
        one()
    request = driver.scheduler.requests[RequestId("a")]
    assert [pages for pages, _ in request.page_needs.values()] == [30], "it is looked at where fewer are free"
    avoids = dict(request.avoid)
    decline()
    assert (request.room_lacked, request.declines, request.avoid) == (1, 2, avoids)
    driver.enqueue("others", tenant="b", **pages(70))
    driver.wait(1.1)
    assert driver.where("a") == "r0"


def test_an_untried_overdue_request_gets_its_reservation_before_the_runner_takes_another():
    """It was behind a request of its tenant, and is tried for the first time when that is cancelled."""
    driver = ready(max_passed_over=1)
    driver.attach(live=(entry("x", 50),))
    driver.enqueue("first", tenant="a", **pages(90))
    driver.enqueue("second", tenant="a", **pages(80))
    driver.enqueue("small0", tenant="b", **pages(1))
    driver.enqueue("small1", tenant="c", **pages(1))
    assert [driver.where(request) for request in ("small0", "small1")] == ["r0", ""]
    driver.cancel("first")
    assert reserved(driver) == {"r0": "second"}
    assert driver.where("small1") == ""


def test_when_the_reserved_runner_is_down_the_one_that_lacks_least_of_all_is_reserved():
    driver = ready(max_passed_over=1)
    for name, used in (("r0", 40), ("r1", 50), ("r2", 60)):
        driver.attach(name, live=(entry(f"on {name}", used),))
    driver.enqueue("large", tenant="a", prompt=1, max_tokens=80 * 16)
    driver.enqueue("small", tenant="b", prompt=1, max_tokens=15)
    assert reserved(driver) == {"r0": "large"}
    driver.detach("r0")
    driver.report("r2", entry("on r2", 60))
    assert reserved(driver) == {"r1": "large"}


def test_a_pool_that_allows_a_larger_batch_takes_the_next_at_once():
    driver = ready()
    driver.attach()
    driver.state(pools=(pool(max_sequences=1),))
    driver.enqueue("a")
    driver.enqueue("b")
    driver.state(pools=(pool(max_sequences=2),))
    assert driver.where("b") == "r0"


def test_a_deadlines_message_says_what_the_request_waits_for_now():
    driver = ready()
    driver.enqueue("a", deadline=0.5)
    driver.attach(max_sequences=1, live=(entry("x", 1),))
    (refused,) = [effect for effect in driver.wait(0.6) if isinstance(effect, effects.SendRefused)]
    assert "every batch is full" in refused.failure.message


def test_what_waits_behind_another_request_hears_when_no_runner_is_up():
    driver = ready()
    driver.enqueue("first")
    driver.enqueue("second")
    why = driver.scheduler.requests[RequestId("second")]
    assert why.waiting_reason == "no runner of this model is up"
    driver.attach(live=(entry("x", 100),))
    driver.wait(1)
    assert why.waiting_reason == "other requests wait before it"


def test_a_request_behind_another_one_of_its_flow_is_compared_with_one_runner():
    driver = ready()
    for n in range(20):
        driver.attach(f"r{n}", live=(entry(f"x{n}", 100),))
    looked = []

    class Runners(list):
        def __iter__(self):
            for runner in super().__iter__():
                looked.append(runner.instance)
                yield runner

    driver.enqueue("first", base="sha256:base")
    runners = driver.scheduler.state.by_group
    runners[GROUP] = Runners(runners[GROUP])
    driver.scheduler.check = lambda: None  # it recounts all
    driver.enqueue("second", base="sha256:base")
    assert set(looked) == {"r0"}, "the first of them could hold it, and takes work"


def test_a_request_that_fits_but_was_not_looked_at_yet_waits_for_no_runner():
    driver = ready()
    driver.attach(live=(entry("x", 100),))
    driver.enqueue("small", prompt=1, max_tokens=15)
    small = driver.scheduler.requests[RequestId("small")]
    assert small.waiting_reason == "it needs 1 pages and 0 are free"
    driver.scheduler.runners[InstanceName("r0")].release_promise((RequestId("x"), 1))
    explain(driver.scheduler.state, small)
    assert small.waiting_reason == "other requests wait before it"


def test_those_that_avoid_a_runner_do_not_hide_others_from_its_room():
    driver = ready(tenants_examined=1, avoid_after_decline=9.0)
    driver.attach(live=(entry("x", 100),))
    driver.enqueue("was declined", avoid=("r0",))
    driver.enqueue("small", tenant="b", prompt=1, max_tokens=15)
    driver.report("r0", entry("x", 50))
    assert (driver.where("was declined"), driver.where("small")) == ("", "r0")


def test_what_avoids_a_runner_no_longer_gets_its_room_by_its_age():
    driver = ready(tenants_examined=1, avoid_after_decline=9.0)
    driver.attach(live=(entry("x", 100),))
    driver.enqueue("was declined", avoid=("r0",))
    driver.enqueue("younger", tenant="b")
    driver.wait(9.0)
    driver.report("r0", entry("x", 95))
    assert (driver.where("was declined"), driver.where("younger")) == ("r0", "")


def test_that_many_runners_have_room_at_once_compares_none_with_each_other(monkeypatch):
    driver = ready()
    for n in range(40):
        driver.attach(f"r{n}", live=(entry(f"x{n}", 100),))
    for n in range(20):
        driver.enqueue(f"q{n}", tenant=f"t{n}")
    compared = []
    monkeypatch.setattr(Runner, "__eq__", lambda one, other: bool(compared.append((one, other))) or one is other)
    driver.send(events.OvercommitSet("default/demo", 2.0))
    placed = len(driver.of(effects.SendPlaced))
    while driver.scheduler.more_to_try:
        driver.send(events.TryMore())
        placed += len(driver.of(effects.SendPlaced))
    assert placed == 20
    assert len(compared) < 20 * 40, "each placement compared each runner with others"


def test_when_many_fit_at_once_they_are_placed_in_parts_and_by_age():
    driver = ready()
    count = 2 * PLACED_AT_ONCE + 1
    full = entry("x", 10 * count)
    driver.attach(pages=10 * count, max_sequences=2 * count, max_model_length=160 * count, live=(full,))
    for n in range(count):
        driver.enqueue(f"{n}", tenant=f"t{n % 7}")
    driver.send(events.OvercommitSet("default/demo", 2.0))
    placed = [[one.request for one in driver.of(effects.SendPlaced)]]
    while driver.scheduler.more_to_try:
        driver.send(events.TryMore())
        placed.append([one.request for one in driver.of(effects.SendPlaced)])
    assert [len(some) for some in placed] == [PLACED_AT_ONCE, PLACED_AT_ONCE, 1]
    assert [one for some in placed for one in some] == [f"{n}" for n in range(count)]


def test_where_many_runners_have_room_one_event_searches_few_of_them():
    """For each that is placed, those that fit are looked for on each runner that has room."""
    driver = ready()
    runners = SEARCHED_AT_ONCE // 4
    for n in range(runners):
        driver.attach(f"r{n}", pages=10, max_sequences=2, live=(entry(f"x{n}", 10),))
    for n in range(runners):
        driver.enqueue(f"{n}", tenant=f"t{n % 7}")
    driver.send(events.OvercommitSet("default/demo", 2.0))
    placed = [[one.request for one in driver.of(effects.SendPlaced)]]
    while driver.scheduler.more_to_try:
        driver.send(events.TryMore())
        placed.append([one.request for one in driver.of(effects.SendPlaced)])
    assert 4 <= max(map(len, placed[:-1])) <= 6
    assert [one for some in placed for one in some] == [f"{n}" for n in range(runners)]


def test_where_more_runners_have_room_than_one_event_searches_it_looks_at_no_more(monkeypatch):
    driver, runners, looked = ready(), 3 * MAX_FREED, []
    for n in range(runners):
        driver.attach(f"r{n}", pages=10, max_sequences=2, live=(entry(f"x{n}", 10),))
    for n in range(runners):
        driver.enqueue(f"{n}", tenant=f"t{n % 7}")
    look = Waiting.that_fit_in
    monkeypatch.setattr(Waiting, "that_fit_in", lambda *one, **how: looked.append(one) or look(*one, **how))
    driver.send(events.OvercommitSet("default/demo", 2.0))
    placed, each = [one.request for one in driver.of(effects.SendPlaced)], [len(looked)]
    while driver.scheduler.more_to_try:
        looked.clear()
        driver.send(events.TryMore())
        placed += [one.request for one in driver.of(effects.SendPlaced)]
        each.append(len(looked))
    assert placed == [f"{n}" for n in range(runners)]
    assert max(each) <= MAX_FREED + SEARCHED_AT_ONCE


def test_when_many_of_several_groups_fit_at_once_one_event_places_no_more():
    saved = ready()
    saved.attach("last")
    driver = SchedulerDriver(saved=saved.scheduler.catalog_to_save())
    driver.gateway()
    for group in ("default/a", "default/b", "default/c"):
        driver.attach(group, group=group, pool=group, pages=1000, max_sequences=100)
        for n in range(PLACED_AT_ONCE):
            driver.enqueue(f"{group} {n}", group=GroupName(group))
    driver.attach("last")
    placed = [len(driver.of(effects.SendPlaced))]
    while driver.scheduler.more_to_try:
        driver.send(events.TryMore())
        placed.append(len(driver.of(effects.SendPlaced)))
    assert (max(placed), sum(placed)) == (PLACED_AT_ONCE, 3 * PLACED_AT_ONCE)


def test_positions_of_many_are_reported_in_parts():
    driver = ready()
    count = 2 * LOOKED_AT_ONCE + 200
    for n in range(count):
        driver.enqueue(f"{n}", tenant=f"t{n % 7}")
    for request in driver.scheduler.requests.values():
        request.reported_position = (0, "")
    driver.wait(1)
    reported = [driver.of(effects.SendPosition)]
    driver.cancel(f"{count - 1}")
    for _ in range(3):
        driver.wait(0.1)
        reported.append(driver.of(effects.SendPosition))
    assert [len(some) for some in reported] == [LOOKED_AT_ONCE, LOOKED_AT_ONCE, 199, 0], "one has gone meanwhile"
    assert [one.position for some in reported for one in some] == list(range(1, count))
    driver.wait(0.7)
    assert not driver.of(effects.SendPosition), "a round begins a second after the last, and nothing has moved"
