"""The local operator: reads the folder, asks `reconcile` what to do, and does it with processes."""

import asyncio
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from motet.addresses import http_url
from motet.clock import monotonic
from motet.domain import ObjectName
from motet.errors import ManifestError, ModelFolderError, StateDirectoryError
from motet.health import Health
from motet.processes import LifecycleConfig, ProcessManager, ProcessRecords, ProcessSpec, RestartBackoff
from motet.resources import LoRAAdapter, Manifest, ServingPool, names_manifest
from motet.service_main import run_until
from motet.settings import Database, ProcessSettings
from motet.sources import folder_of
from motet.surroundings import Surroundings
from motet.task_group import run_together
from motet_operator.earlier_status import unheard_adapters
from motet_operator.local import folder_looks, pauses
from motet_operator.local.folder_looks import FolderLooks, ManyFolders
from motet_operator.local.manifest_folder import (
    Debouncer,
    DeclaredObjects,
    ManifestFolder,
    absolute_uri,
    source_of,
    stamp_of,
)
from motet_operator.local.object_metadata import MetadataFile, ObjectMetadata, StampsFile
from motet_operator.local.runner_table import LocalRunner, RunnerTable
from motet_operator.local.service_specs import ServiceSpecs
from motet_operator.local.state_directory import StateDirectory
from motet_operator.local.status import (
    AdapterDocuments,
    StatusFile,
    conditions_from,
    revisions_from,
    status_document,
    wanted_from,
    with_earlier_reports,
)
from motet_operator.metrics import LocalMetrics
from motet_operator.reconcile import (
    AdapterObject,
    AdapterStatus,
    Plan,
    PoolObject,
    PoolStatus,
    ResultCache,
    View,
    reconcile,
)
from motet_operator.reconcile.conditions import condition_of
from motet_operator.settings import Settings
from motet_operator.sync import SchedulerSync

log = structlog.get_logger(__name__)

MAX_PROBLEMS_SHOWN = 20

FIRST_LOOKS = 3
"""A first start waits as long as this number of adapters' folders that do not answer take."""

TOGETHER_SECONDS = 0.01
"""Changes that come within it make one round."""

NEEDED_OF_A_MODEL = ("config.json", "tokenizer.json")
"""Without the one no runner starts, without the other no request can be read."""


class LocalOperator:
    def __init__(
        self, layout: StateDirectory, process: ProcessSettings, settings: Settings, surroundings: Surroundings
    ) -> None:
        self._layout = layout
        self._process = process
        self._settings = settings
        self._wake = asyncio.Event()
        self.folder = ManifestFolder(settings.manifests, layout.accepted_manifests)
        self._signature_seconds = 0.0
        """That the last look at the manifests took of a core"""
        self._manifest_looks = FolderLooks("manifests", settings.manifests, self._wake.set)
        self._adapter_looks = ManyFolders(
            "adapters",
            self._note_stamps,
            quiet_seconds=settings.quiet_seconds,
            poll_seconds=settings.poll_seconds,
        )
        self._adapter_folders: dict[str, Path] = {}
        """By the source of the adapter."""
        self.objects = DeclaredObjects()
        self._stamps_file = StampsFile(layout.run / "stamps.json")
        self._stamps = self._stamps_file.read()
        self._metadata = MetadataFile(layout.run / "objects.json")
        self._services = ServiceSpecs(layout, process, settings)
        self._runners = RunnerTable(layout.run / "runners.json", self._services)
        self.sync = SchedulerSync(
            layout.address("scheduler"), self._wake.set, surroundings=surroundings, time_scale=process.time_scale
        )
        self._status = StatusFile(layout.status)
        self._documents = AdapterDocuments()
        self._results = ResultCache()
        self._declared: tuple[DeclaredObjects, dict[tuple[str, str], ObjectMetadata], tuple[AdapterObject, ...]]
        self._declared = (self.objects, {}, ())
        """What the last round knew of the objects, and the adapters of its view"""
        config = LifecycleConfig(stop_grace=settings.stop_grace_seconds, liveness_seconds=settings.silent_seconds)
        config = config.scaled(process.time_scale)
        self.processes = ProcessManager(
            ProcessRecords(layout.service_records), config=config, clock=surroundings.clock, changed=self._wake.set
        )
        predictor = self.processes.recorded("predictor")
        self._metrics = LocalMetrics(CollectorRegistry())  # replaced in `run` by the registry that is served
        self._store_ready = predictor is not None and predictor.alive  # then the database is already migrated
        self._unhealthy_grace = timedelta(seconds=settings.unhealthy_seconds * process.time_scale)
        self._remember(self._status.read())

    async def run(self, stop: asyncio.Event, registry: CollectorRegistry, health: Health) -> None:
        """Raises SetupError for a problem that a person must solve before anything can start."""
        self._metrics = LocalMetrics(registry)
        patience = None
        if self._is_in_use():
            patience = folder_looks.ANSWER_SECONDS
            self.objects = self.folder.recall()
        reading = asyncio.create_task(self._manifest_looks(self._read_first), name="first look at the manifests")
        try:
            await run_until(stop, reading, self._adapter_looks.run(), self._work(reading, patience, health))
        finally:
            self._manifest_looks.close()
            self._adapter_looks.close()
            if stop.is_set():
                await self.processes.stop_all()
            else:
                self.processes.release()  # after a crash, the next operator adopts the running processes

    async def _work(self, reading: asyncio.Task[str], patience: float | None, health: Health) -> None:
        """A stack that is not there yet waits for its manifests. One that is in use goes on with what was last read, if
        they do not answer within `patience` seconds."""
        await asyncio.wait({reading}, timeout=patience)
        if reading.done():
            reading.result()
        await self._look_at_adapters(patience or FIRST_LOOKS * folder_looks.ANSWER_SECONDS)
        health.set_ready(True)
        await run_together(self._reconcile_for_ever(), self.sync.run(), self._watch_manifests(reading), self._migrate())

    def _read_first(self) -> str:
        """The signature from before, so that no change since then is missed."""
        looked = self._signature()
        self.read_manifests()
        return looked

    def _is_in_use(self) -> bool:
        return any(record.alive for record in ProcessRecords(self._layout.service_records).read().values())

    def read_manifests(self) -> None:
        """A stack that is not there yet starts only without a problem. One that an operator has left is in use: it gets
        its next operator, with the last valid objects."""
        runs = self._is_in_use()
        if runs:
            self.folder.recall()
        self.objects = self.folder.read()
        if runs and self.objects.pools:
            self._log_problems()
        else:
            self._check_startable()

    def _log_problems(self) -> None:
        for problem in self.objects.problems:
            log.warning("manifest_invalid", problem=str(problem), hint="The last valid version stays in use.")

    def _check_startable(self) -> None:
        problems = self.objects.problems
        if problems:
            shown = [str(problem) for problem in problems[:MAX_PROBLEMS_SHOWN]]
            if len(problems) > len(shown):
                shown.append(f"and {len(problems) - len(shown)} more")
            raise ManifestError("; ".join(shown))
        if not self.objects.pools:
            raise ManifestError(
                f"{self._settings.manifests} declares no ServingPool, so there is nothing to serve. Add one."
            )
        for manifest in self.objects.pools:
            pool = manifest.resource
            assert isinstance(pool, ServingPool)
            folder = folder_of(absolute_uri(pool.spec.model.uri, manifest=manifest.place.file))
            if folder is None:
                continue  # the runner fetches it and reports problems
            self._manifest_looks.at = folder
            missing = next((name for name in NEEDED_OF_A_MODEL if not (folder / name).is_file()), None)
            if missing is not None:
                what = f"has no {missing}" if folder.is_dir() else "does not exist"
                place = manifest.place_of(("spec", "model", "uri"))
                raise ModelFolderError(f"{place}: ServingPool {pool.object_name}: the model folder {folder} {what}.")

    # -------------------------------------------------------------------------------------------------- the loop

    async def _reconcile_for_ever(self) -> None:
        of_rounds = pauses.RoundPauses()
        while True:
            self._wake.clear()
            began = time.thread_time()
            try:
                again = self.reconcile()
            except Exception:
                log.exception("reconcile_failed")
                again = 1.0
            ended = monotonic()
            # Of the round alone: this thread works for others, too.
            pause = of_rounds.after(time.thread_time() - began, ended)
            with suppress(TimeoutError):
                async with asyncio.timeout(again):
                    await self._wake.wait()
            await asyncio.sleep(max(TOGETHER_SECONDS, ended + pause - monotonic()))

    def reconcile(self) -> float | None:
        """One round. Returns the seconds until the next one is due without any change."""
        began = monotonic()
        self.processes.adopt(self._declared_processes())  # whether they are ready belongs to the first view, too
        view = self._view()
        plan = reconcile(view, self._results)
        for replacement in plan.replacements:
            self.processes.kill(replacement.instance, replacement.why)
            self._runners.replaced(replacement.instance, self.sync.unhealthy[replacement.instance].incarnation)
        self._runners.carry_out(plan)
        self.processes.apply(self._declared_processes())
        drains = self._runners.drains(plan, [status.name for status in self.processes.statuses()])
        self.sync.send_state(plan.catalog, drains, (instance.name for instance in view.instances))
        self._update_metrics(plan, monotonic() - began)
        due = [(plan.due - view.now).total_seconds()] if plan.due is not None else []
        if (wait := self.sync.wait_ends_in) is not None:
            due.append(wait)
        self._publish(view, plan)
        return max(0.05, min(due)) if due else None

    def _declared_processes(self) -> list[ProcessSpec]:
        # The runners first: they take longest to be ready.
        runners = self._runners.specs(self._restart_wait)
        return [*runners, *self._services.control(store_ready=self._store_ready)]

    def _restart_wait(self, runner: LocalRunner) -> float:
        """A runner's start needs seconds of a core. Those that take over the requests of a dead one need them more."""
        taken_over = self._runners.others_serve(runner, self.processes.statuses(), leaving=self.sync.unhealthy)
        return self._settings.restart_seconds * self._process.time_scale if taken_over else 0.0

    def _view(self) -> View:
        objects = self.objects
        remembered, adapters = self._remembered(objects)
        statuses = {status.name: status for status in self.processes.statuses()}
        pools = []
        for manifest in objects.pools:
            pool = manifest.resource
            assert isinstance(pool, ServingPool)
            pools.append(
                PoolObject(
                    resource=pool,
                    model_uri=absolute_uri(pool.spec.model.uri, manifest=manifest.place.file),
                    generation=remembered[manifest.key].generation,
                    age=remembered[manifest.key].age,
                    conditions=self._pool_conditions.get((pool.object_name.namespace, pool.object_name.name), ()),
                    wanted=self._wanted.get((pool.object_name.namespace, pool.object_name.name)),
                )
            )
        now = datetime.now(UTC)
        return View(
            now=now,
            pools=tuple(pools),
            adapters=adapters,
            namespaces=objects.namespaces,
            runner_sets=self._runners.sets(),
            instances=self._runners.instances(
                statuses,
                self.sync.drained,
                self.sync.unhealthy,
                self._unhealthy_grace,
                attached=self.sync.attached,
                now=now,
                startup=timedelta(seconds=self._settings.startup_seconds * self._process.time_scale),
            ),
            adapter_reports=self.sync.adapter_reports,
            requests=self.sync.requests,
            slots=self.sync.slots,
            batch_caps=self.sync.batch_caps,
            scaling_advice=self.sync.advice,
            runners_override=self._settings.runners,
        )

    def _remembered(
        self, objects: DeclaredObjects
    ) -> tuple[dict[tuple[str, str], ObjectMetadata], tuple[AdapterObject, ...]]:
        """An adapter of which nothing has changed is the same object as in the last round: its result is kept then."""
        known, remembered, adapters = self._declared
        if known is not objects:
            remembered = self._metadata.remember([*objects.pools, *objects.adapters])
            before = {one.resource.object_name: one for one in adapters}
            adapters = tuple(self._adapter(manifest, remembered[manifest.key], before) for manifest in objects.adapters)
        adapters = tuple(map(self._with_last_round, adapters))
        self._declared = objects, remembered, adapters
        return remembered, adapters

    def _adapter(
        self, manifest: Manifest, known: ObjectMetadata, before: Mapping[ObjectName, AdapterObject]
    ) -> AdapterObject:
        adapter = manifest.resource
        assert isinstance(adapter, LoRAAdapter)
        source, volume = self._source_of(manifest)
        earlier = before.get(adapter.object_name)
        if earlier is None:
            return AdapterObject(
                resource=adapter, source=source, volume=volume, generation=known.generation, age=known.age
            )
        found = replace(
            earlier, resource=adapter, source=source, volume=volume, generation=known.generation, age=known.age
        )
        return earlier if found == earlier else found

    def _with_last_round(self, adapter: AdapterObject) -> AdapterObject:
        name = adapter.resource.object_name
        stamp = self._stamps.get(adapter.source, "")
        conditions, revisions = self._adapter_conditions.get(name, ()), self._revisions.get(name, ())
        if (adapter.content_stamp, adapter.conditions, adapter.revisions) == (stamp, conditions, revisions):
            return adapter
        return replace(adapter, content_stamp=stamp, conditions=conditions, revisions=revisions)

    def _publish(self, view: View, plan: Plan) -> None:
        sync = self.sync
        unheard = unheard_adapters(view, plan, sync)
        for event in plan.events:
            if event.kind == "LoRAAdapter" and unheard.get(event.name):
                continue
            say = log.warning if event.type == "Warning" else log.info
            say("status_changed", kind=event.kind, name=str(event.name), reason=event.reason, message=event.message)
        document = status_document(
            plan,
            self.processes.statuses(),
            (*self.objects.problems, *self._manifest_looks.problems, *self._adapter_looks.problems),
            url=http_url(self._settings.host, self._settings.port),
            operator_pid=os.getpid(),
            kernels=sync.kernels,
            batch_caps=sync.batch_caps,
            adapters=self._documents,
        )
        document = with_earlier_reports(document, self._earlier, view, sync, unheard)
        if document != self._earlier:
            self._remember(document, [one for one in plan.adapters if one.name not in unheard])
        try:
            self._status.write(document)
        except OSError as error:
            log.warning("status_write_failed", path=str(self._layout.status), error=str(error))

    def _remember(self, status: dict[str, Any], judged: Sequence[AdapterStatus] = ()) -> None:
        """The last status is an input of the next round, also of the next operator's first one. To parse again what is
        in `judged` would take as long as half a round."""
        known = {(one.name.namespace, one.name.name): one for one in judged}
        rest = status
        if known:
            rest = {"adapters": [it for it in status["adapters"] if (it["namespace"], it["name"]) not in known]}
        self._earlier = status
        self._pool_conditions = conditions_from(status, "pools")
        self._wanted = wanted_from(status)
        self._adapter_conditions = {name: one.conditions for name, one in known.items()}
        self._adapter_conditions |= conditions_from(rest, "adapters")
        self._revisions = {name: one.revisions for name, one in known.items()} | revisions_from(rest)

    def _update_metrics(self, plan: Plan, seconds: float) -> None:
        metrics = self._metrics
        metrics.reconciles.inc()
        metrics.reconcile_seconds.observe(seconds)
        for kind, statuses in (("ServingPool", plan.pools), ("LoRAAdapter", plan.adapters)):
            metrics.objects.labels(kind).set(len(statuses))
            metrics.ready_objects.labels(kind).set_function(partial(_count_ready, statuses))
        metrics.manifest_problems.set(len(self.objects.problems))
        metrics.process_restarts.clear()  # drop runners that no longer exist
        for status in self.processes.statuses():
            metrics.process_restarts.labels(status.name).set(status.restarts)

    # ------------------------------------------------------------------------------------------------- the store

    async def _migrate(self) -> None:
        failures = 0
        while True:
            try:
                await migrate(Database().url(self._process))
            except StateDirectoryError as error:
                if not self._store_ready:
                    raise
                # The stack runs and needs its operator. The database was migrated before, and may be away for a while.
                log.warning("migration_failed", reason=error.message, hint="It is tried again.")
                failures += 1
                backoff = RestartBackoff().scaled(self._process.time_scale)
                await asyncio.sleep(backoff.delay(failures, needs_a_person=True, jitter=0.5))
            else:
                break
        self._store_ready = True
        self._wake.set()

    # ------------------------------------------------------------------------------------------------- the files

    async def _watch_manifests(self, reading: asyncio.Task[str]) -> None:
        looked = await reading
        settled = Debouncer(self._settings.quiet_seconds)
        settled("manifests", looked, monotonic())
        await self._look_at_adapters(folder_looks.ANSWER_SECONDS)  # it may have taken longer than anybody waits
        while True:
            pause = pauses.AT_MANIFESTS.after(self._signature_seconds)
            # A change that has to rest is looked at soon all the same: with rare looks, it never seems to rest.
            await asyncio.sleep(settled.next_look(max(self._settings.poll_seconds, pause)))
            found = settled("manifests", await self._manifest_looks(self._signature), monotonic())
            if found != looked:
                looked = found
                self.objects = await self._manifest_looks(self.folder.read)
                self._log_problems()
                # What is in a new adapter's folder belongs to its revision: without it, it would be checked twice.
                await self._look_at_adapters(folder_looks.ANSWER_SECONDS)

    def _signature(self) -> str:
        began = time.thread_time()
        try:
            return self._signature_now()
        finally:
            self._signature_seconds = time.thread_time() - began

    def _signature_now(self) -> str:
        path = self._settings.manifests
        if path.is_dir():
            return stamp_of(path, names_manifest)
        try:
            found = path.stat()
        except OSError:
            return "missing"
        return f"{found.st_size} {found.st_mtime_ns} {found.st_ino}"

    async def _look_at_adapters(self, patience: float) -> None:
        """Look at the folders of all adapters that are declared now, and wait for them that long."""
        sources = {self._source_of(manifest)[0] for manifest in self.objects.adapters}
        self._adapter_folders = {source: folder for source in sources if (folder := folder_of(source)) is not None}
        self._adapter_looks.want(self._adapter_folders.values())
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._adapter_looks.each_seen()
        self._note_stamps()

    def _note_stamps(self) -> None:
        folders, known = self._adapter_folders, self._adapter_looks.stamps
        # One that does not answer keeps the stamp that it had, also with the last operator.
        stamps = {source: self._stamps[source] for source in folders if source in self._stamps}
        stamps |= {source: known[folder] for source, folder in folders.items() if folder in known}
        if stamps != self._stamps:
            self._stamps = stamps
            self._stamps_file.write(stamps)
        self._wake.set()

    def _source_of(self, manifest: Manifest) -> tuple[str, str]:
        adapter = manifest.resource
        assert isinstance(adapter, LoRAAdapter)
        source = adapter.spec.source
        claim = source.persistent_volume_claim
        volumes = (
            volume
            for pool in self.objects.pools
            if isinstance(pool.resource, ServingPool) and pool.resource.group == adapter.group
            for volume in pool.resource.spec.adapter_volumes
        )
        sub_path = next((one.sub_path for one in volumes if claim and one.claim_name == claim.claim_name), None)
        return source_of(source, manifest=manifest.place.file, sub_path=sub_path)


def _count_ready(statuses: Iterable[PoolStatus | AdapterStatus]) -> int:
    """Asked when somebody reads the metrics: to look at thousands in each round takes long."""
    ready = (condition_of(status.conditions, "Ready") for status in statuses)
    return sum(one is not None and one.holds for one in ready)


async def migrate(url: str) -> None:
    def in_a_thread() -> None:
        from motet import store

        asyncio.run(store.migrate(url))

    began = time.monotonic()
    # In a thread with its own loop: its imports take long, and starting processes should not wait for them.
    await asyncio.to_thread(in_a_thread)
    log.info("database_migrated", seconds=round(time.monotonic() - began, 3))
