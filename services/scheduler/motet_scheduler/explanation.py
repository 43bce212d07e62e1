"""What the scheduler says of one request: its timeline, and while it waits, what keeps it from each runner. Pure."""

from motet.api.v1 import scheduler_pb2
from motet.domain import RequestId, Tenant
from motet.errors import NotFound
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.policy.waiting_reasons import obstacles


def explanation(
    scheduler: Scheduler, request: RequestId, for_tenant: Tenant, now: float
) -> scheduler_pb2.ExplainResponse:
    """`for_tenant`: it asks about its own requests only. Empty: about everybody's. Raises NotFound, also for a request
    of somebody else: whether that is there, nobody learns."""
    story = scheduler.timelines.story(request)
    if story is None or (for_tenant and story.tenant != for_tenant):
        raise NotFound(
            f"The scheduler does not know request {request}: it is not among those that wait, run or ended last."
        )
    found = scheduler_pb2.ExplainResponse(
        request=request,
        entries=[
            scheduler_pb2.TimelineEntry(seconds=entry.at - story.start, event=entry.event, detail=entry.detail)
            for entry in story
        ],
        now_seconds=now - story.start,
        left_out=story.left_out,
        tenant=story.tenant,
    )
    known = scheduler.requests.get(request)
    if known is None or known.forgotten:
        found.ended = True
    elif known.waiting:
        found.position = known.reported_position[0]
        if not known.held:
            found.runners.extend(
                scheduler_pb2.RunnerObstacle(instance=instance, why=why)
                for instance, why in obstacles(scheduler.state, known, for_tenant)
            )
    return found
