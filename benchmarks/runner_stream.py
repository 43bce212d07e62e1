"""Measures tokens per second over one Runner.Generate stream: engine process → pipe → service → gRPC → reader.

The engine computes nothing: each iteration gives every sequence one token. The engine, the service and the reader are
three processes, as in production. The baseline is a bare gRPC stream: a server in another process repeats one message,
and the same reader counts. The two alternate.

    python -m benchmarks.runner_stream [--sequences 32] [--seconds 2] [--pairs 4] [--json]
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Never, NoReturn

import grpc
import psutil
import structlog
from prometheus_client import CollectorRegistry

from benchmarks.harness import Result, alternate, arguments, percentile, report
from motet.api.v1 import common_pb2, runner_pb2, runner_pb2_grpc
from motet.errors import StructuredOutputUnavailable
from motet.settings import Addresses, ProcessSettings
from motet.surroundings import real_surroundings
from motet.transport.over_grpc import is_healthy, open_channel, serving
from motet_runner import engine_process
from motet_runner.engine_client import EngineClient
from motet_runner.interface import (
    EngineConfig,
    EngineInfo,
    EngineReport,
    LoadProgress,
    NewSequence,
    SequenceOutput,
    StepOutput,
)
from motet_runner.service import RunnerService
from motet_runner.settings import Settings

TARGET = 500_000
WARM_UP_SECONDS = 0.5
NOWHERE = "unix:/nonexistent"


class FreeEngine:
    """An engine whose iterations cost almost nothing."""

    def __init__(self, _: EngineConfig, on_load_progress: LoadProgress) -> None:
        on_load_progress(1, 1)
        self.info = EngineInfo(
            pages=1 << 20, page_tokens=16, page_bytes=1, max_sequences=4096, max_model_length=1 << 30, adapter_slots=1,
            max_lora_rank=8, host_bytes=0, architecture="Free", layers=1, vocabulary=128_000, dtype="float32",
            device="none", eos_token_ids=(), target_modules={},
        )  # fmt: skip
        self._sequences: dict[str, NewSequence] = {}
        self._steps = 0

    def add(self, sequence: NewSequence) -> None:
        self._sequences[sequence.request] = sequence

    def cancel(self, request: str, _: int | None = None) -> int:
        return int(self._sequences.pop(request, None) is not None)

    def set_supervised(self, _: bool) -> None:
        pass

    def mask_of(self, sequence: NewSequence) -> NoReturn:
        raise StructuredOutputUnavailable(f"{sequence.request} asks for what this engine has not.")

    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> StepOutput:
        index = self._steps
        self._steps += 1
        outputs = [
            SequenceOutput(one.request, one.epoch, one.choice, index, [100_000]) for one in self._sequences.values()
        ]
        return StepOutput(self._steps, outputs, [])

    def idle(self) -> float | None:
        return None

    def slabs_written(self) -> list[Never]:
        return []

    def report(self) -> EngineReport:
        return EngineReport(
            steps=self._steps, pages=1 << 20, pages_free=1 << 20, pages_promised=0, running=len(self._sequences),
            waiting=0, parked=0, pending_prefill_tokens=0, host_bytes_free=0, step_seconds=0,
            prefill_seconds_per_token=0, swap_seconds_per_page=0, sequences=[], adapters=[],
        )  # fmt: skip

    def free_share(self) -> float:
        return 1.0


class BareStream(runner_pb2_grpc.RunnerServicer):
    """gRPC without a runner: it sends the same message again and again."""

    async def Generate(  # type: ignore[override] # noqa: N802 - gRPC's name; it writes to the context
        self,
        request_iterator: AsyncIterator[runner_pb2.GenerateUp],
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> None:
        requests: list[str] = []
        async for up in request_iterator:
            if up.HasField("submit"):
                requests.append(up.submit.request)
            if up.HasField("submit") and up.submit.choices[0].choice == LAST:
                break
        sequences = [
            runner_pb2.SequenceStep(request=request, epoch=1, index=1_000, tokens=[100_000]) for request in requests
        ]
        step = runner_pb2.GenerateDown(step=runner_pb2.Step(number=1, sequences=sequences))
        while True:
            await context.write(step)


LAST = 1
"""The choice number in a reader's last request."""


async def serve_bare(address: str) -> None:
    stream = BareStream()  # type: ignore[abstract] # the benchmark calls nothing else of a runner
    async with serving(address, partial(runner_pb2_grpc.add_RunnerServicer_to_server, stream)):
        await asyncio.Event().wait()


async def read(address: str, sequences: int, seconds: float) -> float:
    """Read as a gateway does. Returns tokens per second."""
    async with open_channel(address) as channel:
        call = runner_pb2_grpc.RunnerStub(channel).Generate()
        try:
            await call.write(runner_pb2.GenerateUp(hello=runner_pb2.GenerateHello(gateway="benchmark")))
            for n in range(sequences):
                submit = runner_pb2.Submit(
                    request=f"request-{n:024d}", epoch=1, promise=common_pb2.Promise(pages=1), prompt_ids=[1],
                    choices=[runner_pb2.Choice(choice=LAST if n == sequences - 1 else 0)],
                    sampling=runner_pb2.Sampling(max_tokens=1 << 30),
                )  # fmt: skip
                await call.write(runner_pb2.GenerateUp(submit=submit))
            began, tokens, warm = time.perf_counter(), 0, False
            async for down in call:
                now = time.perf_counter()
                if not warm and now - began > WARM_UP_SECONDS:
                    began, tokens, warm = now, 0, True
                tokens += len(down.step.sequences)
                if warm and now - began > seconds:
                    return tokens / (now - began)
        finally:
            call.cancel()
    raise RuntimeError("the stream ended early")


async def tokens_a_second(address: str, sequences: int, seconds: float) -> float:
    """Read in another process, like a gateway, so that only the server's cost counts."""
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.runner_stream", "--read", address, "--sequences", str(sequences),
        "--seconds", str(seconds), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await reader.communicate()
    return float(json.loads(out))


@asynccontextmanager
async def bare_server(folder: Path) -> AsyncIterator[str]:
    address = f"unix:{folder}/b.sock"
    server = await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.runner_stream", "--bare", address)
    try:
        while not await is_healthy(address):  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.05)
        yield address
    finally:
        server.terminate()
        await server.wait()


@asynccontextmanager
async def runner(folder: Path) -> AsyncIterator[str]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    listen = f"unix:{folder}/r.sock"
    settings = Settings(model_uri=folder.as_uri(), listen=listen)
    process = ProcessSettings(data_dir=folder, log_level="error")
    addresses = Addresses(scheduler_address=NOWHERE, supervisor_address=NOWHERE)
    command = (sys.executable, "-m", "benchmarks.runner_stream", "--child")
    client = EngineClient(settings.engine_config(settings.model_folder()), process, command)
    service = RunnerService(settings, process, addresses, client, CollectorRegistry(), surroundings=real_surroundings())
    running = asyncio.create_task(service.run())
    ready = asyncio.create_task(service.ready.wait())
    try:
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise RuntimeError("the runner ended before it was ready") from running.exception()
        yield listen
    finally:
        ready.cancel()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def measure(sequences: int, seconds: float, pairs: int) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="mt", dir="/tmp") as name:
        folder = Path(name)
        async with runner(folder) as ours, bare_server(folder) as bare:
            own = psutil.Process().children(recursive=True)
            both = await alternate(
                partial(tokens_a_second, ours, sequences, seconds),
                partial(tokens_a_second, bare, sequences, seconds),
                pairs=pairs,
                own=own,
            )
    print(f"{sequences} sequences, tokens per second of the runner against a bare gRPC stream: {both}")
    figure = percentile(both.a, 0.5)
    return [
        Result(
            f"tokens_per_second_{sequences}", figure, "tokens/s", f">= {TARGET}", figure >= TARGET,
            "a bare gRPC stream", both,
        )
    ]  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sequences", type=int, default=32, help="sequences on the stream")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per figure")
    parser.add_argument("--pairs", type=int, default=4, help="quiet pairs to measure")
    for part in ("--read", "--bare"):
        parser.add_argument(part, metavar="ADDRESS", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        print(json.dumps(asyncio.run(read(given.read, given.sequences, given.seconds))))
    elif given.bare:
        asyncio.run(serve_bare(given.bare))
    else:
        report("runner_stream", asyncio.run(measure(given.sequences, given.seconds, given.pairs)), as_json=given.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        del sys.argv[1]
        engine_process.main(FreeEngine)  # type: ignore[arg-type] # it has the calls that this benchmark makes
    else:
        main()
