"""Rounds of the local operator, without any process."""

import asyncio
import json
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path, PosixPath
from time import thread_time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.clock import FakeClock, monotonic
from motet.errors import ManifestError, StateDirectoryError
from motet.health import Health
from motet.processes import ProcessRecord, ProcessRecords, ProcessSpec, ProcessStatus
from motet.processes.lifecycle import Phase
from motet.processes.linux import boot_id, identity_of
from motet.settings import ProcessSettings
from motet_operator.awaited_reports import AWAITED_SECONDS
from motet_operator.local import local_operator, pauses
from motet_operator.local.local_operator import LocalOperator
from motet_operator.local.state_directory import StateDirectory
from motet_operator.reconcile import AdapterObject, CatalogSnapshot, View
from motet_operator.reconcile.adapters import AdapterContext, AdapterResult, evaluate_adapter
from motet_operator.settings import Settings
from motet_operator.sync import SchedulerSync
from tests.common.virtual_time import in_virtual_time
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


def holds(type_: str, reason: str) -> dict[str, object]:
    return {
        "type": type_,
        "status": "True",
        "reason": reason,
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "observedGeneration": 1,
    }


SERVED = {
    "namespace": "default",
    "name": "legal",
    "model": "default/legal",
    "ready": True,
    "conditions": [holds("Accepted", "Valid"), holds("ArtifactReady", "Verified"), holds("Ready", "Serving")],
    "certificate": {"rank": 8},
    "resident": [],
}
DEMO = {"namespace": "default", "name": "demo", "model": "base", "replicas": 1, "ready": 1}
DEMO |= {"adapters": {"registered": 1}}
DEMO |= {"conditions": [holds("AdaptersHealthy", "NoneFailed") | {"status": "False", "reason": "AdaptersFailed"}]}


class NoProcesses:
    def statuses(self) -> list[ProcessStatus]:
        return []

    def adopt(self, specs: Sequence[ProcessSpec]) -> None: ...

    def apply(self, specs: Sequence[ProcessSpec]) -> None: ...

    async def stop_all(self) -> None: ...

    def release(self) -> None: ...


class Adopted(NoProcesses):
    """As a new process manager: every process that is declared to it is there, and ready or not."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self._specs: Sequence[ProcessSpec] = ()

    def statuses(self) -> list[ProcessStatus]:
        return [
            ProcessStatus(
                name=one.name, kind=one.kind, pid=None, phase=self._phase, restarts=0, failures=0, exit_status=None,
                reason="", log=one.log,
            )
            for one in self._specs
        ]  # fmt: skip

    def adopt(self, specs: Sequence[ProcessSpec]) -> None:
        self._specs = self._specs or specs

    def apply(self, specs: Sequence[ProcessSpec]) -> None:
        self._specs = specs


class Rounds:
    """An operator that adopts a stack whose adapter served. The phase is that of its runner."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, pool: str = "demo", phase: Phase = Phase.READY
    ) -> None:
        self.manifests, self.monkeypatch = folder / "manifests", monkeypatch
        self.manifests.mkdir()
        (self.manifests / "all.yaml").write_text(MANIFESTS.replace("POOL", pool))
        self.layout = StateDirectory.of(folder / "state")
        self.layout.prepare()
        self._next(Adopted(phase)).reconcile()  # the last operator: it has started the runner
        self.layout.status.write_text(json.dumps({"adapters": [SERVED], "pools": [DEMO]}))
        self.operator = self._next(Adopted(phase))
        self.clock = FakeClock()
        self.awaited = self.operator.sync.awaited
        monkeypatch.setattr(self.operator.sync, "clock", self.clock)

    def _next(self, processes: NoProcesses) -> LocalOperator:
        found = LocalOperator(self.layout, ProcessSettings(), Settings(manifests=self.manifests), REAL)
        self.monkeypatch.setattr(found, "objects", found.folder.read())
        self.monkeypatch.setattr(found, "processes", processes)
        return found

    def round(self) -> float | None:
        return self.operator.reconcile()

    def runner_is_reported(self) -> None:
        (runner,) = json.loads((self.layout.run / "runners.json").read_text())
        self.operator.sync.slots[runner["name"]] = 4

    def status(self, kind: str = "adapters") -> dict[str, Any]:
        (one,) = json.loads(self.layout.status.read_text())[kind]
        assert isinstance(one, dict)
        return one

    @property
    def ready(self) -> bool:
        return bool(self.status()["ready"])

    def reason(self, type_: str, kind: str = "adapters") -> str:
        return next(str(one["reason"]) for one in self.status(kind)["conditions"] if one["type"] == type_)


async def test_the_next_round_is_due_when_nobody_waits_for_the_scheduler_any_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(tmp_path, monkeypatch, "demo")
    rounds.awaited.leader_begins(rounds.clock())
    rounds.awaited.scheduler_speaks(rounds.clock())
    rounds.runner_is_reported()
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


def test_an_adapter_without_any_ready_runner_is_not_served_although_no_scheduler_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(tmp_path, monkeypatch, phase=Phase.STARTING)
    rounds.round()
    assert (rounds.ready, rounds.reason("Ready")) == (False, "WaitingForRunner")
    assert (rounds.reason("ArtifactReady"), rounds.status()["certificate"]) == ("Verified", {"rank": 8})
    rounds.round()
    assert rounds.reason("ArtifactReady") == "Verified"


def test_what_needs_no_scheduler_is_in_the_status_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(tmp_path, monkeypatch)
    rounds.round()
    assert rounds.status() == SERVED
    assert rounds.status("pools")["ready"] == 1
    assert rounds.reason("AdaptersHealthy", "pools") == "AdaptersFailed"
    suspended = MANIFESTS.replace("POOL", "demo").replace("spec: {poolRef", "spec: {suspend: true, poolRef")
    (rounds.manifests / "all.yaml").write_text(suspended)
    monkeypatch.setattr(rounds.operator, "objects", rounds.operator.folder.read())
    rounds.round()
    assert (rounds.ready, rounds.reason("Ready")) == (False, "Suspended")


def test_a_pool_with_other_adapters_than_before_is_judged_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said of the earlier ones says nothing of them."""
    rounds = Rounds(tmp_path, monkeypatch)
    rounds.round()
    assert rounds.reason("AdaptersHealthy", "pools") == "AdaptersFailed"
    another = MANIFESTS.replace("POOL", "demo").split("---")[1].replace("legal", "medical")
    (rounds.manifests / "more.yaml").write_text(another)
    monkeypatch.setattr(rounds.operator, "objects", rounds.operator.folder.read())
    rounds.round()
    assert rounds.reason("AdaptersHealthy", "pools") == "NoneFailed"


def test_a_ready_runner_that_the_scheduler_has_not_reported_may_hold_any_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(tmp_path, monkeypatch)
    rounds.awaited.scheduler_speaks(rounds.clock())
    rounds.awaited.reported_all([name("demo")])
    rounds.round()
    assert rounds.ready
    rounds.runner_is_reported()
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


class HangingFolder(PosixPath):
    """A folder on a volume that does not answer."""

    answers = threading.Event()

    def is_dir(self) -> bool:
        self.answers.wait()
        return super().is_dir()


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingFolder]:
    """With the manifests. It answers until the test says otherwise."""
    monkeypatch.setattr("motet_operator.local.folder_looks.ANSWER_SECONDS", 0.05)
    folder = HangingFolder(tmp_path / "manifests")
    folder.mkdir()
    (folder / "all.yaml").write_text(MANIFESTS.replace("POOL", "demo"))
    folder.answers.set()
    yield folder
    folder.answers.set()


def state_beside(folder: HangingFolder) -> StateDirectory:
    layout = StateDirectory.of(Path(os.fspath(folder.parent)) / "state")
    layout.prepare()
    return layout


def operator_of(folder: HangingFolder) -> LocalOperator:
    layout = state_beside(folder)
    settings = Settings(manifests=folder, poll_seconds=0.02, quiet_seconds=0.02)
    return LocalOperator(layout, ProcessSettings(), settings.model_copy(update={"manifests": folder}), REAL)


def problems(folder: HangingFolder) -> list[str]:
    path = state_beside(folder).status
    return list(json.loads(path.read_text())["problems"]) if path.exists() else []


async def test_a_manifest_folder_that_hangs_holds_up_nobody(
    hanging: HangingFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = operator_of(hanging)
    async with running(one, monkeypatch, processes=NoProcesses()):
        await until(state_beside(hanging).status.exists)
        hanging.answers.clear()
        (hanging / "more.yaml").write_text(MANIFESTS.split("---", maxsplit=1)[0].replace("demo", "more"))
        await until(lambda: problems(hanging))
        assert "does not answer" in problems(hanging)[0]
        assert len(one.objects.pools) == 1
        hanging.answers.set()
        await until(lambda: len(one.objects.pools) == 2 and not problems(hanging))


async def test_the_next_operator_of_a_stack_in_use_waits_for_no_folder(
    hanging: HangingFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator_of(hanging).read_manifests()
    ProcessRecords(state_beside(hanging).service_records).write(that_runs("gateway"))
    hanging.answers.clear()
    one = operator_of(hanging)
    async with running(one, monkeypatch, processes=NoProcesses()):
        await until(lambda: problems(hanging))
        assert (len(one.objects.pools), len(one.objects.adapters)) == (1, 1)
        hanging.answers.set()
        await until(lambda: not problems(hanging))
        assert (len(one.objects.pools), len(one.objects.adapters)) == (1, 1)


async def test_a_first_start_does_not_wait_for_an_adapter_that_hangs(
    hanging: HangingFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    (hanging / "all.yaml").write_text(MANIFESTS.replace("POOL", "demo").replace("hf://acme/legal", "file://legal"))
    monkeypatch.setattr("motet_operator.local.folder_looks.stamp_of", lambda _: answers.wait() or "stamp")
    try:
        async with running(operator_of(hanging), monkeypatch, processes=NoProcesses()):
            await until(lambda: problems(hanging))
            assert "does not answer" in problems(hanging)[0]
            answers.set()
            await until(lambda: not problems(hanging))
    finally:
        answers.set()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The stamps of the adapters that the scheduler is told, by their names."""
    found: list[dict[str, str]] = []
    send = SchedulerSync.send_state

    def send_state(self: SchedulerSync, catalog: CatalogSnapshot, *rest: Any) -> None:
        found.append({one.name.name: one.content_stamp for one in catalog.adapters})
        send(self, catalog, *rest)

    monkeypatch.setattr(SchedulerSync, "send_state", send_state)
    return found


async def test_a_folder_that_hangs_changes_no_adapter_when_the_operator_restarts(
    hanging: HangingFolder, sent: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its own nor another one."""
    names, hung, answers = ("legal", "medical", "tax"), set[str](), threading.Event()
    pool, adapter = MANIFESTS.replace("POOL", "demo").replace("hf://acme/legal", "file://legal").split("---")
    (hanging / "all.yaml").write_text("---".join([pool, *(adapter.replace("legal", one) for one in names)]))
    ProcessRecords(state_beside(hanging).service_records).write(that_runs("gateway"))
    for one in names:
        (hanging / one).mkdir()
    monkeypatch.setattr(
        "motet_operator.local.folder_looks.stamp_of",
        lambda folder: (folder.name in hung and answers.wait() and "") or f"stamp of {folder.name}",
    )
    stamps = {one: f"stamp of {one}" for one in names}
    async with running(operator_of(hanging), monkeypatch, processes=NoProcesses()):
        await until(lambda: sent and sent[-1] == stamps)
    hung |= {"legal", "medical"}
    sent.clear()
    try:
        async with running(operator_of(hanging), monkeypatch, processes=NoProcesses()):
            await until(lambda: len(problems(hanging)) == 2)
            assert sent
            assert all(one == stamps for one in sent)
    finally:
        answers.set()


async def test_a_first_start_whose_manifests_hang_can_be_stopped(
    hanging: HangingFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging.answers.clear()
    one = operator_of(hanging)
    monkeypatch.setattr(one, "read_manifests", hanging.is_dir)
    async with asyncio.timeout(20):
        async with running(one, monkeypatch, processes=NoProcesses()):
            await asyncio.sleep(0.1)
    assert not state_beside(hanging).status.exists()


async def test_a_new_adapter_is_told_with_its_stamp_beside_slow_ones(
    hanging: HangingFolder, sent: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet_operator.local.folder_looks.ANSWER_SECONDS", 20.0)
    answers = threading.Event()

    def stamp_of(folder: Path) -> str:
        if folder.name.startswith("slow"):
            answers.wait(15.0)
        return f"stamp of {folder.name}"

    monkeypatch.setattr("motet_operator.local.folder_looks.stamp_of", stamp_of)
    pool, adapter = MANIFESTS.replace("POOL", "demo").replace("hf://acme/legal", "file://legal").split("---")
    (hanging / "all.yaml").write_text(
        "---".join([pool, *(adapter.replace("legal", one) for one in ("slow-1", "slow-2"))])
    )
    (hanging / "new").mkdir()
    answers.set()
    try:
        async with running(operator_of(hanging), monkeypatch, processes=NoProcesses()):
            await until(lambda: sent)
            answers.clear()
            await asyncio.sleep(0.1)  # a round with them has begun
            (hanging / "new.yaml").write_text(adapter.replace("legal", "new"))
            async with asyncio.timeout(30):
                while "new" not in sent[-1]:
                    await asyncio.sleep(0.01)
            assert next(one["new"] for one in sent if "new" in one) == "stamp of new"
    finally:
        answers.set()


async def test_a_new_adapter_is_told_with_its_stamp_however_many_others_hang(
    hanging: HangingFolder, sent: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def stamp_of(folder: Path) -> str:
        answers.wait(60.0 if folder.name.startswith("hangs") else 0.01)  # which takes a while, too
        return f"stamp of {folder.name}"

    monkeypatch.setattr("motet_operator.local.folder_looks.stamp_of", stamp_of)
    adapter = MANIFESTS.split("---")[1].replace("POOL", "demo").replace("hf://acme/legal", "file://legal")
    answering = [f"answers-{number}" for number in range(20)]
    for one in answering:
        (hanging / one).mkdir()
    try:
        async with running(operator_of(hanging), monkeypatch, processes=NoProcesses()):
            await until(lambda: sent)
            more = "---".join(adapter.replace("legal", one) for one in ("hangs-1", "hangs-2", *answering))
            (hanging / "more.yaml").write_text(more)
            await until(lambda: all(sent[-1].get(one) == f"stamp of {one}" for one in answering))
    finally:
        answers.set()


def watched_inodes() -> set[int]:
    """Of the folders that the kernel tells this process of."""
    found = set()
    for file in Path("/proc/self/fdinfo").iterdir():
        with suppress(OSError):
            found |= {int(line, 16) for line in re.findall(r"(?m)^inotify .*\bino:(\w+)", file.read_text())}
    return found


async def test_no_folder_can_hold_up_the_process_that_asks_for_notifications(
    hanging: HangingFolder, sent: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's call for that may never return, and nothing else runs meanwhile."""
    (hanging / "legal").mkdir()
    (hanging / "all.yaml").write_text(MANIFESTS.replace("POOL", "demo").replace("hf://acme/legal", "file://legal"))
    async with running(operator_of(hanging), monkeypatch, processes=NoProcesses()):
        await until(lambda: sent and sent[-1]["legal"])
        await asyncio.sleep(0.2)
        assert not watched_inodes() & {folder.stat().st_ino for folder in (hanging, hanging / "legal")}


@pytest.mark.parametrize("kept", ["", "[1]", "{"])
async def test_stamps_that_cannot_be_read_are_found_again(tmp_path: Path, kept: str) -> None:
    layout = StateDirectory.of(tmp_path / "state")
    layout.prepare()
    (layout.run / "stamps.json").write_text(kept)
    operator(tmp_path)


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


def test_only_an_adapter_that_has_changed_is_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(tmp_path, monkeypatch)
    (rounds.manifests / "more.yaml").write_text(
        MANIFESTS.replace("POOL", "demo").split("---")[1].replace("legal", "medical")
    )
    monkeypatch.setattr(rounds.operator, "objects", rounds.operator.folder.read())
    rounds.runner_is_reported()
    judged: list[str] = []

    def judge(view: View, adapter: AdapterObject, context: AdapterContext) -> AdapterResult:
        judged.append(adapter.resource.metadata.name)
        return evaluate_adapter(view, adapter, context)

    monkeypatch.setattr("motet_operator.reconcile.adapters.evaluate_adapter", judge)
    rounds.round()
    assert {*judged} == {"legal", "medical"}
    rounds.round()  # with the conditions of the first
    judged.clear()
    rounds.round()
    assert judged == []
    ref = common_pb2.AdapterRef(namespace="default", name="medical", generation=1)
    report = scheduler_pb2.AdapterReport(ref=ref, serving_digest="sha256:" + 64 * "0")
    rounds.operator.sync.link.receive(scheduler_pb2.SyncDown(adapter=report))
    rounds.round()
    assert judged == ["medical"]
    # Also if all files were read again, as after any change of one.
    monkeypatch.setattr(rounds.operator, "objects", rounds.operator.folder.read())
    rounds.round()
    judged.clear()
    monkeypatch.setattr(rounds.operator, "objects", rounds.operator.folder.read())
    rounds.round()
    assert judged == []


@pytest.mark.parametrize(("took", "share"), [(0.001, 1 / 75), (0.01, 1 / 75), (0.025, 1 / 75), (0.1, 0.05)])
def test_rounds_take_a_seventy_fifth_of_a_core_as_far_as_the_longest_pause_allows(took: float, share: float) -> None:
    rounds, now = pauses.RoundPauses(), 0.0
    for _ in range(1000):
        now += took
        now += rounds.after(took, now)
    assert 1000 * took / now == pytest.approx(share, rel=0.1)


def test_a_few_short_rounds_follow_at_once_after_a_while_without_any() -> None:
    rounds = pauses.RoundPauses()
    for now in (0.0, 100.0):  # the second time as many
        assert [rounds.after(0.01, now) for _ in range(5)] == 5 * [0.0]
        assert rounds.after(0.01, now) == pytest.approx(0.74)


def test_a_round_that_took_long_delays_only_the_next_one() -> None:
    rounds = pauses.RoundPauses()
    assert rounds.after(60.0, 0.0) == pauses.OF_ROUNDS.max_seconds
    assert rounds.after(0.001, pauses.OF_ROUNDS.max_seconds) < 0.1


@in_virtual_time
async def test_a_change_that_comes_when_the_pause_is_over_makes_a_round_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, rounds = asyncio.get_running_loop(), list[float]()
    monkeypatch.setattr(local_operator, "monotonic", loop.time)
    one = operator(tmp_path)
    monkeypatch.setattr(one, "reconcile", lambda: rounds.append(loop.time()))
    monkeypatch.setattr(pauses.RoundPauses, "after", lambda *_: 2.0)
    task = asyncio.create_task(one._reconcile_for_ever())  # noqa: SLF001
    for seconds in (100.0, 0.5):
        await asyncio.sleep(seconds)
        one._wake.set()  # noqa: SLF001
    await asyncio.sleep(100.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert rounds == pytest.approx([0.0, 100.01, 102.01])


async def test_what_else_its_process_computes_delays_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    (manifests / "all.yaml").write_text(MANIFESTS.replace("POOL", "demo"))
    one, rounds, took = operator(tmp_path), list[float](), list[float]()

    def reconcile() -> float:
        rounds.append(0.0)
        return 0.1  # until the next one

    monkeypatch.setattr(one, "reconcile", reconcile)
    monkeypatch.setattr(pauses.RoundPauses, "after", lambda _, seconds, __: took.append(seconds) or 0.0)
    async with running(one, monkeypatch, processes=NoProcesses()):
        await until(lambda: len(rounds) > 1)
        began, known = thread_time(), len(rounds)
        while thread_time() - began < 0.05:  # it polls folders, and hears runners
            pass
        await until(lambda: len(rounds) > known + 1)
    assert max(took) < 0.02


async def test_looks_at_many_manifests_take_little_of_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    (manifests / "all.yaml").write_text(MANIFESTS.replace("POOL", "demo"))
    one, looks, stamp_of = operator(tmp_path), list[float](), local_operator.stamp_of
    monkeypatch.setattr(pauses, "AT_MANIFESTS", pauses.Pause(99, 0.5))

    def stamp(*folder: Any) -> str:
        began = thread_time()
        while thread_time() - began < 0.01:
            pass
        looks.append(monotonic())
        return stamp_of(*folder)

    monkeypatch.setattr(local_operator, "stamp_of", stamp)
    async with running(one, monkeypatch, processes=NoProcesses()):
        await until(lambda: len(looks) > 3)
    assert looks[3] - looks[2] >= 0.5
