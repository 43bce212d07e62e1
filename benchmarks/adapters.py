"""Measures what registered adapters cost a runner while they wait, and what their loads cost.

`registered_*`: a runner's service fetches adapters from folders and checks them; the engine learns of all of them, as
if each had served once. Memory is what both then take more, for each adapter. The adapters are small, but have as many
linears as those of the model below. The check itself is not run: all have the same certificate but for the digest.

`report_kb_s` is what an idle runner sends its scheduler in a second: one report, with as many hints of cached prefixes
as there can be.

`registered_10000`: 64 different adapters of ranks 4 to 16 serve a request each, on a random Llama of 30 M parameters,
once with only these registered, and once with all; the CPU time of an engine, its report included.

`load_vs_read`: CPU time of a load from the page cache to the device, beside an engine, over reading the adapter's file
and copying as many bytes. `host_vs_disk`: such a load where the host's memory keeps the adapter, over one from the page
cache. `switch_vs_peft`: what PEFT takes to load an adapter and set it, over such a load.

`hits_15`, `hits_10`: how many requests find their adapter on a device with 64 places, over an eviction that knows the
future, with Zipf 1.5 and 1.0 over 2,000 adapters. The planner of an engine decides. `disk_hits_15`, `disk_hits_10`: the
same of the disk cache.

`traffic`: one engine with places for 64 of 2,000 adapters of ranks 4 to 16, whose files are in the page cache.
`cold_ttft` is the 95th percentile of the first tokens of requests, one after the other, each for an adapter that is
not on the device, over that of requests for adapters that are there. `gap_loading` is the 99th percentile of the time
between two tokens of eight neighbours: ten requests in a second come for adapters that are to be loaded, over as many
for adapters that are there. `zipf_2000`, `uniform_2000`: the speed of requests, 32 at a time, over that of an engine
with all adapters on its device.

`churn_vs_vllm`: the seconds of requests for 256 adapters, 16 of them on the device, in vLLM's engine over ours.

`stack`: the whole product. `ready_2000` is the time until 2,000 adapters that were applied at once are ready, over that
of as many checks in one process. `gap_checking` is the 99th percentile of the time between two parts of the answers of
eight neighbours, while adapters with long headers and endless patterns are checked, over that without. `herd_*`: 1,000
requests of ten tenants at once, each for another adapter that is on the disk and not on the device: loads of an
adapter, failures, and the mean time of the slowest tenant over the mean of all. `herd_few`: of 1,000 others, nine of
ten are one tenant's, which asks first. The mean time of the slowest of the others over that tenant's.

`dora`: `dora_vs_lora_*` as in `benchmarks.engine`, and `dora_vs_peft_*`: PEFT's seconds, which computes such adapters
one after the other, over ours.

`proof_missed`: defects are planted, one at a time, in what reads an adapter's config, lays its slab out and loads it.
How many of them neither the check nor the proof refuses.

    python -m benchmarks.adapters [--only registered|loads|hits|traffic|churn|stack|dora|proof] [--registered 10000]
        [--requests 64] [--adapters 2000] [--pairs 5] [--scratch FOLDER] [--json]
"""

import argparse
import asyncio
import gc
import json
import pickle
import resource
import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
from prometheus_client import CollectorRegistry
from safetensors.numpy import save

from benchmarks.adapter_churn import measure_churn
from benchmarks.adapter_dora import measure_dora
from benchmarks.adapter_hits import measure_hits
from benchmarks.adapter_loads import measure_loads
from benchmarks.adapter_proofs import measure_proofs
from benchmarks.adapter_stack import measure_stack
from benchmarks.adapter_traffic import measure_traffic
from benchmarks.engine_cases.bench import at_least
from benchmarks.engine_cases.setup import shape_of, start_as_the_product_does
from benchmarks.engine_run import Run
from benchmarks.harness import Measure, Result, alternate, arguments, report
from benchmarks.random_llama import SCRATCH, LlamaShape, random_adapter, random_llama
from motet.api.v1 import common_pb2, scheduler_pb2
from motet.domain import Digest
from motet.prefix_hints import MAX_CACHED_HINTS
from motet.rpc import Outbox
from motet.settings import ProcessSettings
from motet.surroundings import real_surroundings
from motet_runner.accepted_requests import AcceptedRequests
from motet_runner.adapters.adapter_files import DiskAdapterFiles
from motet_runner.adapters.cache import DiskCache
from motet_runner.adapters.certification import Certification, EngineLimits, certify
from motet_runner.adapters.checks import Checks
from motet_runner.adapters.layout import AdapterLayout, FileStamp
from motet_runner.adapters.policy.eviction import CacheLimits
from motet_runner.adapters.registry import AdapterRegistry
from motet_runner.engine import Engine
from motet_runner.generate_service import GenerateService
from motet_runner.interface import EngineConfig, EngineReport
from motet_runner.metrics import Metrics
from motet_runner.scheduler_link import SchedulerLink
from motet_runner.settings import KERNEL_CACHE, Settings
from motet_runner.sources.source_access import Sources

PARTS = ("registered", "loads", "hits", "traffic", "churn", "stack", "dora", "proof")
MAX_KIB, MAX_FILES, MAX_KB_A_SECOND, LEAST = 4, 200, 5, 0.98
MAX_OPEN_FILES = 1024
"""The usual limit of a process"""
WARM_UP, AT_ONCE = 50, 8
SECONDS = 10
ROWS = 16
"""Inputs and outputs of the small adapters' linears."""
RANKS = (4, 8, 12, 16)
SHAPE = LlamaShape(
    vocabulary=4096, width=512, feed_forward=1376, layers=8, heads=8, kv_heads=4, dtype="bfloat16", shard_mib=64
)
LINEARS = [f"self_attn.{one}_proj" for one in "qkvo"] + [f"mlp.{one}_proj" for one in ("gate", "up", "down")]
PATHS = [f"model.layers.{layer}.{linear}" for layer in range(SHAPE.layers) for linear in LINEARS]
LIMITS = EngineLimits(dict.fromkeys(PATHS, (ROWS, ROWS)), max(RANKS), "float32")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class SmallAdapters:
    """Folders with adapters that differ in one number."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        rank = min(RANKS)
        tensors = {}
        for path in PATHS:
            tensors[f"base_model.model.{path}.lora_A.weight"] = np.ones((rank, ROWS), np.float32)
            tensors[f"base_model.model.{path}.lora_B.weight"] = np.ones((ROWS, rank), np.float32)
        self._weights = save(tensors)
        targets = [linear.rpartition(".")[2] for linear in LINEARS]
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
        self._config = json.dumps(config | {"task_type": "CAUSAL_LM"})
        self._checked = certify(self.write(-1), LIMITS)

    def write(self, number: int) -> Path:
        folder = self._folder / f"adapter-{number}"
        folder.mkdir(parents=True)
        (folder / CONFIG).write_text(self._config)
        (folder / WEIGHTS).write_bytes(self._weights[:-4] + np.float32(1 + number).tobytes())
        return folder

    def check(self, folder: Path) -> Certification:
        layout, file = self._checked.layout, folder / WEIGHTS
        return replace(self._checked, layout=replace(layout, path=str(file), stamp=FileStamp.of(file)))


class Service:
    """The part of a runner's service that knows adapters, and its stream to a scheduler, which is not there."""

    def __init__(self, folder: Path, capacity: int) -> None:
        around = real_surroundings()
        self.adapters = SmallAdapters(folder / "sources")
        cache = DiskCache(folder / "cache" / "adapters", max_adapter_bytes=1 << 20)
        cache.prepare()
        registry = CollectorRegistry()
        sources = Sources(Settings(), ProcessSettings(data_dir=folder), registry)
        checks = Checks(cache, self.adapters.check, base_digest=Digest(""), engine_limits=str(LIMITS))
        self.registry = AdapterRegistry(
            DiskAdapterFiles(cache, checks, sources),
            limits=CacheLimits(capacity),
            users_of=lambda _: 0,
            post=lambda _: None,
            metrics=Metrics(registry, wall=around.wall),
            surroundings=around,
        )
        self._link = SchedulerLink(
            "unix:/nowhere",
            network=around.network,
            facts=cast("Any", None),
            accepted=AcceptedRequests(),
            adapters=self.registry,
            requests=cast("GenerateService", SimpleNamespace(asked_to_drain=False)),
            last_report=lambda: None,
            clock=around.clock,
            time_scale=1.0,
        )

    async def register(self, numbers: range) -> None:
        async def one(number: int) -> None:
            source = self.adapters.write(number)
            ref = common_pb2.AdapterRef(namespace="tenant", name=source.name, generation=1)
            stage = common_pb2.ADAPTER_STAGE_CERTIFIED
            await self.registry.ensure(
                scheduler_pb2.EnsureAdapter(adapter=ref, source=source.as_uri(), stage=stage, order=number)
            )
            shutil.rmtree(source)

        for first in range(numbers.start, numbers.stop, AT_ONCE):
            await asyncio.gather(*map(one, range(first, min(first + AT_ONCE, numbers.stop))))
        while tasks := self.registry.tasks:
            await asyncio.wait(tasks)

    def layouts(self) -> Iterator[tuple[Digest, AdapterLayout]]:
        """As they come to an engine's process."""
        for life in self.registry.policy:
            assert life.checked is not None
            yield pickle.loads(pickle.dumps((life.digest, life.checked.layout)))

    def sent_in_a_second(self, last: EngineReport) -> float:
        """Bytes, after the scheduler has been told all."""
        outbox = Outbox[scheduler_pb2.AttachUp]()
        self._link.link.outbox = outbox
        welcome = common_pb2.Welcome(term=1, takes_residency=True)
        self._link.link.receive(scheduler_pb2.AttachDown(welcome=welcome))
        hints = tuple(range((1 << 64) - MAX_CACHED_HINTS, 1 << 64))
        last = replace(last, cached_prefixes=hints)
        sent = []
        for _ in range(1 + SECONDS):
            self._link.report(last, [])
            sent.append(0)
            while (up := outbox.get_nowait()) is not None:
                sent[-1] += up.ByteSize()
        print(f"the first report: {sent[0] / 1000:.0f} kB")
        return sum(sent[1:]) / SECONDS


def rss() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def traced(engine: Engine, service: Service) -> int:
    """The bytes that the engine takes for what it knows of all adapters. It gets memory that the model's load has left,
    so the process does not grow."""
    tracemalloc.start()
    try:
        for digest, layout in service.layouts():
            engine.load_adapter(digest, layout)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def engine_of(model: Path, folders: Sequence[Path], given: argparse.Namespace) -> Run:
    """An engine that has these adapters on its device, by their numbers."""
    config = EngineConfig(
        model=model,
        device="cpu",
        kv_cache_mib=256,
        max_resident_adapters=len(folders),
        kernel_cache=KERNEL_CACHE.expanduser(),
        prefix_cache=False,
    )
    engine = Engine(config)
    for number, folder in enumerate(folders):
        engine.load_adapter(Digest(str(number)), certify(folder, engine.info).layout)
    run = Run(engine, given)
    run.seconds(len(folders), [Digest(str(number)) for number in range(len(folders))])
    run.settle()
    return run


def seconds_of(run: Run, count: int) -> Measure:
    async def measure() -> float:
        began = time.process_time()
        run.seconds(count, [Digest(str(number)) for number in range(count)])
        pickle.dumps(run.engine.report())
        return time.process_time() - began

    return measure


WITH_A_MODEL = {
    "loads": measure_loads,
    "traffic": measure_traffic,
    "churn": measure_churn,
    "stack": measure_stack,
    "dora": measure_dora,
}


async def measure(given: argparse.Namespace) -> list[Result]:
    results = []
    if "registered" in given.only:
        results += await measure_registered(given)
    shape = replace(shape_of(given), shard_mib=SHAPE.shard_mib)
    for part, measure_part in WITH_A_MODEL.items():
        if part in given.only:
            with tempfile.TemporaryDirectory(dir=given.scratch) as name:
                results += await measure_part(shape, random_llama(shape, given.scratch), Path(name), given)
    if "hits" in given.only:
        results += measure_hits()
    if "proof" in given.only:
        results += measure_proofs(given.scratch)
    return results


async def measure_registered(given: argparse.Namespace) -> list[Result]:
    count = given.registered
    with tempfile.TemporaryDirectory(dir=given.scratch) as name:
        folder = Path(name)
        service = Service(folder, WARM_UP + count)
        await service.register(range(WARM_UP))
        before = rss()
        await service.register(range(WARM_UP, WARM_UP + count))
        of_service = (rss() - before) / count
        files = len(list(Path("/proc/self/fd").iterdir()))
        model = random_llama(SHAPE, given.scratch)
        folders = [
            random_adapter(SHAPE, folder / "served" / str(number), rank=RANKS[number % len(RANKS)], seed=number)
            for number in range(given.requests)
        ]
        few, all_of_them = engine_of(model, folders, given), engine_of(model, folders, given)
        of_engine = traced(all_of_them.engine, service) / (WARM_UP + count)
        sent = service.sent_in_a_second(all_of_them.engine.report())
        pairs = await alternate(
            seconds_of(few, given.requests), seconds_of(all_of_them, given.requests), pairs=given.pairs
        )
        service.registry.close()
    kib = (of_service + of_engine) / 1024
    print(f"{count} registered: {of_service / 1024:.2f} KiB each in the service, {of_engine / 1024:.2f} in the engine")
    print(f"{given.requests} adapters served, with these alone against all that are registered: {pairs}")
    return [
        Result("registered_kib", kib, "KiB", f"<= {MAX_KIB}", kib <= MAX_KIB),
        Result("registered_files", files, "files", f"<= {MAX_FILES}", files <= MAX_FILES),
        Result("report_kb_s", sent / 1000, "kB/s", f"<= {MAX_KB_A_SECOND}", sent / 1000 <= MAX_KB_A_SECOND),
        at_least("registered_10000", pairs, f"{given.requests} registered", LEAST),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; again for more (default: all)")
    parser.add_argument("--registered", type=int, default=10_000, help="adapters that wait")
    parser.add_argument("--requests", type=int, default=64, help="adapters that serve")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--adapters", type=int, default=2000, help="different adapters of traffic")
    parser.add_argument("--slots", type=int, default=64, help="of them on the device")
    parser.add_argument("--churn", type=int, default=512, help="requests of a side of zipf_2000 and uniform_2000")
    parser.add_argument("--churn-adapters", type=int, default=256, help="adapters beside vLLM")
    parser.add_argument("--churn-slots", type=int, default=16, help="of them on the device")
    parser.add_argument("--churn-requests", type=int, default=64, help="requests of a side of churn_vs_vllm")
    parser.add_argument("--first-tokens", type=int, default=500, help="cold adapters of cold_ttft in each pair")
    parser.add_argument("--seconds", type=float, default=5.0, help="in which loads come, of a side of gap_loading")
    parser.add_argument("--neighbour-tokens", type=int, default=1000, help="of each neighbour of gap_loading")
    parser.add_argument("--hostile", type=int, default=8, help="adapters to refuse, of a side of gap_checking")
    parser.add_argument("--herd", type=int, default=1000, help="requests that come at once, each for a cold adapter")
    parser.add_argument("--herd-tokens", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds until a runner has told its figures")
    parser.add_argument("--dora-requests", type=int, nargs="+", default=[8, 32], help="each with another adapter")
    parser.add_argument("--dora-output", type=int, default=8, help="tokens of an answer beside PEFT")
    parser.add_argument("--layers", type=int, default=SHAPE.layers, help="of the model, but of registered")
    parser.add_argument("--width", type=int, default=SHAPE.width)
    parser.add_argument("--pairs", type=int, default=5, help="quiet pairs to measure")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="where the model is kept")
    parser.set_defaults(vocabulary=SHAPE.vocabulary, dtype=SHAPE.dtype)
    given = parser.parse_args()
    given.only = given.only or PARTS
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    start_as_the_product_does("benchmarks.adapters")
    given.scratch.mkdir(parents=True, exist_ok=True)
    report("adapters", asyncio.run(measure(given)), as_json=given.json)


if __name__ == "__main__":
    main()
