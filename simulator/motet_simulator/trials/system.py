"""The services of one trial, each in a simulated process of its own, and what starts them again."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from motet.api.v1 import common_pb2, predictor_pb2, runner_pb2
from motet.domain import BASE, Digest, ObjectName
from motet.kube import KubeObject
from motet.leadership import Candidacy, LocalLeadership
from motet.lease import Election
from motet.prefix_hints import prefix_salt, prompt_hints
from motet.settings import Addresses, LeaseSettings
from motet.surroundings import Surroundings
from motet.task_group import run_together
from motet.transport.methods import GENERATE
from motet_gateway.catalog import CurrentCatalog
from motet_gateway.dispatcher import Dispatcher, GenerationRequest
from motet_gateway.estimator import Estimator
from motet_gateway.held_requests import HeldRequests
from motet_gateway.metrics import Metrics as GatewayMetrics
from motet_operator.reconcile import CatalogSnapshot, RunnerDrain
from motet_operator.reconcile.plan import PoolEntry
from motet_operator.sync import SchedulerSync
from motet_predictor.length_model import LengthModel
from motet_predictor.metrics import Metrics as PredictorMetrics
from motet_predictor.service import PredictorService
from motet_runner.accepted_requests import AcceptedRequests
from motet_runner.adapters.registry import AdapterRegistry
from motet_runner.hang_detector import HangDetector
from motet_runner.loaded_runner import LoadedRunner
from motet_runner.metrics import Metrics as RunnerMetrics
from motet_runner.plan import preset_named
from motet_runner.runner_facts import RunnerFacts
from motet_runner.settings import Settings as RunnerSettings
from motet_scheduler import leader_loop
from motet_scheduler.catalog_file import CatalogFile
from motet_scheduler.event_failures import EventFailures
from motet_scheduler.leader_only import LeaderOnly
from motet_scheduler.metrics import Metrics as SchedulerMetrics
from motet_scheduler.predecessor import tell_predecessor
from motet_scheduler.service import SchedulerService
from motet_scheduler.settings import Settings as SchedulerSettings
from motet_simulator.fake_engine import FakeEngine
from motet_simulator.leases import FakeLeaseApi
from motet_simulator.trials.clients import Client
from motet_simulator.trials.engine_process import EngineProcess
from motet_simulator.trials.plan import GATEWAYS, RUNNERS, SCHEDULERS, Ask, Plan
from motet_simulator.trials.turn_checks import TurnChecks
from motet_simulator.world import Process, SimulatedDisk, Wires, World, surroundings_of
from motet_supervisor.metrics import Metrics as SupervisorMetrics
from motet_supervisor.service import SupervisorService
from motet_supervisor.settings import Settings as SupervisorSettings

SCHEDULER, SUPERVISOR, PREDICTOR = "scheduler:1", "supervisor:1", "predictor:1"
ADDRESSES = Addresses(scheduler_address=SCHEDULER, supervisor_address=SUPERVISOR, predictor_address=PREDICTOR)
POOL = ObjectName("default", "demo")
BASE_DIGEST = Digest("sha256:" + "b" * 64)
PROMISE_RULE = preset_named("paged-chunk").promise
LEASE = LeaseSettings(name="it", namespace="here", seconds=6, renew_seconds=4, retry_seconds=1)
LOST_LEADERSHIP, GARBLED = "it no longer leads", "the answer is no JSON"
MAY_END = ("EngineDied", LOST_LEADERSHIP, GARBLED)
"""Why a process may end by itself. The last is at its start only: later it goes on."""
LOAD_SECONDS = 0.5
DRAIN_SECONDS = 2.0
RESTART_SECONDS = 0.3
"""Until a process that has ended by itself is started again."""
MAX_UNNOTICED_SECONDS = 25.0
"""How long a scheduler may keep a request in its queue whose client or gateway has gone: it hears of that at the next
ping, or when a pause of its own ends."""

Main = Callable[[Process], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class GatewayParts:
    process: Process
    dispatcher: Dispatcher
    estimator: Estimator
    revision: tuple[int, int] = (0, 0)
    """Of the catalog that it serves."""
    clients: list[Client] = field(default_factory=list)
    unasked: list[Ask] = field(default_factory=list)
    """They wait for a first catalog."""


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
        self.leases = FakeLeaseApi()
        self.leases_garbled = False
        self.schedulers: dict[str, SchedulerService] = {}
        self.supervisor: SupervisorService | None = None
        self.operator: SchedulerSync | None = None
        self.gateways: dict[str, GatewayParts] = {}
        self.runners: dict[str, RunnerParts] = {}
        self.clients: list[Client] = []
        self.draining: dict[str, None] = {}
        self._wires = wires
        self._turn_checks = TurnChecks()
        self._terms: dict[int, str] = {}
        """Each with the process that led in it."""
        self._ended: list[Process] = []
        schedulers = [f"scheduler-{number}" for number in range(1 if plan.settings.local else SCHEDULERS)]
        wires.aliases[SCHEDULER] = tuple(f"{host}:1" for host in schedulers)
        self._mains: dict[str, Main] = {
            **dict.fromkeys(schedulers, self._run_scheduler),
            "supervisor": self._run_supervisor,
            "predictor": self._run_predictor,
            "operator": self._run_operator,
            **{f"gateway-{number}": self._run_gateway for number in range(GATEWAYS)},
            **{f"runner-{number}": self._run_runner for number in range(RUNNERS)},
        }

    @property
    def leader(self) -> SchedulerService | None:
        return max(self.schedulers.values(), key=lambda one: one.term, default=None)

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

    def close(self) -> None:
        for process in [*self._ended, *self.processes.values()]:
            process.close()

    def _on_end(self, process: Process) -> None:
        self._forget(process.host)
        if not any(why in process.ended for why in MAY_END):
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
        return surroundings_of(process, self.disks.setdefault(process.host, SimulatedDisk()))

    # ---------------------------------------------------------------------------------------------------------- clients

    def ask(self, ask: Ask) -> None:
        """A client asks. If its gateway is not there, it goes elsewhere."""
        if (gateway := self.gateways.get(f"gateway-{ask.gateway}")) is not None:
            gateway.process.loop.call_soon(self._ask, gateway, ask)

    def _ask(self, gateway: GatewayParts, ask: Ask) -> None:
        if not self._base_of(gateway):
            gateway.unasked.append(ask)
            return
        client = Client(
            ask, lambda: self.world.now, queue_limit=self.plan.settings.queue_limit, may_wait=self._may_wait_beside
        )
        gateway.clients.append(client)
        self.clients.append(client)
        gateway.process.loop.create_task(self._start(gateway, ask, client), name=ask.name)
        if ask.cancel_after is not None:
            gateway.process.loop.call_later(ask.cancel_after, self._leave, gateway, client)

    def _may_wait_beside(self, client: Client) -> int:
        """Requests of other clients that the scheduler may have had in its queue since this one asked."""
        return sum(one is not client and one.over_at + MAX_UNNOTICED_SECONDS > client.asked_at for one in self.clients)

    async def _start(self, gateway: GatewayParts, ask: Ask, client: Client) -> None:
        prompt = predictor_pb2.Prompt(
            request=ask.name, tenant=ask.tenant, prompt_tokens=len(ask.prompt), max_tokens=ask.max_tokens
        )
        (estimate,) = await gateway.estimator.estimate([prompt])
        if client.left:
            return
        if ask.unreadable:
            estimate.rank = math.nan
        base = self._base_of(gateway)
        order = GenerationRequest(
            request=ask.name,
            tenant=ask.tenant,
            group=str(POOL),
            adapter="",
            adapter_digest=BASE,
            base_digest=base,
            request_class=common_pb2.RequestClass.ValueType(ask.request_class),
            prompt_ids=list(ask.prompt),
            choice=0,
            sampling=runner_pb2.Sampling(max_tokens=ask.max_tokens, ignore_eos=True),
            seed=ask.seed,
            estimate=estimate,
            deadline_seconds=ask.deadline,
            prefix_hints=prompt_hints(prefix_salt(base, BASE, ask.tenant), ask.prompt),
        )
        outcome = predictor_pb2.Outcome(
            request=ask.name, tenant=ask.tenant, output_tokens=ask.max_tokens, estimate=estimate
        )
        client.ended = lambda: gateway.estimator.observe(outcome)
        gateway.dispatcher.start(order, client)

    @staticmethod
    def _base_of(gateway: GatewayParts) -> Digest:
        """The base model that it may tokenise for; empty: it knows of none yet."""
        catalog = gateway.dispatcher.catalog
        groups = catalog.current.groups if catalog.known else ()
        return Digest(groups[0].base_digest) if groups else BASE

    @staticmethod
    def _leave(gateway: GatewayParts, client: Client) -> None:
        if not client.over:
            client.leave()
            gateway.dispatcher.cancel(client.ask.name, "the client went away")

    # --------------------------------------------------------------------------------------------------- what they run

    async def _run_scheduler(self, process: Process) -> None:
        around, address = self._surroundings(process), f"{process.host}:1"
        if self.plan.settings.local:
            with LocalLeadership(Path("scheduler.term"), around) as alone:
                await self._schedule(process, address, alone, CatalogFile(Path("catalog.json"), around.disk), around)
        else:
            lost = lambda why: process.end(f"{LOST_LEADERSHIP}: {why}")  # noqa: E731
            client = LeaseClient(self, process)
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
        metrics = SchedulerMetrics(CollectorRegistry())
        front = LeaderOnly(lambda: leadership.leader_address)

        def begin(failures: EventFailures) -> SchedulerService:
            if (first := self._terms.setdefault(leadership.term, process.name)) != process.name:
                self.object_to(f"{process.name} leads in term {leadership.term}, in which {first} has led")
            service = self.schedulers[process.host] = SchedulerService(
                settings.config(1.0),
                leadership=leadership,
                metrics=metrics,
                supervisor_address=SUPERVISOR,
                catalog_file=file,
                surroundings=around,
                known_failures=failures,
            )
            front.open(service)
            return service

        async with around.network.serving(address, front.handlers, grace=0):
            await leadership.wait_until_leader()
            await run_together(
                leader_loop.lead(leadership, begin),
                tell_predecessor(leadership.predecessor, leadership.term, network=around.network),
            )

    async def _run_supervisor(self, process: Process) -> None:
        settings, around = SupervisorSettings(overcommit=self.plan.settings.overcommit), self._surroundings(process)
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
        service = PredictorService(LengthModel(), _NoStore(), metrics, around.clock)  # type: ignore[arg-type]
        async with around.network.serving(PREDICTOR, service.handlers):
            await asyncio.Event().wait()

    async def _run_operator(self, process: Process) -> None:
        self.operator = SchedulerSync(SCHEDULER, lambda: None, surroundings=self._surroundings(process))
        self.tell_operator()
        await self.operator.run()

    def tell_operator(self) -> None:
        """Have the operator declare the pool, and which runners drain."""
        if self.operator is None:
            return
        pool = PoolEntry(
            pool=POOL,
            group=POOL,
            served_name="demo",
            model_uri="file:///demo",
            replicas=RUNNERS,
            max_sequences=self.plan.settings.max_sequences,
            tenants=("*",),
        )
        now = surroundings_of(self.processes["operator"], SimulatedDisk()).wall()
        deadline = datetime.fromtimestamp(now + DRAIN_SECONDS, UTC)
        drains = [
            RunnerDrain(instance=host, pool=POOL, revision="", deadline=deadline, begun=True) for host in self.draining
        ]
        runners = [f"runner-{number}" for number in range(RUNNERS)]
        self.operator.send_state(CatalogSnapshot(pools=(pool,)), drains, runners)

    async def _run_gateway(self, process: Process) -> None:
        around = self._surroundings(process)
        estimator = Estimator(PREDICTOR, network=around.network, budget_seconds=0.025)
        dispatcher = Dispatcher(
            process.name,
            SCHEDULER,
            CurrentCatalog(),
            GatewayMetrics(CollectorRegistry(), clock=around.clock),
            network=around.network,
            connect_seconds=2.0,
            held=HeldRequests(lambda: None, around.clock),
            clock=around.clock,
        )
        parts = self.gateways[process.host] = GatewayParts(process, dispatcher, estimator)

        def on_catalog() -> None:
            revision = dispatcher.catalog.current.revision
            if revision < parts.revision:
                self.object_to(f"{process.name} serves catalog {revision} after {parts.revision}")
            parts.revision = revision
            waiting, parts.unasked = parts.unasked, []
            for ask in waiting:
                self._ask(parts, ask)

        dispatcher.catalog.listen(on_catalog)
        await run_together(dispatcher.run(), estimator.run())

    async def _run_runner(self, process: Process) -> None:
        wanted, around = self.plan.settings, self._surroundings(process)
        engine = EngineProcess(
            FakeEngine(
                pages=wanted.pages,
                max_sequences=wanted.max_sequences,
                max_model_length=1024,
                host_pages=wanted.host_pages,
                protect_after_steps=64,
                plan_ahead=wanted.plan_ahead,
            ),
            clock=around.clock,
            step_seconds=wanted.step_seconds,
        )
        await asyncio.sleep(LOAD_SECONDS)
        address = f"{process.host}:1"
        identity = common_pb2.RunnerIdentity(
            pool=str(POOL), group=str(POOL), instance=process.host, incarnation=around.new_id(8)
        )
        accepted, metrics = AcceptedRequests(), RunnerMetrics(CollectorRegistry(), wall=around.wall)
        adapters = AdapterRegistry(
            _NoAdapters(),  # type: ignore[arg-type]
            capacity=1,
            users_of=accepted.users_of,
            post=engine.post,
            metrics=metrics,
            surroundings=around,
        )
        runner = LoadedRunner(
            facts=RunnerFacts(identity, address, engine.engine.info, BASE_DIGEST, BASE_DIGEST, PROMISE_RULE),
            model="demo",
            engine=engine,
            adapters=adapters,
            accepted=accepted,
            settings=RunnerSettings(instance=process.host, pool=str(POOL)),
            addresses=ADDRESSES,
            metrics=metrics,
            hang_detector=HangDetector(60, around.clock),
            surroundings=around,
        )
        self.runners[process.host] = RunnerParts(process, runner, engine)
        process.loop.after_turn = partial(self._turn_checks.check, process.host, engine.engine.planner)
        async with around.network.serving(address, {GENERATE: runner.serve_gateway}, grace=0):
            await runner.run()


class _NoAdapters:
    """The files of a pool without adapters."""

    async def clear_partial(self) -> None: ...


class _NoStore:
    """A predictor without a database."""

    def add(self, sample: object) -> None: ...


class LeaseClient:
    """The way of one process to the API server."""

    def __init__(self, system: System, process: Process) -> None:
        self._system = system
        self._leases = system.leases
        self._process = process
        self._calls = 0

    async def get(self, path: str, *, seconds: float) -> KubeObject:
        return await self._call(self._leases.get(path, seconds=seconds))

    async def post(self, path: str, body: KubeObject, *, seconds: float) -> KubeObject:
        return await self._call(self._leases.post(path, body, seconds=seconds))

    async def put(self, path: str, body: KubeObject, *, seconds: float) -> KubeObject:
        return await self._call(self._leases.put(path, body, seconds=seconds))

    async def _call(self, call: Coroutine[Any, Any, KubeObject]) -> KubeObject:
        self._calls += 1
        await asyncio.sleep(self._way("there"))
        answer = await call
        await asyncio.sleep(self._way("back"))
        if self._system.leases_garbled:
            raise ValueError(GARBLED)
        return answer

    def _way(self, which: str) -> float:
        return 0.002 + 0.02 * self._process.world.draw("lease", self._process.name, which, self._calls)
