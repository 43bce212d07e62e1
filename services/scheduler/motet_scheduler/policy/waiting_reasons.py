"""Why a request waits, as its client is told."""

from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.runner_choice import NO_RUNNER, OTHERS_FIRST, why_it_waits
from motet_scheduler.policy.state import SchedulerState

STARTING = "the scheduler has just started and waits for its runners"

LIMITED = "it waits for a runner that has its adapter, because placement.maxReplicas allows no more"

REPLACED = "it waits for a runner that holds its revision of the adapter, which was replaced"


def explain(state: SchedulerState, request: Request) -> None:
    """Record why a request waits."""
    if not state.may_place:
        request.waiting_reason = STARTING
    elif request.waits_for is None:
        up = any(runner.takes_work for runner in state.runners_of(request.group))
        request.waiting_reason = OTHERS_FIRST if up else NO_RUNNER
    else:
        reserved = state.queues[request.group].reserved_from(request)
        why = why_it_waits(request, state.runners_for(request), state.config, state.now, reserved=reserved)
        if state.limited_to(request) is not None:
            why = f"{REPLACED if request.replaced else LIMITED}: {why}"
        request.waiting_reason = why
