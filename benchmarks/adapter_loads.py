"""Loads of adapters that the disk cache has, in CPU time, beside an engine: see `benchmarks.adapters`.

The files are in the page cache. Each load takes the next of several adapters, so that no processor's cache has it.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_run import settle
from benchmarks.harness import Measure, Pairs, Result, alternate
from benchmarks.random_llama import LlamaShape, random_adapter
from motet.domain import Digest
from motet_runner.adapters.certification import certify
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.engine import Engine
from motet_runner.execute.adapters.adapter_uploads import AdapterLoads
from motet_runner.interface import EngineConfig
from motet_runner.memory.adapter_memory import adapter_memory
from motet_runner.plan import AdapterLoad, HostCopy, LoadArrived
from motet_runner.settings import KERNEL_CACHE

MOST_OF_READ, MOST_OF_SLAB, LEAST_OF_PEFT = 2.5, 1.0, 120
ADAPTERS, RANK = 64, 16
LOADS, SWITCHES = 64, 4
"""A side of a pair"""


class Loader:
    """Loads adapters into the first pages of an engine's device, as its worker does."""

    def __init__(self, engine: Engine) -> None:
        linears = engine.diagnostics.linears
        memory = engine.diagnostics.store.bytes
        self._bytes = linears.run_bytes(RANK)
        in_host = adapter_memory(ADAPTERS * self._bytes, pinned=False)
        self._loads = AdapterLoads(memory, linears.layout, time.perf_counter, linears.base, in_host=in_host)
        of_worker = engine.diagnostics.worker.loads
        assert of_worker is not None
        self._loads.read_file = of_worker.read_file
        print(f"slabs are read by {'Python' if of_worker.read_file is None else 'the compiled kernels'}", flush=True)
        self._number = 0
        self.memory = memory.view(-1)[: self._bytes]

    def keep(self, place: int, layout: AdapterLayout) -> HostCopy:
        """Loads the adapter, and keeps it in the host's memory for its next load."""
        begin = place * self._bytes
        return HostCopy(begin, self.load(layout, HostCopy(begin, None)).contents)

    def load(self, layout: AdapterLayout, host: HostCopy | None = None) -> LoadArrived:
        self._number += 1
        with torch.inference_mode():
            begun: list[AdapterLoad] = [AdapterLoad(self._number, Digest("x"), layout, host)]
            while True:
                found = self._loads.advance(begun, {self._number: 0}, hurry=True)
                begun = []
                if found.failed:
                    raise found.failed[0].error
                if found.arrived:
                    return found.arrived[0]


def with_slabs(engine: Engine, folders: Sequence[Path]) -> list[AdapterLayout]:
    layouts = [certify(one, engine.info).layout.with_slab(str(one), engine.info.run_layout) for one in folders]
    for number, layout in enumerate(layouts):
        engine.write_slab(number, layout)
    left = len(layouts)
    while left:
        left -= len(engine.slabs_written())
        time.sleep(0.01)
    return layouts


def cpu_time_of(do: Callable[[], Any], count: int) -> Measure:
    """Of one of them, in seconds"""

    async def measure() -> float:
        began = time.process_time()
        for _ in range(count):
            do()
        return (time.process_time() - began) / count

    return measure


class Peft:
    """A model of transformers that changes its adapter: the next one is loaded and set. The last one is deleted, which
    does not count."""

    def __init__(self, model: Path, folders: Sequence[Path]) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self._names = itertools.count()
        self._folders = itertools.cycle(folders)
        self._last = str(next(self._names))
        # Adapters would be float32 otherwise, which takes longer.
        first = str(next(self._folders))
        self._model = PeftModel.from_pretrained(base, first, self._last, autocast_adapter_dtype=False)

    async def measure(self) -> float:
        return sum(self._switch() for _ in range(SWITCHES)) / SWITCHES

    def _switch(self) -> float:
        """Its CPU time, in seconds."""
        name, folder = str(next(self._names)), str(next(self._folders))
        began = time.process_time()
        self._model.load_adapter(folder, name, autocast_adapter_dtype=False)
        self._model.set_adapter(name)
        took = time.process_time() - began
        self._model.delete_adapter(self._last)
        self._last = name
        return took


async def measure_loads(shape: LlamaShape, model: Path, scratch: Path, given: argparse.Namespace) -> list[Result]:
    folders = [random_adapter(shape, scratch / f"load-{n}", rank=RANK, seed=n) for n in range(ADAPTERS)]
    engine = Engine(
        EngineConfig(model=model, device="cpu", kv_cache_mib=64, kernel_cache=KERNEL_CACHE.expanduser(), threads=1)
    )
    settle(engine)
    layouts = with_slabs(engine, folders)
    loader = Loader(engine)
    if any(loader.load(one).lacks_slab for one in layouts):
        raise RuntimeError("an adapter was not loaded from its slab")
    kept = itertools.cycle([(layout, loader.keep(place, layout)) for place, layout in enumerate(layouts)])
    loads, files = itertools.cycle(layouts), itertools.cycle(folders)
    run = torch.empty_like(loader.memory).fill_(1)

    def read_and_copy() -> None:
        (next(files) / "adapter_model.safetensors").read_bytes()
        with torch.inference_mode():
            loader.memory.copy_(run)

    def load() -> None:
        loader.load(next(loads))

    def load_from_host() -> None:
        loader.load(*next(kept))

    of_slab = await alternate(cpu_time_of(load_from_host, LOADS), cpu_time_of(load, LOADS), pairs=given.pairs)
    of_read = await alternate(cpu_time_of(load, LOADS), cpu_time_of(read_and_copy, LOADS), pairs=given.pairs)
    peft = Peft(model, folders)
    of_peft = await alternate(peft.measure, cpu_time_of(load, LOADS), pairs=given.pairs)
    milliseconds = [1000 * min(one) for one in (of_read.a, of_slab.a, of_read.b, of_peft.a)]
    print("a load {:.2f} ms, from host memory {:.2f}, read and copy {:.2f}, PEFT's switch {:.1f}".format(*milliseconds))
    for name, pairs in (
        ("from host memory over the page cache", of_slab),
        ("read and copy", of_read),
        ("PEFT", of_peft),
    ):
        print(f"{name}: {pairs}")
    return [
        _most("load_vs_read", of_read, "read and copy", MOST_OF_READ),
        _most("host_vs_disk", of_slab, "a load from the page cache", MOST_OF_SLAB),
        Result(
            "switch_vs_peft",
            of_peft.ratio,
            "x",
            f">= {LEAST_OF_PEFT}",
            of_peft.ratio >= LEAST_OF_PEFT,
            "PEFT's load and set",
            of_peft,
        ),
    ]


def _most(name: str, pairs: Pairs, baseline: str, most: float) -> Result:
    ratio = pairs.ratio
    assert math.isfinite(ratio)
    return Result(name, ratio, "x", f"<= {most:g}", ratio <= most, baseline, pairs)
