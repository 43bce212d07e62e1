"""Runs a scheduler while this process leads, and replaces it after a failed decision.

When handling an event raises an exception, the scheduler's streams end. A new scheduler starts from an empty state, in
a higher term; gateways, runners and operators send it their state again (see `event_failures`).
"""

import asyncio
from collections.abc import Callable

import structlog

from motet.event_record import Write
from motet.leadership import Candidacy, Leadership
from motet.surroundings import Surroundings
from motet.task_group import run_together
from motet_scheduler.catalog_file import CatalogFile
from motet_scheduler.event_failures import EventFailures
from motet_scheduler.leader_only import LeaderOnly
from motet_scheduler.metrics import Metrics
from motet_scheduler.policy.values import SchedulerConfig
from motet_scheduler.predecessor import tell_predecessor
from motet_scheduler.service import DecisionFailed, SchedulerService

log = structlog.get_logger(__name__)


async def run_when_leading(
    config: SchedulerConfig,
    front: LeaderOnly,
    *,
    leadership: Candidacy,
    metrics: Metrics,
    supervisor_address: str,
    catalog_file: CatalogFile | None,
    surroundings: Surroundings,
    time_scale: float = 1.0,
    record: Write | None = None,
    on_begin: Callable[[SchedulerService], None] = lambda _: None,
) -> None:
    """Wait until this process leads, then serve behind `front`, and tell the leader before that it no longer leads.
    `on_begin` is given each scheduler before it serves."""
    await leadership.wait_until_leader()

    def begin(failures: EventFailures) -> SchedulerService:
        service = SchedulerService(
            config,
            leadership=leadership,
            metrics=metrics,
            supervisor_address=supervisor_address,
            catalog_file=catalog_file,
            surroundings=surroundings,
            known_failures=failures,
            record=record,
        )
        on_begin(service)
        front.open(service)
        return service

    await run_together(
        lead(leadership, begin, time_scale=time_scale),
        tell_predecessor(leadership.predecessor, leadership.term, network=surroundings.network, time_scale=time_scale),
    )


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
