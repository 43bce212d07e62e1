"""A gRPC server with health and reflection, and a function that asks whether a server is healthy."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from motet import tls
from motet.errors import SetupError
from motet.health import Health
from motet.transport import HANDLER_END_SECONDS
from motet.transport.over_grpc.channels import SERVER_OPTIONS, is_served, open_channel, socket_path
from motet.transport.over_grpc.roles import ROLES, RoleInterceptor, Roles


class AddServicer(Protocol):
    def __call__(self, server: grpc.aio.Server) -> None: ...


class GrpcServer:
    """What `serving` yields. With it a service says whether it is ready."""

    def __init__(self, health_servicer: health.aio.HealthServicer, port: int, process: Health) -> None:
        self._health = health_servicer
        self._process = process
        self.port = port
        """The TCP port, chosen by the kernel if the address ended with `:0`."""

    async def set_ready(self, ready: bool, why: str = "") -> None:
        """Set the readiness in the gRPC health service and in `Health`."""
        self._process.set_ready(ready, why)
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)


@asynccontextmanager
async def serving(
    address: str,
    *add: AddServicer,
    names: Iterable[str] = (),
    ready: bool = True,
    grace: float = 0.5,
    process: Health | None = None,
    roles: Roles = ROLES,
    calls: Collection["asyncio.Task[Any]"] = (),
) -> AsyncIterator[GrpcServer]:
    """A gRPC server on `unix:/path` or `host:port`, with the services that `add` adds, health and reflection.

    `calls` are the tasks of its handlers that run. `process` gets the same readiness as the health service. With TLS,
    `roles` says which roles may call each method.
    """
    path = socket_path(address)
    identity = tls.current_identity() if path is None else None
    server = grpc.aio.server(
        options=SERVER_OPTIONS, interceptors=[RoleInterceptor(roles)] if identity is not None else []
    )
    for add_servicer in add:
        add_servicer(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    if path is not None:
        path.unlink(missing_ok=True)
    try:
        if identity is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, identity.server_credentials())
    except RuntimeError as error:
        raise SetupError(
            f"cannot listen on {address}: it is in use, or its folder cannot be written. Stop the other process, or "
            "choose another address."
        ) from error
    await server.start()
    handle = GrpcServer(health_servicer, port, process or Health())
    await handle.set_ready(ready, "" if ready else "starting")
    try:
        yield handle
    finally:
        await handle.set_ready(False, "stopping")
        await server.stop(grace)
        await _until_cancelled_calls_have_ended(calls)
        if path is not None:
            path.unlink(missing_ok=True)


async def _until_cancelled_calls_have_ended(calls: Iterable["asyncio.Task[Any]"]) -> None:
    """Wait for the handlers that `stop` cancels, because `stop` does not: it may end before they are cancelled.
    Otherwise the event loop would cancel them again at its end, and gRPC would print a traceback."""
    cancelled = {task for task in asyncio.all_tasks() if task.cancelling() and _name_of(task) == "_handle_exceptions"}
    if cancelled.union(calls):
        await asyncio.wait(cancelled.union(calls), timeout=HANDLER_END_SECONDS)
        await asyncio.sleep(0)  # so that gRPC's own tasks, which wait for the handlers, end as well


def _name_of(task: "asyncio.Task[Any]") -> str:
    return getattr(task.get_coro(), "__qualname__", "")


async def is_healthy(address: str, role: str = "", *, seconds: float = 1.0) -> bool:
    """Ask the health service. False if it does not answer SERVING in time."""
    path = socket_path(address)
    if path is not None and not is_served(path):
        return False
    try:
        async with asyncio.timeout(seconds), open_channel(address, role) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=seconds, wait_for_ready=False
            )
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    except (grpc.aio.AioRpcError, TimeoutError, SetupError):
        return False
