"""`python -m motet_predictor`: the predictor's process."""

import asyncio

from motet.imports import without_collections

with without_collections():
    from prometheus_client import CollectorRegistry

    from motet.clock import every
    from motet.health import Health
    from motet.read_settings import read
    from motet.service_main import run, run_until
    from motet.settings import Addresses, Database, ProcessSettings
    from motet.store import open_store
    from motet.surroundings import real_surroundings
    from motet_predictor.fitted_bytes import MAX_FITTED_BYTES
    from motet_predictor.kept_versions import KeptVersions
    from motet_predictor.learned_requests import LearnedRequests
    from motet_predictor.metrics import Metrics
    from motet_predictor.persistence import Persistence
    from motet_predictor.refits import PAUSE_AFTER_START_SECONDS, Refits
    from motet_predictor.service import PredictorService, empty_model
    from motet_predictor.settings import Settings

WEIGHTS_FILE = "predictor-weights.npz"
"""In the state directory. A refit hands its weights over in it."""

LOOK_SECONDS = 5.0
"""How often it is looked whether a refit is due, or a version was ordered."""

FORGET_SECONDS = 3600.0
"""How often rows of scopes that were forgotten are deleted."""

MAX_WRITE_BYTES_A_SECOND = 384 * 1024
"""Of statistics and samples. A database writes each at least twice, to its log and to its file. Scopes that change
often then wait, and are written with all their changes; samples that are too many are dropped."""

MAX_WEIGHTS_BYTES_A_SECOND = 128 * 1024
"""The same of versions' weights: the largest take a minute or two."""


def main() -> None:
    settings, process, addresses, database = read(Settings), read(ProcessSettings), read(Addresses), read(Database)
    surroundings = real_surroundings()
    save_seconds = settings.save_seconds * process.time_scale

    async def predict(stop: asyncio.Event, registry: CollectorRegistry, health: Health) -> None:
        metrics = Metrics(registry)
        model, learned = empty_model(settings, metrics), LearnedRequests()
        async with open_store(database.url(process)) as store:
            persistence = Persistence(
                store,
                model.lengths,
                metrics,
                learned,
                load_scopes=settings.max_scopes,
                queued_samples=settings.queued_samples,
                keep_samples=settings.keep_samples,
            )
            versions = KeptVersions(store, model, surroundings.clock)
            refits = Refits(
                model,
                versions,
                metrics,
                process.data_dir.absolute() / WEIGHTS_FILE,
                after_answers=settings.refit_answers,
                max_seconds=settings.refit_max_seconds,
                pause_after_start=PAUSE_AFTER_START_SECONDS * process.time_scale,
                clock=surroundings.clock,
            )
            service = PredictorService(model, persistence, metrics, surroundings.clock, learned)

            async def save() -> None:
                await persistence.flush(int(MAX_WRITE_BYTES_A_SECOND * save_seconds))
                await versions.flush(int(MAX_WEIGHTS_BYTES_A_SECOND * save_seconds))

            async with surroundings.network.serving(
                addresses.predictor_address, service.handlers, process=health, ready=False
            ) as server:
                await persistence.flush()  # loads; without a database we start from the prior, and load later
                await versions.flush(0)
                await server.set_ready(True)
                await run_until(
                    stop,
                    every(save_seconds, save, name="save"),
                    every(LOOK_SECONDS * process.time_scale, refits.refit_if_due, name="refit"),
                    every(LOOK_SECONDS * process.time_scale, versions.take_order, name="order"),
                    every(FORGET_SECONDS * process.time_scale, persistence.forget, name="forget"),
                )
            await persistence.flush()
            await versions.flush(MAX_FITTED_BYTES, last=True)

    run("predictor", process, predict)


if __name__ == "__main__":
    main()
