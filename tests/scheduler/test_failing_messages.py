"""A message that cannot be handled ends its own request. The streams of all services go on, and so do their requests.

The kinds of messages come from the protocol itself: a new one is tested as soon as it exists.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from motet.api.v1 import common_pb2, runner_pb2, scheduler_pb2, supervisor_pb2
from motet.errors import Internal, InvalidRequest, MotetError
from motet.rpc import Link, Sessions
from motet.rpc.message_failures import TOLD_ONCE
from motet.rpc.metrics import FAILED_MESSAGES
from motet_gateway.catalog import Catalog
from motet_gateway.dispatcher import Dispatcher
from motet_gateway.generation import EndReason
from motet_operator.sync import SchedulerSync
from motet_simulator.fake_engine import SlowEngines
from tests.operator.test_sync import catalog
from tests.runner_service.fake_peers import gateway_to
from tests.support.in_process_runner import write_adapter
from tests.support.in_process_services import adapter_entry, until
from tests.support.in_process_system import InProcessSystem, in_process_system
from tests.support.metric_values import value_of
from tests.support.real_dispatcher import ask, dispatcher_of
from tests.support.surroundings import REAL

OPENING = {"hello", "more"}
"""A hello that fails ends its stream; `more` is a pack of messages."""


class Streams:
    """Both ends of every stream of a running system."""

    def __init__(self, system: InProcessSystem, dispatcher: Dispatcher, operator: SchedulerSync) -> None:
        self.operator = operator
        scheduler, supervisor = system.control.scheduler_service, system.control.supervisor_service
        service = system.runners["r0"].service
        runner = service.loaded
        to_runner = dispatcher.runners.streams[system.runners["r0"].address]
        pairs = (
            (scheduler_pb2.ServeUp, scheduler_pb2.ServeDown, dispatcher.scheduler, scheduler.gateways),
            (scheduler_pb2.AttachUp, scheduler_pb2.AttachDown, runner.scheduler.link, scheduler.runners),
            (scheduler_pb2.SyncUp, scheduler_pb2.SyncDown, operator.link, scheduler.operators),
            (supervisor_pb2.WatchUp, supervisor_pb2.WatchDown, runner.supervisor.link, supervisor.runners),
            (supervisor_pb2.AdviseUp, supervisor_pb2.AdviseDown, scheduler.supervisor, supervisor.schedulers),
            (runner_pb2.GenerateUp, runner_pb2.GenerateDown, to_runner.link, runner.generation.streams),
        )
        self.senders: dict[type, Any] = {}
        self.receivers: dict[type, Any] = {}
        for up, down, client, server in pairs:
            self.senders |= {up: client, down: server}
            self.receivers |= {up: server, down: client}

        control = system.control
        self.addresses = {
            "Scheduler": control.scheduler_address,
            "Supervisor": control.supervisor_address,
            "Runner": system.runners["r0"].address,
        }
        self._followers = (scheduler, supervisor.supervisor, service.accepted, dispatcher)

    def next_number(self) -> int:
        """Of an operator's stream."""
        return next(self._followers[0]._operator_numbers)  # noqa: SLF001

    def terms(self) -> list[int]:
        """The highest term that each service knows."""
        scheduler, supervisor, accepted, dispatcher = self._followers
        return [scheduler.term, supervisor.highest_term, accepted.highest_term, dispatcher.term]

    async def open_again(self, kind: type) -> None:
        """The stream with messages of this kind."""
        ends = [self.senders[kind], self.receivers[kind]]
        before = list(map(connections_of, ends))
        (server,) = (end for end in ends if isinstance(end, Sessions))
        server.end_all()
        await until(lambda: all(set(connections_of(end)) - set(old) for old, end in zip(before, ends, strict=True)))

    @property
    def open(self) -> bool:
        """Each end knows that its stream is open. Until then it drops what it is to send."""
        return all(map(connections_of, self.senders.values()))


def send(sender: Any, message: Any) -> None:
    if isinstance(sender, Link):
        assert sender.send(message)
    elif "g-real" in sender:  # the system has another gateway, which no test asks
        sender.send("g-real", message)
    else:
        sender.broadcast(message)


@asynccontextmanager
async def all_streams(folder: Any) -> AsyncIterator[Streams]:
    async with in_process_system(folder) as system:
        await system.runner("r0")
        operator = SchedulerSync(system.control.scheduler_address, lambda: None, surroundings=REAL)
        running = asyncio.create_task(operator.run())
        try:
            async with dispatcher_of(system) as dispatcher:
                await until(lambda: operator.connected and system.control.scheduler_service.supervisor.connected)
                client = ask(dispatcher, "before", (1, 2, 3), max_tokens=4)
                assert await client.over() is EndReason.LENGTH
                streams = Streams(system, dispatcher, operator)
                await until(lambda: streams.open)
                yield streams
                await until(lambda: dispatcher.catalog.current.groups)
                client = ask(dispatcher, "after", (1, 2, 3), max_tokens=4)
                assert await client.over() is EndReason.LENGTH
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def streamed_types() -> set[type]:
    """Both directions of each stream of each service."""
    return {
        getattr(module, side.name)
        for module in (runner_pb2, scheduler_pb2, supervisor_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if method.client_streaming and method.server_streaming
        for side in (method.input_type, method.output_type)
    }


def kinds_of(descriptor: Descriptor) -> list[str]:
    return [field.name for field in descriptor.fields if field.message_type is not None and field.name not in OPENING]


class FailsOnce:
    """Stands before a handler: fails for one message of a kind, and sees the next one."""

    def __init__(self, receiver: Any, kind: str) -> None:
        self._name = "_received" if hasattr(receiver, "_received") else "receive"
        self._receiver, self._kind = receiver, kind
        self._handler = getattr(receiver, self._name)
        self.seen = 0

    def __enter__(self) -> "FailsOnce":
        setattr(self._receiver, self._name, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self._receiver, self._name, self._handler)

    def _receive(self, *handed: Any) -> None:
        if handed[-1].WhichOneof("message") != self._kind:
            self._handler(*handed)
            return
        self.seen += 1
        if self.seen == 1:
            raise KeyError("a defect")


def connections_of(end: Link[Any, Any] | Sessions[Any, Any, Any]) -> list[Any]:
    if isinstance(end, Link):
        return [] if end.outbox is None else [end.outbox]
    return list(end)


def are_new(before: list[list[Any]], ends: list[Any]) -> bool:
    """Whether each end has another stream in place of one that it had before."""
    return all(now != old and len(now) == len(old) for old, now in zip(before, map(connections_of, ends), strict=True))


def failures(stream: str, kind: str) -> float:
    return value_of(FAILED_MESSAGES.labels(stream, kind))


@pytest.mark.parametrize("message", sorted(streamed_types(), key=lambda kind: kind.__name__), ids=lambda m: m.__name__)
async def test_a_handler_that_fails_for_one_message_gets_the_next_one(folder, message):
    async with all_streams(folder) as streams:
        receiver, sender = ends = [streams.receivers[message], streams.senders[message]]
        connections = list(map(connections_of, ends))
        for kind in kinds_of(message.DESCRIPTOR):
            failed = failures(message.__name__, kind)
            one = message(**{kind: {"factor": 1.0} if kind == "overcommit" else {}})
            with FailsOnce(receiver, kind) as handler:
                send(sender, one)
                await until(lambda handler=handler: handler.seen >= 1, why=f"{kind} arrives")
                if (message.__name__, kind) in TOLD_ONCE:
                    another = partial(are_new, connections, ends)
                    await until(another, why=f"a stream after {kind}")
                    connections = list(map(connections_of, ends))
                if handler.seen < 2:  # a new stream may have begun with it
                    send(sender, one)
                await until(lambda handler=handler: handler.seen >= 2, why=f"another {kind} arrives")
            assert failures(message.__name__, kind) == failed + 1
            assert list(map(connections_of, ends)) == connections, kind


async def test_a_catalog_that_the_scheduler_could_not_read_is_told_again(folder):
    async with all_streams(folder) as streams:
        scheduler = streams.receivers[scheduler_pb2.SyncUp]
        with FailsOnce(scheduler, "snapshot") as handler:
            streams.operator.send_state(catalog("a"), [])
            await until(lambda: handler.seen >= 2, why="the operator's next stream begins with the whole catalog")


async def test_a_runner_whose_change_of_residency_failed_tells_all_on_another_stream(folder):
    async with all_streams(folder) as streams:
        kind = scheduler_pb2.AttachUp
        runner, scheduler = streams.senders[kind], streams.receivers[kind]
        with FailsOnce(scheduler, "hello") as hellos, FailsOnce(scheduler, "residency"):
            send(runner, kind(residency=scheduler_pb2.ResidencyChanged(gone=["sha256:" + "a" * 64])))
            await until(lambda: hellos.seen, why="a hello tells all")


async def test_a_submit_that_fails_is_declined_and_the_others_run(folder, monkeypatch):
    """Such as the files of an adapter that vanished from a disk that cannot be written."""
    async with in_process_system(folder) as system:
        runner = await system.runner("r0")
        registry = runner.service.loaded.adapters

        def fails(digest: str) -> None:
            raise PermissionError(f"read-only: {digest}")

        monkeypatch.setattr(registry, "for_request", fails)
        async with gateway_to(runner.address, "g1") as gateway:
            await gateway.submit("bad", adapter="sha256:" + "a" * 64)
            await gateway.submit("good")
            declined = await gateway.refusal("bad")
            assert declined.failure.code == Internal.mapping.code
            assert "read-only" not in declined.failure.message, "the path is for the log"
            await gateway.finished("good")
            assert len(runner.service.accepted) == 0
            assert gateway.error is None


async def test_a_request_whose_adapter_fails_unexpectedly_while_it_waits_is_declined(folder, monkeypatch):
    async with in_process_system(folder) as system:
        runner = await system.runner("r0")

        async def fails(digest: str) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(runner.service.loaded.adapters, "wait_for", fails)
        async with gateway_to(runner.address, "g1") as gateway:
            await gateway.submit("waits", adapter="sha256:" + "a" * 64)
            assert (await gateway.refusal("waits")).failure.code == Internal.mapping.code
            assert len(runner.service.accepted) == 0


async def test_an_order_for_an_adapter_that_fails_is_answered(folder, monkeypatch):
    async with in_process_system(folder) as system:
        runner = await system.runner("r0")
        scheduler_link = runner.service.loaded.scheduler

        def fails(work: Any) -> None:
            work.close()
            raise RuntimeError("no task can be made")

        monkeypatch.setattr(scheduler_link, "_spawn", fails)
        sent: list[Any] = []
        monkeypatch.setattr(scheduler_link, "report_adapter", sent.append)
        ensure = scheduler_pb2.EnsureAdapter(term=1, adapter={"namespace": "default", "name": "a"}, source="file:///a")
        system.control.scheduler_service.runners.broadcast(scheduler_pb2.AttachDown(ensure=ensure))
        await until(lambda: sent)
        assert (sent[0].ref.name, sent[0].failure.code) == ("a", Internal.mapping.code)


async def test_an_enqueue_that_fails_is_refused_and_the_others_run(folder):
    async with in_process_system(folder) as system:
        await system.runner("r0")
        async with dispatcher_of(system) as dispatcher:
            ends: list[MotetError] = []
            wrong = ask(dispatcher, "wrong", (1, 2, 3), max_tokens=4)
            wrong.end = ends.append
            dispatcher.choices["wrong"].generation.epoch = 2**31 + 1
            dispatcher.scheduler.send(
                scheduler_pb2.ServeUp(enqueue={"request": "wrong", "epoch": 2**31 + 1, "group": "default/demo"})
            )
            await until(lambda: ends)
            assert isinstance(ends[0], InvalidRequest)
            assert await ask(dispatcher, "good", (1, 2, 3), max_tokens=4).over() is EndReason.LENGTH


@pytest.mark.parametrize("method", ["placed", "deliver", "waiting"])
async def test_an_answer_that_fails_on_its_tokens_ends_alone(folder, method):
    engines = SlowEngines()
    async with in_process_system(folder) as system:
        runner = await system.runner("r0", engines)
        async with dispatcher_of(system) as dispatcher:
            bad, good = (ask(dispatcher, name, (1, 2, 3), max_tokens=50) for name in ("bad", "good"))

            def fails(*_: Any) -> None:
                raise UnicodeError("a defect")

            setattr(bad, method, fails)
            if method == "waiting":
                await until(lambda: bad.tokens)
                step = runner_pb2.Step()
                step.progress.add(request="bad", epoch=1, state=common_pb2.SEQUENCE_STATE_PARKED)
                dispatcher.from_runner(runner.address, runner_pb2.GenerateDown(step=step))
            engines.hurry()
            end = await bad.over()
            assert isinstance(end, Internal)
            assert await good.over() is EndReason.LENGTH
            assert len(good.tokens) == 50


async def test_a_gateway_that_misses_changes_of_a_catalog_gets_the_whole_one_on_its_next_stream(folder, monkeypatch):
    async with in_process_system(folder) as system:
        await system.runner("r0")
        async with dispatcher_of(system) as dispatcher:
            catalog = dispatcher.catalog
            named = lambda: {one.model_name for one in catalog.current.adapters}  # noqa: E731
            changed, applied = Catalog.changed, []
            monkeypatch.setattr(
                Catalog, "changed", lambda self, changes: applied.append(changes) or changed(self, changes)
            )
            entries = [adapter_entry(name, write_adapter(folder / name)) for name in ("pirate", "poet")]
            system.operator.state(entries[0])
            await until(lambda: catalog.known and any(one.digest for one in catalog.current.adapters))
            assert applied, "it was checked after the first catalog"
            catalog.replace(replace(catalog.current, adapters=(), revision=(7, 7)))  # as if one had been missed
            system.operator.state(*entries)
            await until(lambda: named() == {"pirate", "poet"})
            assert catalog.current.revision == system.control.scheduler_service.catalog_revision


async def test_a_wrong_number_ends_only_its_own_request(folder):
    async with in_process_system(folder) as system:
        runner = await system.runner("r0")
        async with gateway_to(runner.address, "g1") as gateway:
            bad = runner_pb2.Submit(
                request="bad", epoch=1, term=1, choices=[{}], sampling={"temperature": float("nan"), "max_tokens": 4}
            )
            await gateway.send(submit=bad)
            await gateway.submit("good")
            assert "must be a finite number" in (await gateway.refusal("bad")).failure.message
            await gateway.finished("good")
