"""Measures the whole product against its engine as a library: the same requests over HTTP, through gateway and gRPC.

All processes run, as `motet up` starts them, and share the cores with the clients, which are in this process: each
request has a connection of its own and streams. The engine alone runs in this process, too, with the same random Llama
(30 million parameters by default), and without the limit that the product has for prompts beside decodes; it gets the
same prompts, and its first tokens must be those that were streamed. Then both get new prompts each time.

`vs_fcfs_live` is how much longer the largest number of distinct requests takes the product if it serves them as a batch
of one adapter does, which is filled in the order in which they come: one after the other, as none has the adapter of
the one before it. Where there are fewer adapters than requests (`--adapters`), they take turns.

For each process of the product it also prints the CPU time per 1,000 tokens. It does not use a GPU.

    python -m benchmarks.served [--requests 8 32] [--traffic base distinct] [--threads N] [--pairs 5]
        [--stream-interval SECONDS] [--json]
"""

import asyncio
import random
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import psutil

from benchmarks.engine_cases.bench import Bench, at_least
from benchmarks.engine_cases.setup import add_sizes, prepared, start_as_the_product_does
from benchmarks.engine_run import KINDS, Ask, Run, owners, random_prompt
from benchmarks.harness import Result, alternate, arguments, cpu_seconds, percentile, report, skip
from benchmarks.served_stack import StreamingClient, serving, text_of

SHARE, VS_FCFS = 0.8, 3.5
DISTINCT = "distinct"
CHECKED = 8
"""Tokens of each answer"""
HERE = "clients"


class Compared:
    """The product and its engine alone."""

    def __init__(self, bench: Bench, client: StreamingClient, processes: dict[str, psutil.Process]) -> None:
        self._given: Namespace = bench.given
        self._run: Run = bench.run("fused")
        self._adapters = bench.adapters
        self._client = client
        self._processes = processes
        self._drawn = random.Random(0)

    async def check_same(self, requests: int, kind: str) -> None:
        """The first tokens. Later, the likeliest two of a random model are often so close that they change places when
        other rows stand beside them, and how requests come together is never the same twice."""
        asks = self._asks(requests, kind)
        expected = self._run.serve(asks).tokens
        for answer, tokens in zip(await self._client.ask_all(asks), expected, strict=True):
            streamed = text_of(answer).split()
            if len(streamed) != len(tokens) or streamed[:CHECKED] != [f"w{token}" for token in tokens[:CHECKED]]:
                raise SystemExit(f"the product streamed {streamed}, and the engine alone gave {tokens}")

    async def share(self, name: str, requests: int, kind: str) -> list[Result]:
        tokens = requests * self._given.output
        of_cpu = dict.fromkeys(self._processes, 0.0)

        async def served() -> float:
            asks = self._asks(requests, kind)
            before = self._cpu()
            began = perf_counter()
            await self._client.ask_all(asks)
            seconds = perf_counter() - began
            for process, now in self._cpu().items():
                of_cpu[process] += now - before[process]
            return seconds

        async def alone() -> float:
            return self._run.serve(self._asks(requests, kind)).seconds

        await served()
        await alone()
        of_cpu = dict.fromkeys(self._processes, 0.0)
        pairs = await alternate(alone, served, pairs=self._given.pairs, own=list(self._processes.values()))
        print(f"{name}: the engine alone against the product: {pairs}")
        calls = len(pairs.a) + pairs.discarded
        for process, seconds in sorted(of_cpu.items(), key=lambda item: -item[1]):
            print(f"  {process}: {seconds / calls / tokens * 1e6:.0f} ms of CPU per 1,000 tokens")
        return [
            at_least(name, pairs, "the engine alone", SHARE),
            Result(f"{name.replace('share', 'tokens')}", tokens / percentile(pairs.b, 0.5), "tok/s"),
        ]

    async def against_fcfs(self, requests: int) -> Result:
        """All at once against one after the other."""

        async def all_at_once() -> float:
            began = perf_counter()
            await self._client.ask_all(self._asks(requests, DISTINCT))
            return perf_counter() - began

        async def in_turn() -> float:
            began = perf_counter()
            await self._client.ask_in_turn(self._asks(requests, DISTINCT), at_once=1)
            return perf_counter() - began

        pairs = await alternate(in_turn, all_at_once, pairs=self._given.pairs, own=list(self._processes.values()))
        print(f"vs_fcfs_live: one after the other against all at once: {pairs}")
        return at_least("vs_fcfs_live", pairs, "one after the other", VS_FCFS)

    def _asks(self, requests: int, kind: str) -> list[Ask]:
        given = self._given
        return [
            Ask(random_prompt(self._drawn, given.prompt, given.vocabulary), given.output, adapter)
            for adapter in owners(kind, requests, self._adapters)
        ]

    def _cpu(self) -> dict[str, float]:
        return {name: cpu_seconds(process) for name, process in self._processes.items()}


async def measure(bench: Bench, port: int, processes: dict[str, psutil.Process]) -> list[Result]:
    given = bench.given
    client = StreamingClient(port, bench.adapters)
    compared = Compared(bench, client, processes)
    results = []
    try:
        for name in given.traffic:
            suffix = "" if name == "base" else f"_{name}"
            await compared.check_same(min(given.requests), name)
            for requests in given.requests:
                results += await compared.share(f"served_share{suffix}_{requests}", requests, name)
            if name == DISTINCT:
                results.append(await compared.against_fcfs(max(given.requests)))
    finally:
        await client.close()
    return results


def named(pids: Sequence[int]) -> dict[str, psutil.Process]:
    """The processes by what they run. An engine is the child of its runner."""
    found = {HERE: psutil.Process()}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            module = next((word for word in process.cmdline() if word.startswith("motet_")), "")
            found[f"{module.removeprefix('motet_') or 'other'} {pid}"] = process
    return found


def main() -> None:
    start_as_the_product_does("benchmarks.served")
    parser = arguments(__doc__)
    parser.add_argument("--traffic", nargs="+", default=["base", "distinct"], choices=["base", *KINDS])
    parser.add_argument(
        "--stream-interval", type=float, default=0.0, help="seconds that tokens may wait for the next ones"
    )
    add_sizes(parser)
    parser.set_defaults(kernels=["fused"])
    given = parser.parse_args()
    engine = {
        "dtype": given.dtype,
        "kvCacheMiB": given.kv_mib,
        "maxResidentAdapters": given.adapters,
        "prefixCache": False,
    }
    env = {"MOTET_RUNNER_KERNELS": "cpp", "MOTET_RUNNER_KERNEL_CACHE": str(given.cache)}
    env["MOTET_RUNNER_STREAM_INTERVAL_SECONDS"] = str(given.stream_interval)
    if given.threads is not None:
        env["MOTET_RUNNER_THREADS"] = str(given.threads)
    with prepared(given) as bench, tempfile.TemporaryDirectory(prefix="mt", dir="/tmp") as folder:
        if not bench.kernels:
            skip("it compares with the compiled kernels")
        with serving(Path(folder), bench.model, bench.folders, engine=engine, env=env) as stack:
            results = asyncio.run(measure(bench, stack.port, named(stack.processes())))
    report("served", results, as_json=given.json)


if __name__ == "__main__":
    main()
