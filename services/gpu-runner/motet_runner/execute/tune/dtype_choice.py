"""The type in which a model computes on a CPU if nobody has set it (`engine.dtype: auto`).

Files in bfloat16 are served in bfloat16, unless the CPU does not multiply bfloat16 or float32 is clearly faster with
the serving kernels: bfloat16 reads half the bytes and keeps the saved numbers. All other files are served in float32.
The choice is kept beside the compiled kernels, for weights of these shapes on this machine.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import structlog
import torch

from motet_kernels.decoder_weights import PackedLinears
from motet_runner.cpu import cpu_name, multiplies_bfloat16
from motet_runner.execute.load.checkpoint_headers import FLOATS, Checkpoint
from motet_runner.execute.pack.linear_packing import Packing
from motet_runner.execute.tune.kept_choices import KeptChoices
from motet_runner.execute.tune.thread_choice import MEASURE_SECONDS, ROUNDS, quiet

log = structlog.get_logger(__name__)

CANDIDATES = (torch.float32, torch.bfloat16)

MEASURED_ROWS = 8
MEASURED_NUMBERS = 8 << 20
"""How many weights are measured: more than the caches near a core hold, and quickly packed"""
LEAST_GAIN = 1.1
"""float32 must be faster by this factor: it takes twice the memory."""

FILE = "dtypes.json"


class DtypeChoice:
    def __init__(self, kernels: str, packing: Packing | None, *, compiled_follow: bool, folder: Path | None) -> None:
        """`kernels`: the name of the first kernels. `packing`: how these kernels pack weights; None: they do not, or
        are not chosen yet. `compiled_follow`: compiled kernels may replace these kernels. `folder`: where choices are
        kept; None: nowhere."""
        self._kernels = kernels
        self._packing = packing
        self._compiled_follow = compiled_follow
        self._kept = KeptChoices(folder / FILE, "dtype") if folder is not None else None

    def __call__(self, checkpoint: Checkpoint) -> torch.dtype:
        """The type for a model with these files."""
        matrix = largest_matrices(checkpoint)
        if checkpoint.stored != "BF16" or matrix is None:
            return _chosen(torch.float32, f"the files have {checkpoint.stored}")
        if not multiplies_bfloat16():
            return _chosen(torch.float32, "this CPU does not multiply bfloat16")
        if self._packing is None:
            if self._compiled_follow:  # compiled kernels cannot be measured before they are built
                return _chosen(torch.bfloat16, "this CPU multiplies bfloat16")
            return _chosen(torch.float32, "there is nothing to measure it with")
        return self._measured(self._packing, *matrix)

    def _measured(self, packing: Packing, shape: tuple[int, int], count: int) -> torch.dtype:
        key = " ".join(map(str, (self._kernels, cpu_name(), torch.get_num_threads(), *shape, count)))
        kept = self._kept.find(key) if self._kept is not None else None
        for dtype in CANDIDATES:
            if _name(dtype) == kept:
                return _chosen(dtype, f"it was the faster one with the kernels {self._kernels}")
        with torch.inference_mode():
            seconds = measure({dtype: _products(packing, dtype, shape, count) for dtype in CANDIDATES})
        dtype = preferred(seconds)
        if self._kept is not None and quiet(seconds):
            self._kept.keep(key, _name(dtype))
        taken = {_name(one): round(statistics.median(each) * 1e3, 3) for one, each in seconds.items()}
        return _chosen(dtype, f"measured with the kernels {self._kernels}", milliseconds=taken)


def largest_matrices(checkpoint: Checkpoint) -> tuple[tuple[int, int], int] | None:
    """The shape of the matrices with most of the model's weights, and the number of matrices to measure. None: there is
    no matrix."""
    numbers: Counter[tuple[int, int]] = Counter()
    for tensor in checkpoint.tensors.values():
        if tensor.dtype in FLOATS and len(tensor.shape) == 2 and min(tensor.shape) > 0:
            outputs, inputs = tensor.shape
            numbers[outputs, inputs] += outputs * inputs
    if not numbers:
        return None
    (outputs, inputs), _ = numbers.most_common(1)[0]
    outputs = min(outputs, max(1, MEASURED_NUMBERS // inputs))
    return (outputs, inputs), max(1, min(numbers.total(), MEASURED_NUMBERS) // (outputs * inputs))


def measure(
    calls: Mapping[torch.dtype, Callable[[], object]], clock: Callable[[], float] = time.perf_counter
) -> dict[torch.dtype, Sequence[float]]:
    """Seconds of each call. The calls take turns, so that a disturbance affects both types equally."""
    seconds: dict[torch.dtype, list[float]] = {dtype: [] for dtype in calls}
    for _ in range(1 + ROUNDS):
        for dtype, call in calls.items():
            before = clock()
            call()
            seconds[dtype].append(clock() - before)
        if sum(map(sum, seconds.values())) > MEASURE_SECONDS:
            break
    return {dtype: taken[1:] or taken for dtype, taken in seconds.items()}  # the first round finds a cold cache


def preferred(seconds: Mapping[torch.dtype, Sequence[float]]) -> torch.dtype:
    wide, stored = (statistics.median(seconds[dtype]) for dtype in (torch.float32, torch.bfloat16))
    return torch.float32 if wide * LEAST_GAIN <= stored else torch.bfloat16


def _products(packing: Packing, dtype: torch.dtype, shape: tuple[int, int], count: int) -> Callable[[], None]:
    x = torch.full((MEASURED_ROWS, shape[1]), 0.5, dtype=dtype)
    packed = list(_packed(packing, dtype, shape, count))

    def multiply() -> None:
        for weights in packed:
            weights.linear(x)

    return multiply


def _packed(packing: Packing, dtype: torch.dtype, shape: tuple[int, int], count: int) -> Iterator[PackedLinears]:
    for _ in range(count):
        weight = [torch.full(shape, 0.01, dtype=dtype)]
        packed = packing.begin(weight, looked_up=False)
        for _ in packed.parts(weight):
            pass
        yield packed


def _chosen(dtype: torch.dtype, reason: str, **measured: object) -> torch.dtype:
    log.info("dtype_chosen", dtype=_name(dtype), reason=reason, **measured)
    return dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
