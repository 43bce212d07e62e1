"""gRPC as a `Network`."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from typing import Any

import grpc

from motet import tls
from motet.errors import MotetError
from motet.health import Health
from motet.transport import (
    CallFailed,
    Down,
    DownloadMethod,
    Handlers,
    Method,
    StatusCode,
    StreamMethod,
    UnaryMethod,
    Up,
    spread,
    status_of,
)
from motet.transport.over_grpc.channels import is_served, open_channel, socket_path
from motet.transport.over_grpc.server import GrpcServer, serving
from motet.transport.over_grpc.streams import GrpcClientStream, GrpcServerStream, call_failures

SOCKET_POLL_SECONDS = 0.025
_RANDOM = Random()  # noqa: S311 - guards nothing

Calls = set["asyncio.Task[None]"]
"""The tasks of handlers that run"""


class GrpcNetwork:
    @asynccontextmanager
    async def channel(
        self, address: str, role: str = "", *, grace: float | None = None
    ) -> AsyncIterator["GrpcChannel"]:
        async with open_channel(address, role, grace=grace) as channel:
            yield GrpcChannel(channel)

    def serving(
        self,
        address: str,
        handlers: Handlers,
        *,
        ready: bool = True,
        grace: float = 0.5,
        process: Health | None = None,
    ) -> AbstractAsyncContextManager[GrpcServer]:
        """With the methods of `handlers`, health and reflection."""
        calls: Calls = set()
        return serving(
            address,
            lambda server: add_to(server, handlers, calls),
            names=_services(handlers),
            ready=ready,
            grace=grace,
            process=process,
            calls=calls,
        )

    async def pause(self, address: str, seconds: float) -> None:
        """If the address is a Unix socket without a server, wait only until it has one."""
        path = socket_path(address)
        if path is None or is_served(path):
            await asyncio.sleep(seconds)
            return
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0 and not is_served(path):  # noqa: ASYNC110 - another process's doing
            await asyncio.sleep(min(left, SOCKET_POLL_SECONDS))

    def spread(self, seconds: float) -> float:
        return spread(_RANDOM, seconds)

    def explain_failure(self, why: str, role: str) -> str:
        identity = tls.current_identity()
        return "" if identity is None else identity.explain_failure(why, role)


class GrpcChannel:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._unary: dict[str, grpc.aio.UnaryUnaryMultiCallable[Any, Any]] = {}

    def stream(self, method: StreamMethod[Up, Down]) -> GrpcClientStream:
        call = self._channel.stream_stream(method.path, _encoder(method.up), _decoder(method.down))
        return GrpcClientStream(call())

    async def call(self, method: UnaryMethod[Up, Down], request: Up, *, seconds: float) -> Down:
        call = self._unary.get(method.path)
        if call is None:
            call = self._channel.unary_unary(method.path, _encoder(method.up), _decoder(method.down))
            self._unary[method.path] = call
        with call_failures():
            answer: Down | None = await call(request, timeout=seconds)
        if answer is None:  # so gRPC says that it could not decode the answer
            raise CallFailed(StatusCode.INTERNAL, f"the answer of {method.path} cannot be decoded")
        return answer

    async def download(self, method: DownloadMethod[Up, Down], request: Up) -> AsyncGenerator[Down, None]:
        call = self._channel.unary_stream(method.path, _encoder(method.up), _decoder(method.down))(request)
        try:
            with call_failures():
                async for answer in call:
                    yield answer
        finally:
            call.cancel()


def add_to(server: grpc.aio.Server, handlers: Handlers, calls: Calls) -> None:
    """Not the generated functions: these need no class for each service. `calls` gets the tasks that run."""
    for service in _services(handlers):
        of_service = {
            method.name: _handler(method, handle, calls)
            for method, handle in handlers.items()
            if method.service == service
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, of_service),))


def _services(handlers: Handlers) -> list[str]:
    return sorted({method.service for method in handlers})


def _handler(method: Method[Any, Any], handle: Callable[..., Any], calls: Calls) -> "grpc.RpcMethodHandler[Any, Any]":
    decode = _decoder(method.up)
    match method:
        case StreamMethod():

            async def stream(requests: AsyncIterator[Any], context: Any) -> None:
                _note(calls)
                await _answered(context, handle(GrpcServerStream(requests, context)))

            return grpc.stream_stream_rpc_method_handler(
                stream, decode, None if method.encoded else _encoder(method.down)
            )
        case DownloadMethod():

            async def download(request: Any, context: Any) -> AsyncIterator[Any]:
                _note(calls)
                try:
                    async for answer in handle(request):
                        yield answer
                except MotetError as error:
                    await context.abort(*status_of(error))

            return grpc.unary_stream_rpc_method_handler(download, decode, _encoder(method.down))
        case _:

            async def unary(request: Any, context: Any) -> Any:
                _note(calls)
                return await _answered(context, handle(request))

            return grpc.unary_unary_rpc_method_handler(unary, decode, _encoder(method.down))


def _note(calls: Calls) -> None:
    task = asyncio.current_task()
    if task is not None:
        calls.add(task)
        task.add_done_callback(calls.discard)


async def _answered(context: Any, answer: Awaitable[Any]) -> Any:
    try:
        return await answer
    except MotetError as error:
        await context.abort(*status_of(error))


def _encoder(kind: type[Any]) -> Callable[[Any], bytes] | None:
    return None if kind is bytes else kind.SerializeToString


def _decoder(kind: type[Any]) -> Callable[[bytes], Any] | None:
    return None if kind is bytes else kind.FromString
