"""Answers at the scheduler's address: passes calls to the scheduler while this process leads, else names the leader.

A standby is ready and holds no state: it gets catalog, queue and ledger from its peers when it leads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from motet.api.v1 import scheduler_pb2
from motet.api.v1.common_pb2 import NotLeader
from motet.errors import Overloaded
from motet.transport import Handlers, Method, ServerStream, StreamMethod
from motet.transport.methods import ATTACH, EXPLAIN, SERVE, SUCCEED, SYNC
from motet_scheduler.service import SchedulerService

STREAMS: tuple[StreamMethod[Any, Any], ...] = (SERVE, ATTACH, SYNC)


class LeaderOnly:
    def __init__(self, leader_address: Callable[[], str]) -> None:
        self._leader_address = leader_address
        self._leading: Handlers = {}

    def open(self, service: SchedulerService) -> None:
        self._leading = service.handlers

    @property
    def handlers(self) -> Handlers:
        handlers: dict[Method[Any, Any], Callable[..., Any]] = {EXPLAIN: self._explain, SUCCEED: self._succeed}
        return handlers | {method: partial(self.stream, method) for method in STREAMS}

    async def stream(self, method: StreamMethod[Any, Any], stream: ServerStream[Any, Any]) -> None:
        if (handle := self._leading.get(method)) is not None:
            await handle(stream)
            return
        await stream.send(method.down(not_leader=NotLeader(address=self._leader_address())))

    async def _explain(self, request: scheduler_pb2.ExplainRequest) -> scheduler_pb2.ExplainResponse:
        if (explain := self._leading.get(EXPLAIN)) is None:
            leader = self._leader_address() or "not elected yet"
            raise Overloaded(f"this scheduler is a standby; the leader is {leader}")
        return await explain(request)  # type: ignore[no-any-return]

    async def _succeed(self, request: scheduler_pb2.SucceedRequest) -> scheduler_pb2.SucceedResponse:
        succeed = self._leading.get(SUCCEED)
        return await succeed(request) if succeed is not None else scheduler_pb2.SucceedResponse()
