"""Which promise of a parked request is meant, by the number that its runner gave it."""

from motet.domain import RequestId
from motet.runner_info import Capacity, RunnerIdentity, RunnerRequest, SequenceState
from motet_scheduler.conversion import read_promise, write_promise
from motet_scheduler.policy.ledger_sync import sync_ledger
from motet_scheduler.policy.runners import Listing, Runner
from motet_scheduler.policy.values import Promise, SchedulerConfig

A = RequestId("a")


def report(runner: Runner, number: int) -> None:
    parked = RunnerRequest(A, 1, 8, state=SequenceState.PARKED, promise_number=number)
    known = {"requests": {}, "gateways": set(), "ended": {}, "unlisted": {}}
    sync_ledger(runner, Listing(), (parked,), **known, config=SchedulerConfig(), now=0.0)


def test_a_request_that_was_parked_again_resumes_under_its_new_promise() -> None:
    """It resumed and was parked between two reports. By the old promise its runner would not let it resume."""
    identity = RunnerIdentity(pool="acme/a", group="acme/a", instance="r0", incarnation="1")
    runner = Runner(identity, "r0", Capacity(pages=20), 1.0)
    report(runner, 2)
    assert runner.parked[A].wanted.number == 2
    report(runner, 4)
    assert (runner.parked[A].wanted.pages, runner.parked[A].wanted.number) == (8, 4)


def test_a_number_stays_with_its_promise() -> None:
    promise = Promise(8, 128, number=4)
    assert read_promise(write_promise(promise)) == promise
