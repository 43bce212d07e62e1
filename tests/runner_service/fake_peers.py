"""Fakes for the other ends of a runner's streams. They record what arrives and send what a test wants."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from motet.api.v1 import (
    common_pb2,
    runner_pb2,
    runner_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    supervisor_pb2,
    supervisor_pb2_grpc,
)
from motet.domain import PAGE_TOKENS, pages_for
from motet.rpc import Outbox, run_stream
from motet.transport.over_grpc import GrpcServerStream, open_channel, serving
from tests.common.waiting import until


class Peer:
    """One connection at a time; `received` has the messages of all connections."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.connections = 0
        self._outbox: Outbox[Any] | None = None

    def of(self, kind: str) -> list[Any]:
        return [getattr(up, kind) for up in self.received if up.WhichOneof("message") == kind]

    def send(self, down: Any) -> None:
        assert self._outbox is not None, "nobody is connected"
        self._outbox.put(down)

    async def _converse(self, requests: AsyncIterator[Any], context: Any, greeting: Any) -> None:
        self.connections += 1
        outbox = self._outbox = Outbox[Any]()
        if greeting is not None:
            outbox.put(greeting)
        await run_stream(GrpcServerStream(requests, context), outbox, self.received.append)


class RecordingScheduler(Peer, scheduler_pb2_grpc.SchedulerServicer):
    term = 1
    takes_residency = takes_listed = False
    welcomes_at_once = True

    async def Attach(self, requests, context):
        await self._converse(requests, context, self.welcome() if self.welcomes_at_once else None)

    def welcome(self) -> scheduler_pb2.AttachDown:
        takes = {"takes_residency": self.takes_residency, "takes_listed": self.takes_listed}
        welcome = common_pb2.Welcome(term=self.term, **takes)
        return scheduler_pb2.AttachDown(welcome=welcome)

    def ensure(self, name: str, source: str, stage: int = common_pb2.ADAPTER_STAGE_CERTIFIED, **more: Any) -> None:
        ref = common_pb2.AdapterRef(namespace="default", name=name, generation=1)
        order = scheduler_pb2.EnsureAdapter(term=self.term, adapter=ref, source=source, stage=stage, **more)
        self.send(scheduler_pb2.AttachDown(ensure=order))

    async def adapter(
        self, name: str, *, stage: int = common_pb2.ADAPTER_STAGE_CERTIFIED, failed: bool = False
    ) -> scheduler_pb2.AdapterState:
        """The first report that this adapter has reached the stage or failed. Reports of progress may come before."""

        def found() -> Any:
            states = [state for state in self.of("adapter") if state.ref.name == name]
            if failed:
                return next((state for state in states if state.HasField("failure")), None)
            return next((state for state in states if state.stage >= stage and not state.HasField("failure")), None)

        return await until(found)


class RecordingSupervisor(Peer, supervisor_pb2_grpc.SupervisorServicer):
    async def Watch(self, requests, context):
        await self._converse(requests, context, supervisor_pb2.WatchDown(welcome={"supervisor": "s"}))


@asynccontextmanager
async def scheduler_at(address: str) -> AsyncIterator[RecordingScheduler]:
    peer = RecordingScheduler()
    async with serving(address, lambda s: scheduler_pb2_grpc.add_SchedulerServicer_to_server(peer, s), grace=0):
        yield peer


@asynccontextmanager
async def supervisor_at(address: str) -> AsyncIterator[RecordingSupervisor]:
    peer = RecordingSupervisor()
    async with serving(address, lambda s: supervisor_pb2_grpc.add_SupervisorServicer_to_server(peer, s), grace=0):
        yield peer


class CheckingGateway:
    """A Generate stream that puts tokens in order by (request, epoch) and fails on a gap or a repetition."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._one_at_a_time = asyncio.Lock()
        self.steps: list[runner_pb2.Step] = []
        self.declined: list[runner_pb2.SubmitDeclined] = []
        self.welcome: runner_pb2.GenerateWelcome | None = None
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.first_index: dict[tuple[str, int], int] = {}
        self.finish: dict[tuple[str, int], runner_pb2.SequenceStep] = {}
        self.engine_died = ""
        self.error: grpc.aio.AioRpcError | None = None

    async def send(self, **message: Any) -> None:
        async with self._one_at_a_time:  # gRPC refuses a write while another one is under way
            await self._call.write(runner_pb2.GenerateUp(**message))

    async def submit(
        self,
        request: str,
        *,
        prompt: tuple[int, ...] = (1, 2, 3),
        max_tokens: int = 8,
        epoch: int = 1,
        term: int = 1,
        adapter: str = "",
        seed: int = 7,
        pages: int | None = None,
        delivered: tuple[int, ...] = (),
        choices: int = 1,
        engines_lost: int = 0,
        parent: str = "",
        base: str = "",
        traceparent: str = "",
        prompt_number: int = 0,
    ) -> None:
        await self.send(
            submit=runner_pb2.Submit(
                term=term,
                request=request,
                epoch=epoch,
                promise=common_pb2.Promise(pages=pages or pages_for(len(prompt) + max_tokens, PAGE_TOKENS)),
                adapter_digest=adapter,
                prompt_ids=prompt,
                choices=[runner_pb2.Choice(choice=n, delivered_ids=delivered) for n in range(choices)],
                sampling=runner_pb2.Sampling(max_tokens=max_tokens, ignore_eos=True),
                seed=seed,
                tenant="default",
                request_class=common_pb2.REQUEST_CLASS_INTERACTIVE,
                engines_lost=engines_lost,
                parent=parent,
                base_digest=base,
                traceparent=traceparent,
                prompt_number=prompt_number,
            )
        )

    async def cancel(self, request: str, epoch: int = 1) -> None:
        await self.send(cancel=runner_pb2.CancelGeneration(request=request, epoch=epoch))

    async def finished(self, request: str, epoch: int = 1) -> runner_pb2.SequenceStep:
        key = request, epoch
        await until(lambda: key in self.finish or self.error)
        assert key in self.finish, f"the stream broke: {self.error}"
        return self.finish[key]

    async def refusal(self, request: str, epoch: int = 1) -> runner_pb2.SubmitDeclined:
        def found() -> list[runner_pb2.SubmitDeclined]:
            return [one for one in self.declined if (one.request, one.epoch) == (request, epoch)]

        await until(lambda: found() or self.error)
        assert found(), f"the stream broke: {self.error}"
        return found()[0]

    def progress(self, request: str) -> list[int]:
        return [one.state for step in self.steps for one in step.progress if one.request == request]

    async def read(self) -> None:
        try:
            async for down in self._call:
                match down.WhichOneof("message"):
                    case "step":
                        self._take(down.step)
                    case "declined":
                        self.declined.append(down.declined)
                    case "welcome":
                        self.welcome = down.welcome
                    case "engine_died":
                        self.engine_died = down.engine_died.why
        except grpc.aio.AioRpcError as error:
            self.error = error

    def _take(self, step: runner_pb2.Step) -> None:
        self.steps.append(step)
        for one in step.sequences:
            key = (one.request, one.epoch)
            tokens = self.tokens.setdefault(key, [])
            first = self.first_index.setdefault(key, one.index)
            assert one.index == first + len(tokens), "a gap or a repetition"
            tokens.extend(one.tokens)
            if one.finish:
                assert key not in self.finish, "finished twice"
                self.finish[key] = one


SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]
"""The options of a client that buffers only KiB, not MiB: a busy machine needs long to produce MiB."""


@asynccontextmanager
async def gateway_to(
    address: str, name: str = "g0", *, hello: bool = True, deaf: bool = False
) -> AsyncIterator[CheckingGateway]:
    """A gateway's stream. A `deaf` one does not read by itself. If a message breaks a rule, the test fails at once."""
    test, in_use = asyncio.current_task(), True
    assert test is not None

    def fail_now(read: asyncio.Task[None]) -> None:
        if in_use and not read.cancelled() and read.exception() is not None:
            test.cancel()

    async with grpc.aio.insecure_channel(address, SMALL_WINDOW) if deaf else open_channel(address) as channel:
        call = runner_pb2_grpc.RunnerStub(channel).Generate()
        gateway = CheckingGateway(call)
        reader = asyncio.create_task(asyncio.sleep(3600) if deaf else gateway.read())
        reader.add_done_callback(fail_now)
        try:
            if hello:
                await gateway.send(hello=runner_pb2.GenerateHello(gateway=name))
            yield gateway
            if reader.done():
                reader.result()
        except asyncio.CancelledError:
            if reader.done() and not reader.cancelled():
                test.uncancel()
                reader.result()
            raise
        finally:
            in_use = False
            call.cancel()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
