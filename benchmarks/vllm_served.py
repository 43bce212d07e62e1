"""The whole product against vLLM's own HTTP server, for `benchmarks.vllm_peer`.

The same client streams the same requests from both: all of the base, from a server of vLLM's without LoRA, or with
distinct adapters. vLLM's server is stopped while the product is measured. The product is not stopped: its processes
watch each other, and it is nearly idle without requests.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.driven import DrivenError, Stoppable
from benchmarks.engine_run import Ask, owners, random_prompt
from benchmarks.harness import Measure, Result, alternate, percentile
from benchmarks.peer_sizes import settings_of
from benchmarks.served_stack import SERVED, StreamingClient, serving, text_of
from benchmarks.vllm_setup import environment_of_vllm
from motet.domain import Digest
from testbed.ports import free_port

FEW = 16
READY_SECONDS = 300
AskAll = Callable[[list[Ask]], Awaitable[list[bytes]]]
EQUAL = 0.5
"""The least share of first words that must be equal: a server without the adapters would have none."""


class Beside(NamedTuple):
    name: str
    """Of its results, with the number of requests"""
    traffic: str
    with_lora: bool
    """vLLM's server knows the adapters."""
    least: tuple[float, float] | None
    """The ratio with up to FEW requests, and with more"""


CASES = (
    Beside("vllm_http_base_{}", "base", False, (1.4, 0.9)),
    Beside("vllm_http_distinct_{}", "distinct", True, (6, 6)),
)


def measure_served(given: argparse.Namespace, model: Path, adapters: Sequence[str]) -> list[Result]:
    env = {"MOTET_RUNNER_KERNELS": "cpp", "MOTET_RUNNER_KERNEL_CACHE": str(given.cache)}
    if given.threads != [None]:
        env["MOTET_RUNNER_THREADS"] = str(given.threads[0])
    return measure_beside(given, model, adapters, CASES, engine={}, env=env)


def measure_beside(
    given: argparse.Namespace,
    model: Path,
    adapters: Sequence[str],
    cases: Sequence[Beside],
    *,
    engine: Mapping[str, Any],
    env: Mapping[str, str],
) -> list[Result]:
    """`engine`: of the pool; `env`: of the product's processes"""
    engine = {
        "dtype": given.dtype,
        "kvCacheMiB": given.kv_mib,
        "maxResidentAdapters": given.adapters,
        "prefixCache": False,
        **engine,
    }
    with (
        tempfile.TemporaryDirectory(prefix="mt", dir="/tmp") as folder,
        serving(Path(folder), model, [Path(one) for one in adapters], engine=engine, env=dict(env)) as stack,
    ):
        own = [psutil.Process(pid) for pid in stack.processes()]
        results = []
        for case in cases:
            port, of_peer = free_port(), adapters if case.with_lora else []
            command = command_of_vllm(given, Path(folder) / "manifests" / "model", of_peer, port)
            with Stoppable("vLLM's server", command, environment_of_vllm(given)) as server:
                results += asyncio.run(_measure(given, case, server, (stack.port, port), own))
        return results


def command_of_vllm(given: argparse.Namespace, model: Path, adapters: Sequence[str], port: int) -> list[str | Path]:
    """Its server, with the tokenizer that the product has: it makes text of all tokens, too."""
    return [
        *(given.python, "-P", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--served-model-name", SERVED, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", given.dtype, "--max-model-len", str(given.context), "--max-num-seqs", str(max(given.requests))),
        "--no-enable-prefix-caching",
        *(_with_lora(given, adapters) if adapters else []),
        *(["--enforce-eager"] if given.vllm_eager else []),
    ]


def _with_lora(given: argparse.Namespace, adapters: Sequence[str]) -> list[str]:
    return [
        *("--enable-lora", "--max-lora-rank", str(given.rank)),
        *("--max-loras", str(given.adapters), "--max-cpu-loras", str(given.adapters)),
        *("--lora-modules", *(f"adapter-{number}={folder}" for number, folder in enumerate(adapters))),
    ]


async def _measure(
    given: argparse.Namespace, case: Beside, server: Stoppable, ports: tuple[int, int], own: Sequence[psutil.Process]
) -> list[Result]:
    """`ports`: ours and theirs"""
    await until_ready(server, ports[1])
    digests = [Digest(f"sha256:{number}") for number in range(given.adapters)]
    ours, theirs = (StreamingClient(port, digests) for port in ports)

    async def of_theirs(asks: list[Ask]) -> list[bytes]:
        server.resume()
        answers = await theirs.ask_all(asks)
        server.stop()
        return answers

    results = []
    try:
        for requests in given.requests:
            name, adapters = case.name.format(requests), owners(case.traffic, requests, digests)
            asks = _asks(given, adapters, 0)
            share = equal_first_words(await ours.ask_all(asks), await of_theirs(asks))
            print(f"{name}: {share:.0%} of all first words equal", flush=True)
            of_both = [_seconds(given, adapters, ask_all) for ask_all in (of_theirs, ours.ask_all)]
            for seconds in of_both:
                await seconds()
            pairs = await alternate(*of_both, pairs=given.pairs, own=[*own, *server.processes])
            print(f"{name}: {pairs}", flush=True)
            tokens = requests * given.output
            least = case.least[requests > FEW] if case.least is not None else None
            results += [
                Result(f"{name}_first_words", share, "", f">= {EQUAL:g}", share >= EQUAL),
                Result(
                    name,
                    pairs.ratio,
                    "x",
                    "" if least is None else f">= {least:g}",
                    None if least is None else pairs.ratio >= least,
                    "vLLM's server",
                    pairs,
                    same=share >= EQUAL,
                    settings=settings_of(given),
                ),
                Result(f"{name}_ours", tokens / percentile(pairs.b, 0.5), "tok/s"),
                Result(f"{name}_theirs", tokens / percentile(pairs.a, 0.5), "tok/s"),
            ]
    finally:
        await ours.close()
        await theirs.close()
    return results


def _seconds(given: argparse.Namespace, adapters: Sequence[Digest], ask_all: AskAll) -> Measure:
    seeds = count(1)

    async def measure() -> float:
        asks = _asks(given, adapters, next(seeds))
        began = time.perf_counter()
        await ask_all(asks)
        return time.perf_counter() - began

    return measure


def _asks(given: argparse.Namespace, adapters: Sequence[Digest], seed: int) -> list[Ask]:
    tokens = random.Random(seed)
    return [Ask(random_prompt(tokens, given.prompt, given.vocabulary), given.output, adapter) for adapter in adapters]


def equal_first_words(ours: Sequence[bytes], theirs: Sequence[bytes]) -> float:
    both = zip(ours, theirs, strict=True)
    return sum(text_of(mine).split()[:1] == text_of(other).split()[:1] for mine, other in both) / len(ours)


async def until_ready(server: Stoppable, port: int) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if server.ended:
            raise DrivenError(f"{server.name} ended.\n{server.last_said()}")
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
            head = await reader.readuntil(b"\r\n")
            writer.close()
            if b" 200 " in head:
                return
        await asyncio.sleep(0.5)
    raise DrivenError(f"{server.name} was not ready after {READY_SECONDS} seconds.\n{server.last_said()}")
