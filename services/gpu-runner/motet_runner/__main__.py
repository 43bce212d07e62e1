"""`python -m motet_runner`: starts one runner, with the settings in its environment."""

import asyncio
import sys

from motet.imports import without_collections

with without_collections():
    import structlog
    import uvloop
    from prometheus_client import CollectorRegistry

    from motet.health import Health
    from motet.read_settings import read
    from motet.service_main import run, run_until
    from motet.settings import Addresses, ProcessSettings
    from motet.surroundings import real_surroundings
    from motet_runner.engine_client import EngineClient, EngineDied
    from motet_runner.external.engine_start import engine_start
    from motet_runner.service import RunnerService
    from motet_runner.settings import Settings
    from motet_runner.sources.base_model import model_folder
    from motet_runner.sources.source_access import Sources

log = structlog.get_logger(__name__)

ENGINE_DIED = 1
"""Exit status when the engine has ended: the runner must be started again."""


def main() -> None:
    process, settings, addresses = read(ProcessSettings), read(Settings), read(Addresses)
    surroundings = real_surroundings()

    async def serve(stop: asyncio.Event, registry: CollectorRegistry, health: Health) -> None:
        sources = Sources(settings, process, registry)
        service: RunnerService | None = None
        drained = asyncio.Event()

        async def serve_model() -> None:
            nonlocal service
            cache = settings.model_cache or process.cache_dir / "models"
            model = await model_folder(settings, sources, cache.absolute())
            config = settings.engine_config(model)
            engine = EngineClient(config, process, *await asyncio.to_thread(engine_start, settings))
            service = RunnerService(
                settings,
                process,
                addresses,
                engine,
                registry,
                surroundings=surroundings,
                sources=sources,
                model=model,
                health=health,
            )
            await service.run()

        async def leave() -> None:
            await stop.wait()
            if service is not None:
                await service.drain(settings.drain_seconds)
            drained.set()

        await run_until(drained, serve_model(), leave())

    try:
        run("runner", process, serve, loop_factory=uvloop.new_event_loop)
    except EngineDied as error:
        log.error("runner_exiting", reason=error.message)
        sys.exit(ENGINE_DIED)


if __name__ == "__main__":
    main()
