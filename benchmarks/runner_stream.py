"""Tokens a second over one Runner.Generate stream: engine child → pipe → service → gRPC → a gateway's reader.

The engine costs nothing here: each step gives every sequence one token. All three processes are real ones.

    python benchmarks/runner_stream.py [--sequences 32] [--seconds 5] [--json]
"""

import argparse
import asyncio
import json
import logging
import os
import platform
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from motet.api.v1 import runner_pb2, runner_pb2_grpc
from motet.rpc import open_channel
from motet.settings import Addresses, ProcessSettings
from motet_runner import child
from motet_runner.host import ChildHost
from motet_runner.interface import (
    EngineConfig,
    EngineInfo,
    EngineReport,
    NewSequence,
    SequenceOutput,
    StepOutput,
)
from motet_runner.service import RunnerService
from motet_runner.settings import Settings

NOWHERE = "unix:/nonexistent"


class FreeEngine:
    """An engine whose iterations cost next to nothing."""

    def __init__(self, _: EngineConfig) -> None:
        self.info = EngineInfo(
            pages=1 << 20, page_tokens=16, page_bytes=1, max_sequences=4096, max_model_length=1 << 30, adapter_slots=1,
            max_lora_rank=8, host_bytes=0, architecture="Free", vocabulary=128_000, dtype="float32", device="none",
            eos_token_ids=(), target_modules={},
        )  # fmt: skip
        self._sequences: dict[str, NewSequence] = {}
        self._steps = 0

    def add(self, sequence: NewSequence) -> None:
        self._sequences[sequence.request] = sequence

    def cancel(self, request: str, _: int | None = None) -> bool:
        return self._sequences.pop(request, None) is not None

    def set_supervised(self, _: bool) -> None:
        pass

    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> StepOutput:
        index = self._steps
        self._steps += 1
        outputs = [
            SequenceOutput(one.request, one.epoch, one.choice, index, [100_000]) for one in self._sequences.values()
        ]
        return StepOutput(self._steps, outputs, [])

    def report(self) -> EngineReport:
        return EngineReport(
            steps=self._steps, pages_free=1 << 20, pages_promised=0, running=len(self._sequences), waiting=0, parked=0,
            pending_prefill_tokens=0, host_bytes_free=0, step_seconds=0, prefill_seconds_per_token=0,
            swap_seconds_per_page=0, book=[], adapters=[],
        )  # fmt: skip


async def read(address: str, sequences: int, seconds: float) -> dict[str, float]:
    """The gateway's side: count what comes."""
    async with open_channel(address) as channel:
        call = runner_pb2_grpc.RunnerStub(channel).Generate()
        try:
            await call.write(runner_pb2.GenerateUp(hello=runner_pb2.GenerateHello(gateway="bench")))
            for n in range(sequences):
                submit = runner_pb2.Submit(
                    request=f"request-{n:024d}", epoch=1, promise={"pages": 1}, prompt_ids=[1], choices=[{}],
                    sampling={"max_tokens": 1 << 30},
                )  # fmt: skip
                await call.write(runner_pb2.GenerateUp(submit=submit))
            began, tokens, messages, steps = time.perf_counter(), 0, 0, 0
            warm = False
            async for down in call:
                now = time.perf_counter()
                if not warm and now - began > 1.0:
                    began, tokens, messages, warm, steps = now, 0, 0, True, down.step.number
                messages += 1
                tokens += len(down.step.sequences)
                if warm and now - began > seconds:
                    took = now - began
                    return {
                        "tokens": tokens / took,
                        "messages": messages / took,
                        "steps": (down.step.number - steps) / took,
                    }
        finally:
            call.cancel()
    raise RuntimeError("the stream ended early")


async def measure(sequences: int, seconds: float) -> dict[str, float]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory(prefix="mt", dir="/tmp") as name:
        folder = Path(name)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"")
        listen = f"unix:{folder}/r.sock"
        settings = Settings(model_uri=folder.as_uri(), listen=listen)
        process = ProcessSettings(data_dir=folder, log_level="error")
        addresses = Addresses(scheduler_address=NOWHERE, supervisor_address=NOWHERE)
        host = ChildHost(
            settings.engine_config(settings.model_folder()), process, (sys.executable, __file__, "--child")
        )
        service = RunnerService(settings, process, addresses, host, CollectorRegistry())
        running = asyncio.create_task(service.run())
        await service.ready.wait()
        # The reader has a process of its own: as a gateway would, and so that only the runner's cost counts.
        reader = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--read", listen, "--sequences", str(sequences), "--seconds", str(seconds),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        cpu, began = time.process_time(), time.perf_counter()
        out, _ = await reader.communicate()
        used = (time.process_time() - cpu) / (time.perf_counter() - began)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        figures: dict[str, float] = json.loads(out)
        return figures | {"cpu": used}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(asyncio.run(read(options.read, options.sequences, options.seconds))))
        return
    figures = asyncio.run(measure(options.sequences, options.seconds))
    print(
        f"{options.sequences} sequences: {figures['tokens']:,.0f} tokens/s in {figures['messages']:,.0f} messages/s "
        f"of {figures['steps']:,.0f} steps/s; the service uses {figures['cpu']:.0%} of a core"
    )
    if options.json:
        result: dict[str, Any] = {
            "benchmark": "runner_stream",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "results": [
                {
                    "name": f"tokens_per_second_{options.sequences}",
                    "value": round(figures["tokens"]),
                    "unit": "tokens/s",
                    "target": 500_000,
                    "holds": figures["tokens"] >= 500_000,
                }
            ],
        }
        print(json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        del sys.argv[1]
        child.main(FreeEngine)  # type: ignore[arg-type]
    else:
        main()
