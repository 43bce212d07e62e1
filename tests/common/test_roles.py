"""Which role may call which method, with real TLS certificates over real gRPC."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from structlog.testing import capture_logs

from motet.api.v1 import (
    predictor_pb2_grpc,
    runner_pb2,
    runner_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    supervisor_pb2_grpc,
)
from motet.clock import monotonic
from motet.rpc import LAST_RETRY_SECONDS, Link
from motet.tls import TlsIdentity, acting_as
from motet.transport.methods import SYNC
from motet.transport.over_grpc import GrpcNetwork, is_healthy, open_channel, serving
from motet.transport.over_grpc.roles import ANY_ROLE, ROLES
from tests.common import wire
from tests.common.echo import Echo, open_talk
from tests.common.waiting import PATIENCE_S, until
from tests.support.authority import Authority
from tests.support.logs import use_plain_logs

COMPONENTS = ("gateway", "runner", "operator", "scheduler", "supervisor", "predictor")


def methods() -> Iterator[Any]:
    for module in (*wire.MODULES, health_pb2, reflection_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            yield from service.methods


def test_every_method_has_a_row_and_no_row_is_without_a_method() -> None:
    assert {f"/{one.containing_service.full_name}/{one.name}" for one in methods()} == set(ROLES)


def test_each_method_of_ours_needs_a_role() -> None:
    assert [method for method, roles in ROLES.items() if method.startswith("/motet.") and roles is ANY_ROLE] == []


class Everything(
    scheduler_pb2_grpc.SchedulerServicer,
    runner_pb2_grpc.RunnerServicer,
    supervisor_pb2_grpc.SupervisorServicer,
    predictor_pb2_grpc.PredictorServicer,
):
    """Has each method of each service; none does more than accept the call."""

    def __init__(self) -> None:
        self.reached: set[tuple[str, str]] = set()

    async def Assets(self, request: Any, context: Any) -> AsyncIterator[runner_pb2.AssetChunk]:  # type: ignore[override]
        yield runner_pb2.AssetChunk(name="reached")

    async def Generate(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        await context.write(runner_pb2.GenerateDown())

    async def Explain(self, request: Any, context: Any) -> scheduler_pb2.ExplainResponse:
        return scheduler_pb2.ExplainResponse()

    def add(self, server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, server)
        runner_pb2_grpc.add_RunnerServicer_to_server(self, server)
        supervisor_pb2_grpc.add_SupervisorServicer_to_server(self, server)
        predictor_pb2_grpc.add_PredictorServicer_to_server(self, server)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    authority, folder = Authority(), tmp_path_factory.mktemp("tls")
    return {role: authority.issue(folder / role, role) for role in (*COMPONENTS, "cli", "stranger")}


@contextmanager
def acting(folders: dict[str, Path], role: str) -> Iterator[None]:
    with acting_as(TlsIdentity(folders[role], role, clock=monotonic)):
        yield


@asynccontextmanager
async def everything(folders: dict[str, Path]) -> AsyncIterator[str]:
    with acting(folders, "scheduler"):
        context = serving("127.0.0.1:0", Everything().add, Echo().add, grace=0)
        server = await context.__aenter__()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await context.__aexit__(None, None, None)


async def outcome(channel: grpc.aio.Channel, method: str, *, streams_up: bool, streams_down: bool) -> grpc.StatusCode:
    """The answer to an empty request."""
    kind = f"{'stream' if streams_up else 'unary'}_{'stream' if streams_down else 'unary'}"
    stub: Any = getattr(channel, kind)(method)
    call = stub(timeout=PATIENCE_S) if streams_up else stub(b"", timeout=PATIENCE_S)
    if streams_up:
        await call.done_writing()
    if streams_down:
        with suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
    code: grpc.StatusCode = await call.code()
    return code


@pytest.mark.parametrize("role", [*COMPONENTS, "cli", "stranger"])
async def test_each_role_may_call_only_its_own_methods(folders: dict[str, Path], role: str) -> None:
    async with everything(folders) as address:
        with acting(folders, role):
            async with open_channel(address, "scheduler") as channel:
                for method in (one for module in wire.MODULES for one in _methods_of(module)):
                    path = f"/{method.containing_service.full_name}/{method.name}"
                    code = await outcome(
                        channel, path, streams_up=method.client_streaming, streams_down=method.server_streaming
                    )
                    assert (code is grpc.StatusCode.PERMISSION_DENIED) == (role not in ROLES[path]), (path, code)
            assert await is_healthy(address, "scheduler"), "anybody with a certificate"


def _methods_of(module: Any) -> Iterator[Any]:
    for service in module.DESCRIPTOR.services_by_name.values():
        yield from service.methods


async def test_a_runner_cannot_replace_the_catalog_and_gets_the_reason(folders: dict[str, Path]) -> None:
    async with everything(folders) as address:
        with acting(folders, "runner"):
            async with open_channel(address, "scheduler") as channel:
                call = scheduler_pb2_grpc.SchedulerStub(channel).Sync()
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    async for _ in call:
                        pass
        assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "Sync is only for the role operator, but the caller's certificate has runner" in str(
            refusal.value.details()
        )


async def test_a_refused_link_logs_it_once_and_retries_slowly(folders: dict[str, Path]) -> None:
    use_plain_logs()
    link: Link[Any, Any] = Link(
        "scheduler",
        "",
        SYNC,
        network=GrpcNetwork(),
        greet=list,
        receive=lambda _: None,
    )
    async with everything(folders) as link.address:
        with capture_logs() as logs:
            retries = lambda: [line for line in logs if line["event"] == "stream_retry"]  # noqa: E731
            with acting(folders, "runner"):
                running = asyncio.create_task(link.run())
            await until(lambda: len(retries()) == 1)
            began = time.monotonic()
            await until(lambda: len(retries()) == 2)
            assert time.monotonic() - began >= LAST_RETRY_SECONDS
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    (said,) = [line for line in logs if line["event"] == "connect_failed"]
    assert said["reason"].startswith("PERMISSION_DENIED: ")
    assert len([line for line in logs if line["event"] == "call_refused"]) == 1


async def test_no_role_may_call_a_method_without_a_row(folders: dict[str, Path]) -> None:
    async with everything(folders) as address:
        with acting(folders, "gateway"):
            async with open_channel(address, "scheduler") as channel:
                call = open_talk(channel)
                assert await call.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_certificate_with_two_roles_has_both(tmp_path: Path) -> None:
    authority = Authority()
    folders = {
        "scheduler": authority.issue(tmp_path / "s", "scheduler"),
        "gateway": authority.issue(tmp_path / "g", "gateway", others=("operator",)),
    }
    async with everything(folders) as address:
        with acting(folders, "gateway"):
            async with open_channel(address, "scheduler") as channel:
                for method, streams_up in (("Sync", True), ("Serve", True), ("Explain", False)):
                    path = f"/motet.api.v1.Scheduler/{method}"
                    code = await outcome(channel, path, streams_up=streams_up, streams_down=streams_up)
                    assert code is not grpc.StatusCode.PERMISSION_DENIED


async def test_a_local_stack_does_not_check_roles(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    async with serving(address, Everything().add), open_channel(address) as channel:
        answer = await scheduler_pb2_grpc.SchedulerStub(channel).Explain(
            scheduler_pb2.ExplainRequest(), timeout=PATIENCE_S
        )
    assert answer == scheduler_pb2.ExplainResponse()
