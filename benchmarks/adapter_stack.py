"""Thousands of adapters in the whole product, as `motet up` starts it: see `benchmarks.adapters`.

Nothing serves at first. All adapters are applied at once, in the namespaces of some tenants. Then neighbours stream
while hostile adapters are checked. At last the tenants ask for adapters that are on the disk and not on the device, all
at once: of one half of them each tenant has as many, of the other half one tenant has most, and asks first.
"""

import argparse
import asyncio
import itertools
import json
import random
import resource
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.engine_cases.bench import at_most
from benchmarks.engine_run import Ask, random_prompt
from benchmarks.harness import Measure, Result, alternate, percentile
from benchmarks.many_adapters import CONFIG, WEIGHTS, ManyAdapters
from benchmarks.random_llama import LlamaShape
from benchmarks.served_stack import StreamingClient, serving, write_adapter
from motet_runner.adapters.certification import certify
from motet_runner.adapters.compatibility_check import MAX_OTHER_BYTES
from motet_runner.engine import Engine
from motet_runner.interface import EngineConfig
from testbed.local_stack import LocalStack

MOST_OF_CERTIFY, MOST_GAP, MOST_OF_MEAN, MOST_OF_PILE = 3, 1.25, 1.3, 0.5
NEIGHBOURS, TENANTS = 8, 10
SPARE_FILES = 256
READY_SECONDS = 3600
LOADS, DEVICE = "motet_adapter_loads_total", "device"
HEADER_BYTES = MAX_OTHER_BYTES
"""A header that is much longer is refused at once, without parsing."""
NAME_CHARS = 20
ENDLESS = "(.*)" * 14 + r"\1\2\3\4\5[!?]"


def owner_of(number: int, adapters: int) -> int:
    """The tenant of an adapter: of the first half, each has as many. Of the second half, nine of ten are the first
    tenant's, and the rest are the others' in turn."""
    if number < adapters // 2:
        return number % TENANTS
    turn, rest = divmod(number, TENANTS)
    return 0 if rest else 1 + turn % (TENANTS - 1)


class HostileAdapters:
    """Each a little different from the others, so that it is checked: a long header, a pattern without end, in turn."""

    def __init__(self, folder: Path, honest: Path, header_bytes: int = HEADER_BYTES) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._config = json.loads((honest / CONFIG).read_text())
        self._weights = (honest / WEIGHTS).read_bytes()
        entries = (_entry(f"{number:0{NAME_CHARS}}") for number in itertools.count())
        self._header = "{" + ",".join(itertools.islice(entries, header_bytes // len(_entry("0" * NAME_CHARS))))

    def __iter__(self) -> Iterator[Path]:
        for number in self._numbers:
            folder = self._folder / f"hostile-{number}"
            folder.mkdir(parents=True)
            config, weights = self._config | {"lora_alpha": 1 + number}, self._weights
            if number % 2:
                config["target_modules"] = ENDLESS
            else:
                header = f"{self._header},{_entry(f'last-{number}')}}}"
                weights = struct.pack("<Q", len(header)) + header.encode()
            (folder / CONFIG).write_text(json.dumps(config))
            (folder / WEIGHTS).write_bytes(weights)
            yield folder


@dataclass(frozen=True, slots=True)
class Rush:
    """What came of many requests at once."""

    requests: int
    loads: float
    failures: int
    means: dict[int, float]
    """Of the seconds of each tenant's that were answered"""


class Herd:
    def __init__(self, stack: LocalStack, manifests: Path, adapters: ManyAdapters, given: argparse.Namespace) -> None:
        self._stack = stack
        self._manifests = manifests
        self._adapters = adapters
        self._given = given
        self._drawn = random.Random(0)

    def apply(self) -> float:
        """Seconds until all are ready, after all manifests came at once."""
        staged = self._manifests.parent / "staged"
        staged.mkdir()
        for number, folder in enumerate(self._adapters.folders):
            write_adapter(staged, f"adapter-{number}", folder, namespace=_tenant(self._owner(number)))
        began = time.perf_counter()
        for path in sorted(staged.iterdir()):
            path.rename(self._manifests / path.name)
        self._stack.until(
            self._when_written(lambda: self._count("Ready") >= len(self._adapters.folders)), READY_SECONDS
        )
        return time.perf_counter() - began

    def _when_written(self, condition: Callable[[], bool]) -> Callable[[], bool]:
        """Looks only if the status was written since the last look: to read it takes time from what is measured."""
        seen = 0

        def holds() -> bool:
            nonlocal seen
            before, seen = seen, self._stack.status_written_ns()
            return seen != before and condition()

        return holds

    def _count(self, condition: str) -> int:
        """Of adapters for which this condition is true: `Ready`, or `Stalled` if they are refused"""
        conditions = [of for one in self._stack.status()["adapters"] for of in one["conditions"]]
        return sum((of["type"], of["status"]) == (condition, "True") for of in conditions)

    def gaps(self, hostile: Iterator[Path] | None) -> Measure:
        """The 99th percentile of the seconds between two parts of the neighbours' answers."""

        async def measure() -> float:
            client = StreamingClient(self._stack.port)
            given, refused = self._given, self._count("Stalled")
            if hostile is not None:
                for folder in itertools.islice(hostile, given.hostile):
                    write_adapter(self._manifests, folder.name, folder)
            asks = [Ask(self._prompt(), given.neighbour_tokens) for _ in range(NEIGHBOURS)]
            await client.ask_all(asks)
            await client.close()
            if hostile is not None:
                self._stack.until(lambda: self._count("Stalled") >= refused + given.hostile, READY_SECONDS)
            return percentile([b - a for of in client.arrivals for a, b in pairwise(of)], 0.99)

        return measure

    async def rush(self) -> list[Result]:
        given, half = self._given, len(self._adapters.folders) // 2
        create = ("key", "create", "--scopes", "user,monitor", "--tenant")
        keys = [self._stack.motet(*create, _tenant(number)).stdout.strip() for number in range(TENANTS)]
        for key, status in (*((one, 200) for one in keys), ("no", 401)):
            self._until_answered(key, status)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, given.herd + SPARE_FILES), hard))
        alike = await self._ask_all("herd", self._cold(range(half)), keys)
        pile = await self._ask_all("herd of unequal tenants", self._cold(range(half, 2 * half)), keys)
        loads = (alike.loads + pile.loads) / (alike.requests + pile.requests)
        failures = alike.failures + pile.failures
        worst = max(alike.means.values()) / statistics.fmean(alike.means.values())
        few = max(mean for tenant, mean in pile.means.items() if tenant) / pile.means[0]
        return [
            Result("herd_loads", loads, "", "= 1", loads == 1),
            Result("herd_failures", failures, "", "= 0", not failures),
            Result("herd_worst", worst, "x", f"<= {MOST_OF_MEAN:g}", worst <= MOST_OF_MEAN),
            Result("herd_few", few, "x", f"<= {MOST_OF_PILE:g}", few <= MOST_OF_PILE, "the tenant with most of them"),
        ]

    def _until_answered(self, key: str, status: int) -> None:
        with self._stack.http(headers={"authorization": f"Bearer {key}"}) as http:
            self._stack.until(lambda: http.get("/v1/models").status_code == status)

    def _owner(self, number: int) -> int:
        return owner_of(number, len(self._adapters.folders))

    def _cold(self, numbers: Sequence[int]) -> list[int]:
        """Those that are not on the device. The first tenant's come first."""
        on_device = {
            one["name"]
            for one in self._stack.status()["adapters"]
            if any(place["tier"] == DEVICE for place in one["resident"])
        }
        cold = [number for number in numbers if f"adapter-{number}" not in on_device]
        return sorted(cold[: self._given.herd], key=lambda number: self._owner(number) != 0)

    async def _ask_all(self, name: str, numbers: Sequence[int], keys: Sequence[str]) -> "Rush":
        before = self._loads(keys[0])
        seconds: list[list[float]] = [[] for _ in range(TENANTS)]
        failures: list[str] = []

        async def one(number: int) -> None:
            tenant = self._owner(number)
            client = StreamingClient(self._stack.port, self._adapters.digests, keys[tenant])
            began = time.perf_counter()
            try:
                await client.ask_all([Ask(self._prompt(), self._given.herd_tokens, self._adapters.digests[number])])
            except (OSError, EOFError, RuntimeError, ValueError) as error:
                failures.append(str(error))
            else:
                seconds[tenant].append(time.perf_counter() - began)
            finally:
                await client.close()

        await asyncio.gather(*map(one, numbers))
        await asyncio.sleep(self._given.settle)  # until the runner has told its figures
        means = {tenant: statistics.fmean(one) for tenant, one in enumerate(seconds) if one}
        shown = ", ".join(f"{one:.2f}" for one in means.values())
        print(f"{name}: {len(failures)} failures {failures[:1]}; seconds of each tenant: {shown}", flush=True)
        return Rush(len(numbers), self._loads(keys[0]) - before, len(failures), means)

    def _loads(self, key: str) -> float:
        with self._stack.http(headers={"authorization": f"Bearer {key}"}) as http:
            families = list(text_string_to_metric_families(http.get("/metrics").text))
        return sum(one.value for family in families for one in family.samples if one.name == LOADS)

    def _prompt(self) -> tuple[int, ...]:
        return random_prompt(self._drawn, self._given.prompt, self._given.vocabulary)


async def measure_stack(shape: LlamaShape, model: Path, scratch: Path, given: argparse.Namespace) -> list[Result]:
    adapters = ManyAdapters(shape, scratch, given.adapters)
    info = Engine(EngineConfig(model=model, device="cpu", kv_cache_mib=64, kernels="torch")).info
    half = len(adapters.folders) // 2

    spent = 0.0

    def certified(folders: Sequence[Path]) -> float:
        nonlocal spent
        began, before = time.perf_counter(), time.process_time()
        for one in folders:
            certify(one, info)
        spent += time.process_time() - before
        return time.perf_counter() - began

    engine = {
        "dtype": shape.dtype,
        "maxResidentAdapters": given.slots,
        "maxCachedAdapters": len(adapters.folders) + SPARE_FILES,
        "prefixCache": False,
    }
    with (
        tempfile.TemporaryDirectory(prefix="mt", dir="/tmp") as name,
        serving(Path(name), model, [], engine=engine, env={}) as stack,
    ):
        herd = Herd(stack, Path(name) / "manifests", adapters, given)
        pids = {*stack.processes()}
        own = [one for one in psutil.process_iter() if one.pid in pids]
        baseline = certified(adapters.folders[:half])
        before = _cpu(own)
        applied = herd.apply()
        cpu = sum(max(0.0, after - earlier) for after, earlier in zip(_cpu(own), before, strict=True))
        baseline += certified(adapters.folders[half:])
        ready = applied / baseline
        took, checks = f"{applied:.1f} s, {cpu:.1f} of CPU", f"{baseline:.1f} s, {spent:.1f} of CPU"
        print(f"ready_2000: {took}; as many checks: {checks}", flush=True)
        hostile = iter(HostileAdapters(scratch / "hostile", adapters.folders[0]))
        await herd.gaps(hostile)()
        own += [child for one in own if one.is_running() for child in one.children(recursive=True)]
        pairs = await alternate(herd.gaps(hostile), herd.gaps(None), pairs=given.pairs, own=own)
        print(f"gap_checking: {1e3 * min(pairs.a):.2f} and {1e3 * min(pairs.b):.2f} ms: {pairs}", flush=True)
        return [
            Result("ready_2000", ready, "x", f"<= {MOST_OF_CERTIFY}", ready <= MOST_OF_CERTIFY, "certify"),
            at_most("gap_checking", pairs, "no checks", MOST_GAP),
            *await herd.rush(),
        ]


def _cpu(processes: Sequence[psutil.Process]) -> list[float]:
    """Seconds of each, with its children that have ended. 0 of one that has ended: some only help others"""
    found = []
    for process in processes:
        try:
            found.append(sum(process.cpu_times()[:4]))
        except psutil.NoSuchProcess:
            found.append(0.0)
    return found


def _entry(name: str) -> str:
    return f'"{name}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'


def _tenant(number: int) -> str:
    return f"tenant-{number}"
