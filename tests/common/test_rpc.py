"""Streams that break and come back, over real gRPC on real sockets."""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from hypothesis import given
from hypothesis import strategies as st

from motet.errors import Internal, InvalidRequest, MotetError, SetupError
from motet.rpc import Backoff, EndStream, Link, Outbox
from motet.terms import ImpossibleTerm
from motet.transport.over_grpc import GrpcNetwork, is_healthy, open_channel, serving, socket_path
from tests.common.echo import TALK, Echo
from tests.common.waiting import PATIENCE_S, until


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/echo.sock"


class Client:
    """A running link and everything that happened to it."""

    def __init__(self, address: str, greet: Callable[[], Iterable[bytes]], receive: Callable[[bytes], None]) -> None:
        self.received: list[bytes] = []
        self.events: list[str] = []
        self.failed: list[tuple[bytes, MotetError]] = []
        self.link: Link[bytes, bytes] = Link(
            "test",
            address,
            TALK,
            network=GrpcNetwork(),
            greet=greet,
            receive=self._receive,
            failed=lambda message, error: self.failed.append((message, error)),
            opened=lambda: self.events.append("opened"),
            closed=lambda why: self.events.append(f"closed: {why}"),
        )
        self._then = receive

    def _receive(self, message: bytes) -> None:
        self.received.append(message)
        self._then(message)


@asynccontextmanager
async def linked(
    address: str,
    greet: Callable[[], Iterable[bytes]] = lambda: [b"hello"],
    receive: Callable[[bytes], None] = lambda message: None,
) -> AsyncIterator[Client]:
    client = Client(address, greet, receive)
    running = asyncio.create_task(client.link.run())
    try:
        yield client
        assert not running.done(), "a link runs until it is cancelled"
    finally:
        running.cancel()
        (outcome,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError)


async def test_a_link_sends_its_hello_and_then_messages_in_order_both_ways(address: str) -> None:
    echo = Echo()
    async with serving(address, echo.add), linked(address, lambda: [b"hello", b"again"]) as client:
        await until(lambda: client.link.connected)
        for number in range(100):
            assert client.link.send(str(number).encode())
        expected = [b"hello", b"again", *(str(number).encode() for number in range(100))]
        await until(lambda: len(client.received) == len(expected))
        assert client.received == echo.heard[0] == expected
        assert client.events == ["opened"]


async def test_a_link_waits_for_a_server_that_has_not_started(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    echo, attempts = Echo(), 0
    next_wait = Backoff.next

    def counted(backoff: Backoff) -> float:
        nonlocal attempts
        attempts += 1
        return next_wait(backoff)

    monkeypatch.setattr(Backoff, "next", counted)
    async with linked(address) as client:
        await until(lambda: attempts >= 2)
        assert client.events == []
        async with serving(address, echo.add):
            await until(lambda: client.received == [b"hello"])


async def test_a_socket_without_a_server_is_not_healthy_and_takes_no_channel(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services that start are asked often."""
    asked: list[str] = []

    def noted(asked_for: str, role: str) -> Any:
        asked.append(asked_for)
        return open_channel(asked_for, role)

    monkeypatch.setattr("motet.transport.over_grpc.server.open_channel", noted)
    assert not await is_healthy(address)
    assert asked == []
    async with serving(address, lambda _: None, names=[], ready=True):
        assert await is_healthy(address)
    assert asked == [address]


async def test_a_link_reconnects_after_a_restart_and_sends_its_hello_again(address: str) -> None:
    echo = Echo()
    state = [b"state 1"]
    async with linked(address, lambda: state) as client:
        for turn in range(3):
            state[0] = f"state {turn}".encode()
            async with serving(address, echo.add, grace=0):
                await until(lambda: state[0] in client.received)
            await until(lambda: client.events[-1].startswith("closed"))
            assert not client.link.connected
        assert [event.split(":")[0] for event in client.events] == ["opened", "closed"] * 3
    assert echo.heard == [[b"state 0"], [b"state 1"], [b"state 2"]]


class Lingering(Echo):
    """Its handler waits for more than the client's end, and still has something to do when it is cancelled."""

    async def talk(self, requests: AsyncIterator[bytes], context: Any) -> None:
        self.heard.append([await anext(requests)])
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            self.ended.append("cancelled, and ready")
            raise


async def test_a_server_has_ended_once_the_calls_that_it_cancelled_have(address: str) -> None:
    echo = Lingering()
    async with linked(address) as client:
        async with serving(address, echo.add, grace=0):
            await until(lambda: client.link.connected and bool(echo.heard))
        assert echo.ended == ["cancelled, and ready"]


STARTS_PROCESSES = """
import asyncio, sys
import uvloop
from motet.transport.over_grpc import open_channel, serving
from tests.common.echo import Echo, open_talk

async def main():
    async with serving("unix:" + sys.argv[1], Echo().add), open_channel("unix:" + sys.argv[1]) as channel:
        async def talk():
            call = open_talk(channel)
            await call.write(b"hello")
            await call.read()
            call.cancel()
        for _ in range(10):
            talks = asyncio.gather(*(talk() for _ in range(20)))
            child = await asyncio.create_subprocess_exec("true")
            await asyncio.gather(talks, child.wait())

uvloop.run(main())
"""


def test_starting_a_process_writes_nothing_into_the_log_of_a_service(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTS_PROCESSES, str(tmp_path / "echo.sock")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


LOSES_ITS_PEER = """
import asyncio, sys
from motet.transport.over_grpc import open_channel, serving
from tests.common.echo import Echo, open_talk

async def main():
    async with open_channel("unix:" + sys.argv[1]) as channel:
        async with serving("unix:" + sys.argv[1], Echo().add, grace=0):
            call = open_talk(channel)
            await call.write(b"hello")
            await call.read()
            await asyncio.sleep(0.3)
        await call.code()
        await asyncio.sleep(0.3)

asyncio.run(main())
"""


def test_a_peer_that_goes_away_writes_nothing_into_the_log_of_a_service(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOSES_ITS_PEER, str(tmp_path / "echo.sock")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


async def test_messages_sent_while_the_stream_is_down_are_dropped(address: str) -> None:
    echo = Echo()
    async with linked(address) as client:
        assert not client.link.send(b"too early")
        async with serving(address, echo.add, grace=0):
            await until(lambda: client.link.connected and bool(echo.heard) and bool(echo.heard[0]))
        await until(lambda: not client.link.connected)
        assert not client.link.send(b"into the void")
        async with serving(address, echo.add, grace=0):
            await until(lambda: len(echo.heard) == 2 and echo.heard[1])
            await until(lambda: client.link.send(b"now"))
            await until(lambda: client.received[-1] == b"now")
    assert echo.heard == [[b"hello"], [b"hello", b"now"]]


async def test_a_refused_message_ends_the_stream_with_the_errors_text(address: str) -> None:
    echo = Echo()
    async with serving(address, echo.add), linked(address) as client:
        await until(lambda: client.link.send(b"nonsense"))
        await until(lambda: len(client.events) >= 2)
        assert client.events[1] == "closed: INVALID_ARGUMENT: this makes no sense; say something else"
        await until(lambda: client.link.connected)


async def test_a_defect_of_the_server_ends_the_stream_and_the_link_comes_back(address: str) -> None:
    echo = Echo()
    async with serving(address, echo.add), linked(address) as client:
        await until(lambda: client.link.send(b"defect"))
        await until(lambda: len(client.events) >= 3)
        assert client.events[1].startswith("closed: UNKNOWN")
        assert client.events[2] == "opened"


async def test_a_message_that_cannot_be_taken_fails_alone(address: str) -> None:
    def receive(message: bytes) -> None:
        if message == b"bad":
            raise ValueError("cannot take this one")

    async with serving(address, Echo().add), linked(address, lambda: [b"bad", b"good"], receive) as client:
        await until(lambda: client.received == [b"bad", b"good"])
        assert client.events == ["opened"]
        ((message, error),) = client.failed
        assert (message, type(error)) == (b"bad", Internal)


@pytest.mark.parametrize("error", [EndStream(InvalidRequest("wrong peer")), ImpossibleTerm("not possible")])
async def test_a_peer_that_breaks_the_protocol_ends_the_connection_and_not_the_link(
    address: str, error: Exception
) -> None:
    failures = [error]

    def receive(_message: bytes) -> None:
        if failures:
            raise failures.pop()

    async with serving(address, Echo().add), linked(address, receive=receive) as client:
        await until(lambda: client.received == [b"hello", b"hello"])
        assert [event.split(":")[0] for event in client.events] == ["opened", "closed", "opened"]
        assert client.failed == []


async def test_a_cancelled_link_ends_the_servers_stream_at_once(address: str) -> None:
    echo = Echo()
    async with serving(address, echo.add):
        async with linked(address) as client:
            await until(lambda: client.received)
        await until(lambda: echo.ended)
        assert client.events[-1].startswith("closed")


class NeverAtEnd(Echo):
    """Its streams have no end. Otherwise a handler may see the end of a cancelled call before gRPC cancels it."""

    async def talk(self, requests: AsyncIterator[bytes], context: Any) -> None:
        await super().talk(self._endless(requests), context)

    async def _endless(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for message in requests:
            yield message
        await asyncio.Event().wait()


async def test_a_stopping_server_cancels_its_handlers_and_they_re_raise(address: str) -> None:
    echo = NeverAtEnd()
    async with linked(address) as client:
        async with serving(address, echo.add, grace=0):
            await until(lambda: client.received)
        await until(lambda: echo.ended)
    assert echo.ended == ["CancelledError"]


async def test_no_task_outlives_a_link(address: str) -> None:
    before = asyncio.all_tasks()
    echo = Echo()
    async with serving(address, echo.add, grace=0):
        async with linked(address) as client:
            await until(lambda: client.received)
        await until(lambda: echo.ended)
    await until(lambda: {task for task in asyncio.all_tasks() - before if "Link" in repr(task)} == set())
    assert [task for task in asyncio.all_tasks() - before if ": write" in task.get_name()] == []


async def test_a_server_says_whether_it_is_ready(address: str) -> None:
    assert not await is_healthy(address)
    async with serving(address, Echo().add, ready=False) as server:
        assert not await is_healthy(address)
        await server.set_ready(True)
        assert await is_healthy(address)
        await server.set_ready(False)
        assert not await is_healthy(address)
    assert not await is_healthy(address)
    assert not Path(address.removeprefix("unix:")).exists()


async def test_a_server_that_never_answers_counts_as_unhealthy(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent.sock"))
        silent.listen()
        asked = is_healthy(f"unix:{tmp_path}/silent.sock", seconds=0.2)
        assert not await asyncio.wait_for(asked, PATIENCE_S)


async def test_a_server_lists_its_services(address: str) -> None:
    def services() -> Iterable[str]:
        with grpc.insecure_channel(address) as channel:
            return list(ProtoReflectionDescriptorDatabase(channel).get_services())

    async with serving(address, Echo().add, names=["motet.api.v1.Predictor"]):
        found = await asyncio.to_thread(services)
    assert set(found) == {
        "motet.api.v1.Predictor",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"cannot listen on 127.0.0.1:{port}: it is in use"):
            async with serving(f"127.0.0.1:{port}"):
                pass


async def test_a_socket_in_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="folder cannot be written"):
        async with serving(f"unix:{tmp_path}/nowhere/x.sock"):
            pass


async def test_a_dead_processes_socket_is_replaced(address: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "echo.sock"))
    async with serving(address, Echo().add):
        assert await is_healthy(address)


async def test_tcp_works_like_a_socket_file() -> None:
    echo = Echo()
    async with serving("127.0.0.1:0", echo.add) as server:
        async with linked(f"127.0.0.1:{server.port}") as client:
            await until(lambda: client.received == [b"hello"])
        async with open_channel(f"127.0.0.1:{server.port}") as channel:
            check: Any = health_pb2_grpc.HealthStub(channel).Check
            answer = await check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_only_unix_addresses_are_files() -> None:
    assert socket_path("unix:/run/x.sock") == Path("/run/x.sock")
    assert socket_path("localhost:1") is None


@given(st.integers(min_value=1, max_value=30))
def test_waits_double_up_to_a_bound_and_start_over_after_a_success(tries: int) -> None:
    backoff = Backoff(GrpcNetwork().spread, 0.05, 0.5)
    waits = [backoff.next() for _ in range(tries)]
    for n, wait in enumerate(waits):
        assert 0.75 * min(0.05 * 2**n, 0.5) <= wait <= 1.25 * min(0.05 * 2**n, 0.5)
    backoff.reset()
    assert backoff.next() <= 0.05 * 1.25


async def test_put_into_an_outbox_never_blocks() -> None:
    outbox: Outbox[bytes] = Outbox()
    for number in range(1000):
        outbox.put(b"%d" % number)
    assert [await outbox.get() for _ in range(1000)] == [b"%d" % number for number in range(1000)]


SERVE = """
import asyncio, sys
from motet.transport.over_grpc import serving
from tests.common.echo import Echo

async def serve():
    async with serving("127.0.0.1:0", Echo().add) as server:
        print(server.port, flush=True)
        await asyncio.Event().wait()

asyncio.run(serve())
"""


SPEAK = """
import asyncio, sys
from motet.rpc import Link
from motet.transport.over_grpc import GrpcNetwork
from tests.common.echo import TALK

network = GrpcNetwork()
asyncio.run(Link("test", sys.argv[1], TALK, network=network, greet=lambda: [b"hello"], receive=lambda _: None).run())
"""


@contextmanager
def child(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


SILENCE_SECONDS = 13.0
"""Ten, on a busy machine. A stopped process is like a vanished machine: its connection stays, but nothing answers."""


async def test_a_silent_server_is_noticed_and_reconnected() -> None:
    with child(SERVE) as process:
        assert process.stdout is not None
        async with linked(f"127.0.0.1:{int(process.stdout.readline())}") as client:
            await until(lambda: client.link.connected)
            process.send_signal(signal.SIGSTOP)
            await until(lambda: not client.link.connected, SILENCE_SECONDS)
            process.send_signal(signal.SIGCONT)
            await until(lambda: client.link.connected)


async def test_a_silent_client_is_noticed() -> None:
    echo = Echo()
    async with serving("127.0.0.1:0", echo.add, grace=0) as server:
        with child(SPEAK, f"127.0.0.1:{server.port}") as process:
            await until(lambda: echo.heard == [[b"hello"]])
            process.send_signal(signal.SIGSTOP)
            await until(lambda: echo.ended, SILENCE_SECONDS)
