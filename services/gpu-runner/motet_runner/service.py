"""One runner: an engine behind gRPC. This module connects the runner's parts; each part is explained in its own file.

First the engine starts to load, the server answers "not serving", and the digests are computed. When the engine is
loaded, the server answers "serving", and the streams to scheduler and supervisor open. `run` ends when it is cancelled,
or with EngineDied.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog
from prometheus_client import CollectorRegistry

from motet.api.v1 import common_pb2, runner_pb2
from motet.asset_fields import check_asset_files
from motet.clock import every
from motet.digest import asset_digest, base_digest
from motet.domain import Digest
from motet.errors import ModelFolderError, MotetError, Overloaded
from motet.health import Health
from motet.rpc import Server, serving
from motet.settings import Addresses, ProcessSettings
from motet.task_group import run_together
from motet_runner.accepted_requests import AcceptedRequests, has_work
from motet_runner.adapters.cache import DiskCache
from motet_runner.adapters.certification import certify, limits_of
from motet_runner.adapters.checks import Check, Checks
from motet_runner.adapters.registry import AdapterRegistry
from motet_runner.assets import stream_assets
from motet_runner.engine_client import EngineClient, EngineDied
from motet_runner.engine_messages import EngineOutputs, ReportNow
from motet_runner.generate_service import GenerateService
from motet_runner.hang_detector import HangDetector
from motet_runner.interface import (
    AdapterEvicted,
    AdapterFailed,
    AdapterLoaded,
    EngineInfo,
    EngineReport,
    Event,
    OverflowAhead,
    ParkedNow,
    ResumedNow,
    StateChanged,
)
from motet_runner.metrics import Metrics
from motet_runner.plan import preset_named
from motet_runner.runner_facts import RunnerFacts
from motet_runner.scheduler_link import SchedulerLink
from motet_runner.settings import Settings
from motet_runner.sources.base_model import mark_unverified
from motet_runner.sources.source_access import Sources
from motet_runner.supervisor_link import HEARTBEAT_SECONDS, SupervisorLink

log = structlog.get_logger(__name__)

SERVICE_NAME = "motet.api.v1.Runner"

DRAIN_POLL_SECONDS = 0.1
DRAINED_FLUSH_SECONDS = 2.0
"""How long a runner that ends waits for gateways to read which of their requests must be placed again."""

LOAD_LOG_SECONDS = 10.0

UPKEEP_SECONDS = 30.0
"""How often the disk cache is looked after."""

ENGINE_DIED_FLUSH_SECONDS = 0.5
"""The same after the engine has died. It is short, because the requests make no progress meanwhile. A gateway that does
not read in this time notices that the stream ends."""


class RunnerService:
    """`run` serves until cancelled. `ready` is set once the engine is loaded and the runner answers "serving"."""

    def __init__(
        self,
        settings: Settings,
        process: ProcessSettings,
        addresses: Addresses,
        engine: EngineClient,
        registry: CollectorRegistry,
        *,
        sources: Sources | None = None,
        model: Path | None = None,
        check: Check | None = None,
        health: Health | None = None,
    ) -> None:
        """`model` is the base model's folder, if it had to be fetched first."""
        self._settings = settings
        self._process = process
        self._addresses = addresses
        self._engine = engine
        self._check = check
        self._sources = sources or Sources(settings, process, registry)
        self._folder = model or settings.model_folder()
        self._server: Server | None = None
        self._hang_detector = HangDetector(settings.hang_seconds)
        self._welcomed = asyncio.Event()
        health = health or Health()
        health.add_liveness_check(self._hang_detector.hung_reason)
        health.add_readiness_check(self._unready_reason)
        health.set_ready(True)
        self.last_report: EngineReport | None = None
        self._report_asked = False
        self.parts: Parts | None = None
        self._load_progress = ""
        self._load_logged = time.monotonic()
        self.metrics = Metrics(registry, names=process.metrics_names)
        self.accepted = AcceptedRequests()
        self.identity = common_pb2.RunnerIdentity(
            pool=settings.pool,
            group=settings.served_group,
            revision=settings.revision,
            instance=settings.instance,
            incarnation=secrets.token_hex(8),
            pod_name=settings.pod_name,
            pod_uid=settings.pod_uid,
        )
        self.ready = asyncio.Event()

    @property
    def draining(self) -> bool:
        return self.parts is not None and bool(self.parts.generation.refusal_reason)

    async def drain(self, seconds: float) -> None:
        """Accept no new requests, hand back those that wait, and let running ones end, for at most `seconds`.

        Requests that still run then move to other runners, with the tokens that they have. A drain may be interrupted
        at any time: gateways have the requests of a runner that ended placed again.
        """
        parts = self.parts
        if parts is None or self._server is None or seconds <= 0:
            return
        log.info("draining", seconds=seconds, requests=len(self.accepted))
        parts.generation.ending = True
        await self._server.set_ready(False)
        parts.scheduler.draining(seconds)
        handed_back: set[tuple[str, int]] = set()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while len(self.accepted):
                    self._request_report()
                    await asyncio.sleep(DRAIN_POLL_SECONDS)
                    for one in self.accepted.idle(self.last_report):
                        if (one.request, one.epoch) not in handed_back:
                            handed_back.add((one.request, one.epoch))
                            parts.generation.cancel(one.request, one.epoch)
        left = list(self.accepted)
        for one in left:
            parts.generation.cancel(one.request, one.epoch)
        await parts.generation.wait_flushed(DRAINED_FLUSH_SECONDS, nothing_left=True)
        log.info("drained", handed_back=len(handed_back), moved=len(left))

    async def run(self) -> None:
        # Start the engine's process before this one makes any gRPC channel or server.
        await self._engine.start()
        try:
            async with serving(
                self._settings.listen, self._add_to, names=[SERVICE_NAME], ready=False, grace=0
            ) as server:
                self._server = server
                await self._serve(server)
        finally:
            await self._engine.stop()

    async def _serve(self, server: Server) -> None:
        loading = asyncio.gather(self._engine.loaded(self.on_load_progress), self._digests())
        try:
            info, (base, assets) = await loading
        finally:
            loading.cancel()
        parts = await self._assemble(info, base, assets)
        report_seconds = self._settings.report_seconds * self._process.time_scale
        try:
            self._request_report()
            await server.set_ready(True)
            self.ready.set()
            log.info("serving", model=str(self._folder), architecture=info.architecture, pages=info.pages)
            await run_together(
                self._engine.run(self.on_batch),
                parts.scheduler.run(),
                parts.supervisor.run(),
                every(report_seconds, self._request_report, name="report"),
                every(UPKEEP_SECONDS * self._process.time_scale, parts.adapters.tick, name="adapters"),
                every(HEARTBEAT_SECONDS * self._process.time_scale, parts.supervisor.heartbeat, name="heartbeat"),
            )
        except EngineDied as error:
            parts.generation.engine_died(error.message)
            await parts.generation.wait_flushed(ENGINE_DIED_FLUSH_SECONDS)
            raise
        finally:
            await parts.generation.close()
            parts.adapters.close()

    async def _digests(self) -> tuple[Digest, Digest]:
        """The digests of the base model and of its assets. Raises ModelFolderError if the pool asks for another model;
        it does not wait for the engine then. Also raises it for assets that no gateway could use."""
        base, assets = await asyncio.gather(
            asyncio.to_thread(base_digest, self._folder), asyncio.to_thread(asset_digest, self._folder)
        )
        expected = self._settings.model_digest
        if expected and base != expected:
            mark_unverified(self._folder)
            raise ModelFolderError(
                f"The model in {self._folder} has the digest {base}, but the pool {self._settings.pool} asks for "
                f"{expected}. Put the right files there, or correct model.digest."
            )
        await asyncio.to_thread(check_asset_files, self._folder)
        return base, assets

    async def _assemble(self, info: EngineInfo, base: Digest, assets: Digest) -> "Parts":
        settings, scale = self._settings, self._process.time_scale
        cache = DiskCache(
            self._process.cache_dir.absolute() / "adapters", max_adapter_bytes=settings.max_adapter_mib << 20
        )
        await asyncio.to_thread(cache.prepare)
        check = self._check or (lambda folder: certify(folder, info))
        promise_rule = preset_named(settings.preset).promise
        facts = RunnerFacts(self.identity, settings.reachable_at, info, base, assets, promise_rule)
        adapters = AdapterRegistry(
            cache,
            checks=Checks(cache, check, base_digest=base, engine_limits=limits_of(info)),
            capacity=settings.max_cached_adapters,
            users_of=self.accepted.users_of,
            post=self._engine.post,
            metrics=self.metrics,
            sources=self._sources,
        )
        generation = GenerateService(
            identity=self.identity,
            base_digest=base,
            accepted=self.accepted,
            adapters=adapters,
            engine=self._engine,
            metrics=self.metrics,
            model=self._folder.name,
            settings=settings,
            time_scale=scale,
            declined=lambda declined: scheduler.declined(declined),  # noqa: PLW0108 - made below
        )
        scheduler = SchedulerLink(
            self._addresses.scheduler_address,
            facts=facts,
            accepted=self.accepted,
            adapters=adapters,
            requests=generation,
            last_report=lambda: self.last_report,
            welcomed=self._welcomed.set,
            time_scale=scale,
        )
        supervisor = SupervisorLink(
            self._addresses.supervisor_address,
            facts=facts,
            accepted=self.accepted,
            last_report=lambda: self.last_report,
            post=self._engine.post,
            answer_seconds=settings.supervisor_answer_seconds * scale,
        )
        parts = self.parts = Parts(facts, adapters, generation, scheduler, supervisor)
        return parts

    def on_load_progress(self, read_bytes: int, total: int) -> None:
        self._load_progress = f" ({read_bytes / total:.0%} of {total / 2**30:.1f} GiB)"
        if time.monotonic() - self._load_logged >= LOAD_LOG_SECONDS * self._process.time_scale or read_bytes == total:
            self._load_logged = time.monotonic()
            log.info("model_load_progress", bytes=read_bytes, total=total)

    def _unready_reason(self) -> str:
        """Requests may come once a scheduler has welcomed this runner. If that scheduler ends, the runner stays ready
        for the next one."""
        if self.parts is None:
            return "the runner is loading the model" + self._load_progress
        return self.parts.generation.refusal_reason or (
            "" if self._welcomed.is_set() else "no scheduler has accepted this runner yet"
        )

    # ---------------------------------------------------------------------------------------------------------- engine

    def on_batch(self, batch: EngineOutputs) -> None:
        parts = self._loaded()
        if batch.report is not None:
            self.last_report = batch.report
        parts.generation.on_batch(batch)
        for event in batch.events:
            self._on_event(event, parts)
        for ended in batch.ended:
            if not self.accepted.holds(ended.request, ended.epoch):  # else it was submitted again
                parts.supervisor.ended(ended)
        if batch.report is not None:
            self._report_asked = False
            self._publish(batch.report)

    def _on_event(self, event: Event, parts: "Parts") -> None:
        match event:
            case OverflowAhead():
                self.metrics.overflows.inc()
                parts.supervisor.overflow(event)
            case ParkedNow():
                self.metrics.parks.labels(event.method.value).inc()
                self.metrics.vllm_preemptions.labels(self._folder.name).inc()
                if event.by_itself:
                    self.metrics.self_parks.inc()
                parts.supervisor.parked(event)
            case ResumedNow():
                self.metrics.resumes.labels(event.method.value).inc()
                parts.supervisor.resumed(event)
            case AdapterLoaded():
                if (one := parts.adapters.on_loaded(event)) is not None:
                    parts.scheduler.adapter_changed(one)
            case AdapterEvicted():
                parts.adapters.on_evicted(event)
            case AdapterFailed():
                log.warning("adapter_load_failed", adapter=event.digest, reason=event.error.message)
                if (one := parts.adapters.on_failed(event)) is not None:
                    parts.scheduler.adapter_changed(one, event.error)
            case StateChanged():
                pass  # the gateway gets it with a step

    def _request_report(self) -> None:
        """Ask the engine for a report. If it has not answered the last time, it is busy or hangs: then its last report
        is sent again. So steps that stand still mean an engine that hangs."""
        if self._report_asked and self.last_report is not None:
            self._publish(self.last_report)
        self._report_asked = True
        self._engine.post(ReportNow())

    def _publish(self, report: EngineReport) -> None:
        parts = self._loaded()
        self._hang_detector.observe(report.steps, work=has_work(report, self.accepted))
        self.metrics.on_report(report, model=self._folder.name)
        running = {entry.adapter for entry in report.sequences if entry.adapter and entry.pages_used}
        wanted = {one.adapter for one in self.accepted if one.adapter}
        names = {digest: parts.adapters.name_of(digest) for digest in running | wanted}
        self.metrics.on_adapters(
            max_lora=parts.facts.info.adapter_slots,
            waiting={names[digest] for digest in wanted - running},
            running={names[digest] for digest in running},
        )
        parts.scheduler.report(report)
        parts.supervisor.report(report)

    # ------------------------------------------------------------------------------------------------------------ gRPC

    def _add_to(self, server: grpc.aio.Server) -> None:
        # Not the generated function: messages to gateways are encoded already, so this handler has no serializer.
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": grpc.stream_stream_rpc_method_handler(
                self._generate, request_deserializer=runner_pb2.GenerateUp.FromString
            ),
            "Assets": grpc.unary_stream_rpc_method_handler(
                self._assets,
                request_deserializer=runner_pb2.AssetsRequest.FromString,
                response_serializer=runner_pb2.AssetChunk.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def _generate(self, requests: AsyncIterator[runner_pb2.GenerateUp], context: Any) -> None:
        try:
            generation = self._loaded().generation
        except MotetError as error:
            await context.abort(error.mapping.grpc, error.message)
            raise
        await generation.streams.serve(requests, context)

    async def _assets(self, request: runner_pb2.AssetsRequest, context: Any) -> AsyncIterator[runner_pb2.AssetChunk]:
        try:
            facts = self._loaded().facts
            async for chunk in stream_assets(self._folder, facts.asset_digest, request):
                yield chunk
        except MotetError as error:
            await context.abort(error.mapping.grpc, error.message)

    def _loaded(self) -> "Parts":
        if self.parts is None:
            raise Overloaded("This runner is still loading the model. Try again later.")
        return self.parts


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that exist once the engine is loaded."""

    facts: RunnerFacts
    adapters: AdapterRegistry
    generation: GenerateService
    scheduler: SchedulerLink
    supervisor: SupervisorLink
