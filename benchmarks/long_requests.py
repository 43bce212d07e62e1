"""Measures what long requests do to the short ones of the same gateway.

Short requests, 200 a second, are sent alone, and beside two prompts of 220 KB and two new JSON schemas of 100 KB a
second. `short_p99_beside_long` is the 99th percentile of their latencies with the long ones over the one without. The
gateway is the real process; fake services answer at once.

    python -m benchmarks.long_requests [--seconds 5] [--pairs 5] [--json]
"""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import psutil
import uvloop

from benchmarks.gateway import BODY, BenchConnection, paced, ready_gateway, services_process
from benchmarks.harness import Measure, Result, alternate, arguments, percentile, report

PROMPT_BYTES, SCHEMA_BYTES = 220_000, 100_000
EACH_PER_SECOND = 2
QUIET_SHARE = 0.25
"""The forks that try grammars count as others."""
MOST = 2.0


def long_prompt(number: int) -> dict[str, Any]:
    words = f"{number} " + "The quick brown fox jumps over the lazy dog. " * (PROMPT_BYTES // 45)
    return BODY | {"max_tokens": 1, "messages": [{"role": "user", "content": words}]}


def large_schema(number: int) -> dict[str, Any]:
    """No other has the same number, so that each is tried."""
    described = {"type": "string", "maxLength": 40, "description": "What a reader of this field should know. " * 8}
    properties = {f"field_{at}": described for at in range(SCHEMA_BYTES // len(json.dumps(described)))}
    schema = {"title": f"{number}", "type": "object", "properties": properties, "required": [*properties]}
    return BODY | {"max_tokens": 1, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


async def send(port: int, bodies: Sequence[dict[str, Any]], began: float) -> None:
    """One after the other, evenly, each when it is due."""

    async def one(connection: BenchConnection) -> None:
        await connection.open()
        await connection.ask()
        connection.close()

    prepared = [BenchConnection(port, body) for body in bodies]
    async with asyncio.TaskGroup() as tasks:
        for number, connection in enumerate(prepared):
            await asyncio.sleep(max(0.0, began + number / EACH_PER_SECOND - time.perf_counter()))
            tasks.create_task(one(connection))


class Short:
    """The 99th percentile of short requests' latencies in milliseconds"""

    def __init__(self, port: int, seconds: float, *, beside_long: bool) -> None:
        self._port, self._seconds, self._beside_long = port, seconds, beside_long
        self._sent = 0

    async def __call__(self) -> float:
        first = self._sent
        self._sent += int(self._seconds * EACH_PER_SECOND) if self._beside_long else 0
        bodies = [[of(number) for number in range(first, self._sent)] for of in (long_prompt, large_schema)]
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number, kind in enumerate(bodies):
                tasks.create_task(send(self._port, kind, began + number / EACH_PER_SECOND / 2))
            short = tasks.create_task(paced(self._port, self._seconds))
        return percentile(short.result(), 0.99) * 1e3


async def measure(seconds: float, pairs: int) -> list[Result]:
    async with AsyncExitStack() as stack:
        cluster, addresses = await stack.enter_async_context(services_process())
        gateway, port = await stack.enter_async_context(ready_gateway(**addresses))
        beside: Measure = Short(port, seconds, beside_long=True)
        alone: Measure = Short(port, seconds, beside_long=False)
        await beside()  # warm: the processes that try grammars start
        own = [psutil.Process(one.pid) for one in (gateway, cluster)]
        found = await alternate(beside, alone, pairs=pairs, own=own, quiet_share=QUIET_SHARE)
    print(f"short requests beside long ones, p99 {percentile(found.a, 0.5):.1f} ms, against alone: {found}")
    return [Result("short_p99_beside_long", found.ratio, "x", f"<= {MOST}", found.ratio <= MOST, "alone", found)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=5, help="of each figure")
    parser.add_argument("--pairs", type=int, default=5, help="quiet pairs to measure")
    given = parser.parse_args()
    report("long_requests", uvloop.run(measure(given.seconds, given.pairs)), as_json=given.json)


if __name__ == "__main__":
    main()
