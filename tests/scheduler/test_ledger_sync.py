"""The ledger against the runners' reports, and how parked requests resume."""

from motet.domain import InstanceName, RequestId
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.values import Promise
from tests.scheduler.builders import entry, ready

R0 = InstanceName("r0")
A = RequestId("a")


def park(told, request="a", *, epoch=1, pages=10):
    return told.tell(events.RequestParked(R0, RequestId(request), epoch, Promise(pages)))


def supervised(**config):
    told = ready(**config)
    told.tell(events.SupervisorConnected())
    return told


def test_the_runners_promise_stands():
    told = ready()
    told.attach()
    told.enqueue("a")
    told.report("r0", entry("a", 9))
    assert told.ledger() == {("a", 1): 9}


def test_what_the_runner_holds_and_we_did_not_know_is_adopted():
    told = ready()
    told.attach()
    told.report("r0", entry("stranger", 6))
    assert told.ledger() == {("stranger", 1): 6}


def test_a_placement_that_never_arrived_is_given_up_after_two_reports_and_two_seconds():
    told = ready()
    told.attach()
    told.enqueue("a")
    for _ in range(3):
        told.clock.advance(0.5)
        told.report("r0")
    assert told.ledger(), "too young"
    told.clock.advance(0.6)
    told.report("r0")
    assert not told.ledger()


def test_one_report_is_never_enough():
    told = ready()
    told.attach()
    told.enqueue("a")
    told.clock.advance(10)
    told.report("r0")
    assert told.ledger()
    told.report("r0")
    assert not told.ledger()


def test_a_placement_that_was_given_up_can_still_be_lost_and_placed_again():
    told = ready()
    told.attach()
    told.enqueue("a")
    for _ in range(2):
        told.clock.advance(3)
        told.report("r0")
    told.lose("a")
    told.wait(1)
    assert told.where("a") == "r0"


def test_a_report_sent_before_a_request_ended_does_not_record_it_again():
    told = ready()
    told.attach()
    told.enqueue("a")
    told.finish("a")
    told.report("r0", entry("a", 5))
    assert not told.ledger()


def test_a_request_that_runs_long_after_its_end_uses_pages_and_is_counted():
    told = ready()
    told.attach()
    told.enqueue("a")
    told.finish("a")
    told.wait(3)
    told.report("r0", entry("a", 5))
    assert told.ledger() == {("a", 1): 5}


def test_work_that_its_gateway_does_not_know_is_cancelled_after_three_reports():
    told = ready()
    told.attach()
    for _ in range(2):
        told.report("r0", entry("orphan", 5))
        assert not told.of(effects.CancelAtRunner)
    told.report("r0", entry("orphan", 5))
    assert [effect.request for effect in told.of(effects.CancelAtRunner)] == ["orphan"]


def test_work_of_a_gateway_that_is_away_is_left_alone():
    told = ready()
    told.attach()
    for _ in range(5):
        told.report("r0", entry("a", 5, gateway="elsewhere"))
        assert not told.of(effects.CancelAtRunner)


def test_an_earlier_placement_that_still_runs_is_cancelled_and_counted():
    told = ready()
    told.attach("r0")
    told.attach("r1")
    told.enqueue("a")
    assert told.where("a") == "r1"
    told.lose("a")
    told.wait(3)
    told.report("r1", entry("a", 5, epoch=1))
    assert [(effect.instance, effect.epoch) for effect in told.of(effects.CancelAtRunner)] == [("r1", 1)]
    assert told.ledger("r1") == {("a", 1): 5}


def test_a_parked_request_gives_its_promise_back_and_holds_the_door_for_itself():
    told = supervised()
    told.attach(pages=12)
    told.enqueue("a", max_tokens=48)
    told.enqueue("b", max_tokens=48)
    park(told, pages=10)
    assert told.ledger() == {("b", 1): 4}
    told.enqueue("c", max_tokens=16)
    assert told.where("c") == "", "two pages are free, and the parked request wants them first"
    told.finish("b")
    assert told.of(effects.AllowResume) == [effects.AllowResume(R0, A, 1, Promise(10))]
    assert told.where("c") == "r0"


def test_without_a_supervisor_the_runner_lets_its_parked_requests_back_in_itself():
    told = ready()
    told.attach()
    told.report("r0", entry("a", 8, parked=True))
    assert not told.of(effects.AllowResume)
    told.report("r0", entry("a", 8))
    assert told.ledger() == {("a", 1): 8}


def test_parked_requests_come_back_by_class_then_age():
    told = supervised()
    told.attach(pages=20)
    for name in ("a", "b"):
        told.enqueue(name, max_tokens=16)
        told.clock.advance(0.1)
    told.report("r0", entry("a", 2), entry("b", 2), entry("big", 16))
    park(told, "b", pages=12)
    park(told, "a", pages=12)
    told.report("r0", entry("a", 12, parked=True), entry("b", 12, parked=True))
    told.clock.advance(3)
    told.report("r0", entry("a", 12, parked=True), entry("b", 12, parked=True))
    assert [effect.request for effect in told.of(effects.AllowResume)] == ["a"]


def test_a_readmission_that_never_happened_is_tried_again():
    told = supervised()
    told.attach()
    told.enqueue("a")
    park(told)
    assert told.of(effects.AllowResume)
    for _ in range(3):
        told.clock.advance(0.5)
        told.report("r0", entry("a", 10, parked=True))
        assert not told.of(effects.AllowResume), "on its way"
    told.clock.advance(1)
    told.report("r0", entry("a", 10, parked=True))
    assert told.of(effects.AllowResume)


def test_a_promise_that_the_supervisor_enlarged_is_in_the_ledger_at_once():
    told = supervised()
    told.attach()
    told.enqueue("a")
    told.tell(events.PromiseChanged(R0, A, 1, Promise(20)))
    assert told.ledger() == {("a", 1): 20}


def test_news_of_a_request_that_has_gone_changes_nothing():
    told = supervised()
    told.attach()
    told.tell(events.PromiseChanged(R0, A, 1, Promise(20)))
    park(told)
    told.tell(events.RequestResumed(R0, A, 1, Promise(20)))
    assert not told.ledger()
    assert not told.scheduler.runners[R0].parked


def test_a_parked_request_that_moves_is_forgotten_at_its_old_place():
    told = supervised()
    told.attach(pages=8)
    told.report("r0", entry("x", 6))
    told.gateway("g0", told.live("a", pages=2))
    park(told, pages=8)
    told.lose("a")
    assert not told.scheduler.runners[R0].parked
