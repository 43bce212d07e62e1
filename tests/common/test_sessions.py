"""The sessions of a server, over real gRPC: from a peer's hello to the end of its stream."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from motet.errors import Internal, InvalidRequest, MotetError, Overloaded
from motet.rpc import Backoff, EndStream, Link, Session, Sessions, sessions
from motet.rpc.links import FIRST_REPLACED_SECONDS, REPLACED_SECONDS
from motet.rpc.sessions import OTHER_PROCESS
from motet.terms import ImpossibleTerm
from motet.transport.over_grpc import GrpcNetwork, GrpcServerStream, open_channel, serving
from motet.transport.over_grpc.channels import LAST_RETRY_SECONDS
from tests.common.echo import TALK, open_talk
from tests.common.waiting import until


class RecordingSessions:
    """Serves streams that begin with `hello <name>`, and records when they open and close."""

    def __init__(self) -> None:
        self.record: list[str] = []
        self.fails: set[str] = set()
        self.answers = False
        self.error: Exception = RuntimeError("a defect")
        self.failures: list[tuple[str, bytes, MotetError]] = []
        self.sessions: Sessions[str, bytes, bytes] = Sessions(
            hello=lambda message: message.removeprefix(b"hello ").decode() if message.startswith(b"hello") else None,
            key=lambda name: name.split("/")[0],
            opened=lambda session: self._note("opened", session),
            received=lambda session, message: self._note(message.decode(), session),
            failed=self._on_failure,
            closed=lambda session: self._note("closed", session),
        )

    def _on_failure(self, session: Session[str, bytes], message: bytes, error: MotetError) -> None:
        self.failures.append((session.peer, message, error))
        if f"answer to {message.decode()}" in self.fails:
            raise RuntimeError("and no answer")

    def _note(self, what: str, session: Session[str, bytes]) -> None:
        self.record.append(f"{session.peer}: {what}")
        if what.startswith("hello") and self.answers:
            self.sessions.send(session.peer.split("/")[0], f"to {session.peer}".encode())
        if what in self.fails:
            raise self.error

    @asynccontextmanager
    async def serving(self, address: str, *, peer: str | None = None) -> AsyncIterator[None]:
        async def talk(requests: AsyncIterator[bytes], context: Any) -> None:
            await self.sessions.serve(GrpcServerStream(requests, context), peer)

        def add(server: grpc.aio.Server) -> None:
            method: Any = grpc.stream_stream_rpc_method_handler(talk)  # type: ignore[arg-type]
            server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Echo", {"Talk": method})])

        async with serving(address, add, grace=0):
            yield


@asynccontextmanager
async def open_stream(address: str, *messages: bytes) -> AsyncIterator[Any]:
    async with open_channel(address) as channel:
        call = open_talk(channel)
        try:
            for message in messages:
                await call.write(message)
            yield call
        finally:
            call.cancel()


async def refusal(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in call:
            pass
    return f"{error.value.code().name}: {error.value.details()}"


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/s.sock"


async def test_a_session_is_open_from_its_hello_to_the_end_of_its_stream(address: str) -> None:
    recorder = RecordingSessions()
    async with recorder.serving(address):
        async with open_stream(address, b"hello a", b"one", b"two"):
            await until(lambda: recorder.record == ["a: opened", "a: hello a", "a: one", "a: two"])
            assert "a" in recorder.sessions
        await until(lambda: recorder.record[-1] == "a: closed")
        assert not len(recorder.sessions)


@pytest.mark.parametrize("first", [b"one", b"hello "])
async def test_a_stream_that_does_not_begin_with_a_hello_that_has_a_name_is_refused(address: str, first: bytes) -> None:
    recorder = RecordingSessions()
    async with recorder.serving(address), open_stream(address, first) as call:
        assert (await refusal(call)).startswith("INVALID_ARGUMENT: the first message of a stream must be a hello")
    assert recorder.record == []


async def test_a_stream_without_a_hello_ends_after_a_while(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "HELLO_SECONDS", 0.1)
    recorder = RecordingSessions()
    async with recorder.serving(address), open_stream(address, b"hello a") as greeted:
        async with open_stream(address) as mute, asyncio.timeout(5):
            assert (await refusal(mute)).startswith("INVALID_ARGUMENT: no hello came within 0.1 s")
        await greeted.write(b"one")
        await until(lambda: recorder.record[-1] == "a: one")  # its time is over, too


async def test_a_second_hello_is_refused_and_cannot_leave_the_first_name_behind(address: str) -> None:
    recorder = RecordingSessions()
    async with recorder.serving(address), open_stream(address, b"hello a", b"hello b") as call:
        assert (await refusal(call)).startswith("INVALID_ARGUMENT: a stream has only one hello")
        await until(lambda: recorder.record == ["a: opened", "a: hello a", "a: closed"])
        assert not len(recorder.sessions)


@pytest.mark.parametrize("what", ["opened", "hello a"])
async def test_after_an_error_while_it_opens_no_session_is_left(address: str, what: str) -> None:
    recorder = RecordingSessions()
    recorder.fails.add(what)
    async with recorder.serving(address), open_stream(address, b"hello a") as call:
        assert (await refusal(call)).startswith("UNKNOWN")
        await until(lambda: recorder.record[-1] == "a: closed")
        assert not len(recorder.sessions)


@pytest.mark.parametrize("error", [RuntimeError("a secret"), InvalidRequest("not like this")])
async def test_a_message_that_cannot_be_handled_fails_alone(address: str, error: Exception) -> None:
    recorder = RecordingSessions()
    recorder.fails.add("one")
    recorder.error = error
    async with recorder.serving(address), open_stream(address, b"hello a", b"one", b"two"):
        await until(lambda: recorder.record == ["a: opened", "a: hello a", "a: one", "a: two"])
        ((peer, message, failure),) = recorder.failures
        assert (peer, message) == ("a", b"one")
        assert failure is error or (isinstance(failure, Internal) and "a secret" not in failure.message)


async def test_a_failure_that_cannot_be_answered_fails_alone(address: str) -> None:
    recorder = RecordingSessions()
    recorder.fails = {"one", "answer to one"}
    async with recorder.serving(address), open_stream(address, b"hello a", b"one", b"two"):
        await until(lambda: recorder.record[-1:] == ["a: two"])


@pytest.mark.parametrize("error", [EndStream(Overloaded("I begin again")), ImpossibleTerm("not possible")])
async def test_what_ends_a_stream_ends_it(address: str, error: Exception) -> None:
    recorder = RecordingSessions()
    recorder.fails.add("one")
    recorder.error = error
    async with recorder.serving(address), open_stream(address, b"hello a", b"one") as call:
        assert (await refusal(call)).endswith(str(error))
        await until(lambda: recorder.record == ["a: opened", "a: hello a", "a: one", "a: closed"])
        assert recorder.failures == []


async def test_an_error_while_a_session_without_a_hello_opens_leaves_no_session(address: str) -> None:
    recorder = RecordingSessions()
    recorder.fails.add("opened")
    async with recorder.serving(address, peer="operator"), open_stream(address) as call:
        assert (await refusal(call)).startswith("UNKNOWN")
        await until(lambda: recorder.record == ["operator: opened", "operator: closed"])
        assert not len(recorder.sessions)


async def test_a_session_without_a_hello_that_may_not_open_is_refused_with_a_reason(address: str) -> None:
    recorder = RecordingSessions()
    recorder.fails.add("opened")
    recorder.error = Overloaded("come back later")
    async with recorder.serving(address, peer="operator"), open_stream(address) as call:
        assert await refusal(call) == "UNAVAILABLE: come back later"


async def test_what_a_replaced_stream_goes_on_to_send_is_not_handled(address: str) -> None:
    recorder = RecordingSessions()

    async def send_for_ever(call: Any) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(b"late")

    async with recorder.serving(address), open_stream(address, b"hello a/old") as older:
        sending = asyncio.create_task(send_for_ever(older))
        await until(lambda: recorder.record.count("a/old: late") > 10)
        async with open_stream(address, b"hello a/new", b"one") as newer:
            await until(lambda: "a/new: one" in recorder.record)
            assert await refusal(older)
            await newer.write(b"two")
            await until(lambda: recorder.record[-1] == "a/new: two")
        await sending
    replaced_at = recorder.record.index("a/new: opened")
    assert "a/old: late" not in recorder.record[replaced_at:]


async def test_a_peer_that_connects_again_replaces_its_session_without_a_close(address: str) -> None:
    recorder = RecordingSessions()
    async with recorder.serving(address):
        async with open_stream(address, b"hello a/first") as first:
            await until(lambda: "a" in recorder.sessions)
            async with open_stream(address, b"hello a/second") as second:
                assert await refusal(first) == f"ALREADY_EXISTS: {OTHER_PROCESS[1]}"
                recorder.sessions.send("a", b"for you")
                recorder.sessions.send("b", b"for nobody")
                assert await second.read() == b"for you"
        await until(lambda: recorder.record[-1] == "a/second: closed")
        assert not len(recorder.sessions)
    assert "a/first: closed" not in recorder.record


async def test_a_link_whose_streams_all_end_at_once_asks_less_often(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those to a scheduler that refuses its hello for a minute. Each begins with the gateway's whole state."""
    waits: list[float] = []
    next_wait = Backoff.next

    def noted(backoff: Backoff) -> float:
        waits.append(next_wait(backoff))
        return waits[-1] / 100

    monkeypatch.setattr(Backoff, "next", noted)
    recorder = RecordingSessions()
    recorder.fails.add("opened")
    recorder.error = Overloaded("come back later")
    link: Link[bytes, bytes] = Link(
        "test", address, TALK, network=GrpcNetwork(), greet=lambda: [b"hello a"], receive=lambda _: None
    )
    async with recorder.serving(address):
        running = asyncio.create_task(link.run())
        await until(lambda: len(waits) >= 6)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert waits[5] >= 0.75 * LAST_RETRY_SECONDS


async def test_a_link_whose_name_another_process_uses_waits_long_from_the_second_time_and_says_why(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: dict[str, list[float]] = {}
    next_wait = Backoff.next

    def noted(backoff: Backoff) -> float:
        task = asyncio.current_task()
        assert task is not None
        wait = next_wait(backoff)
        waits.setdefault(task.get_name(), []).append(wait)
        return wait / 10_000

    monkeypatch.setattr(Backoff, "next", noted)
    welcomed: list[bytes] = []
    recorder = RecordingSessions()
    recorder.answers = True
    with capture_logs() as logs:
        async with recorder.serving(address):
            running = [
                asyncio.create_task(
                    Link(
                        "test",
                        address,
                        TALK,
                        network=GrpcNetwork(),
                        greet=partial(list, [b"hello a/" + process]),
                        receive=welcomed.append,
                    ).run(),
                    name=process.decode(),
                )
                for process in (b"first", b"second")
            ]
            await until(lambda: [len(each) > 1 for each in waits.values()] == [True, True])
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    for first, *later in waits.values():
        assert first <= 1.25 * FIRST_REPLACED_SECONDS, waits
        assert all(wait >= 0.75 * REPLACED_SECONDS for wait in later), waits
    reasons = [line["reason"] for line in logs if line["log_level"] == "warning"]
    assert reasons
    assert all("another process" in reason and "its own name" in reason for reason in reasons)


async def test_a_newer_stream_of_the_same_process_ends_the_older_one_as_any_other_end(address: str) -> None:
    recorder = RecordingSessions()
    async with recorder.serving(address), open_stream(address, b"hello a/first") as first:
        await until(lambda: "a" in recorder.sessions)
        async with open_stream(address, b"hello a/first"):
            assert (await refusal(first)).startswith("UNAVAILABLE: ")


@pytest.mark.parametrize("what", ["opened", "hello a/second"])
@pytest.mark.parametrize(
    "error", [Overloaded("come back later"), EndStream(Overloaded("later")), RuntimeError("a defect")]
)
async def test_a_stream_whose_hello_is_refused_leaves_the_older_one(address: str, what: str, error: Exception) -> None:
    recorder = RecordingSessions()
    async with recorder.serving(address), open_stream(address, b"hello a/first") as first:
        await until(lambda: recorder.record[-1:] == ["a/first: hello a/first"])
        recorder.error = error
        recorder.fails.add(what)
        async with open_stream(address, b"hello a/second") as second:
            await refusal(second)
        recorder.sessions.send("a", b"still yours")
        assert await first.read() == b"still yours"
        await first.write(b"one")
        await until(lambda: recorder.record[-1] == "a/first: one")
        assert "a/second: closed" not in recorder.record
    assert recorder.record[-1] == "a/first: closed"


async def test_what_is_sent_while_a_hello_is_handled_goes_to_the_stream_with_the_hello(address: str) -> None:
    """What a decision about a hello sends by name is for the new stream."""
    recorder = RecordingSessions()
    recorder.answers = True
    async with recorder.serving(address), open_stream(address, b"hello a/first") as first:
        assert await first.read() == b"to a/first"
        async with open_stream(address, b"hello a/second") as second:
            assert await second.read() == b"to a/second"


async def test_a_cancelled_handler_closes_its_session(address: str) -> None:
    recorder = RecordingSessions()
    async with recorder.serving(address, peer="operator"), open_stream(address):
        await until(lambda: "operator" in recorder.sessions)
    await until(lambda: recorder.record[-1] == "operator: closed")
    assert not len(recorder.sessions)


async def test_a_stream_that_the_server_ends_gets_the_reason(address: str) -> None:
    recorder = RecordingSessions()
    async with recorder.serving(address), open_stream(address, b"hello a") as a, open_stream(address, b"hello b") as b:
        await until(lambda: len(recorder.sessions) == 2)
        recorder.sessions.end_all()
        assert await refusal(a) == await refusal(b) == "UNAVAILABLE: the server has ended this stream; connect again"
        assert not len(recorder.sessions)
    assert {"a: closed", "b: closed"} <= set(recorder.record)
