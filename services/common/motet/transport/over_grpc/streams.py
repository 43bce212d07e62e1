"""Streams over gRPC. A call of `send_all` or `receive_all` lasts as long as its stream, so nothing of ours is between
gRPC and the messages."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc

from motet.transport import CallFailed, StatusCode

HAS_ENDED = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError)
"""What a write raises when its stream has ended."""


class GrpcClientStream:
    def __init__(self, call: "grpc.aio.StreamStreamCall[Any, Any]") -> None:
        self._call = call

    async def connected(self) -> None:
        with call_failures():
            await self._call.wait_for_connection()

    async def send_all(self, take: Callable[[], Awaitable[Any]]) -> None:
        await _send_all(take, self._call.write)

    async def receive_all(self, receive: Callable[[Any], None]) -> None:
        with call_failures():
            async for message in self._call:
                receive(message)

    def cancel(self) -> None:
        self._call.cancel()


class GrpcServerStream:
    def __init__(self, requests: AsyncIterator[Any], context: Any) -> None:
        self._requests = requests
        self._context = context

    async def accept(self) -> None:
        await self._context.send_initial_metadata(())

    async def send(self, message: Any) -> None:
        await self._context.write(message)

    async def send_all(self, take: Callable[[], Awaitable[Any]]) -> None:
        await _send_all(take, self._context.write)

    async def receive_all(self, receive: Callable[[Any], None]) -> None:
        async for message in self._requests:
            receive(message)

    async def end(self, code: StatusCode, details: str) -> None:
        with suppress(grpc.aio.UsageError):  # it ends already, with another status
            await self._context.abort(code, details)


async def _send_all(take: Callable[[], Awaitable[Any]], write: Callable[[Any], Awaitable[None]]) -> None:
    # When the stream breaks, this function just returns. The reader gets the status and reports the error.
    with suppress(*HAS_ENDED):
        while True:
            await write(await take())


@contextmanager
def call_failures() -> Iterator[None]:
    """Raise gRPC's errors of calls as CallFailed."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise CallFailed(error.code(), error.details() or "") from error
