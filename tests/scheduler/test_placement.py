"""Which runner takes a request, and the reasons that waiting requests get (PU-12)."""

import pytest

from motet.domain import Digest, InstanceName
from motet.runner_info import RequestClass, Tier
from motet_scheduler.policy import effects, events
from tests.scheduler.builders import PIRATE, POET, SchedulerDriver, adapter, entry, pool, ready, resident


def test_the_fullest_runner_that_fits_takes_it():
    told = ready()
    told.attach("r0")
    told.attach("r1", live=(entry("x", 10),))
    told.enqueue("a")
    assert told.where("a") == "r1"


def test_a_full_runner_is_left_for_the_next_fullest():
    told = ready()
    told.attach("r0", pages=12, live=(entry("x", 10),))
    told.attach("r1")
    told.enqueue("a", max_tokens=64)
    assert told.where("a") == "r1"


@pytest.mark.parametrize(
    ("there", "elsewhere"), [(Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DISK), (Tier.DISK, Tier.NONE)]
)
def test_of_equally_full_runners_the_one_nearest_to_the_adapter_is_chosen(there, elsewhere):
    told = ready()
    told.attach("r0", resident=(resident(PIRATE, there),))
    told.attach("r9", resident=() if elsewhere is Tier.NONE else (resident(PIRATE, elsewhere),))
    told.state(adapter())
    told.certify()
    told.enqueue("a", digest=PIRATE)
    assert told.where("a") == "r0"


def test_otherwise_the_highest_name_wins():
    told = ready()
    for name in ("r0", "r2", "r1"):
        told.attach(name)
    told.enqueue("a")
    assert told.where("a") == "r2"


def test_the_adapter_is_ordered_before_the_request_is_placed():
    told = ready()
    told.attach()
    told.state(adapter())
    told.certify(bytes=4096)
    told.enqueue("a", digest=PIRATE)
    order, expect, place = [
        effect
        for effect in told.effects
        if isinstance(effect, effects.EnsureAdapter | effects.ExpectRequest | effects.SendPlaced)
    ]
    assert (order.expected_digest, order.source) == (PIRATE, "file:///adapters/pirate")
    assert expect.digest == PIRATE
    assert place.promise.adapter_bytes == 4096


def test_an_adapter_that_is_on_its_way_is_not_ordered_twice():
    told = ready()
    told.attach()
    told.state(adapter())
    told.certify()
    told.enqueue("a", digest=PIRATE)
    told.enqueue("b", digest=PIRATE)
    assert not told.of(effects.EnsureAdapter)


def test_a_request_waits_while_all_adapter_slots_are_in_use():
    told = ready()
    told.attach(adapter_slots=1)
    told.state(adapter(), adapter("poet"))
    told.certify()
    told.certify("poet", POET)
    told.enqueue("a", digest=PIRATE)
    told.enqueue("b", digest=POET)
    assert [effect.why for effect in told.of(effects.SendPosition)] == ["all adapter slots are in use"]
    told.enqueue("base", tenant="other")
    assert told.where("base") == "r0", "the base model needs no slot"
    told.finish("a")
    assert told.where("b") == "r0"


def test_a_request_waits_while_the_batch_is_full():
    told = ready()
    told.attach(max_sequences=1)
    told.enqueue("a")
    told.enqueue("b")
    assert told.of(effects.SendPosition)[0].why == "every batch is full"
    told.finish("a")
    assert told.where("b") == "r0"


def test_a_pool_may_set_a_smaller_batch_than_its_runners_could_take():
    told = ready()
    told.attach(max_sequences=8)
    told.state(pools=(pool(max_sequences=1),))
    told.enqueue("a")
    told.enqueue("b")
    assert told.where("b") == ""


def test_the_reason_of_a_request_that_waits_for_memory_says_how_much():
    told = ready()
    told.attach(pages=6)
    told.enqueue("a", max_tokens=64)
    told.enqueue("b", max_tokens=64)
    assert told.of(effects.SendPosition) == [effects.SendPosition("g0", "b", 1, "it needs 5 pages and 1 are free")]


def test_what_no_runner_can_ever_hold_is_refused():
    told = ready()
    told.attach(pages=4)
    told.enqueue("a", max_tokens=500)
    (refusal,) = told.of(effects.SendRefused)
    assert refusal.failure.code == "context_length_exceeded"
    assert "lower max_tokens" in refusal.failure.message


def test_a_prompt_longer_than_the_context_is_refused():
    told = ready()
    told.attach(max_model_length=64)
    told.enqueue("a", prompt=64)
    (refusal,) = told.of(effects.SendRefused)
    assert "context is 64" in refusal.failure.message


def test_a_larger_runner_that_is_away_for_a_moment_is_waited_for():
    told = ready()
    told.attach("small", pages=4)
    told.attach("large", pages=100)
    told.detach("large")
    told.enqueue("a", max_tokens=500)
    assert not told.of(effects.SendRefused)
    told.attach("large", pages=100)
    assert told.where("a") == "large"


def test_a_smaller_request_of_another_tenant_may_go_first():
    told = ready()
    told.attach(pages=20, live=(entry("x", 10),))
    told.enqueue("large", max_tokens=300, tenant="a")
    told.enqueue("small", max_tokens=16, tenant="b")
    assert told.where("large") == ""
    assert told.where("small") == "r0"


def test_but_never_one_of_the_same_tenant_and_class():
    told = ready()
    told.attach(pages=20, live=(entry("x", 10),))
    told.enqueue("large", max_tokens=300)
    told.enqueue("small", max_tokens=16)
    assert told.where("small") == ""


def test_no_request_is_passed_over_for_ever():
    told = ready(max_passed_over=2)
    told.attach(pages=20, live=(entry("x", 10),))
    told.enqueue("large", max_tokens=300, tenant="a")
    for n in range(4):
        told.enqueue(f"small{n}", max_tokens=16, tenant=f"b{n}")
    assert [told.where(f"small{n}") for n in range(4)] == ["r0", "r0", "", ""]


def test_many_batch_requests_that_wait_never_go_before_interactive_ones():
    told = ready(max_passed_over=4)
    told.attach(max_sequences=1)
    told.enqueue("runs")
    for n in range(30):
        told.enqueue(f"batch{n}", request_class=RequestClass.BATCH)
    placed = "runs"
    for n in range(20):
        told.enqueue(f"chat{n}", request_class=RequestClass.INTERACTIVE)
        told.finish(placed)
        (place,) = told.of(effects.SendPlaced)
        placed = place.request
        assert placed == f"chat{n}"


def test_while_a_large_batch_request_waits_for_pages_interactive_ones_are_placed():
    told = ready(max_passed_over=2)
    told.attach(pages=20, live=(entry("x", 10),))
    told.enqueue("large", max_tokens=300, tenant="a", request_class=RequestClass.BATCH)
    for n in range(3):
        told.enqueue(f"small{n}", max_tokens=16, tenant=f"b{n}", request_class=RequestClass.BATCH)
    assert [told.where(f"small{n}") for n in range(3)] == ["r0", "r0", ""], "the large one is overdue"
    told.enqueue("chat", max_tokens=16, request_class=RequestClass.INTERACTIVE)
    assert told.where("chat") == "r0"
    assert told.where("small2") == ""


@pytest.mark.parametrize("leaves", ["cancelled", "past its deadline", "its gateway is gone"])
def test_when_one_that_everybody_was_held_back_for_leaves_the_others_go_at_once(leaves):
    told = ready(max_passed_over=1)
    told.attach(pages=20, live=(entry("x", 10),))
    told.gateway("g1")
    told.enqueue("large", max_tokens=300, tenant="a", gateway="g1", deadline=5.0)
    told.enqueue("small0", max_tokens=16, tenant="b")
    told.enqueue("small1", max_tokens=16, tenant="c")
    assert told.where("small1") == ""
    match leaves:
        case "cancelled":
            told.cancel("large", gateway="g1")
        case "past its deadline":
            told.wait(6)
        case _:
            told.tell(events.GatewayDisconnected("g1"))
    assert told.where("small1") == "r0"


def test_what_stood_behind_a_cancelled_one_of_its_own_tenant_goes_at_once():
    told = ready()
    told.attach(pages=20, live=(entry("x", 10),))
    told.enqueue("large", max_tokens=300, tenant="a")
    told.enqueue("small", max_tokens=16, tenant="a")
    assert told.where("small") == ""
    told.cancel("large")
    assert told.where("small") == "r0"


def test_a_full_queue_refuses_the_next_with_the_time_to_come_back():
    told = ready(queue_limit=2)
    for name in "abc":
        told.enqueue(name)
    (refusal,) = told.of(effects.SendRefused)
    assert (refusal.request, refusal.failure.code) == ("c", "pool_saturated")
    assert refusal.failure.retry_after > 0


def test_an_adapter_that_is_no_longer_served_is_refused():
    told = ready()
    told.attach()
    told.enqueue("a", digest=Digest("sha256:gone"))
    assert told.of(effects.SendRefused)[0].failure.code == "model_not_found"


def test_after_a_takeover_the_scheduler_accepts_unknown_digests_until_runners_have_reported_theirs():
    told = SchedulerDriver()
    told.gateway()
    told.state(adapter())
    told.attach(resident=(resident(PIRATE),))
    told.wait(1.0)
    told.enqueue("a", digest=PIRATE)
    assert told.where("a") == "r0"
    assert not told.of(effects.DropAdapter), "what it holds is not in the way"
    told.certify(digest=Digest("sha256:newer"))
    told.enqueue("b", digest=Digest("sha256:gone"))
    assert told.of(effects.SendRefused)[0].failure.code == "model_not_found"


def test_a_deadlines_message_says_what_the_request_waited_for():
    told = ready()
    told.attach(max_sequences=1)
    told.enqueue("a")
    told.enqueue("b", deadline=5.0)
    told.wait(4.9)
    assert not told.of(effects.SendRefused)
    told.wait(0.2)
    (refusal,) = told.of(effects.SendRefused)
    assert refusal.failure.code == "deadline_exceeded"
    assert "every batch is full" in refusal.failure.message


def test_a_deadlines_message_says_that_there_is_no_runner():
    told = ready()
    told.enqueue("a", deadline=5.0)
    told.wait(6)
    assert told.of(effects.SendRefused)[0].failure.code == "no_runner"


def test_positions_are_reported_again_when_they_change():
    told = ready()
    told.attach(max_sequences=1)
    for name in "abc":
        told.enqueue(name)
    told.finish("a")
    told.wait(1.0)
    assert [(effect.request, effect.position) for effect in told.of(effects.SendPosition)] == [("c", 1)]


def test_a_draining_runner_gets_nothing_new():
    told = ready()
    told.attach()
    told.tell(
        events.DrainsDeclared((events.DrainRequested(told.scheduler.runners[InstanceName("r0")].identity, 10.0),))
    )
    told.enqueue("a")
    assert told.of(effects.SendPosition)[0].why == "its runners are draining"


def test_an_empty_runner_is_drained_at_once():
    told = ready()
    told.attach()
    told.tell(
        events.DrainsDeclared((events.DrainRequested(told.scheduler.runners[InstanceName("r0")].identity, 10.0),))
    )
    assert told.of(effects.ReportDrained)


def test_the_supervisors_overcommit_factor_adds_capacity():
    told = ready()
    told.attach(pages=10)
    told.enqueue("a", max_tokens=140)
    told.enqueue("b", max_tokens=48)
    assert told.where("b") == ""
    told.tell(events.OvercommitSet("default/demo", 1.5))
    assert told.where("b") == "r0"


def test_what_only_a_runner_that_is_given_up_could_hold_is_refused_then():
    told = ready(forget_runner=30.0)
    told.attach("large", pages=100)
    told.attach("small", pages=10)
    told.detach("large")
    told.enqueue("a", prompt_tokens=16 * 20)
    assert not told.of(effects.SendRefused), "it may come back"
    told.wait(31)
    (refusal,) = told.of(effects.SendRefused)
    assert refusal.failure.code == "context_length_exceeded"
