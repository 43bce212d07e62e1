"""What services rely on, whatever carries their messages."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import pytest

from motet.api.v1 import scheduler_pb2 as api
from motet.errors import InvalidRequest, NotFound, SetupError
from motet.health import Health
from motet.rpc import EndStream, Link, Session, Sessions
from motet.transport import CallFailed, Channel, Network, ServerStream, StatusCode
from motet.transport.methods import ASSETS, ATTACH, EXPLAIN, SERVE
from tests.common.test_addresses import free_port
from tests.common.waiting import PATIENCE_S, until
from tests.contract.networks import NETWORKS, Test


@pytest.fixture(params=NETWORKS)
def run(request: pytest.FixtureRequest) -> Callable[[Test], None]:
    return NETWORKS[request.param]


def up(number: int) -> api.ServeUp:
    return api.ServeUp(cancel=api.CancelRequest(request=str(number)))


def down(number: int) -> api.ServeDown:
    return api.ServeDown(position=api.Position(request=str(number)))


def numbers(count: int, make: Callable[[int], Any]) -> Callable[[], Any]:
    """A `take` for `send_all`: these messages, and then none."""
    left = iter(range(count))

    async def take() -> Any:
        for number in left:
            return make(number)
        return await asyncio.Event().wait()

    return take


class Handler:
    """Records one stream. `then` runs after it was accepted."""

    def __init__(self, then: Callable[[ServerStream[Any, Any]], Any] | None = None) -> None:
        self.heard: list[str] = []
        self.ended = ""
        self._then = then

    async def __call__(self, stream: ServerStream[api.ServeDown, api.ServeUp]) -> None:
        try:
            await stream.accept()
            if self._then is not None:
                await self._then(stream)
            await stream.receive_all(lambda message: self.heard.append(message.cancel.request))
        except BaseException as error:
            self.ended = type(error).__name__
            raise
        self.ended = "left"


async def failure(work: Any) -> tuple[StatusCode, str]:
    with pytest.raises(CallFailed) as failed:
        async with asyncio.timeout(PATIENCE_S):
            await work
    return failed.value.code, failed.value.details


def test_messages_keep_their_order_both_ways(run: Callable[[Test], None]) -> None:
    async def test(client: Network, server: Network, address: str) -> None:
        async def send(stream: ServerStream[Any, Any]) -> None:
            sending = asyncio.create_task(stream.send_all(numbers(300, down)))
            try:
                await stream.receive_all(lambda message: handler.heard.append(message.cancel.request))
            finally:
                sending.cancel()

        handler, heard = Handler(send), []
        async with server.serving(address, {SERVE: handler}, grace=0), client.channel(address) as channel:
            stream = channel.stream(SERVE)
            await stream.connected()
            work = [
                asyncio.create_task(stream.send_all(numbers(300, up))),
                asyncio.create_task(stream.receive_all(lambda message: heard.append(message.position.request))),
            ]
            await until(lambda: len(heard) == len(handler.heard) == 300)
            assert heard == handler.heard == [str(number) for number in range(300)]
            stream.cancel()
            work[0].cancel()
            await asyncio.gather(*work, return_exceptions=True)

    run(test)


def test_a_stream_ends_with_the_status_that_its_handler_gives_it(run: Callable[[Test], None]) -> None:
    async def test(client: Network, server: Network, address: str) -> None:
        handler = Handler(lambda stream: stream.end(StatusCode.ALREADY_EXISTS, "there is another one"))
        async with server.serving(address, {SERVE: handler}, grace=0), client.channel(address) as channel:
            stream = channel.stream(SERVE)
            assert await failure(stream.receive_all(lambda _: None)) == (
                StatusCode.ALREADY_EXISTS,
                "there is another one",
            )
            async with asyncio.timeout(PATIENCE_S):
                await stream.send_all(numbers(1000, up))  # it has ended, so this ends, too

    run(test)


def test_a_second_status_of_a_stream_does_not_count(run: Callable[[Test], None]) -> None:
    async def twice(stream: ServerStream[Any, Any]) -> None:
        with suppress(Exception):
            await stream.end(StatusCode.NOT_FOUND, "first")
        await stream.end(StatusCode.INTERNAL, "second")

    async def test(client: Network, server: Network, address: str) -> None:
        async with server.serving(address, {SERVE: Handler(twice)}, grace=0), client.channel(address) as channel:
            assert await failure(channel.stream(SERVE).receive_all(lambda _: None)) == (StatusCode.NOT_FOUND, "first")

    run(test)


def test_a_handler_that_returns_ends_its_stream_well(run: Callable[[Test], None]) -> None:
    async def one(stream: ServerStream[api.ServeDown, api.ServeUp]) -> None:
        await stream.send(down(7))

    async def test(client: Network, server: Network, address: str) -> None:
        heard: list[str] = []
        async with server.serving(address, {SERVE: one}, grace=0), client.channel(address) as channel:
            stream = channel.stream(SERVE)
            async with asyncio.timeout(PATIENCE_S):
                await stream.connected()
                await stream.receive_all(lambda message: heard.append(message.position.request))
        assert heard == ["7"]

    run(test)


@pytest.mark.parametrize(
    ("error", "code"), [(InvalidRequest("no"), StatusCode.INVALID_ARGUMENT), (RuntimeError("no"), StatusCode.UNKNOWN)]
)
def test_an_error_of_a_handler_ends_its_call(run: Callable[[Test], None], error: Exception, code: StatusCode) -> None:
    async def fails(_: Any) -> None:
        raise error

    async def test(client: Network, server: Network, address: str) -> None:
        handlers = {SERVE: fails, EXPLAIN: fails}
        async with server.serving(address, handlers, grace=0), client.channel(address) as channel:
            found, _ = await failure(channel.stream(SERVE).receive_all(lambda _: None))
            assert found is code
            found, _ = await failure(channel.call(EXPLAIN, api.ExplainRequest(), seconds=PATIENCE_S))
            assert found is code

    run(test)


def test_an_error_of_the_receiver_is_its_own(run: Callable[[Test], None]) -> None:
    async def test(client: Network, server: Network, address: str) -> None:
        handler = Handler(lambda stream: stream.send(down(1)))

        def receive(_: Any) -> None:
            raise LookupError("mine")

        async with server.serving(address, {SERVE: handler}, grace=0), client.channel(address) as channel:
            stream = channel.stream(SERVE)
            with pytest.raises(LookupError, match="mine"):
                await stream.receive_all(receive)
            stream.cancel()
            await until(lambda: handler.ended)

    run(test)


def test_a_client_that_cancels_ends_the_handler_and_its_own_reading(run: Callable[[Test], None]) -> None:
    async def test(client: Network, server: Network, address: str) -> None:
        handler = Handler()
        async with server.serving(address, {SERVE: handler}, grace=0), client.channel(address) as channel:
            stream = channel.stream(SERVE)
            await stream.connected()
            reading = asyncio.create_task(stream.receive_all(lambda _: None))
            await asyncio.sleep(0.01)
            stream.cancel()
            await asyncio.wait({reading}, timeout=PATIENCE_S)
            assert reading.cancelled()
            await until(lambda: handler.ended)
            assert handler.ended in ("left", "CancelledError")

    run(test)


def test_a_closed_channel_ends_its_streams(run: Callable[[Test], None]) -> None:
    async def test(client: Network, server: Network, address: str) -> None:
        handler = Handler()
        async with server.serving(address, {SERVE: handler}, grace=0):
            async with client.channel(address) as channel:
                await channel.stream(SERVE).connected()
            await until(lambda: handler.ended)

    run(test)


def test_a_server_that_stops_cancels_its_handlers_and_clients_hear_of_it(run: Callable[[Test], None]) -> None:
    async def test(client: Network, server: Network, address: str) -> None:
        handler = Handler(lambda _: asyncio.Event().wait())
        async with client.channel(address) as channel:
            async with server.serving(address, {SERVE: handler}, grace=0):
                stream = channel.stream(SERVE)
                await stream.connected()
                reading = asyncio.create_task(stream.receive_all(lambda _: None))
                await asyncio.sleep(0.01)
            assert handler.ended == "CancelledError"
            code, _ = await failure(reading)
            assert code in (StatusCode.UNAVAILABLE, StatusCode.CANCELLED)

    run(test)


def test_nobody_at_an_address_is_unavailable(run: Callable[[Test], None]) -> None:
    async def test(client: Network, _server: Network, address: str) -> None:
        async with client.channel(address) as channel:
            code, _ = await failure(channel.stream(SERVE).connected())
            assert code is StatusCode.UNAVAILABLE
            code, _ = await failure(channel.call(EXPLAIN, api.ExplainRequest(), seconds=PATIENCE_S))
            assert code is StatusCode.UNAVAILABLE

    run(test)


def test_a_method_that_is_not_served_is_unimplemented(run: Callable[[Test], None]) -> None:
    async def test(client: Network, server: Network, address: str) -> None:
        async with server.serving(address, {EXPLAIN: Handler()}, grace=0), client.channel(address) as channel:
            code, _ = await failure(channel.stream(SERVE).receive_all(lambda _: None))
            assert code is StatusCode.UNIMPLEMENTED

    run(test)


def test_a_call_gets_its_answer_or_its_status(run: Callable[[Test], None]) -> None:
    async def explain(request: api.ExplainRequest) -> api.ExplainResponse:
        if request.request == "gone":
            raise NotFound("there is no such request")
        if request.request == "slow":
            await asyncio.Event().wait()
        return api.ExplainResponse(request=request.request)

    async def test(client: Network, server: Network, address: str) -> None:
        async with server.serving(address, {EXPLAIN: explain}, grace=0), client.channel(address) as channel:
            ask = partial(channel.call, EXPLAIN)
            answer = await ask(api.ExplainRequest(request="a"), seconds=PATIENCE_S)
            assert answer.request == "a"
            assert await failure(ask(api.ExplainRequest(request="gone"), seconds=PATIENCE_S)) == (
                StatusCode.NOT_FOUND,
                "there is no such request",
            )
            code, _ = await failure(ask(api.ExplainRequest(request="slow"), seconds=0.05))
            assert code is StatusCode.DEADLINE_EXCEEDED

    run(test)


def test_a_download_is_read_to_its_end_or_its_status(run: Callable[[Test], None]) -> None:
    async def assets(request: Any) -> AsyncIterator[Any]:
        for number in range(3):
            yield ASSETS.down(name=str(number))
        if request.digest == "broken":
            raise NotFound("no more")

    async def test(client: Network, server: Network, address: str) -> None:
        async with server.serving(address, {ASSETS: assets}, grace=0), client.channel(address) as channel:

            async def read(digest: str) -> list[str]:
                async with aclosing(channel.download(ASSETS, ASSETS.up(digest=digest))) as chunks:
                    return [chunk.name async for chunk in chunks]

            assert await read("whole") == ["0", "1", "2"]
            assert await failure(read("broken")) == (StatusCode.NOT_FOUND, "no more")

    run(test)


def test_a_link_and_sessions_meet_again_after_their_stream_broke(run: Callable[[Test], None]) -> None:
    async def test(client: Network, server: Network, address: str) -> None:
        peers: list[str] = []

        def received(session: Session[str, api.ServeDown], message: api.ServeUp) -> None:
            if message.HasField("hello"):
                peers.append(session.peer)
                session.send(down(len(peers)))
            else:
                raise EndStream(InvalidRequest("begin again"))

        sessions: Sessions[str, api.ServeUp, api.ServeDown] = Sessions(
            hello=lambda message: message.hello.gateway if message.HasField("hello") else None,
            received=received,
            closed=lambda session: peers.append(f"{session.peer} left"),
        )
        heard: list[str] = []
        link: Link[api.ServeUp, api.ServeDown] = Link(
            "scheduler",
            address,
            SERVE,
            network=client,
            greet=lambda: [api.ServeUp(hello=api.GatewayHello(gateway="g"))],
            receive=lambda message: heard.append(message.position.request),
        )
        running = asyncio.create_task(link.run())
        async with server.serving(address, {SERVE: sessions.serve}, grace=0):
            await until(lambda: heard == ["1"])
            link.send(up(1))
            await until(lambda: len(heard) == 2)
            assert peers == ["g", "g left", "g"]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(test)


@pytest.mark.parametrize("error", [KeyError("closed"), TimeoutError("closed"), InvalidRequest("closed")])
def test_a_cancelled_link_ends_although_its_owner_fails_at_that(run: Callable[[Test], None], error: Exception) -> None:
    async def test(client: Network, server: Network, address: str) -> None:
        closed: list[str] = []

        def fail(why: str) -> None:
            closed.append(why)
            raise error

        link: Link[api.ServeUp, api.ServeDown] = Link(
            "scheduler", address, SERVE, network=client, greet=list, receive=lambda _: None, closed=fail
        )
        running = asyncio.create_task(link.run())
        async with server.serving(address, {SERVE: Handler()}, grace=0):
            await until(lambda: link.connected)
            running.cancel()
            await asyncio.wait({running}, timeout=1)
            assert running.cancelled()
            assert len(closed) == 1

    run(test)


def test_a_link_whose_owner_fails_at_a_lost_connection_connects_again(run: Callable[[Test], None]) -> None:
    async def test(client: Network, server: Network, address: str) -> None:
        def fail(_: str) -> None:
            raise KeyError("closed")

        link: Link[api.ServeUp, api.ServeDown] = Link(
            "scheduler", address, SERVE, network=client, greet=list, receive=lambda _: None, closed=fail
        )
        running = asyncio.create_task(link.run())
        for _ in range(2):
            async with server.serving(address, {SERVE: Handler()}, grace=0):
                await until(lambda: link.connected)
            await until(lambda: not link.connected)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(test)


def test_a_server_that_stops_gives_its_calls_their_grace_and_takes_no_more(run: Callable[[Test], None]) -> None:
    async def test(client: Network, server: Network, address: str) -> None:
        began: list[str] = []

        async def brief(stream: ServerStream[Any, Any]) -> None:
            await stream.accept()
            began.append("brief")
            await asyncio.sleep(0.3)

        async def wait(_: Any) -> None:
            began.append("endless")
            await asyncio.Event().wait()

        endless = Handler(wait)
        handlers = {SERVE: brief, ATTACH: endless}
        async with client.channel(address) as channel:
            async with server.serving(address, handlers, grace=0.6):
                streams = [channel.stream(SERVE), channel.stream(ATTACH)]
                reading = [asyncio.create_task(stream.receive_all(lambda _: None)) for stream in streams]
                await until(lambda: len(began) == 2)
                late = asyncio.create_task(_call_soon(channel))
            code, _ = await failure(late)
            assert code in (StatusCode.UNAVAILABLE, StatusCode.CANCELLED)
            async with asyncio.timeout(PATIENCE_S):
                await reading[0]  # its handler has ended by itself, so it ends well
            await failure(reading[1])
            assert endless.ended == "CancelledError"

    run(test)


async def _call_soon(channel: Channel) -> None:
    await asyncio.sleep(0.1)
    await channel.stream(SERVE).connected()


def test_a_process_is_as_ready_as_its_server(run: Callable[[Test], None]) -> None:
    async def test(_client: Network, server: Network, address: str) -> None:
        process = Health()
        async with server.serving(address, {}, ready=False, grace=0, process=process) as serving:
            assert process.unready_reason() == "starting"
            await serving.set_ready(False, "it loads")
            assert process.unready_reason() == "it loads"
            await serving.set_ready(True)
            assert process.unready_reason() == ""
        assert process.unready_reason() == "stopping"

    run(test)


def test_two_servers_do_not_get_one_address(run: Callable[[Test], None]) -> None:
    async def test(_client: Network, server: Network, address: str) -> None:
        if address.startswith("unix:"):  # there the file of a dead process may be left, so a new server takes it over
            address = f"127.0.0.1:{free_port('127.0.0.1')}"
        async with server.serving(address, {}, grace=0):
            with pytest.raises(SetupError, match=f"cannot listen on {address}"):
                async with server.serving(address, {}, grace=0):
                    pass
        async with server.serving(address, {}, grace=0):
            pass

    run(test)


@pytest.mark.parametrize("code", [StatusCode.NOT_FOUND, StatusCode.OK])
def test_all_who_wait_for_one_stream_hear_of_its_end(run: Callable[[Test], None], code: StatusCode) -> None:
    async def test(client: Network, server: Network, address: str) -> None:
        go = asyncio.Event()

        async def wait(stream: ServerStream[Any, Any]) -> None:
            await go.wait()
            if code is not StatusCode.OK:
                await stream.end(code, "")

        async with server.serving(address, {SERVE: wait}, grace=0), client.channel(address) as channel:
            stream = channel.stream(SERVE)
            waiting = [asyncio.create_task(stream.receive_all(lambda _: None))]
            waiting += [asyncio.create_task(stream.connected()) for _ in range(2)]
            await asyncio.sleep(0.1)
            go.set()
            _, late = await asyncio.wait(waiting, timeout=2)
            assert not late
            await asyncio.gather(*waiting, return_exceptions=True)

    run(test)


def test_a_download_is_read_while_it_goes_on(run: Callable[[Test], None]) -> None:
    async def test(client: Network, server: Network, address: str) -> None:
        read = asyncio.Event()

        async def assets(_: Any) -> AsyncIterator[Any]:
            yield ASSETS.down(name="first")
            await read.wait()
            yield ASSETS.down(name="second")

        async with server.serving(address, {ASSETS: assets}, grace=0), client.channel(address) as channel:
            names = []
            async with asyncio.timeout(PATIENCE_S), aclosing(channel.download(ASSETS, ASSETS.up())) as chunks:
                async for chunk in chunks:
                    names.append(chunk.name)
                    read.set()
            assert names == ["first", "second"]

    run(test)
