"""Something came free at a runner: parked requests come back first, then the queue has another look."""

from motet_scheduler.policy.effects import AllowResume
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.state import SchedulerState


def on_capacity_freed(state: SchedulerState, runner: Runner) -> None:
    while state.supervised and runner.attached and (following := runner.next_parked()) is not None:
        name, parked = following
        if parked.wanted.pages > runner.ledger.free or not runner.slot_for(parked.digest):
            break
        del runner.parked[name]
        runner.record_promise((name, parked.epoch), parked.wanted.pages, parked.digest, state.now, readmitted=True)
        state.emit(AllowResume(runner.instance, name, parked.epoch, parked.wanted))
    queue = state.queues.get(runner.group)
    if queue is not None:
        queue.retry_on(runner)
