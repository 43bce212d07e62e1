"""A gateway without HTTP. It enqueues requests, submits each to the runner that the scheduler chose, reports lost ones,
and checks every token.

async with fake_gateway("g0", scheduler=address) as gateway:
    tokens = await gateway.ask("r1", prompt=(1, 2, 3), max_tokens=32)
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from motet.api.v1 import common_pb2, runner_pb2, scheduler_pb2
from motet.errors import from_proto
from motet.rpc import Link
from motet.task_group import run_together
from motet.transport.methods import GENERATE, SERVE
from motet.transport.over_grpc import GrpcNetwork
from tests.common.waiting import PATIENCE_S

GROUP = "default/demo"


@dataclass
class FakeRequest:
    request: str
    prompt: tuple[int, ...]
    max_tokens: int
    q80: int
    adapter: str
    tenant: str
    request_class: "common_pb2.RequestClass.ValueType"
    seed: int
    deadline: float
    group: str
    base: str
    done: "asyncio.Future[list[int]]"
    asked_at: float = field(default_factory=time.monotonic)
    tokens: list[int] = field(default_factory=list)
    epoch: int = 0
    placed: scheduler_pb2.Placed | None = None
    placed_at: float = 0.0
    placements: list[tuple[int, str]] = field(default_factory=list)
    moves: int = 0
    positions: list[tuple[int, str]] = field(default_factory=list)


class FakeGateway:
    def __init__(self, name: str, scheduler: str) -> None:
        self.name = name
        self.term = 0
        self.asked: dict[str, FakeRequest] = {}
        self.catalogs: list[scheduler_pb2.Catalog] = []
        self.declines = 0
        self._runners: dict[str, Link[runner_pb2.GenerateUp, runner_pb2.GenerateDown]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._opening: dict[str, list[runner_pb2.GenerateUp]] = {}
        self.link: Link[scheduler_pb2.ServeUp, scheduler_pb2.ServeDown] = Link(
            f"{name}: scheduler",
            scheduler,
            SERVE,
            network=GrpcNetwork(),
            greet=self._greet,
            receive=self._on_scheduler_message,
        )

    async def ask(self, request: str, **how: Any) -> list[int]:
        return await self.start(request, **how)

    def start(
        self,
        request: str,
        *,
        prompt: tuple[int, ...] = (1, 2, 3),
        max_tokens: int = 16,
        q80: int = 0,
        adapter: str = "",
        tenant: str = "default",
        request_class: "common_pb2.RequestClass.ValueType" = common_pb2.REQUEST_CLASS_STANDARD,
        seed: int = 7,
        deadline: float = 0.0,
        group: str = GROUP,
        base: str = "",
    ) -> "asyncio.Future[list[int]]":
        done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        one = FakeRequest(
            request, prompt, max_tokens, q80, adapter, tenant, request_class, seed, deadline, group, base, done
        )
        self.asked[request] = one
        self.link.send(self._enqueue(one))
        return done

    def cancel(self, request: str) -> None:
        one = self.asked[request]
        if one.placed is None:
            self.link.send(scheduler_pb2.ServeUp(cancel=scheduler_pb2.CancelRequest(request=request, epoch=one.epoch)))
        else:
            self._to_runner(
                one.placed.address,
                runner_pb2.GenerateUp(cancel=runner_pb2.CancelGeneration(request=request, epoch=one.epoch)),
            )
            self._finished(one, common_pb2.FINISH_REASON_CANCELLED)
        one.done.cancel()

    def live(self) -> list[FakeRequest]:
        return [one for one in self.asked.values() if not one.done.done()]

    # ----------------------------------------------------------------------------------------------------- scheduler

    def _greet(self) -> Iterable[scheduler_pb2.ServeUp]:
        yield scheduler_pb2.ServeUp(
            hello=scheduler_pb2.GatewayHello(
                gateway=self.name,
                highest_term=self.term,
                live=[self._live(one) for one in self.live() if one.placed is not None],
            )
        )
        yield from (self._enqueue(one) for one in self.live() if one.placed is None)

    def _live(self, one: FakeRequest) -> scheduler_pb2.LiveRequest:
        assert one.placed is not None
        return scheduler_pb2.LiveRequest(
            request=one.request,
            epoch=one.epoch,
            instance=one.placed.instance,
            incarnation=one.placed.incarnation,
            promise=one.placed.promise,
            tenant=one.tenant,
            group=one.group,
            adapter_digest=one.adapter,
            request_class=one.request_class,
            prompt_tokens=len(one.prompt),
            max_tokens=one.max_tokens,
            delivered_tokens=len(one.tokens),
            age_seconds=time.monotonic() - one.asked_at,
            estimate=common_pb2.Estimate(q80=one.q80),
            deadline_seconds=one.deadline,
        )

    def _enqueue(self, one: FakeRequest) -> scheduler_pb2.ServeUp:
        return scheduler_pb2.ServeUp(
            enqueue=scheduler_pb2.Enqueue(
                request=one.request,
                epoch=one.epoch,
                tenant=one.tenant,
                group=one.group,
                adapter_digest=one.adapter,
                base_digest=one.base,
                request_class=one.request_class,
                prompt_tokens=len(one.prompt),
                max_tokens=one.max_tokens,
                delivered_tokens=len(one.tokens),
                estimate=common_pb2.Estimate(q80=one.q80),
                deadline_seconds=one.deadline,
                age_seconds=time.monotonic() - one.asked_at,
            )
        )

    def _on_scheduler_message(self, down: scheduler_pb2.ServeDown) -> None:
        match down.WhichOneof("message"):
            case "welcome":
                self.term = max(self.term, down.welcome.term)
            case "placed":
                self._placed(down.placed)
            case "moved":
                one = self.asked.get(down.moved.placement.request)
                if one is not None and one.placed is not None:
                    one.moves += 1
                    cancel = runner_pb2.CancelGeneration(request=one.request, epoch=one.epoch)
                    self._to_runner(one.placed.address, runner_pb2.GenerateUp(cancel=cancel))
                self._placed(down.moved.placement)
            case "refused":
                one = self.asked.get(down.refused.request)
                if one is not None and not one.done.done():
                    one.done.set_exception(from_proto(down.refused.failure))
            case "position":
                one = self.asked.get(down.position.request)
                if one is not None:
                    one.positions.append((down.position.position, down.position.why))
            case "catalog":
                self.catalogs.append(down.catalog)

    def _placed(self, placed: scheduler_pb2.Placed) -> None:
        one = self.asked.get(placed.request)
        if one is None or one.done.done() or placed.epoch <= one.epoch:
            return
        one.epoch, one.placed, one.placed_at = placed.epoch, placed, time.monotonic()
        one.placements.append((placed.epoch, placed.instance))
        submit = runner_pb2.Submit(
            term=placed.term,
            request=one.request,
            epoch=one.epoch,
            promise=placed.promise,
            adapter_digest=one.adapter,
            prompt_ids=one.prompt,
            choices=[runner_pb2.Choice(choice=0, delivered_ids=one.tokens)],
            sampling=runner_pb2.Sampling(max_tokens=one.max_tokens, ignore_eos=True),
            seed=one.seed,
            tenant=one.tenant,
            request_class=one.request_class,
        )
        self._to_runner(placed.address, runner_pb2.GenerateUp(submit=submit))

    # ------------------------------------------------------------------------------------------------------- runners

    def _to_runner(self, address: str, message: runner_pb2.GenerateUp) -> None:
        link = self._runners.get(address)
        if link is None:
            self._opening[address] = [message]
            self._open(address)
        elif address in self._opening:
            self._opening[address].append(message)
        elif not link.send(message) and message.WhichOneof("message") == "submit":
            self._lose(self.asked[message.submit.request], "no stream to the runner")

    def _open(self, address: str) -> None:
        def greet() -> Iterable[runner_pb2.GenerateUp]:
            yield runner_pb2.GenerateUp(hello=runner_pb2.GenerateHello(gateway=self.name))
            yield from self._opening.pop(address, [])

        def closed(why: str) -> None:
            for one in self.live():
                if one.placed is not None and one.placed.address == address:
                    self._lose(one, why)

        link: Link[runner_pb2.GenerateUp, runner_pb2.GenerateDown] = Link(
            f"{self.name}: {address}",
            address,
            GENERATE,
            network=GrpcNetwork(),
            greet=greet,
            receive=self._on_runner_message,
            closed=closed,
        )
        self._runners[address] = link
        self._tasks[address] = asyncio.create_task(link.run())

    def _on_runner_message(self, down: runner_pb2.GenerateDown) -> None:
        match down.WhichOneof("message"):
            case "step":
                for sequence in down.step.sequences:
                    self._step(sequence)
            case "declined":
                one = self.asked.get(down.declined.request)
                if one is not None and one.epoch == down.declined.epoch and not one.done.done():
                    self.declines += 1
                    self._lose(one, down.declined.failure.message)

    def _step(self, sequence: runner_pb2.SequenceStep) -> None:
        one = self.asked.get(sequence.request)
        if one is None or one.done.done() or sequence.epoch != one.epoch or one.placed is None:
            return
        assert sequence.index == len(one.tokens), f"{one.request}: index {sequence.index} after {len(one.tokens)}"
        one.tokens.extend(sequence.tokens)
        if sequence.finish == common_pb2.FINISH_REASON_CANCELLED:
            self._lose(one, "the runner gave it up")  # this gateway did not ask for that: the request is about to move
            return
        if sequence.finish == common_pb2.FINISH_REASON_FAILED:
            one.done.set_exception(from_proto(sequence.failure))
        elif sequence.finish:
            one.done.set_result(one.tokens)
        if sequence.finish:
            self._finished(one, sequence.finish)

    def _finished(self, one: FakeRequest, reason: "common_pb2.FinishReason.ValueType") -> None:
        self.link.send(
            scheduler_pb2.ServeUp(
                finished=scheduler_pb2.Finished(
                    request=one.request,
                    epoch=one.epoch,
                    prompt_tokens=len(one.prompt),
                    output_tokens=len(one.tokens),
                    reason=reason,
                )
            )
        )

    def _lose(self, one: FakeRequest, why: str) -> None:
        one.placed = None
        self.link.send(
            scheduler_pb2.ServeUp(
                lost=scheduler_pb2.Lost(request=one.request, epoch=one.epoch, why=why, delivered_tokens=len(one.tokens))
            )
        )

    async def run(self) -> None:
        try:
            await run_together(self.link.run())
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)


@asynccontextmanager
async def fake_gateway(name: str, *, scheduler: str) -> AsyncIterator[FakeGateway]:
    gateway = FakeGateway(name, scheduler)
    task = asyncio.create_task(gateway.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not gateway.term:
                await asyncio.sleep(0.005)
        yield gateway
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for one in gateway.live():
            one.done.cancel()
