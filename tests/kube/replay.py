"""Repeats a series of changes of pools and adapters: once with an operator that lives, and once with one that is killed
after each of its writes."""

import os
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from testbed.cluster.cluster import Cluster, CommandRefused
from testbed.cluster.operators import OperatorNamespaces, OperatorProcess
from tests.kube.proxy import ProxiedRequest, Proxy
from tests.kube.schedulers import WAITS_FOR_RUNNERS, SchedulerProgram
from tests.kube.site_state import Object, SiteState, in_order, is_ready

WITHIN_S = 60.0
QUIET_S = 1.5
"""An operator has nothing to write if everything is done and it has written nothing for so long."""


def _drains(pod: Object) -> bool:
    return "motet.dev/draining-until" in pod["metadata"].get("annotations", {})


def _is_done(pod: Object) -> bool:
    """Whether its time to drain is over. Then it may overlap with its successor. This would also be so after the
    scheduler has reported it as drained, but the schedulers here never do."""
    until = pod["metadata"].get("annotations", {}).get("motet.dev/draining-until")
    return until is not None and datetime.fromisoformat(until) <= datetime.now(UTC)


def _told(pod: Object) -> str:
    """What identifies a runner."""
    metadata = pod["metadata"]
    marks = metadata.get("annotations") or {}
    ready = "ready" if is_ready(pod) else "not ready"
    return f"{metadata['name']}, created {metadata['creationTimestamp']}, {ready}, {marks or 'no marks'}"


def reason(it: Object, condition: str = "Ready") -> str:
    """The reason of a condition; empty if the status is of an older generation."""
    conditions = it.get("status", {}).get("conditions", [])
    generation = it["metadata"]["generation"]
    return next(
        (one["reason"] for one in conditions if one["type"] == condition and one["observedGeneration"] == generation),
        "",
    )


@dataclass(frozen=True)
class Scenario:
    name: str
    change: Callable[[], object]
    reached: Callable[[SiteState], bool]
    """Whether everything is as it should be after this step."""

    most: int
    """The most runners that a pool may have during this step. A draining runner counts until its time is over."""


@dataclass
class Outcome:
    """The result of a flow."""

    state: Object
    writes: Counter[str]
    """The operator's writes, by verb and kind."""

    made: Counter[str]
    """The objects that were created for runners, by kind."""

    makers: list[str]
    """What each of these is, and who created it."""

    told: Object
    """The pools and adapters that the scheduler knows."""

    entries: int
    """The number of all writes, of whoever."""

    lives: int = 1

    def __str__(self) -> str:
        each = ", ".join(f"{count} {what}" for what, count in sorted(self.writes.items()))
        return f"{self.lives} lives, {self.writes.total()} writes: {each or 'none'}"


@dataclass
class ReadyMaker:
    """Makes pods ready in a separate thread, and counts them."""

    world: SiteState
    most: int = 0
    done_at_once: bool = False
    """Whether a draining runner may overlap with its successor from the beginning. The scheduler of the version before
    reports runners that it does not know as drained at once."""

    excess: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator["ReadyMaker"]:
        thread = threading.Thread(target=self._work, name="kubelet", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join(10)

    def _work(self) -> None:
        while not self._stop.wait(0.2):
            with suppress(OSError, CommandRefused):
                found = self.world.runners()
                for pod in found:
                    if not pod["status"].get("containerStatuses"):
                        self.world.make_ready(pod)
                by_pool: dict[str, list[Object]] = defaultdict(list)
                for pod in found:
                    if not (_drains(pod) if self.done_at_once else _is_done(pod)):
                        by_pool[pod["metadata"]["labels"]["motet.dev/pool"]].append(pod)
                self.excess += [
                    f"{len(pods)} runners of {pool}, {datetime.now(UTC):%H:%M:%S.%f}: " + "; ".join(map(_told, pods))
                    for pool, pods in by_pool.items()
                    if len(pods) > self.most
                ]


def undisturbed(cluster: Cluster, home: OperatorNamespaces, flows: Sequence[Scenario]) -> list[Outcome]:
    world, outcomes = SiteState(home), []
    with (
        SchedulerProgram(home, "undisturbed", env=WAITS_FOR_RUNNERS) as scheduler,
        ReadyMaker(world).running() as kubelet,
        OperatorProcess(home, env={"MOTET_CLUSTER_WRITERS": "1"}),
    ):
        for flow in flows:
            kubelet.most, before = flow.most, len(world.history())
            flow.change()
            cluster.wait_for(lambda flow=flow: flow.reached(world), flow.name, within_s=WITHIN_S)  # type: ignore[misc]
            written = -1
            while (now := len(world.history())) != written:
                written = now
                time.sleep(QUIET_S)
            outcomes.append(_outcome(home, world, before, _known_to(scheduler)))
            assert not kubelet.excess, f"{flow.name}: {kubelet.excess}"
    return outcomes


def killed(
    home: OperatorNamespaces, door: Proxy, flows: Sequence[Scenario], alone: Sequence[Outcome]
) -> Generator[Outcome, None, None]:
    """Run the flows with an operator that is killed after each write. A flow ends when the operator has told the
    scheduler what it told it `alone`, and has nothing to write."""
    world, died = SiteState(home), threading.Event()
    operator = OperatorProcess(home, kubeconfig=door.kubeconfig, env={"MOTET_CLUSTER_WRITERS": "1"})

    def die(seen: ProxiedRequest) -> None:
        if "/events" not in seen.path and not died.is_set():
            died.set()
            os.kill(operator.program.pid, signal.SIGKILL)

    def has_nothing_to_write(flow: Scenario, told: Object) -> bool:
        deadline = time.monotonic() + WITHIN_S
        while not died.wait(0.2):
            with suppress(OSError, LookupError):  # it has not started yet, or its write has not arrived
                rounds, waiting = map(operator.metric, ("motet_reconciles_total", "motet_kubernetes_write_queue_depth"))
                if rounds >= 1 and not waiting and flow.reached(world) and _known_to(scheduler) == told:
                    return not died.wait(QUIET_S)
            assert time.monotonic() < deadline, f"{flow.name}: nothing is written, and it is not done: {world.state()}"
        return False

    try:
        with (
            SchedulerProgram(home, "disturbed", env=WAITS_FOR_RUNNERS) as scheduler,
            ReadyMaker(world).running() as kubelet,
        ):
            operator.program.start()
            door.faults.written = die
            # What is written after a flow's end, in spite of all, belongs to the next one, as the death after it does.
            before = len(world.history())
            for flow, undisturbed_flow in zip(flows, alone, strict=True):
                kubelet.most, lives = flow.most, 0
                flow.change()
                while not has_nothing_to_write(flow, undisturbed_flow.told):
                    operator.program.kill()
                    lives += 1
                    operator.program.start(wait=False)
                    died.clear()  # only now: a write of the killed operator may arrive after its death
                outcome = _outcome(home, world, before, _known_to(scheduler))
                before += outcome.entries
                outcome.lives = lives
                assert not kubelet.excess, f"{flow.name}: {kubelet.excess}"
                yield outcome
    finally:
        door.faults.written = lambda _: None
        operator.program.kill()


def _known_to(scheduler: SchedulerProgram) -> Object:
    # Sorted: the order of pools depends on whether the operator saw them one by one or all at its start.
    return {"pools": in_order(scheduler.told().get("pools", [])), "adapters": scheduler.adapters()}


def _outcome(home: OperatorNamespaces, world: SiteState, before: int, told: Object) -> Outcome:
    news = world.history()[before:]
    ours = [entry for entry in news if entry["user"]["username"] == home.user]
    created = [
        entry
        for entry in news
        if entry["responseStatus"]["code"] == 201
        and entry["objectRef"]["resource"] in ("deployments", "pods")
        and not entry["objectRef"].get("subresource")
    ]
    made = Counter(entry["objectRef"]["resource"] for entry in created)
    return Outcome(world.state(), Counter(map(_what, ours)), made, [*map(_made_by, created)], told, len(news))


def _made_by(entry: Object) -> str:
    """A name that the API server generates is not in what was asked for."""
    about, at = entry["objectRef"], entry["requestReceivedTimestamp"][11:23]
    return f"{about['resource']}/{about.get('name', '')} by {entry['user']['username'].rpartition(':')[2]} at {at}"


def _what(entry: Object) -> str:
    about = entry["objectRef"]
    if about.get("subresource"):
        return f"{about['subresource']} of {about['resource']}"
    if entry["verb"] == "delete":
        return f"{about['resource']} deleted"
    manager = entry["requestURI"].partition("fieldManager=")[2].partition("&")[0]
    done = {"motet-operator": "applied", "motet-scaler": "scaled", "motet-drainer": "marked"}
    return f"{about['resource']} {done.get(manager, manager)}"
