"""Resumes parked requests, as soon as their runner has enough free pages and a slot for their adapter."""

from motet_scheduler.policy import effects
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.state import SchedulerState


def on_capacity_freed(state: SchedulerState, runner: Runner) -> None:
    """A runner has free capacity: its parked requests resume first, then the queue is tried again."""
    while state.supervised and runner.attached and (following := runner.next_parked()) is not None:
        name, parked = following
        if not runner.may_resume(parked):
            break
        runner.record_promise((name, parked.epoch), parked.wanted.pages, parked.digest, state.now, readmitted=True)
        runner.unpark(name)
        state.emit(effects.AllowResume(runner.instance, name, parked.epoch, parked.wanted))
    state.queue(runner.group).retry_on(runner)
