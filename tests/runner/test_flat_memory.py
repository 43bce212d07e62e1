"""An engine that runs for long needs no more memory than one that has just warmed up."""

import gc
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest

from motet.domain import BASE, Digest, ParkMethod
from motet_runner.engine import Engine
from motet_runner.execute.worker.device_worker import DeviceWorker
from motet_runner.execute.worker.local_worker import LocalWorker
from testbed.compiled_kernels import needs_a_compiler
from tests.runner.engines import ask, load, make_engine
from tests.support.chosen_worker import chosen_worker

MOST_LIVE = 12
MOST_GROWTH_MIB = 8
MOST_WARM_UP_ITERATIONS = 2000
"""Memory that is taken once, as for pages on the host, is the process's when it is first written."""


class Traffic:
    """Sequences of two adapters and of the base join and leave: at their end, cancelled, parked and resumed."""

    def __init__(self, engine: Engine, adapters: list[Digest]) -> None:
        self._engine = engine
        self._adapters = adapters
        self._chance = random.Random(0)
        self._live: dict[str, int] = {}
        self._joined = 0
        self.left: Counter[str] = Counter()

    def iterate(self, times: int) -> None:
        for _ in range(times):
            self._disturb()
            while len(self._live) < self._chance.randint(1, MOST_LIVE):
                self._join()
            self._step()

    def end(self) -> None:
        for request in list(self._live):
            self._leave(request, "cancelled")
        while self._engine.has_work():
            self._step()
        self._engine.check()

    def _join(self) -> None:
        name = f"r{self._joined}"
        self._joined += 1
        new = ask(
            name,
            prompt=tuple(self._chance.randrange(2, 500) for _ in range(self._chance.randint(1, 60))),
            adapter=self._chance.choice(self._adapters),
            max_tokens=self._chance.randint(1, 30),
            temperature=self._chance.choice((0.0, 0.8)),
            seed=self._joined,
        )
        self._engine.add(new)
        self._live[name] = new.promise

    def _disturb(self) -> None:
        if not self._live:
            return
        request = self._chance.choice(list(self._live))
        match self._chance.randrange(20):
            case 0:
                self._leave(request, "cancelled")
            case 1:
                method = self._chance.choice(list(ParkMethod))
                promise = self._live[request]
                if self._engine.park(request, 1, promise, promise, method):
                    self._step()
                    self.left["parked"] += 1
                    if request in self._live:
                        self._engine.resume(request, 1, promise)

    def _leave(self, request: str, how: str) -> None:
        if self._engine.cancel(request):
            self.left[how] += 1
        self._live.pop(request, None)

    def _step(self) -> None:
        for output in self._engine.step().sequences:
            if output.finish is not None and self._live.pop(output.request, None) is not None:
                self.left[output.finish.value] += 1


def memory_after_collection() -> tuple[int, int]:
    """Resident bytes, and objects of Python."""
    gc.collect()
    return psutil.Process().memory_info().rss, len(gc.get_objects())


def run_iterations(
    iterations: int, worker: str, kernels: str, base: Path, adapters: list[Path]
) -> tuple[float, int, Counter[str]]:
    """How many MiB and objects of Python the process has more after them, and who has left."""
    ahead = int(worker != "local")
    with chosen_worker(worker):
        engine = make_engine(base, host_kv_mib=1, max_concurrent_sequences=MOST_LIVE, kernels=kernels, plan_ahead=ahead)
    assert isinstance(engine.diagnostics.worker, LocalWorker if worker == "local" else DeviceWorker)
    assert (worker == "recorded") == bool(getattr(engine.diagnostics.worker, "captures", 0))
    names = [Digest(f"sha256:{number:064}") for number in range(2)]
    for name, folder in zip(names, adapters, strict=False):
        load(engine, name, folder)
    traffic = Traffic(engine, [BASE, *names])
    traffic.iterate(min(iterations, MOST_WARM_UP_ITERATIONS))
    traffic.end()
    bytes_before, objects_before = memory_after_collection()
    traffic.iterate(iterations)
    traffic.end()
    bytes_after, objects_after = memory_after_collection()
    return (bytes_after - bytes_before) / 2**20, objects_after - objects_before, traffic.left


@pytest.mark.parametrize(("worker", "kernels"), [("local", "torch"), ("device", "torch"), ("recorded", "cpp")])
@pytest.mark.parametrize("iterations", [300, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_memory_is_flat_however_many_iterations(
    iterations: int, worker: str, kernels: str, llama: Path, adapters: list[Path]
) -> None:
    """In a process of its own: the memory of this one is also that of other tests. All of them begin with torch."""
    if kernels == "cpp":
        needs_a_compiler()
    processes = get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=processes) as process:
        grown_mib, objects, left = process.submit(run_iterations, iterations, worker, kernels, llama, adapters).result()
    print(f"{iterations} iterations of {worker}: {grown_mib:+.2f} MiB, {objects:+} objects, {left}")
    assert min(left[how] for how in ("length", "cancelled", "parked")) > iterations / 100
    assert grown_mib <= MOST_GROWTH_MIB
    assert objects <= 100
