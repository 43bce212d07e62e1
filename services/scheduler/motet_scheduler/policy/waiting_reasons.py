"""Why a request waits, as its client is told."""

from collections.abc import Iterator

from motet.domain import InstanceName, Tenant
from motet_scheduler.policy.happenings import Happening
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.runner_choice import (
    NO_RUNNER,
    OTHERS_FIRST,
    RESERVED,
    Obstacle,
    obstacle_on,
    why_it_waits,
)
from motet_scheduler.policy.state import SchedulerState

STARTING = Obstacle("the scheduler has just started and waits for its runners")
UNTRIED = Obstacle(OTHERS_FIRST)
NOBODY = Obstacle(NO_RUNNER)

PASSING = frozenset({(STARTING,), (UNTRIED,), (NOBODY,)})
"""Reasons that others soon follow: it is looked at again."""

MAX_RUNNERS = 20
"""Of more, nobody reads why each does not get a request."""

LIMITED = "it waits for a runner that has its adapter, because placement.maxReplicas allows no more"

REFUSED = "its runners have refused the adapter, and others may come"

REPLACED = "it waits for a runner that holds its revision of the adapter, which was replaced"


def explain(state: SchedulerState, request: Request) -> None:
    """Record why a request waits. Its timeline has each kind of reason once, not each number."""
    limit = ""
    if not state.may_place:
        why = STARTING
    elif request.waits_for is None:
        up = any(runner.takes_work for runner in state.runners_of(request.group))
        why = UNTRIED if up else NOBODY
    else:
        queue = state.queues[request.group]
        reserved, kept = queue.reserved_from(request), queue.kept_from(request)
        able = state.runners_for(request)
        why = why_it_waits(request, able, state.config, state.now, reserved=reserved, kept=kept)
        is_limited = state.limited_to(request) is not None
        if not able and any(one.takes_work and one.serves(request.base) for one in state.runners_of(request.group)):
            why = Obstacle(REPLACED if is_limited else REFUSED)
        elif is_limited:
            limit = f"{REPLACED if request.replaced else LIMITED}: "
    request.why = (limit, why) if limit else (why,)
    kind = limit + why.kind
    if request.waits_for_what != kind:
        request.waits_for_what = kind
        state.note_event(request, Happening.WAITS, limit, why)


def obstacles(state: SchedulerState, request: Request, for_tenant: Tenant) -> Iterator[tuple[InstanceName, str]]:
    """Why each of the first runners does not get a request that waits. `for_tenant`: who reads that, and may not learn
    other tenants' names; nobody: everybody's."""
    queue = state.queues[request.group]
    reserved, left_to_others, kept = queue.reserved, queue.reserved_from(request), queue.kept_from(request)
    for runner in state.runners_of(request.group)[:MAX_RUNNERS]:
        if request.base and not runner.serves(request.base):
            yield runner.instance, "it has another base model"
            continue
        if not runner.may_serve(request.digest, request.adapter):
            yield runner.instance, "it has refused the adapter"
            continue
        obstacle = obstacle_on(request, runner, state.config, state.now, reserved=left_to_others, kept=kept)
        if obstacle.kind is not RESERVED:
            yield runner.instance, str(obstacle)
        elif not for_tenant:
            yield runner.instance, f"it is reserved for {reserved[runner].id} of tenant {reserved[runner].tenant}"
        else:
            whose = "another request of yours" if reserved[runner].tenant == for_tenant else "another tenant"
            yield runner.instance, f"it is reserved for {whose}"
