"""Runs a scheduler while this process leads, and replaces it after a failed decision.

When handling an event raises an exception, the scheduler's streams end. A new scheduler starts from an empty state, in
a higher term; gateways, runners and operators send it their state again (see `event_failures`).
"""

import asyncio
from collections.abc import Callable

import structlog

from motet.leadership import Leadership
from motet.task_group import run_together
from motet_scheduler.event_failures import EventFailures
from motet_scheduler.service import DecisionFailed, SchedulerService

log = structlog.get_logger(__name__)


async def lead(
    leadership: Leadership,
    begin: Callable[[EventFailures], SchedulerService],
    *,
    time_scale: float = 1.0,
) -> None:
    """Run until cancelled. Raises DecisionFailed after too many restarts."""
    failures = EventFailures(time_scale=time_scale)
    while True:
        service = begin(failures)
        try:
            await run_together(service.supervisor.run(), service.due_times.run(), service.until_it_fails())
        except DecisionFailed:
            if service.has_failed_enough:
                raise
        await _higher_term(leadership)
        log.warning(
            "scheduler_state_reset",
            term=leadership.term,
            hint="Gateways, runners and operators send their state again.",
        )


async def _higher_term(leadership: Leadership) -> None:
    """Raise the term, so that peers never mix messages of the old scheduler with those of the new one."""
    raised = asyncio.Event()
    leadership.raise_term_above(leadership.term, raised.set)
    await raised.wait()
