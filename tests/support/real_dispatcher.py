"""A gateway's real dispatcher beside an in-process system, and clients that ask it without HTTP."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from motet.api.v1 import common_pb2, runner_pb2
from motet.clock import monotonic
from motet.domain import BASE, Digest
from motet.errors import MotetError
from motet.prefix_hints import prefix_salt, prompt_hints
from motet.transport.over_grpc import GrpcNetwork
from motet_gateway.catalog import CurrentCatalog
from motet_gateway.dispatcher import Dispatcher
from motet_gateway.generation import EndReason
from motet_gateway.held_requests import HeldRequests
from motet_gateway.live_choice import GenerationRequest
from motet_gateway.metrics import Metrics
from tests.common.waiting import PATIENCE_S, until
from tests.support.in_process_system import InProcessSystem

SEED = 7


class Client:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.placed_times = 0
        self.told = ""
        self._ended: asyncio.Future[EndReason | MotetError] = asyncio.get_running_loop().create_future()

    def placed(self) -> None:
        self.placed_times += 1

    def waiting(self, for_what: str) -> None:
        self.told = for_what

    def score(self, logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None: ...

    def deliver(self, tokens: Sequence[int], logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None:
        self.tokens.extend(tokens)

    async def over(self) -> EndReason | MotetError:
        async with asyncio.timeout(PATIENCE_S):
            return await self._ended

    def end(self, how: EndReason | MotetError) -> None:
        self._ended.set_result(how)


@asynccontextmanager
async def dispatcher_of(system: InProcessSystem, *, connect_seconds: float = PATIENCE_S) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(
        "g-real",
        system.control.scheduler_address,
        CurrentCatalog(),
        Metrics(CollectorRegistry(), clock=monotonic),
        network=GrpcNetwork(),
        connect_seconds=connect_seconds,
        held=HeldRequests(lambda: None, monotonic),
        clock=monotonic,
    )
    running = asyncio.create_task(dispatcher.run())
    try:
        await until(lambda: dispatcher.catalog.known)
        yield dispatcher
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def ask(
    dispatcher: Dispatcher,
    name: str,
    prompt: tuple[int, ...],
    *,
    max_tokens: int,
    tenant: str = "acme",
    parent: str = "",
    choices: int = 1,
    sampling: runner_pb2.Sampling | None = None,
) -> Client:
    """Start a request whose estimated length is right, and which runs for as long as it may."""
    client = Client()
    base = Digest(dispatcher.catalog.current.groups[0].base_digest)
    dispatcher.start(
        GenerationRequest(
            request=name,
            tenant=tenant,
            group="default/demo",
            adapter="",
            adapter_digest=BASE,
            base_digest=base,
            request_class=common_pb2.REQUEST_CLASS_STANDARD,
            prompt_ids=list(prompt),
            choice=0,
            sampling=sampling or runner_pb2.Sampling(max_tokens=max_tokens, ignore_eos=True),
            seed=SEED,
            estimate=common_pb2.Estimate(q50=max_tokens, q80=max_tokens, q90=max_tokens, q95=max_tokens),
            deadline_seconds=PATIENCE_S,
            parent=parent,
            choices=choices,
            prefix_hints=prompt_hints(prefix_salt(base, BASE, tenant), prompt),
        ),
        client,
    )
    return client
