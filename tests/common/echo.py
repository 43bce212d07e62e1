"""A real gRPC service with one bidirectional stream of bytes, to test streams without the services of Motet."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from motet.errors import InvalidRequest
from motet.rpc import Outbox, run_stream
from motet.transport import StreamMethod
from motet.transport.over_grpc import GrpcServerStream

Talk = Callable[[AsyncIterator[bytes], Any], Any]


class Echo:
    """Answers each message with the same message, and records the messages of each stream."""

    def __init__(self) -> None:
        self.heard: list[list[bytes]] = []
        self.ended: list[str] = []

    async def talk(self, requests: AsyncIterator[bytes], context: Any) -> None:
        mine: list[bytes] = []
        self.heard.append(mine)
        outbox: Outbox[bytes] = Outbox()

        def receive(message: bytes) -> None:
            mine.append(message)
            if message == b"nonsense":
                raise InvalidRequest("this makes no sense; say something else")
            if message == b"defect":
                raise RuntimeError("a defect of the server")
            outbox.put(message)

        try:
            await run_stream(GrpcServerStream(requests, context), outbox, receive)
        except BaseException as error:
            self.ended.append(type(error).__name__)
            raise
        self.ended.append("left")

    def add(self, server: grpc.aio.Server) -> None:
        method: Any = grpc.stream_stream_rpc_method_handler(self.talk)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Echo", {"Talk": method})])


TALK = StreamMethod("/test.Echo/Talk", bytes, bytes)


def open_talk(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream("/test.Echo/Talk")()
