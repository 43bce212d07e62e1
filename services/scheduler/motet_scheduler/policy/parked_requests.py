"""Resumes parked requests, as soon as their runner has enough free pages and a slot for their adapter."""

from heapq import nsmallest

from motet_scheduler.policy import effects
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.state import SchedulerState

RESUMED_AT_ONCE = 32
"""In one event: a runner may claim thousands, and the next report goes on."""


def on_capacity_freed(state: SchedulerState, runner: Runner) -> None:
    """A runner has free capacity: its parked requests resume first, then the queue is tried again. While it lists what
    it has, none resumes: what takes the room may be in the next part."""
    if runner.parked and state.supervised and runner.attached and runner.listing is None:
        for name, parked in nsmallest(RESUMED_AT_ONCE, runner.parked.items(), key=lambda item: item[1].order):
            if not runner.may_resume(parked):
                break
            runner.record_promise((name, parked.epoch), parked.wanted.pages, parked.digest, state.now, readmitted=True)
            runner.unpark(name)
            state.emit(effects.AllowResume(runner.instance, name, parked.epoch, parked.wanted))
    state.queue(runner.group).retry_on(runner)
