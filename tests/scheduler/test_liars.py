"""What a runner says about requests that are placed elsewhere counts for nothing: neither for these requests, nor for
the runners that have them. It may deny its own requests, which then go on elsewhere."""

import pytest

from motet.domain import InstanceName, RequestId
from motet.runner_info import Failure
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.values import Promise, ScalingMode
from tests.scheduler.builders import PIRATE, adapter, entry, pool, ready, resident


def two_runners():
    """Request `a` is placed on r0, and listed there. r1 has told nothing yet."""
    driver = ready(unlisted_timeout=4.0)
    driver.attach("r0")
    driver.enqueue("a")
    driver.report("r0", entry("a", 5))
    driver.attach("r1")
    return driver


def decline(driver, instance, *, epoch=1, code="adapter_incompatible"):
    return driver.send(events.RunnerDeclined(InstanceName(instance), RequestId("a"), epoch, Failure(code, "no")))


def assert_untouched(driver):
    assert driver.where("a") == "r0"
    assert driver.ledger("r0") == {("a", 1): 5}
    assert not driver.of(effects.SendRefused)
    assert not driver.of(effects.SendPlaced)


def test_a_runner_cannot_decline_what_another_one_has():
    driver = two_runners()
    decline(driver, "r1")
    assert_untouched(driver)
    driver.lose("a")
    assert not driver.of(effects.SendRefused), "the decline was noted"


def test_a_runner_cannot_decline_what_waits():
    driver = two_runners()
    driver.detach("r0")
    driver.detach("r1")
    driver.lose("a")
    decline(driver, "r1")
    assert RequestId("a") in driver.scheduler.requests
    assert not driver.of(effects.SendRefused)


def test_only_the_runner_that_a_request_was_lost_on_may_decline_what_waits():
    """Its gateway may say first that it lost the placement. A runner that declined it before has no say any more."""
    driver = two_runners()
    decline(driver, "r0", code="overloaded")
    driver.lose("a")
    assert driver.where("a") == "r1"
    driver.detach("r1")
    driver.lose("a", epoch=2)
    assert driver.where("a") == ""
    decline(driver, "r0", epoch=2)
    assert not driver.of(effects.SendRefused)
    decline(driver, "r1", epoch=1)
    assert not driver.of(effects.SendRefused)
    decline(driver, "r1", epoch=2)
    assert [one.failure.code for one in driver.of(effects.SendRefused)] == ["adapter_incompatible"]


def test_a_runner_cannot_decline_what_its_gateway_only_wants_to_avoid_there():
    driver = ready()
    driver.attach()
    driver.enqueue("a", epoch=1, avoid=("r0",))
    decline(driver, "r0")
    assert RequestId("a") in driver.scheduler.requests


def test_a_runner_writes_nothing_into_the_timeline_of_what_another_one_has():
    driver = two_runners()
    driver.report("r1", entry("a", 9))
    for kind in (events.PromiseChanged, events.RequestParked, events.RequestResumed):
        driver.send(kind(InstanceName("r1"), RequestId("a"), 1, Promise(7)))
        driver.send(kind(InstanceName("r0"), RequestId("a"), 2, Promise(7)))
    told = {one[1] for one in driver.scheduler.timelines.of(RequestId("a"))}
    assert told
    assert not told & {"extended", "parked", "resumed"}


def test_a_request_is_no_larger_than_the_context_of_its_runner_whatever_a_peer_claims():
    driver = ready(unlisted_timeout=4.0)
    driver.attach(pages=1000, max_model_length=160)
    driver.gateway("g1", *(driver.live(f"x{number}", pages=2**31) for number in range(3)))
    driver.report("r0", *(entry(f"x{number}", 2**31, charged_pages=2**31, parked=number == 2) for number in range(3)))
    assert driver.ledger() == {("x0", 1): 10, ("x1", 1): 10}
    assert driver.scheduler.runners[InstanceName("r0")].demand(0.0) == (3, 30)


def test_no_gateway_says_that_more_was_delivered_than_was_asked_for():
    """Else the tenant would pay for it: its next request would be behind all of the others."""
    driver = ready()
    driver.attach(pages=1000)
    requests = driver.scheduler.requests
    driver.gateway("g1", driver.live("live", delivered=10**9), driver.live("long", delivered=10**9, max_tokens=10**9))
    driver.enqueue("again", delivered=10**9)
    for name in ("live", "again"):
        assert requests[RequestId(name)].delivered == 64
    assert requests[RequestId("long")].delivered == 2048, "the context"
    driver.enqueue("lost")
    driver.lose("lost", delivered=10**9)
    assert requests[RequestId("lost")].delivered == 64
    driver.enqueue("endless", max_tokens=10**9)
    endless = requests[RequestId("endless")]
    driver.send(events.RequestFinished("g0", endless.id, 1, 10**9))
    assert endless.delivered == 2048, "the context"
    driver.attach("r1", pages=1000, max_model_length=4096)
    driver.gateway("g2", driver.live("longer", delivered=10**9, max_tokens=10**9))
    assert requests[RequestId("longer")].delivered == 4096, "that of the runner that has come"


@pytest.mark.parametrize("epoch", [1, 2, 9])
def test_what_a_runner_claims_is_charged_to_it_alone_and_cancelled_there(epoch):
    driver = two_runners()
    for _ in range(2):
        driver.report("r1", entry("a", 60, epoch=epoch, output_tokens=50))
        assert [(one.instance, one.epoch) for one in driver.of(effects.CancelAtRunner)] == [("r1", epoch)]
    assert_untouched(driver)
    assert driver.ledger("r1") == {("a", epoch): 60}
    assert driver.scheduler.requests[RequestId("a")].delivered == 0


def test_a_runner_that_claims_a_request_does_not_hide_that_it_never_arrived():
    driver = ready(unlisted_timeout=4.0)
    driver.attach("r0")
    driver.enqueue("a")
    driver.attach("r1")
    for _ in range(5):
        driver.wait(1)
        driver.report("r0")
        driver.report("r1", entry("a", 2))
    assert driver.scheduler.requests[RequestId("a")].epoch == 2, "it was placed again"


def test_a_runner_that_claims_a_request_and_gives_it_up_does_not_move_it():
    driver = two_runners()
    driver.report("r1", entry("a", 2))
    for _ in range(3):
        driver.wait(1)
        driver.report("r1")
    assert not driver.ledger("r1")
    driver.report("r0", entry("a", 5))
    driver.send(events.SequencesEnded(InstanceName("r1"), "1", ((RequestId("a"), 1),)))
    assert not driver.scheduler.lifecycle.unlisted
    assert_untouched(driver)


def test_a_runner_cannot_end_what_another_one_has():
    driver = two_runners()
    driver.report("r1", entry("a", 2))
    driver.ended("a", instance="r1")
    assert not driver.scheduler.lifecycle.unanswered
    assert_untouched(driver)


def test_what_a_runner_denies_goes_on_elsewhere_and_is_cancelled_there_once_it_is_listed_again():
    driver = two_runners()
    for _ in range(10):
        driver.wait(1)
        driver.report("r0")
        driver.report("r1")
        if driver.where("a") == "r1":
            break
    assert driver.where("a") == "r1"
    driver.wait(3)  # it may have been in a report that was under way
    driver.report("r0", entry("a", 5))
    assert [(one.instance, one.epoch) for one in driver.of(effects.CancelAtRunner)] == [("r0", 1)]


def test_a_pool_does_not_grow_by_requests_that_one_of_its_runners_invents():
    driver = ready()
    driver.state(pools=(pool(replicas=2, scaling=ScalingMode.BUILTIN, min_replicas=1, max_replicas=None),))
    driver.attach("r0")
    driver.attach("r1")
    driver.enqueue("a")
    ghosts = [entry(f"ghost{number}", 2**31, gateway=("nobody", "g0")[number % 2]) for number in range(100)]
    ghosts += [entry("parked", 2**31, parked=True, gateway="nobody"), entry("a", 2**31)]
    wanted = []
    for second in range(60):
        driver.report("r0", entry("a", 2), steps=second)
        driver.report("r1", *ghosts, steps=second)
        driver.wait(1)
        wanted += [one.replicas for one in driver.of(effects.ReportDesiredReplicas)]
    assert max(wanted) <= 4, "it doubled for what nobody had denied yet"
    assert driver.scheduler.capacity.needed["default/demo"] == 1


def test_a_runner_that_lists_a_request_for_an_adapter_does_not_keep_others_from_the_one_that_has_it():
    driver = ready()
    driver.state(adapter(max_replicas=1))
    driver.attach("r1", resident=resident(PIRATE))
    driver.certify(instance="r1")
    driver.report("r1", resident=resident(PIRATE))
    driver.attach("r0")
    driver.report("r0", entry("ghost", 2**31, digest=PIRATE, gateway="nobody"))
    driver.enqueue("a", digest=PIRATE, adapter="default/pirate")
    assert driver.where("a") == "r1"
