"""While a process leads: one scheduler after the other, each from an empty state and in a higher term than the last.

Nearly always there is only one. When it fails to decide what follows from an event, its streams end and the next one
takes its place; gateways, runners and operators tell it everything again (see `failures`).
"""

import asyncio
from collections.abc import Callable

import structlog

from motet.clock import every
from motet.leadership import Leadership
from motet.task_group import run_together
from motet_scheduler.event_failures import EventFailures
from motet_scheduler.service import DecisionFailed, SchedulerService

log = structlog.get_logger(__name__)


async def lead(
    leadership: Leadership,
    begin: Callable[[EventFailures], SchedulerService],
    *,
    tick_seconds: float,
    time_scale: float = 1.0,
) -> None:
    """Until cancelled, or until beginning anew does not help: then FailedToDecide is raised."""
    failures = EventFailures(time_scale=time_scale)
    while True:
        service = begin(failures)
        try:
            await run_together(
                service.supervisor.run(), every(tick_seconds, service.tick, name="tick"), service.until_it_fails()
            )
        except DecisionFailed:
            if service.has_failed_enough:
                raise
        await _higher_term(leadership)
        log.warning("the scheduler begins anew, and hears from everybody what there is", term=leadership.term)


async def _higher_term(leadership: Leadership) -> None:
    """Nothing that was said before may be mixed with what is said from here on."""
    kept = asyncio.Event()
    leadership.raise_term_above(leadership.term, kept.set)
    await kept.wait()
