"""A runner after its engine has loaded: its requests, its streams to scheduler and supervisor, its reports, its drain.

`RunnerService` has the files, the engine's process and the server. So `LoadedRunner` works with any engine that takes
commands and returns outputs, also with an engine in this process.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Protocol

import structlog

from motet.api.v1 import runner_pb2
from motet.clock import every
from motet.errors import AdapterUnproved
from motet.settings import Addresses
from motet.surroundings import Surroundings
from motet.task_group import run_together
from motet.transport import ServerStream
from motet_runner.accepted_requests import AcceptedRequests, has_work
from motet_runner.adapters.proof import Proof
from motet_runner.adapters.registry import AdapterRegistry
from motet_runner.engine_client import EngineDied
from motet_runner.engine_messages import Command, EngineOutputs, ReportNow
from motet_runner.generate_service import GenerateService
from motet_runner.hang_detector import HangDetector
from motet_runner.interface import (
    AdapterEvicted,
    AdapterFailed,
    AdapterLeftHost,
    AdapterLoaded,
    EngineReport,
    Event,
    OrderRefused,
    OverflowAhead,
    ParkedNow,
    ProofEnded,
    ResumedNow,
    SlabWritten,
    StateChanged,
)
from motet_runner.metrics import Metrics
from motet_runner.runner_facts import RunnerFacts
from motet_runner.scheduler_link import SchedulerLink
from motet_runner.settings import Settings
from motet_runner.supervisor_link import HEARTBEAT_SECONDS, SupervisorLink

log = structlog.get_logger(__name__)

DRAIN_POLL_SECONDS = 0.1
DRAINED_FLUSH_SECONDS = 2.0
"""How long a runner waits, before it ends, for gateways to read which requests must be placed again."""

UPKEEP_SECONDS = 30.0
"""How often the disk cache is checked."""

ENGINE_DIED_FLUSH_SECONDS = 0.5
"""Like DRAINED_FLUSH_SECONDS, after the engine has died: short, because the requests make no progress meanwhile. A
gateway that does not read in this time sees its stream end."""


class RunningEngine(Protocol):
    """An engine that is loaded."""

    def post(self, command: Command) -> None:
        """Send a command, without waiting. The error of a command that cannot be packed is raised, and no other command
        is lost."""

    async def run(self, receive: Callable[[EngineOutputs], None]) -> None:
        """Hand all outputs to `receive` until cancelled. Raises EngineDied when the engine ends."""


class LoadedRunner:
    def __init__(
        self,
        *,
        facts: RunnerFacts,
        model: str,
        engine: RunningEngine,
        adapters: AdapterRegistry,
        accepted: AcceptedRequests,
        settings: Settings,
        addresses: Addresses,
        metrics: Metrics,
        hang_detector: HangDetector,
        surroundings: Surroundings,
        time_scale: float = 1.0,
    ) -> None:
        """`model`: the base model's name in metrics."""
        self.facts = facts
        self.adapters = adapters
        self.accepted = accepted
        self.last_report: EngineReport | None = None
        self._report_asked = False
        self._model = model
        self._engine = engine
        self._metrics = metrics
        metrics.engine.labels(facts.info.backend, facts.info.version or version("motet")).set(1)
        self._hang_detector = hang_detector
        self._report_seconds = settings.report_seconds * time_scale
        self._scale = time_scale
        self.generation = GenerateService(
            identity=facts.identity,
            base_digest=facts.base_digest,
            accepted=accepted,
            adapters=adapters,
            post=engine.post,
            metrics=metrics,
            model=model,
            settings=settings,
            time_scale=time_scale,
            clock=surroundings.clock,
            declined=lambda declined: self.scheduler.declined(declined),  # noqa: PLW0108 - made below
        )
        self.scheduler = SchedulerLink(
            addresses.scheduler_address,
            network=surroundings.network,
            facts=facts,
            accepted=accepted,
            adapters=adapters,
            requests=self.generation,
            last_report=lambda: self.last_report,
            clock=surroundings.clock,
            time_scale=time_scale,
        )
        self.supervisor = SupervisorLink(
            addresses.supervisor_address,
            network=surroundings.network,
            facts=facts,
            accepted=accepted,
            last_report=lambda: self.last_report,
            has_scheduler=lambda: self.scheduler.attached,
            post=engine.post,
            answer_seconds=settings.supervisor_answer_seconds * time_scale,
        )

    @property
    def draining(self) -> bool:
        return bool(self.generation.refusal_reason)

    def unready_reason(self) -> str:
        """Requests may come once a scheduler has welcomed this runner. If that scheduler ends, the runner stays ready
        for the next one."""
        return self.generation.refusal_reason or (
            "" if self.scheduler.welcomed else "no scheduler has accepted this runner yet"
        )

    async def run(self) -> None:
        """Ends when it is cancelled, or with EngineDied."""
        try:
            await run_together(
                self._engine.run(self.on_batch),
                self.scheduler.run(),
                self.supervisor.run(),
                every(self._report_seconds, self.request_report, name="report"),
                every(UPKEEP_SECONDS * self._scale, self.adapters.tick, name="adapters"),
                every(HEARTBEAT_SECONDS * self._scale, self.supervisor.heartbeat, name="heartbeat"),
            )
        except EngineDied as error:
            self.generation.engine_died(error.message)
            await self.generation.wait_flushed(ENGINE_DIED_FLUSH_SECONDS)
            raise

    async def close(self) -> None:
        await self.generation.close()
        self.adapters.close()

    async def serve_gateway(self, stream: ServerStream[bytes | runner_pb2.GenerateDown, runner_pb2.GenerateUp]) -> None:
        """Handle one stream of a gateway."""
        await self.generation.streams.serve(stream)

    async def drain(self, seconds: float, *, take_no_more: Callable[[], Awaitable[None]]) -> None:
        """See `RunnerService.drain`. `take_no_more` is called once new requests are refused."""
        log.info("draining", seconds=seconds, requests=len(self.accepted))
        self.generation.ending = True
        await take_no_more()
        self.scheduler.draining(seconds)
        handed_back: set[tuple[str, int]] = set()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while len(self.accepted):
                    self.request_report()
                    await asyncio.sleep(DRAIN_POLL_SECONDS)
                    for one in self.accepted.idle(self.last_report):
                        if (one.request, one.epoch) not in handed_back:
                            handed_back.add((one.request, one.epoch))
                            self.generation.cancel(one.request, one.epoch)
        left = list(self.accepted)
        for one in left:
            self.generation.cancel(one.request, one.epoch)
        await self.generation.wait_flushed(DRAINED_FLUSH_SECONDS, nothing_left=True)
        log.info("drained", handed_back=len(handed_back), moved=len(left))

    # ---------------------------------------------------------------------------------------------------------- engine

    def on_batch(self, batch: EngineOutputs) -> None:
        if batch.report is not None:
            self.last_report = batch.report
        self.generation.on_batch(batch)
        for event in batch.events:
            self._on_event(event)
        # Others were submitted again.
        gone = [one for one in batch.ended if not self.accepted.holds(one.request, one.epoch)]
        self.scheduler.ended(gone)
        for ended in gone:
            self.supervisor.ended(ended)
        if batch.report is not None:
            self._report_asked = False
            self.adapters.on_report(batch.report.adapters)
            if batch.report.kernels is not None:
                self.adapters.on_kernels(batch.report.kernels.serving)
            self._publish(batch.report)

    def _on_event(self, event: Event) -> None:
        match event:
            case OverflowAhead():
                self._metrics.overflows.inc()
                self.supervisor.overflow(event)
            case ParkedNow():
                self._metrics.parks.labels(event.method.value).inc()
                self._metrics.vllm_preemptions.labels(self._model).inc()
                if event.by_itself:
                    self._metrics.self_parks.inc()
                self.supervisor.parked(event)
            case ResumedNow():
                self._metrics.resumes.labels(event.method.value).inc()
                self.supervisor.resumed(event)
            case OrderRefused():
                self.supervisor.refused(event)
            case AdapterLoaded():
                self._metrics.adapter_pause_seconds.observe(event.pause)
                if (one := self.adapters.on_loaded(event)) is not None:
                    awaited = self.adapters.awaited(event.digest)
                    if not self.scheduler.adapter_changed(one, awaited=awaited):
                        self._engine.post(ReportNow())
            case ProofEnded():
                self._on_proof_ended(event)
            case AdapterEvicted():
                one = self.adapters.on_evicted(event)
                if one is None or one.drop_when_idle or not self.scheduler.adapter_left(one):
                    self._engine.post(ReportNow())  # only a report tells that it is gone altogether
            case AdapterLeftHost():
                self.adapters.on_left_host(event)  # the next report tells it
            case AdapterFailed():
                log.warning("adapter_load_failed", adapter=event.digest, reason=event.error.message)
                if (one := self.adapters.on_failed(event)) is not None:
                    self.scheduler.adapter_changed(one, event.error)
            case SlabWritten():
                self.adapters.on_slab(event)
            case StateChanged():
                pass  # the gateway gets it with a step

    def _on_proof_ended(self, event: ProofEnded) -> None:
        """The scheduler is told also of proofs that no order of it waits for."""
        awaited = self.adapters.awaited(event.digest)
        one, found = self.adapters.on_proof_ended(event), event.found
        if one is None:
            return
        if isinstance(found, Proof):
            log.info("adapter_proved", adapter=event.digest, **found._asdict())
            self.scheduler.adapter_changed(one, awaited=awaited)
            return
        log.warning("adapter_not_proved", adapter=event.digest, reason=found.message)
        if isinstance(found, AdapterUnproved):
            self.scheduler.adapter_changed(one, found)

    def request_report(self) -> None:
        """Ask the engine for a report. An engine that has not answered the previous call is busy or hangs: then its
        last report is sent again, so that the number of steps shows a hanging engine."""
        if self._report_asked and self.last_report is not None:
            self._publish(self.last_report, again=True)
        self._report_asked = True
        self._engine.post(ReportNow())

    def _publish(self, report: EngineReport, *, again: bool = False) -> None:
        work_pending = has_work(report, self.accepted)
        self._hang_detector.observe(report.progress, work=work_pending)
        self._metrics.on_report(report, model=self._model)
        running = {entry.adapter for entry in report.sequences if entry.adapter and entry.pages_used}
        wanted = {one.adapter for one in self.accepted if one.adapter}
        names = {digest: self.adapters.name_of(digest) for digest in running | wanted}
        self._metrics.on_adapters(
            max_lora=self.facts.info.adapter_slots,
            waiting={names[digest] for digest in wanted - running},
            running={names[digest] for digest in running},
        )
        live = self.accepted.runner_requests(report)
        self.scheduler.report(report, live)
        self.supervisor.report(report, live, work_pending=work_pending, again=again)
