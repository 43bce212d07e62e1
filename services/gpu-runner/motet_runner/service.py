"""One runner: an engine behind gRPC. This module has the runner's files, engine process, server and start.

First the engine starts to load, the server answers "not serving", and the digests are computed. When the engine is
loaded, the server answers "serving", and the streams to scheduler and supervisor open: see `loaded_runner`. `run` ends
when it is cancelled, or with EngineDied.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

from motet.api.v1 import runner_pb2
from motet.asset_fields import check_asset_files
from motet.digest import asset_digest, base_digest
from motet.domain import Digest
from motet.errors import ModelFolderError, Overloaded
from motet.health import Health
from motet.settings import Addresses, ProcessSettings
from motet.surroundings import Surroundings
from motet.transport import Handlers, Server, ServerStream
from motet.transport.methods import ASSETS, GENERATE
from motet_runner.accepted_requests import AcceptedRequests
from motet_runner.adapters.adapter_files import DiskAdapterFiles
from motet_runner.adapters.cache import DiskCache
from motet_runner.adapters.certification import EngineLimits
from motet_runner.adapters.check_processes import CheckProcesses
from motet_runner.adapters.checks import Checks
from motet_runner.adapters.kept_proofs import KeptProofs, ProofKey
from motet_runner.assembly import assemble, new_identity
from motet_runner.assets import stream_assets, stream_template
from motet_runner.engine_client import EngineClient
from motet_runner.hang_detector import HangDetector
from motet_runner.interface import EngineInfo
from motet_runner.loaded_runner import LoadedRunner
from motet_runner.metrics import Metrics
from motet_runner.settings import Settings
from motet_runner.sources.base_model import mark_unverified
from motet_runner.sources.source_access import SLOWEST_BYTES_PER_SECOND, Sources

log = structlog.get_logger(__name__)


CHECK_SHARE = 0.75
"""A check ends after this part of the time that the runner's disk may take: what takes longer is the disk."""
LOAD_LOG_SECONDS = 10.0


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
        surroundings: Surroundings,
        sources: Sources | None = None,
        model: Path | None = None,
        health: Health | None = None,
    ) -> None:
        """`model` is the base model's folder, if it had to be fetched first."""
        self._settings = settings
        self._process = process
        self._addresses = addresses
        self._engine = engine
        self._sources = sources or Sources(settings, process, registry)
        self._folder = model or settings.model_folder()
        self._server: Server | None = None
        self._around = surroundings
        self._hang_detector = HangDetector(settings.hang_seconds, surroundings.clock)
        health = health or Health()
        health.add_liveness_check(self._hang_detector.hung_reason)
        health.add_readiness_check(self._unready_reason)
        health.set_ready(True)
        self.loaded: LoadedRunner | None = None
        self._load_progress = ""
        self._load_logged = surroundings.clock()
        self.metrics = Metrics(registry, names=process.metrics_names, wall=surroundings.wall)
        self.accepted = AcceptedRequests()
        self.identity = new_identity(settings, surroundings)
        self.ready = asyncio.Event()

    @property
    def draining(self) -> bool:
        return self.loaded is not None and self.loaded.draining

    async def drain(self, seconds: float) -> None:
        """Accept no new requests, hand back waiting ones, and let running ones end, for at most `seconds`.

        Requests that still run then move to other runners, with the tokens that they have. A drain may be interrupted
        at any time: the requests of an ended runner are placed again, because their gateways ask for that.
        """
        server = self._server
        if self.loaded is not None and server is not None and seconds > 0:
            await self.loaded.drain(seconds, take_no_more=lambda: server.set_ready(False))

    async def run(self) -> None:
        # Start the engine's process before this one makes any gRPC channel or server.
        await self._engine.start()
        try:
            handlers: Handlers = {GENERATE: self._generate, ASSETS: self._assets}
            async with self._around.network.serving(self._settings.listen, handlers, ready=False, grace=0) as server:
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
        runner = self.loaded = await self._assemble(info, base, assets)
        try:
            runner.request_report()
            await server.set_ready(True)
            self.ready.set()
            log.info("serving", model=str(self._folder), architecture=info.architecture, pages=info.pages)
            await runner.run()
        finally:
            await runner.close()
            self._checks.close()

    async def _digests(self) -> tuple[Digest, Digest]:
        """The digests of the base model and of its assets. Raises ModelFolderError, without waiting for the engine, if
        the pool asks for another model or no gateway could use the assets."""
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

    async def _assemble(self, info: EngineInfo, base: Digest, assets: Digest) -> LoadedRunner:
        settings = self._settings
        folder, uri = self._folder.absolute(), settings.model_uri
        limits = EngineLimits.of_engine(info).with_base(folder, assets, info.vocabulary, uri)
        self._checks = CheckProcesses(
            limits,
            seconds=CHECK_SHARE * settings.disk_stall_seconds,
            bytes_per_second=SLOWEST_BYTES_PER_SECOND,
        )
        cache = DiskCache(
            self._process.cache_dir.absolute() / "adapters",
            max_adapter_bytes=settings.max_adapter_mib << 20,
            check_whole=self._checks.check_whole,
        )
        await asyncio.to_thread(cache.prepare)
        proofs = None
        if info.kernels is not None:
            proofs = KeptProofs(cache, ProofKey.of(info, base), linears=info.proves)
        checks = Checks(
            cache,
            self._checks.check,
            base_digest=base,
            engine_limits=str(limits),
            run_layout=info.run_layout if settings.writes_slabs else "",
            proofs=proofs,
        )
        return assemble(
            settings,
            self._addresses,
            identity=self.identity,
            model=self._folder.name,
            base=base,
            assets=assets,
            info=info,
            engine=self._engine,
            files=DiskAdapterFiles(cache, checks, self._sources),
            accepted=self.accepted,
            metrics=self.metrics,
            hang_detector=self._hang_detector,
            surroundings=self._around,
            time_scale=self._process.time_scale,
        )

    def on_load_progress(self, read_bytes: int, total: int) -> None:
        self._load_progress = f" ({read_bytes / total:.0%} of {total / 2**30:.1f} GiB)"
        now = self._around.clock()
        if now - self._load_logged >= LOAD_LOG_SECONDS * self._process.time_scale or read_bytes == total:
            self._load_logged = now
            log.info("model_load_progress", bytes=read_bytes, total=total)

    def _unready_reason(self) -> str:
        if self.loaded is None:
            return "the runner is loading the model" + self._load_progress
        return self.loaded.unready_reason()

    # ------------------------------------------------------------------------------------------------------------ gRPC

    async def _generate(self, stream: ServerStream[bytes | runner_pb2.GenerateDown, runner_pb2.GenerateUp]) -> None:
        await self._loaded().serve_gateway(stream)

    async def _assets(self, request: runner_pb2.AssetsRequest) -> AsyncIterator[runner_pb2.AssetChunk]:
        loaded = self._loaded()
        if request.adapter:
            chunks = stream_template(loaded.adapters, request)
        else:
            chunks = stream_assets(self._folder, loaded.facts.asset_digest, request)
        async for chunk in chunks:
            yield chunk

    def _loaded(self) -> LoadedRunner:
        if self.loaded is None:
            raise Overloaded("This runner is still loading the model. Try again later.")
        return self.loaded
