"""Messages that wait for a peer which reads slowly or not at all."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.api.v1 import scheduler_pb2
from motet.rpc import Link, Outbox, Sessions
from motet.rpc.coalescing import COALESCED, coalescing_key
from motet.rpc.outbox import MESSAGE_BYTES
from motet.transport.over_grpc import GrpcNetwork, GrpcServerStream, open_channel, serving
from tests.common.echo import TALK, Echo, open_talk
from tests.common.waiting import until

LIMIT = 1 << 20
BLOCK = b"x" * (64 << 10)


def subject(message: bytes) -> bytes | None:
    """Of `subject=value`."""
    name, equals, _ = message.partition(b"=")
    return name if equals else None


def emptied(outbox: Outbox[bytes]) -> list[bytes]:
    return list(iter(outbox.get_nowait, None))  # type: ignore[arg-type]


def test_a_newer_message_replaces_one_about_the_same_subject_and_goes_to_the_end() -> None:
    outbox: Outbox[bytes] = Outbox(subject=subject)
    for message in (b"hello", b"catalog=1", b"r1=3", b"placed r1", b"catalog=2", b"r2=1"):
        outbox.put(message)
    assert emptied(outbox) == [b"hello", b"r1=3", b"placed r1", b"catalog=2", b"r2=1"]


def test_a_whole_catalog_that_was_not_read_takes_its_changes_with_it() -> None:
    outbox: Outbox[scheduler_pb2.ServeDown] = Outbox()
    whole = [scheduler_pb2.ServeDown(catalog=scheduler_pb2.Catalog(revision=one)) for one in (1, 3)]
    changes = [
        scheduler_pb2.ServeDown(catalog_changes=scheduler_pb2.CatalogChanges(before=one - 1, revision=one))
        for one in (2, 4)
    ]
    position = scheduler_pb2.ServeDown(position=scheduler_pb2.Position(request="r"))
    for message in (whole[0], changes[0], position, whole[1], changes[1]):
        outbox.put(message)
    assert list(iter(outbox.get_nowait, None)) == [position, whole[1], changes[1]]


def test_a_report_that_was_not_read_takes_its_parts_with_it() -> None:
    outbox: Outbox[scheduler_pb2.AttachUp] = Outbox()
    for _ in range(9):
        outbox.put(report := scheduler_pb2.AttachUp(report=scheduler_pb2.Report(live_follows=True)))
        outbox.put(part := scheduler_pb2.AttachUp(listed=scheduler_pb2.ListedRequests()))
    assert list(iter(outbox.get_nowait, None)) == [report, part]


def test_what_was_reported_before_all_was_stays_before_it() -> None:
    """An operator would take what it has not heard for what is not there."""
    outbox: Outbox[scheduler_pb2.SyncDown] = Outbox()
    adapters = [
        scheduler_pb2.SyncDown(adapter=scheduler_pb2.AdapterReport(serving_digest=one)) for one in ("old", "new")
    ]
    desired = [scheduler_pb2.SyncDown(desired=scheduler_pb2.DesiredCapacity(pool="p", replicas=one)) for one in (1, 2)]
    runners = [scheduler_pb2.SyncDown(runner=scheduler_pb2.RunnerReport(attached=one)) for one in (False, True)]
    every = scheduler_pb2.SyncDown(reported_all=scheduler_pb2.ReportedAll(groups=["g"]))
    for message in (adapters[0], desired[0], runners[0], every, adapters[1], desired[1], runners[1]):
        outbox.put(message)
    assert list(iter(outbox.get_nowait, None)) == [adapters[1], desired[1], runners[1], every]


def test_a_message_that_was_read_is_not_replaced() -> None:
    outbox: Outbox[bytes] = Outbox(subject=subject)
    outbox.put(b"a=1")
    assert outbox.get_nowait() == b"a=1"
    outbox.put(b"a=2")
    assert emptied(outbox) == [b"a=2"]


@given(st.lists(st.sampled_from([b"a=1", b"a=2", b"b=1", b"b=2", b"one", b"two", b"read"])))
def test_a_slow_reader_gets_the_messages_of_a_fast_one_without_outdated_ones(steps: list[bytes]) -> None:
    outbox: Outbox[bytes] = Outbox(subject=subject)
    heard: list[bytes] = []
    everything = [message for message in steps if message != b"read"]
    for message in steps:
        if message == b"read":
            heard += [one] if (one := outbox.get_nowait()) is not None else []
        else:
            outbox.put(message)
    heard += emptied(outbox)
    assert outbox.empty
    rest = iter(everything)
    assert all(message in rest for message in heard), "in the order in which it was said"
    assert [m for m in heard if subject(m) is None] == [m for m in everything if subject(m) is None]
    for name in (b"a", b"b"):
        last = [m for m in everything if subject(m) == name][-1:]
        assert [m for m in heard if subject(m) == name][-1:] == last


def test_an_outbox_is_full_beyond_its_limit_until_it_is_read() -> None:
    for message in (b"", BLOCK):
        outbox: Outbox[bytes] = Outbox(LIMIT)
        count = 0
        while not outbox.full:
            outbox.put(message)
            count += 1
        assert (count - 1) * (MESSAGE_BYTES + len(message)) <= LIMIT
        outbox.get_nowait()
        assert not outbox.full


def test_a_replacing_message_does_not_fill_the_outbox() -> None:
    outbox: Outbox[bytes] = Outbox(LIMIT, subject=subject)
    for number in range(1000):
        outbox.put(b"catalog=%d" % number + BLOCK)
    assert not outbox.full
    assert len(emptied(outbox)) == 1


def test_replaceable_messages_name_existing_fields_and_share_no_subject() -> None:
    for kind, members in COALESCED.items():
        for member, paths in members.items():
            message = kind()
            getattr(message, member).SetInParent()
            assert message.WhichOneof("message") == member
            assert coalescing_key(message) == (member, *[""] * len(paths))


def test_a_request_keeps_its_place_and_its_placement_and_a_gateway_one_catalog() -> None:
    def down(**members: Any) -> scheduler_pb2.ServeDown:
        return scheduler_pb2.ServeDown(**members)

    outbox: Outbox[scheduler_pb2.ServeDown] = Outbox()
    steps = [
        down(catalog={"revision": 1}),
        down(position={"request": "a", "position": 2}),
        down(position={"request": "b", "position": 3}),
        down(position={"request": "a", "position": 1}),
        down(placed={"request": "a"}),
        down(placed={"request": "b"}),
        down(catalog={"revision": 2}),
    ]
    for message in steps:
        outbox.put(message)
    assert list(iter(outbox.get_nowait, None)) == steps[2:]  # type: ignore[arg-type]


@pytest.fixture
def address(tmp_path: Any) -> str:
    return f"unix:{tmp_path}/s.sock"


async def test_a_client_that_does_not_read_loses_its_stream_and_the_memory_that_it_held(address: str) -> None:
    closed: list[str] = []
    outboxes: list[Outbox[bytes]] = []

    def make() -> Outbox[bytes]:
        outboxes.append(Outbox(LIMIT))
        return outboxes[-1]

    sessions: Sessions[str, bytes, bytes] = Sessions(
        hello=bytes.decode, received=lambda *_: None, closed=lambda session: closed.append(session.peer), outbox=make
    )

    async def talk(requests: AsyncIterator[bytes], context: Any) -> None:
        await sessions.serve(GrpcServerStream(requests, context))

    def add(server: grpc.aio.Server) -> None:
        method: Any = grpc.stream_stream_rpc_method_handler(talk)  # type: ignore[arg-type]
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Echo", {"Talk": method})])

    async with serving(address, add, grace=0), open_channel(address) as channel, open_channel(address) as other:
        deaf, reader = open_talk(channel), open_talk(other)
        await deaf.write(b"deaf")
        await reader.write(b"reader")
        await until(lambda: len(sessions) == 2)
        # gRPC itself takes some megabytes before it makes a writer wait; then the outbox fills.
        for _ in range(5000):
            sessions.broadcast(BLOCK)
            assert await reader.read() == BLOCK
            if closed:
                break
        assert closed == ["deaf"]
        sessions.send("deaf", BLOCK)
        sessions.send("reader", b"still served")
        assert await reader.read() == b"still served"
        deaf.cancel()
        reader.cancel()


async def test_a_server_that_does_not_read_is_given_up_for_a_new_connection(address: str) -> None:
    greeted = 0
    deaf = True

    async def talk(requests: AsyncIterator[bytes], context: Any) -> None:
        nonlocal greeted
        await context.send_initial_metadata(())
        async for _ in requests:
            greeted += 1
            break
        while deaf:
            await asyncio.sleep(0.01)

    def add(server: grpc.aio.Server) -> None:
        method: Any = grpc.stream_stream_rpc_method_handler(talk)  # type: ignore[arg-type]
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Echo", {"Talk": method})])

    closed: list[str] = []
    link: Link[bytes, bytes] = Link(
        "test",
        address,
        TALK,
        network=GrpcNetwork(),
        greet=lambda: [b"hello"],
        receive=lambda _: None,
        closed=closed.append,
        limit_bytes=LIMIT,
    )
    running = asyncio.create_task(link.run())
    try:
        async with serving(address, add, grace=0):
            await until(lambda: link.connected and greeted == 1)
            for _ in range(5000):
                link.send(BLOCK)
                await asyncio.sleep(0)
                if closed:
                    break
            assert closed == ["the peer does not read"]
            await until(lambda: greeted == 2)
            assert not running.done()
            deaf = False
    finally:
        running.cancel()
        (outcome,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError)


async def test_a_slow_client_gets_only_the_newest_state(address: str) -> None:
    """Over a real stream, a slow reader gets only a few of ten thousand states of one thing."""

    class ManyStates(Echo):
        async def talk(self, requests: AsyncIterator[bytes], context: Any) -> None:
            sessions: Sessions[str, bytes, bytes] = Sessions(
                hello=bytes.decode,
                received=self._send_states,
                closed=lambda _: None,
                outbox=lambda: Outbox(subject=subject),
            )
            await sessions.serve(GrpcServerStream(requests, context))

        def _send_states(self, session: Any, _: bytes) -> None:
            for number in range(10_000):
                session.send(b"state=%d" % number)
            session.send(b"end")

    async with serving(address, ManyStates().add, grace=0), open_channel(address) as channel:
        call = open_talk(channel)
        await call.write(b"hello")
        heard = []
        while (message := await call.read()) != b"end":
            heard.append(message)
        call.cancel()
    assert heard == [b"state=9999"]
