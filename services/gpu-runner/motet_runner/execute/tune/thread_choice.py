"""The number of threads that an engine uses if nobody has set one: the number with the fastest iteration.

The compiled kernels' results are the same with any number of threads; torch's results may differ in their last digits.
The choice is kept beside the compiled kernels, for this model on this machine.
"""

import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
import torch

from motet.errors import SetupError
from motet_runner.cpu import cpu_name
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.trial import MakeAttention, decode_probe
from motet_runner.execute.tune.cores import allowed_cores, usable_cores
from motet_runner.execute.tune.kept_choices import KeptChoices
from motet_runner.memory.out_of_memory import is_out_of_memory

log = structlog.get_logger(__name__)

MEASURED_ROWS = 8
ROUNDS = 9
MEASURE_SECONDS = 0.3
"""After this time, no new round begins."""

LEAST_GAIN = 1.1
"""More threads must be faster by this factor: they take cores from other processes."""

FILE = "threads.json"
QUIET = 1.25
"""On an otherwise idle machine, the median call takes at most this multiple of the fastest call's time."""


def threads_to_begin_with(asked: int | None) -> int:
    """`asked`: the number that somebody has set. More threads than cores would only wait for each other."""
    if asked is None:
        return 1
    if not isinstance(asked, int) or asked < 1:
        raise SetupError(f"engine.threads is {asked!r}. Give a whole number from 1 on, or leave it out.")
    cores = allowed_cores()
    if asked > cores:
        log.warning("too_many_threads", asked=asked, cores=cores, taking=cores)
    return min(asked, cores)


def threads_to_judge(asked: int | None) -> list[int]:
    """The numbers of threads with which the gate judges compiled kernels: the number that somebody has `asked` for, or
    the fewest and the most that may be chosen."""
    counts = candidates(usable_cores())
    return [torch.get_num_threads()] if asked is not None else sorted({counts[0], counts[-1]})


def candidates(cores: int) -> list[int]:
    """One candidate is half the cores, because two of the cores may be threads of one physical core."""
    return sorted({1, cores // 2, cores} - {0}) if cores > 2 else list(range(1, cores + 1))


def fastest(seconds: dict[int, Sequence[float]]) -> int:
    """The number of threads with the shortest iterations; a smaller number if more threads gain little."""
    best = min(seconds)
    for threads in sorted(seconds)[1:]:
        if statistics.median(seconds[threads]) * LEAST_GAIN <= statistics.median(seconds[best]):
            best = threads
    return best


def quiet(seconds: Mapping[Any, Sequence[float]]) -> bool:
    """True if nothing disturbed the calls. Otherwise another start might choose differently."""
    return all(statistics.median(taken) <= QUIET * min(taken) for taken in seconds.values())


def measure(
    call: Callable[[], object], counts: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> Generator[None, None, dict[int, Sequence[float]]]:
    """Seconds of calls with each number of threads. The numbers take turns, so that a disturbance affects all equally.
    Between two calls the engine may compute."""
    seconds: dict[int, list[float]] = {threads: [] for threads in counts}
    usual = torch.get_num_threads()
    for _ in range(1 + ROUNDS):
        for threads in counts:
            torch.set_num_threads(threads)
            before = clock()
            call()
            seconds[threads].append(clock() - before)
            torch.set_num_threads(usual)
            yield
        if sum(map(sum, seconds.values())) > MEASURE_SECONDS:
            break
    # In the first round, weights are read and threads are started for the first time.
    return {threads: taken[1:] or taken for threads, taken in seconds.items()}


def choose_threads(
    loaded: LoadedModel, kernels: str, attention: MakeAttention, folder: Path | None
) -> Generator[None, None, None]:
    """Find the best number of threads, in parts between which the engine may compute, and use this number from then on.
    `folder`: where choices are kept; None: nowhere."""
    counts = candidates(usable_cores())
    if len(counts) == 1:
        return
    kept = KeptChoices(folder / FILE, "threads") if folder is not None else None
    key = _key(loaded, kernels, counts)
    threads = kept.find(key) if kept is not None else None
    if type(threads) is int and threads in counts:
        torch.set_num_threads(threads)
        log.info("threads_chosen", threads=threads, kept=True)
        return
    try:
        call = decode_probe(loaded, attention, MEASURED_ROWS)
        yield
        seconds = yield from measure(call, counts)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        torch.set_num_threads(1)
        return
    threads = fastest(seconds)
    torch.set_num_threads(threads)
    taken = {count: round(statistics.median(one) * 1e3, 3) for count, one in seconds.items()}
    log.info("threads_chosen", threads=threads, kept=False, milliseconds=taken)
    if kept is not None and quiet(seconds):
        kept.keep(key, threads)


def _key(loaded: LoadedModel, kernels: str, counts: Sequence[int]) -> str:
    config = loaded.config
    size = [getattr(config, name, None) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")]
    parts = [loaded.architecture, *size, loaded.vocabulary, loaded.dtype, kernels, cpu_name(), *counts]
    return " ".join(map(str, parts))
