"""Answers at the scheduler's address: passes calls to the scheduler while this process leads, else names the leader.

A standby is ready and holds no state: it gets catalog, queue and ledger from its peers when it leads.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

from motet.api.v1 import scheduler_pb2, scheduler_pb2_grpc
from motet.api.v1.common_pb2 import NotLeader
from motet.errors import Overloaded
from motet_scheduler.service import SchedulerService


class LeaderOnlyServicer(scheduler_pb2_grpc.SchedulerServicer):
    def __init__(self, leader_address: Callable[[], str]) -> None:
        self._leader_address = leader_address
        self._service: SchedulerService | None = None

    def open(self, service: SchedulerService) -> None:
        self._service = service

    async def Serve(  # type: ignore[override]  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[scheduler_pb2.ServeUp], context: Any
    ) -> None:
        if self._service is not None:
            await self._service.Serve(request_iterator, context)
        else:
            await context.write(scheduler_pb2.ServeDown(not_leader=self._not_leader()))

    async def Attach(  # type: ignore[override]  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[scheduler_pb2.AttachUp], context: Any
    ) -> None:
        if self._service is not None:
            await self._service.Attach(request_iterator, context)
        else:
            await context.write(scheduler_pb2.AttachDown(not_leader=self._not_leader()))

    async def Sync(  # type: ignore[override]  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[scheduler_pb2.SyncUp], context: Any
    ) -> None:
        if self._service is not None:
            await self._service.Sync(request_iterator, context)
        else:
            await context.write(scheduler_pb2.SyncDown(not_leader=self._not_leader()))

    async def Explain(  # noqa: N802 - gRPC's name
        self, request: scheduler_pb2.ExplainRequest, context: Any
    ) -> scheduler_pb2.ExplainResponse:
        if self._service is not None:
            return await self._service.Explain(request, context)
        error = Overloaded(f"this scheduler is a standby; the leader is {self._leader_address() or 'not elected yet'}")
        await context.abort(error.mapping.grpc, error.message)
        raise error

    async def Succeed(  # noqa: N802 - gRPC's name
        self, request: scheduler_pb2.SucceedRequest, context: Any
    ) -> scheduler_pb2.SucceedResponse:
        return await self._service.Succeed(request, context) if self._service else scheduler_pb2.SucceedResponse()

    def _not_leader(self) -> NotLeader:
        return NotLeader(address=self._leader_address())
