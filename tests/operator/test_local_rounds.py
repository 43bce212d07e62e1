"""Rounds of the local operator, without any process."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from motet.clock import FakeClock
from motet.errors import ManifestError, StateDirectoryError
from motet.health import Health
from motet.processes import ProcessRecord, ProcessRecords, ProcessSpec, ProcessStatus
from motet.processes.linux import boot_id, identity_of
from motet.settings import ProcessSettings
from motet_operator.awaited_reports import AWAITED_SECONDS
from motet_operator.local import local_operator
from motet_operator.local.local_operator import LocalOperator
from motet_operator.local.state_directory import StateDirectory
from motet_operator.settings import Settings
from tests.operator.builders import name
from tests.support.surroundings import REAL

MANIFESTS = """
apiVersion: motet.dev/v1alpha1
kind: ServingPool
metadata: {name: demo}
spec: {model: {uri: "hf://acme/base"}}
---
apiVersion: motet.dev/v1alpha1
kind: LoRAAdapter
metadata: {name: legal}
spec: {poolRef: {name: POOL}, source: {uri: "hf://acme/legal"}}
"""
SERVING = {
    "type": "Ready",
    "status": "True",
    "reason": "Serving",
    "message": "",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
    "observedGeneration": 1,
}


class NoProcesses:
    def statuses(self) -> list[ProcessStatus]:
        return []

    def apply(self, specs: Sequence[ProcessSpec]) -> None: ...

    async def stop_all(self) -> None: ...

    def release(self) -> None: ...


class Rounds:
    """An operator that adopts a stack whose adapter served."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, pool: str) -> None:
        manifests = folder / "manifests"
        manifests.mkdir()
        (manifests / "all.yaml").write_text(MANIFESTS.replace("POOL", pool))
        self.layout = StateDirectory.of(folder / "state")
        self.layout.prepare()
        earlier = {"namespace": "default", "name": "legal", "model": "default/legal", "ready": True}
        document = {"adapters": [earlier | {"conditions": [SERVING], "certificate": None, "resident": []}], "pools": []}
        self.layout.status.write_text(json.dumps(document))
        self.operator = LocalOperator(self.layout, ProcessSettings(), Settings(manifests=manifests), REAL)
        self.clock = FakeClock()
        self.awaited = self.operator.sync.awaited
        monkeypatch.setattr(self.operator, "objects", self.operator.folder.read())
        monkeypatch.setattr(self.operator, "processes", NoProcesses())
        monkeypatch.setattr(self.operator.sync, "clock", self.clock)

    def round(self) -> float | None:
        return self.operator.reconcile()

    @property
    def ready(self) -> bool:
        (one,) = json.loads(self.layout.status.read_text())["adapters"]
        return bool(one["ready"])


async def test_the_next_round_is_due_when_nobody_waits_for_the_scheduler_any_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(tmp_path, monkeypatch, "demo")
    rounds.awaited.leader_begins(rounds.clock())
    rounds.awaited.scheduler_speaks(rounds.clock())
    rounds.clock.advance(20.0)
    again = rounds.round()
    assert rounds.ready
    assert again is not None
    assert again <= AWAITED_SECONDS - 20.0
    rounds.clock.advance(AWAITED_SECONDS - 20.0)
    rounds.round()
    assert not rounds.ready


async def test_no_adapter_of_a_group_without_a_pool_is_as_it_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(tmp_path, monkeypatch, "gone")
    rounds.awaited.reported_all([name("demo")])
    rounds.round()
    assert not rounds.ready


def operator(folder: Path) -> LocalOperator:
    layout = StateDirectory.of(folder / "state")
    layout.prepare()
    return LocalOperator(layout, ProcessSettings(), Settings(manifests=folder / "manifests"), REAL)


def that_runs(service: str) -> ProcessRecord:
    me = identity_of(os.getpid())
    assert me is not None
    return ProcessRecord(
        name=service, kind=service, pid=me.pid, start_ticks=me.start_ticks, boot=boot_id(), fingerprint="", log=""
    )


def test_a_stack_that_runs_gets_its_next_operator_whatever_its_manifests_say_now(tmp_path: Path) -> None:
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    (manifests / "all.yaml").write_text(MANIFESTS.replace("POOL", "demo"))
    first = operator(tmp_path)
    first.read_manifests()
    (manifests / "all.yaml").write_text("kind: LoRAAdapterr\n")
    records, runs = ProcessRecords(StateDirectory.of(tmp_path / "state").service_records), that_runs("gateway")
    records.write(runs)
    second = operator(tmp_path)
    second.read_manifests()
    assert [one.resource for one in second.objects.pools] == [one.resource for one in first.objects.pools]
    assert len(second.objects.adapters) == len(second.objects.problems) == 1
    records.write(replace(runs, start_ticks=1))  # it has ended
    with pytest.raises(ManifestError, match="did you mean LoRAAdapter"):
        operator(tmp_path).read_manifests()
    records.write(runs)
    (tmp_path / "state/run/manifests.json").unlink()
    with pytest.raises(ManifestError):  # rather than end all runners
        operator(tmp_path).read_manifests()


async def migrated(url: str) -> None: ...


@asynccontextmanager
async def running(
    one: LocalOperator, monkeypatch: pytest.MonkeyPatch, *, processes: object, migrate: object = migrated
) -> AsyncIterator[None]:
    monkeypatch.setattr(one, "processes", processes)
    monkeypatch.setattr(local_operator, "migrate", migrate)
    stop = asyncio.Event()
    task = asyncio.create_task(one.run(stop, CollectorRegistry(), Health()))
    try:
        yield
    finally:
        stop.set()
        await task


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_manifest_that_is_written_while_processes_start_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    (manifests / "all.yaml").write_text(MANIFESTS.replace("POOL", "demo"))

    class Starting(NoProcesses):
        def apply(self, specs: Sequence[ProcessSpec]) -> None:
            if not (more := manifests / "more.yaml").exists():
                more.write_text(MANIFESTS.split("---", maxsplit=1)[0].replace("demo", "more"))

    one = operator(tmp_path)
    async with running(one, monkeypatch, processes=Starting()):
        await until(lambda: len(one.objects.pools) == 2)


async def test_only_a_first_start_needs_the_database_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    (manifests / "all.yaml").write_text(MANIFESTS.replace("POOL", "demo"))
    tries = 0

    async def away_at_first(url: str) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise StateDirectoryError("the database does not answer")

    with pytest.raises(StateDirectoryError):
        async with running(operator(tmp_path), monkeypatch, processes=NoProcesses(), migrate=away_at_first):
            await until(lambda: tries)
            await asyncio.sleep(0.1)
    layout = StateDirectory.of(tmp_path / "state")
    ProcessRecords(layout.service_records).write(that_runs("predictor"))
    async with running(operator(tmp_path), monkeypatch, processes=NoProcesses(), migrate=away_at_first):
        await until(lambda: tries == 3)
