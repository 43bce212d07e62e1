"""The gate before all that computes in place of a model's modules: it must be as near to the truth as they are.

The truth is what the modules compute in wider numbers, for a few texts, each as a whole. How far the modules are off in
the type that serves, with torch's kernels, is rounding: that is the yardstick. Both compute the texts in iterations as
they are served: beside each other, in chunks and token by token, with adapters on every linear.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import linear

from motet_kernels import LinearGroup, LoraBackend, PlacedAdapter, Segment, TorchBackend
from motet_kernels.decoder_weights import PackedLinears
from motet_runner.execute.flat_batch import FlatBatch
from motet_runner.execute.forward import Forward
from motet_runner.execute.kernels import Kernels
from motet_runner.execute.lora import LoraLinears
from motet_runner.execute.model import LoadedModel
from motet_runner.execute.packed_linears import weight_of
from motet_runner.execute.trial import MakeAttention, Trial, text
from motet_runner.execute.wide import Wide, wide
from motet_runner.memory.host_limit import available_host_bytes
from motet_runner.memory.out_of_memory import device_has_failed

ALLOWED = 1.5
"""Times the root mean square error of what is known to be right. The largest error would say less: it is noise."""
LEAST = {torch.float32: 2e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}
"""An error that is always allowed, as a share of what is computed. Sums of float32 in another order may differ by more
than half of an error that is small by luck."""

LENGTHS = (40, 22, 23, 17, 1)
"""Of the texts: about 100 tokens, on several pages"""
COPIES = 6
"""Of each text, in rows of their own: the first ones are computed in parts, and then all others at once, if at all."""


class _Iteration(NamedTuple):
    counts: Mapping[int, int]
    """How many tokens of each row are computed"""
    some: bool = False
    """Whether the logits of some tokens are wanted, in any order, and not those of all"""


ITERATIONS = (
    _Iteration({0: 17, 1: 20, 2: 16, 3: 15}),
    _Iteration({0: 22, 1: 1, 2: 6, 3: 1, 4: 1}, some=True),  # chunks beside decodes and a prompt of one token
    _Iteration({0: 1, 1: 1, 2: 1, 3: 1}),  # one of them is the first token on its page
)
CROWD = _Iteration({row: LENGTHS[row % len(LENGTHS)] for row in range(len(LENGTHS), COPIES * len(LENGTHS))}, some=True)
"""For fused forward passes: as many rows as a usual chunk has. The modules would take long for them."""
SOME = 64
"""Logits that are wanted of many tokens"""
ADAPTER_OF = {0: 0, 2: 1, 3: 0}
"""Text → its adapter; the others have none."""
RANKS = (8, 3)
"""Of the adapters"""

LOGIT_BYTES = 16
"""What the gate takes for each logit of its texts: of a large vocabulary, hundreds of MiB"""
MIB = 1024 * 1024

TRIES = 3
LINEAR_ROWS = 25

_Matrices = dict[str, list[tuple[torch.Tensor, torch.Tensor]]]
"""Linear → A [rank, inputs] and B [outputs, rank] of each adapter"""
_MakeBackend = Callable[[torch.Tensor], LoraBackend[Any]]
"""Gets the memory [bytes] with the adapters."""
_Bound = tuple[LoraBackend[Any], dict[int, PlacedAdapter]]
"""A back end, and where its adapters are, by row"""


class _Wrong(Exception):
    """Why a forward pass cannot serve"""


class Gate:
    """What it cannot judge, for whatever reason, it refuses."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._taken = 0
        """How many sets of texts were taken so far"""
        self._yardstick: _Yardstick | None = None
        self._missing = "not judged: nothing is known that is right"
        """Why there is no yardstick"""

    def prepare(self, kernels: Kernels) -> Iterator[None]:
        """In parts: find the truth, while the modules have their own weights. If that fails, nothing passes until a
        later call finds it. To be called in inference mode. `kernels`: any of those that may be judged; the numbers of
        an adapter are the same in all of them."""
        if self._yardstick is not None:
            return
        try:
            self._yardstick = yield from _yardstick(self._loaded, kernels, self._taken)
        except Exception as error:
            self._missing = not_judged(error)

    def fault_of(self, kernels: Kernels) -> Generator[None, None, str]:
        """In parts: why attention and add_lora of these kernels cannot serve beside the modules; empty if they can. To
        be called while the modules have their own weights.

        Where a router finds two experts nearly alike, rounding decides between them, and its token differs by far more
        than rounding in one of the two. So there is another try, with other texts: a wrong kernel fails them all.
        """
        for self._taken in range(TRIES):
            yield from self.prepare(kernels)
            fault = yield from self.fault_of_forward(kernels, None)
            if not fault:
                break
            self._yardstick = None
        return fault

    def fault_of_forward(self, kernels: Kernels, fused: Forward | None) -> Generator[None, None, str]:
        """In parts: why this forward pass cannot serve; empty if it can. `prepare` comes before. `fused`: None for the
        modules"""
        yardstick, dtype = self._yardstick, self._loaded.dtype
        if yardstick is None:
            return self._missing
        trial = replace(self._loaded, fused=fused)
        errors = []
        try:
            for error in yardstick.errors(
                trial, lambda memory: kernels.lora(yardstick.groups, memory, dtype, 0), kernels.attention
            ):
                errors.append(error)
                yield
        except _Wrong as wrong:
            return str(wrong)
        except Exception as error:
            return not_judged(error)
        off = _root(errors)
        if off <= yardstick.allowed:
            return ""
        return f"its logits are off by {off:.2g}, and rounding explains {yardstick.allowed:.2g}"


def not_judged(error: Exception) -> str:
    """A fault: what failed may do so again. Raises the error if the device computes nothing more."""
    if device_has_failed(error):
        raise error
    return f"not judged: {reason_of(error)}"


def reason_of(error: Exception) -> str:
    """In one line"""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


@dataclass(frozen=True)
class _Yardstick:
    texts: Sequence[Sequence[int]]
    groups: Sequence[LinearGroup]
    matrices: _Matrices
    truth: torch.Tensor
    """[tokens of all texts, vocabulary] logits, rounded to float32: they may wait long for a compiler."""
    allowed: float

    def errors(
        self, loaded: LoadedModel, make: _MakeBackend, attention: MakeAttention | None = None
    ) -> Iterator[torch.Tensor]:
        """The mean squares of the rows of each iteration"""
        iterations = ITERATIONS if loaded.fused is None else (*ITERATIONS, CROWD)
        for places, logits in self.computed(loaded, iterations, self.bound(make, loaded.device), attention):
            right = self.truth[places]
            yield torch.stack([_square(ours.double() - known) for ours, known in zip(logits, right, strict=True)])

    def computed(
        self,
        loaded: LoadedModel,
        iterations: Sequence[_Iteration],
        bound: _Bound,
        attention: MakeAttention | None = None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Logits of each iteration, and their places in `truth`"""
        backend, adapters = bound
        if loaded.fused is not None:
            loaded.fused.use_lora(backend)
        trial = Trial(loaded, [*self.texts] * COPIES, attention=attention, backend=backend, adapters=adapters)
        for iteration in iterations:
            batch = trial.batch(iteration.counts)
            if iteration.some:
                _keep_some(batch)
            places = _places(batch)
            with _added(loaded, backend, batch):
                logits = loaded.forward(batch)
            if len(logits) != len(places):
                raise _Wrong("it gives logits of other tokens than those that are wanted")
            if batch.chosen is not None and not _are_largest(batch.chosen, logits):
                raise _Wrong("it chooses tokens whose logits are not the largest")
            yield places, logits

    def bound(self, make: _MakeBackend, device: torch.device) -> _Bound:
        """A back end that reads the adapters"""
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        layouts = [make(nothing).layout(rank) for rank in RANKS]
        memory = nothing.new_zeros(sum(layout.bytes for layout in layouts))
        placed: list[PlacedAdapter] = []
        offset = 0
        for number, layout in enumerate(layouts):
            run = memory[offset : offset + layout.bytes]
            for path, of_linear in self.matrices.items():
                layout.write(run, path, *of_linear[number], 1.0)
            placed.append(PlacedAdapter(str(number), offset, layout.rank, frozenset(self.matrices)))
            offset += layout.bytes
        rows = [(copy * len(LENGTHS) + first, placed[of]) for copy in range(COPIES) for first, of in ADAPTER_OF.items()]
        return make(memory), dict(rows)


def _yardstick(loaded: LoadedModel, kernels: Kernels, taken: int) -> Generator[None, None, _Yardstick]:
    """In parts. `taken`: how many sets of texts were taken before"""
    needed = sum(LENGTHS) * loaded.vocabulary * LOGIT_BYTES
    if loaded.device.type == "cpu" and needed > (left := available_host_bytes()):
        raise MemoryError(f"{needed / MIB:.0f} MiB are needed for logits, and {left / MIB:.0f} MiB are left")
    lora = LoraLinears(loaded.linears, loaded.dtype, kernels, loaded.linear_groups)
    groups, matrices = lora.groups, _random_matrices(loaded, lora)
    texts = [
        text(count, stride=7 + 4 * number, first=3 + number + 97 * taken, vocabulary=loaded.vocabulary)
        for number, count in enumerate(LENGTHS)
    ]
    unknown = _Yardstick(texts, groups, matrices, torch.empty(0, dtype=torch.float32), math.nan)
    bound = unknown.bound(lambda _: _Truth(matrices, lora), loaded.device)
    with wide(loaded, wider(loaded.dtype)) as exact:
        ((places, logits),) = unknown.computed(exact, [_Iteration(dict(enumerate(LENGTHS)))], bound)
    known = replace(unknown, truth=torch.empty_like(logits, dtype=torch.float32).index_copy_(0, places, logits.float()))
    del logits
    yield
    errors = []
    for error in known.errors(
        replace(loaded, fused=None), lambda memory: TorchBackend(groups, memory, loaded.dtype, copy_bytes=0)
    ):
        errors.append(error)
        yield
    size = _root([torch.stack([_square(row.double()) for row in known.truth])])
    return replace(known, allowed=max(ALLOWED * _root(errors), LEAST[loaded.dtype] * size))


def _keep_some(batch: FlatBatch) -> None:
    """Others are not computed, and none may be taken for another."""
    order = torch.randperm(batch.tokens, generator=torch.Generator().manual_seed(0))
    batch.keep = batch.keep[order[: min(SOME, 3 * batch.tokens // 4)].to(batch.keep.device)]
    batch.choices = torch.empty(len(batch.keep), dtype=torch.int64)


def _places(batch: FlatBatch) -> torch.Tensor:
    """Of the kept rows of an iteration, among the tokens of all texts"""
    line = batch.line
    firsts = np.cumsum([0, *LENGTHS])[[row.number % len(LENGTHS) for row in line.rows]]
    return torch.from_numpy(firsts[line.sequence_of] + line.positions).to(batch.keep.device)[batch.keep]


def _square(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.square().mean()


def _root(squares: Sequence[torch.Tensor]) -> float:
    """Of the mean of the mean squares of rows"""
    return float(torch.cat(list(squares)).mean().sqrt())


def linear_fault(weights: Sequence[torch.Tensor], packed: PackedLinears) -> str:
    """Why these packed weights cannot replace the originals; empty if they can."""
    like = weights[0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(LINEAR_ROWS, packed.inputs, generator=generator, dtype=torch.float32).to(like.device, like.dtype)
    for index, weight in enumerate(weights):
        with Wide(wider(weight.dtype)):
            truth = linear(x, weight)
        for rows in (1, LINEAR_ROWS):
            right = truth[:rows]
            own = rms(linear(x[:rows], weight) - right)
            error = rms(packed.linear(x[:rows], index=index) - right)
            if not error <= allowed(own, right, weight.dtype):
                return f"a product is off by {error:.2g}, and that of torch by {own:.2g}"
    return ""


def allowed(own: float, truth: torch.Tensor, dtype: torch.dtype) -> float:
    """`own`: the error of what is known to be right"""
    return max(ALLOWED * own, LEAST[dtype] * rms(truth))


def rms(numbers: torch.Tensor) -> float:
    return float(numbers.double().square().mean().sqrt())


def wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float32 else torch.float32


class _Truth:
    """A back end of add_lora for wide numbers"""

    tile = 1
    copies = False

    def __init__(self, matrices: _Matrices, lora: LoraLinears) -> None:
        self._matrices = matrices
        self.layout = lora.layout

    @staticmethod
    def order(adapter: PlacedAdapter) -> tuple[int, int]:
        return adapter.offset, 0

    @staticmethod
    def make_batch(segments: Sequence[Segment]) -> Sequence[Segment]:
        return segments

    def add_lora(self, y: torch.Tensor, x: torch.Tensor, linear: str, batch: Sequence[Segment]) -> None:
        for segment in batch:
            a, b = self._matrices[linear][int(segment.adapter.name)]
            rows = slice(segment.start, segment.stop)
            y[rows] += x[rows] @ a.t() @ b.t()


def _random_matrices(loaded: LoadedModel, lora: LoraLinears) -> _Matrices:
    """Adapters that add as much as the linears give themselves. Their numbers are those that a run can hold."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(loaded.device)

    layouts = [lora.layout(rank) for rank in RANKS]
    runs = [torch.zeros(layout.bytes, dtype=torch.uint8, device=loaded.device) for layout in layouts]
    matrices: _Matrices = {}
    for path, (inputs, outputs) in lora.shapes.items():
        size = float(weight_of(loaded.linears[path])[:64].float().std())
        matrices[path] = []
        for rank, layout, run in zip(RANKS, layouts, runs, strict=True):
            layout.write(run, path, random(rank, inputs), random(outputs, rank), size / rank**0.5)
            a, b = layout.stored(run, path)
            matrices[path].append((a[:rank], b[:rank].t()))
    return matrices


@contextmanager
def _added(loaded: LoadedModel, backend: LoraBackend[Any], batch: FlatBatch) -> Iterator[None]:
    """Let this back end add to the modules' linears, and not that of the engine, if it is there already. A fused
    forward pass does so by itself."""
    if loaded.fused is not None:
        yield
        return
    lora, batch.lora = batch.lora, None

    def add(path: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def followed(_: torch.nn.Module, given: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
            backend.add_lora(y.view(-1, y.shape[-1]), given[0].reshape(-1, given[0].shape[-1]), path, lora)

        return followed

    hooks = []
    if lora is not None:
        hooks = [module.register_forward_hook(add(path)) for path, module in loaded.linears.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _are_largest(chosen: torch.Tensor, logits: torch.Tensor) -> bool:
    return bool((chosen >= 0).all()) and torch.equal(
        logits.gather(1, chosen.clamp(min=0)[:, None])[:, 0], logits.max(1).values
    )
