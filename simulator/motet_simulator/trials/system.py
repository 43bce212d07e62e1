"""The services of one trial, each in a simulated process of its own, and what starts them again."""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from motet.domain import Digest
from motet.leadership import Candidacy, LocalLeadership
from motet.lease import Election
from motet.settings import LeaseSettings
from motet.surroundings import Surroundings
from motet.transport.methods import GENERATE
from motet_gateway.catalog import Target
from motet_predictor.learned_requests import LearnedRequests
from motet_predictor.metrics import Metrics as PredictorMetrics
from motet_predictor.service import PredictorService, empty_model
from motet_predictor.settings import Settings as PredictorSettings
from motet_runner.accepted_requests import AcceptedRequests
from motet_runner.assembly import assemble, new_identity
from motet_runner.hang_detector import HangDetector
from motet_runner.loaded_runner import LoadedRunner
from motet_runner.metrics import Metrics as RunnerMetrics
from motet_runner.settings import Settings as RunnerSettings
from motet_scheduler.catalog_file import CatalogFile
from motet_scheduler.leader_loop import run_when_leading
from motet_scheduler.leader_only import LeaderOnly
from motet_scheduler.metrics import Metrics as SchedulerMetrics
from motet_scheduler.service import SchedulerService
from motet_scheduler.settings import Settings as SchedulerSettings
from motet_simulator.fake_engine import PAGE_BYTES, FakeEngine
from motet_simulator.trials.adapters import AdapterCache, AdapterSources, SimulatedAdapterFiles, digest_of
from motet_simulator.trials.addresses import ADDRESSES, PREDICTOR, SCHEDULER, SUPERVISOR
from motet_simulator.trials.clients import Client
from motet_simulator.trials.engine_process import EngineProcess
from motet_simulator.trials.gateway import Gateway
from motet_simulator.trials.grant_checks import GrantChecks
from motet_simulator.trials.leases import GARBLED, LeaseClient, TrialLeases
from motet_simulator.trials.operator import INSTANCES, POOL, DeclaredObjects, TrialOperator
from motet_simulator.trials.plan import CONTEXT_TOKENS, GATEWAYS, SCHEDULERS, AdapterChange, Ask, Plan
from motet_simulator.trials.served import ServedRevisions
from motet_simulator.trials.turn_checks import TurnChecks
from motet_simulator.trials.waiting import WaitingChecks
from motet_simulator.world import Process, SimulatedDisk, Wires, World, surroundings_of
from motet_supervisor.metrics import Metrics as SupervisorMetrics
from motet_supervisor.service import SupervisorService
from motet_supervisor.settings import Settings as SupervisorSettings

LEASE = LeaseSettings(name="it", namespace="here", seconds=6, renew_seconds=4, retry_seconds=1)
NO_LONGER_LEADS = "it no longer leads"
MAY_END = "EngineDied", NO_LONGER_LEADS
"""Why a process may end by itself."""
MAY_NOT_BEGIN = GARBLED, "No space left"
"""And why a scheduler may, until it leads. Later it goes on."""
LOAD_SECONDS = 0.5
REPLACED_AFTER_SECONDS, NEXT_REPLACED_AFTER_SECONDS = 3.0, 4.0
"""When the base model is replaced: from a runner's drain to its end, and from the drain of one runner to the next."""
ASK_AGAIN_SECONDS = 0.5
RESTART_SECONDS = 0.3
"""Until a process that has ended by itself is started again."""
MAX_UNNOTICED_SECONDS = 25.0
"""How long a scheduler may keep a request in its queue whose client or gateway has gone: it hears of that at the next
ping, or when a pause of its own ends."""

Main = Callable[[Process], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class RunnerParts:
    process: Process
    runner: LoadedRunner
    engine: EngineProcess


class System:
    """`object_to` is called with what must never happen."""

    def __init__(self, plan: Plan, world: World, wires: Wires, object_to: Callable[[str], None]) -> None:
        self.plan = plan
        self.world = world
        self.object_to = object_to
        self.processes: dict[str, Process] = {}
        self.disks: dict[str, SimulatedDisk] = {}
        self.caches: dict[str, AdapterCache] = {name: AdapterCache() for name in INSTANCES}
        self.sources = AdapterSources(world)
        self.objects = DeclaredObjects(
            max_sequences=plan.settings.max_sequences,
            ready=lambda: self.runners,
            shrinks=plan.settings.shrinks,
            grants=plan.grants,
        )
        self.base = 0
        """The number of the base model that runners load from now on."""
        self.leases = TrialLeases()
        self.schedulers: dict[str, SchedulerService] = {}
        self.supervisor: SupervisorService | None = None
        self.operator: TrialOperator | None = None
        self.gateways: dict[str, Gateway] = {}
        self.runners: dict[str, RunnerParts] = {}
        self.clients: list[Client] = []
        self._wires = wires
        self.waiting_checks = WaitingChecks()
        self._turn_checks = TurnChecks()
        self.grant_checks = GrantChecks(plan.grants)
        self._terms: dict[int, str] = {}
        """Each with the process that led in it."""
        self._forgotten_term = 0
        """The highest that was reserved when the Lease was deleted."""
        self._ended: list[Process] = []
        schedulers = [f"scheduler-{number}" for number in range(1 if plan.settings.local else SCHEDULERS)]
        wires.aliases[SCHEDULER] = tuple(f"{host}:1" for host in schedulers)
        self._mains: dict[str, Main] = {
            **dict.fromkeys(schedulers, self._run_scheduler),
            "supervisor": self._run_supervisor,
            "predictor": self._run_predictor,
            "operator": self._run_operator,
            **{f"gateway-{number}": self._run_gateway for number in range(GATEWAYS)},
            **dict.fromkeys(INSTANCES, self._run_runner),
        }

    @property
    def leading_host(self) -> str:
        """Empty: no scheduler leads."""
        return max(self.schedulers, key=lambda host: self.schedulers[host].term, default="")

    @property
    def lying(self) -> Collection[str]:
        """Hosts that lie."""
        return self._wires.lies.keys()

    @property
    def busiest_host(self) -> str:
        """The runner whose engine computes most requests. Empty: none has any."""
        loads = {host: len(runner.engine.engine.planner.sequences) for host, runner in self.runners.items()}
        busiest = max(loads, key=loads.__getitem__, default="")
        return busiest if loads.get(busiest) else ""

    @property
    def leader(self) -> SchedulerService | None:
        return self.schedulers.get(self.leading_host)

    # -------------------------------------------------------------------------------------------------------- processes

    def start_all(self) -> None:
        for host in self._mains:
            self.start(host)

    def start(self, host: str) -> None:
        if (running := self.processes.get(host)) is not None:
            if running.alive:
                return
            self._ended.append(running)
        life = 0 if running is None else running.life + 1
        failed = lambda what: self.object_to(f"{host}: {what}")  # noqa: E731
        process = Process(self.world, self._wires, host, life, self._mains[host], failed=failed)
        process.on_end = self._on_end
        self.processes[host] = process

    def kill(self, host: str, seconds: float, *, power: bool = False) -> None:
        """Kill it, and start it again after `seconds`."""
        process = self.processes[host]
        if process.alive:
            process.kill(power=power)
            self._forget(host)
            self.world.after(seconds, self.start, host)

    def kill_in_write(self, host: str, seconds: float) -> bool:
        """Kill it while it writes a file: before the file has changed, or before it does anything else. False: that is
        to come already."""
        disk = self._disk(host)
        if disk.kill_in_write is not None:
            return False

        def kill() -> None:
            self.world.on_met("kill in write", host)
            self.kill(host, seconds)

        disk.kill_in_write = kill
        return True

    def power_off(self, host: str, seconds: float) -> None:
        """The machine goes off, and comes back after `seconds`. What runs locally is all on one machine."""
        for one in list(self.processes) if self.plan.settings.local else [host]:
            self.kill(one, seconds, power=True)
            self._disk(one).lose_unsynced(self.world)
            if (cache := self.caches.get(one)) is not None:
                cache.lose_unsynced(self.world, one)

    def fill_disk(self, host: str, full: bool) -> None:
        self._disk(host).full = full
        if (cache := self.caches.get(host)) is not None:
            cache.full = full

    def _disk(self, host: str) -> SimulatedDisk:
        return self.disks.setdefault(host, SimulatedDisk())

    def note_term(self, host: str) -> None:
        """It may rise while a scheduler leads."""
        name, term = self.processes[host].name, self.schedulers[host].term
        if (first := self._terms.setdefault(term, name)) != name and term > self._forgotten_term:
            self.object_to(f"{name} leads in term {term}, in which {first} has led")

    def delete_lease(self) -> bool:
        """As an administrator would. Whoever makes the next one begins with a term of long ago, until its peers tell it
        theirs. False: there is none."""
        if self.leases.lease is None:
            return False
        self._forgotten_term = max(self._forgotten_term, self.leases.term)  # who leads may raise its own up to that
        self.leases.lease = None
        return True

    def close(self) -> None:
        for process in [*self._ended, *self.processes.values()]:
            process.close()

    def _on_end(self, process: Process) -> None:
        begins = process.host.startswith("scheduler") and process.host not in self.schedulers
        may_end = MAY_END + MAY_NOT_BEGIN if begins else MAY_END
        self._forget(process.host)
        if not any(why in process.ended for why in may_end):
            self.object_to(f"{process.name} ended: {process.ended}")
        self.world.after(RESTART_SECONDS, self.start, process.host)

    def _forget(self, host: str) -> None:
        if (gateway := self.gateways.pop(host, None)) is not None:
            for client in gateway.clients:  # its connection breaks
                client.leave()
        self.runners.pop(host, None)
        self._turn_checks.forget(host)
        self.schedulers.pop(host, None)
        if host == "supervisor":
            self.supervisor = None
        elif host == "operator":
            self.operator = None

    def _surroundings(self, process: Process) -> Surroundings:
        return surroundings_of(process, self._disk(process.host))

    # ------------------------------------------------------------------------------------------------- what is declared

    def change(self, change: AdapterChange) -> None:
        """Somebody applies or deletes the manifest of an adapter. Its files are there before."""
        if not change.deleted:
            self.sources.put(change)
        self.objects.change(change)
        self._tell_operator()

    def set_drain(self, host: str, drains: bool) -> None:
        if not drains:
            self.objects.draining.pop(host, None)
        elif self.operator is not None:
            self.objects.draining[host] = self.operator.drain_deadline()
        self._tell_operator()

    def _tell_operator(self) -> None:
        if self.operator is not None:
            self.processes["operator"].loop.call_soon(self.operator.changed)

    def replace_base(self) -> None:
        """Another base model: one runner after the other drains, ends, and comes back with it."""
        self.base += 1
        for number, host in enumerate(INSTANCES):
            self.world.after(number * NEXT_REPLACED_AFTER_SECONDS, self.set_drain, host, True)
            self.world.after(number * NEXT_REPLACED_AFTER_SECONDS + REPLACED_AFTER_SECONDS, self._replace_runner, host)

    def _replace_runner(self, host: str) -> None:
        self.kill(host, RESTART_SECONDS)
        self.set_drain(host, False)

    # ---------------------------------------------------------------------------------------------------------- clients

    def ask(self, ask: Ask) -> None:
        """A client asks. If its gateway is not there, it goes elsewhere; if none is, it tries again."""
        wanted = f"gateway-{ask.gateway}"
        gateway = self.gateways.get(wanted) or next(iter(self.gateways.values()), None)
        if gateway is None:
            self.world.after(ASK_AGAIN_SECONDS, self.ask, ask)
            return
        client = Client(
            ask,
            now=lambda: self.world.now,
            arrival=lambda: gateway.process.loop.arrival,
            queue_limit=self.plan.settings.queue_limit,
            may_wait=self._may_wait_beside,
            catalog=lambda: gateway.dispatcher.catalog.current,
            start_again=gateway.ask_again,
            grant=self.plan.grant_of(ask.tenant),
            adapter_may_fail=self.plan.may_fail(ask.adapter),
            adapter_may_be_missing=self.plan.may_be_missing(ask.adapter),
            base_may_change=any(fault.kind == "new base" for fault in self.plan.faults),
            may_drain=any(fault.kind in ("drain", "new base") for fault in self.plan.faults),
            revision_is_gone=self._is_gone,
        )
        self.clients.append(client)
        gateway.ask(client)

    def _may_wait_beside(self, client: Client) -> int:
        """Requests of other clients that the scheduler may have had in its queue since this one asked."""
        return sum(
            one is not client and not one.refused_for_room and one.over_at + MAX_UNNOTICED_SECONDS > client.asked_at
            for one in self.clients
        )

    def _is_gone(self, target: Target) -> bool:
        """Whether this revision was replaced by another one, and no runner of its base model that the scheduler knows
        holds it."""
        digest, history = Digest(target.adapter_digest), self.objects.history.get(target.adapter_name.partition("/")[2])
        contents = [one.content for one in history or () if not one.deleted and one.content < AdapterChange.BROKEN]
        digests = list(map(digest_of, contents))
        if digest not in digests or set(digests[digests.index(digest) :]) == {digest}:
            return False
        known = self.leader.scheduler.runners.values() if self.leader is not None else ()
        return not any(digest in runner.adapters.tiers and runner.serves(target.base_digest) for runner in known)

    # --------------------------------------------------------------------------------------------------- what they run

    async def _run_scheduler(self, process: Process) -> None:
        around, address = self._surroundings(process), f"{process.host}:1"
        if self.plan.settings.local:
            with LocalLeadership(Path("scheduler.term"), around) as alone:
                await self._schedule(process, address, alone, CatalogFile(Path("catalog.json"), around.disk), around)
        else:
            lost = lambda why: process.end(f"{NO_LONGER_LEADS}: {why}")  # noqa: E731
            client = LeaseClient(self.leases, process)
            async with Election(client, LEASE, address=address, surroundings=around, lost=lost) as election:
                await self._schedule(process, address, election, None, around)

    async def _schedule(
        self, process: Process, address: str, leadership: Candidacy, file: CatalogFile | None, around: Surroundings
    ) -> None:
        wanted = self.plan.settings
        settings = SchedulerSettings(
            queue_limit=wanted.queue_limit,
            max_passed_over=wanted.max_passed_over,
            force_promise_pages=wanted.force_promise_pages,
        )
        front = LeaderOnly(lambda: leadership.leader_address)

        def note(service: SchedulerService) -> None:
            self.schedulers[process.host] = service
            self.note_term(process.host)

        async with around.network.serving(address, front.handlers, grace=0):
            await run_when_leading(
                settings.config(1.0),
                front,
                leadership=leadership,
                metrics=SchedulerMetrics(CollectorRegistry()),
                supervisor_address=SUPERVISOR,
                catalog_file=file,
                surroundings=around,
                on_begin=note,
            )

    async def _run_supervisor(self, process: Process) -> None:
        wanted, around = self.plan.settings, self._surroundings(process)
        settings = SupervisorSettings(overcommit=wanted.overcommit, hang_seconds=wanted.hang_seconds)
        service = self.supervisor = SupervisorService(
            settings.config(1.0),
            metrics=SupervisorMetrics(CollectorRegistry()),
            clock=around.clock,
        )
        async with around.network.serving(SUPERVISOR, service.handlers):
            await service.due_times.run()

    async def _run_predictor(self, process: Process) -> None:
        around = self._surroundings(process)
        metrics = PredictorMetrics(CollectorRegistry())
        service = PredictorService(
            empty_model(_predictor_settings(), metrics), _NoStore(), metrics, around.clock, LearnedRequests()
        )
        async with around.network.serving(PREDICTOR, service.handlers):
            await asyncio.Event().wait()

    async def _run_operator(self, process: Process) -> None:
        self.operator = TrialOperator(SCHEDULER, self.objects, self._surroundings(process))
        await self.operator.run()

    async def _run_gateway(self, process: Process) -> None:
        gateway = self.gateways[process.host] = Gateway(
            process,
            self._surroundings(process),
            served=ServedRevisions(self.objects.history),
            object_to=self.object_to,
        )
        await gateway.run()

    async def _run_runner(self, process: Process) -> None:
        wanted, around = self.plan.settings, self._surroundings(process)
        base, cache = base_digest(self.base), self.caches[process.host]
        engine = EngineProcess(
            FakeEngine(
                pages=wanted.pages,
                max_sequences=wanted.max_sequences,
                max_model_length=CONTEXT_TOKENS,
                host_pages=wanted.host_pages,
                protect_after_steps=64,
                plan_ahead=wanted.plan_ahead,
                adapter_slots=wanted.adapter_slots,
                adapter_pages=wanted.adapter_pages,
                base=base,
                reads=cache.read,
                preset=wanted.preset,
                reported_step_seconds=wanted.step_seconds,
            ),
            clock=around.clock,
            step_seconds=wanted.step_seconds,
        )
        await asyncio.sleep(LOAD_SECONDS)
        address = f"{process.host}:1"
        settings = _runner_settings(process.host, address).model_copy(
            update={"preset": wanted.preset, "max_cached_adapters": wanted.cached_adapters}
        )
        runner = assemble(
            settings,
            ADDRESSES,
            identity=new_identity(settings, around),
            model="demo",
            base=base,
            assets=base,
            info=engine.engine.info,
            engine=engine,
            files=SimulatedAdapterFiles(
                process, cache, self.sources, base=base, adapter_bytes=wanted.adapter_pages * PAGE_BYTES
            ),
            accepted=AcceptedRequests(),
            metrics=RunnerMetrics(CollectorRegistry(), wall=around.wall),
            hang_detector=HangDetector(60, around.clock),
            surroundings=around,
        )
        self.runners[process.host] = RunnerParts(process, runner, engine)
        process.loop.after_turn = partial(self._check_turn, process.host, engine)
        async with around.network.serving(address, {GENERATE: runner.serve_gateway}, grace=0):
            await runner.run()

    def _check_turn(self, host: str, engine: EngineProcess) -> None:
        if engine.has_turned:
            engine.has_turned = False
            self._turn_checks.check(host, engine.engine.planner)


@cache
def _runner_settings(host: str, address: str) -> RunnerSettings:
    """Made once: to look into the environment for all of them takes 20 ms."""
    return RunnerSettings(instance=host, pool=str(POOL), listen=address)


@cache
def _predictor_settings() -> PredictorSettings:
    return PredictorSettings()


def base_digest(number: int) -> Digest:
    """Of the base model with this number. No adapter has it."""
    return Digest(f"sha256:b{number:063x}")


class _NoStore:
    """A predictor without a database."""

    async def recalled(self) -> None: ...

    def add(self, sample: object) -> None: ...
