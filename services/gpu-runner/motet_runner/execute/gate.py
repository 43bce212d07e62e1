"""The gate before all that computes in place of a model's modules: it must be as near to the truth as they are.

The truth is what the modules compute in wider numbers, for a few texts. How far the modules are off in the type that
serves, with torch's kernels, is rounding. That is the yardstick, token by token: what is judged is compared with the
errors of the very tokens that it computes. Both compute the texts in iterations as they are served: beside each other,
in chunks and token by token, with adapters on every linear.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import linear

from motet.domain import PAGE_TOKENS, pages_for
from motet_kernels import LinearGroup, LoraBackend, PlacedAdapter, Segment, TorchBackend
from motet_kernels.decoder_weights import PackedLinears
from motet_runner.execute.flat_batch import FlatBatch
from motet_runner.execute.forward import Forward
from motet_runner.execute.kernels import Kernels
from motet_runner.execute.lora import LoraLinears
from motet_runner.execute.model import LoadedModel
from motet_runner.execute.packed_linears import weight_of
from motet_runner.execute.same_experts import SameExperts, choices_of
from motet_runner.execute.trial import MakeAttention, Trial, text
from motet_runner.execute.wide import Wide, wide
from motet_runner.memory.host_limit import available_host_bytes
from motet_runner.memory.out_of_memory import device_has_failed

ALLOWED = {torch.float32: 2.0, torch.bfloat16: 1.5, torch.float16: 1.5}
"""Times the root mean square error of what is known to be right. The largest error would say less: it is noise. In
float32 it comes from the order of sums, which differs. In 16 bits it comes from the rounding of results, whatever the
order."""
OF_ONE = 6.0
"""Times what is allowed: the error of a single token. Many right tokens would hide a wrong one in the mean of all."""
LEAST = {torch.float32: 2e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}
"""An error that is always allowed, as a share of what is computed. Sums of float32 in another order may differ by more
than half of an error that is small by luck."""

LENGTHS = (40, 22, 23, 17, 1)
"""Of the texts: about 100 tokens, on several pages"""


class _Iteration(NamedTuple):
    counts: Mapping[int, int]
    """How many tokens of each row are computed"""
    some: bool = False
    """Whether the logits of some tokens are wanted, in any order, and not those of all"""


class _Session(NamedTuple):
    """Rows on pages of their own"""

    rows: Sequence[tuple[int, int]]
    """The text of each, and how many of its tokens"""
    iterations: Sequence[_Iteration]

    @property
    def pages(self) -> int:
        return sum(pages_for(tokens) for _, tokens in self.rows)


WHOLE = tuple(enumerate(LENGTHS))
PARTS = _Session(
    WHOLE,
    (
        _Iteration({0: 17, 1: 20, 2: 16, 3: 15}),
        _Iteration({0: 22, 1: 1, 2: 6, 3: 1, 4: 1}, some=True),  # chunks beside decodes and a prompt of one token
        _Iteration({0: 1, 1: 1, 2: 1, 3: 1}),  # one of them is the first token on its page
    ),
)
"""Each token once"""
_MANY = (*WHOLE, *((row % 4, PAGE_TOKENS) for row in range(26)))
CROWD = _Session(_MANY, (_Iteration({row: tokens for row, (_, tokens) in enumerate(_MANY)}, some=True),))
"""For fused forward passes: as many rows as a usual chunk has, on few pages. The modules would take long for them."""
CROWD_TOKENS = sum(tokens for _, tokens in _MANY)
SOME = 64
"""Logits that are wanted of many tokens"""
ADAPTER_OF = {0: 0, 2: 1, 3: 0}
"""Text → its adapter; the others have none."""
RANKS = (8, 3)
"""Of the adapters"""

LOGIT_BYTES = 16
"""What the gate takes for each logit of its texts, the truth's included: of a large vocabulary, hundreds of MiB"""
JUDGED_LOGIT_BYTES = 10
"""What it takes beside the truth for each logit of an iteration: the logit, the true one, and a share of one row's
errors"""
JUDGED_TOKENS = max(SOME, *(sum(iteration.counts.values()) for iteration in PARTS.iterations))
"""Of one iteration, at most"""
WIDE_LOGIT_BYTES = 64 * 1024 * 1024
"""Of wide logits, at most so many are computed at a time."""
MIB = 1024 * 1024

LINEAR_ROWS = 25

_Matrices = dict[str, list[tuple[torch.Tensor, torch.Tensor]]]
"""Linear → A [rank, inputs] and B [outputs, rank] of each adapter"""
_MakeBackend = Callable[[torch.Tensor], LoraBackend[Any]]
"""Gets the memory [bytes] with the adapters."""
_Bound = tuple[LoraBackend[Any], dict[int, PlacedAdapter]]
"""A back end, and where its adapters are, by text"""


class _Wrong(Exception):
    """Why a forward pass cannot serve"""


def room_bytes(loaded: LoadedModel) -> int:
    """What truth and judgement take at most beside the model and what its forward pass computes in between"""
    return _page_bytes(loaded) + sum(LENGTHS) * loaded.vocabulary * LOGIT_BYTES


def judgement_bytes(loaded: LoadedModel) -> int:
    """The same for a judgement alone, once the truth is there"""
    return _page_bytes(loaded) + JUDGED_TOKENS * loaded.vocabulary * JUDGED_LOGIT_BYTES


def _page_bytes(loaded: LoadedModel) -> int:
    return max(PARTS.pages, CROWD.pages) * loaded.shape.bytes_per_page()


class Gate:
    """What it cannot judge, for whatever reason, it refuses. It does not try again."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._yardstick: _Yardstick | None = None
        self._missing = ""
        """Why there is no yardstick, and none will come"""

    def prepare(self, kernels: Kernels) -> Iterator[None]:
        """In parts: find the truth, while the modules have their own weights. If that fails, nothing passes. To be
        called in inference mode. `kernels`: any of those that may be judged; the numbers of an adapter are the same in
        all of them."""
        if self._yardstick is not None or self._missing:
            return
        try:
            self._yardstick = yield from _yardstick(self._loaded, kernels)
        except Exception as error:
            self._missing = not_judged(error)

    def fault_of(self, kernels: Kernels) -> Generator[None, None, str]:
        """In parts: why attention and add_lora of these kernels cannot serve beside the modules; empty if they can. To
        be called while the modules have their own weights."""
        yield from self.prepare(kernels)
        return (yield from self.fault_of_forward(kernels, None))

    def fault_of_forward(self, kernels: Kernels, fused: Forward | None) -> Generator[None, None, str]:
        """In parts: why this forward pass cannot serve; empty if it can. `prepare` comes before. `fused`: None for the
        modules"""
        yardstick, dtype = self._yardstick, self._loaded.dtype
        if yardstick is None:
            return self._missing or "not judged: nothing is known that is right"
        trial = replace(self._loaded, fused=fused)
        sessions = [PARTS] if fused is None else [PARTS, CROWD]
        places, squares = [], []
        try:
            check_room(self._loaded, judgement_bytes(self._loaded))
            for computed, error in yardstick.errors(
                trial, sessions, lambda memory: kernels.lora(yardstick.groups, memory, dtype, 0), kernels.attention
            ):
                places.append(computed)
                squares.append(error)
                yield
        except _Wrong as wrong:
            return str(wrong)
        except Exception as error:
            return not_judged(error)
        return yardstick.fault(torch.cat(places), torch.cat(squares))


def check_room(loaded: LoadedModel, needed: int) -> None:
    """An allocation would succeed, and its use would end the process."""
    if loaded.device.type == "cpu" and needed > (left := available_host_bytes()):
        raise MemoryError(f"{needed / MIB:.0f} MiB are needed to judge, and {left / MIB:.0f} MiB are left")


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
    experts: SameExperts
    least: torch.Tensor
    """[tokens] the mean square of an error that is always allowed"""
    own: torch.Tensor
    """[tokens] the mean square of the modules' errors"""
    times: float
    """As much as these is allowed."""

    def fault(self, places: torch.Tensor, squares: torch.Tensor) -> str:
        """Why such errors of these tokens are no rounding; empty if they are. `squares`: the mean square of each"""
        own, least = self.own[places], self.least[places]
        if not own.isfinite().all():
            return "not judged: the logits of the model's modules are not finite"
        off, most = _root(squares), max(self.times * _root(own), _root(least))
        if not off <= most:
            return f"its logits are off by {off:.2g}, and rounding explains {most:.2g}"
        of_one = OF_ONE**2 * torch.maximum(self.times**2 * own, least)
        worst = (squares - of_one).argmax()  # no quotient: that of two zeros would be the largest
        off, most = float(squares[worst].sqrt()), float(of_one[worst].sqrt())
        return "" if off <= most else f"its logits are off by {off:.2g} for one token, and rounding explains {most:.2g}"

    def errors(
        self,
        loaded: LoadedModel,
        sessions: Sequence[_Session],
        make: _MakeBackend,
        attention: MakeAttention | None = None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each iteration, the places of its tokens in `truth`, and the mean squares of their errors"""
        bound = self.bound(make, loaded.device)
        for session in sessions:
            for places, logits in self.computed(loaded, session, bound, self.experts.followed, attention):
                right = self.truth[places]
                squares = [_square(ours.double() - known) for ours, known in zip(logits, right, strict=True)]
                yield places, torch.stack(squares)

    def computed(
        self,
        loaded: LoadedModel,
        session: _Session,
        bound: _Bound,
        routed: Callable[[torch.Tensor], AbstractContextManager[None]],
        attention: MakeAttention | None = None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The places of each iteration's tokens in `truth`, and their logits"""
        backend, of_text = bound
        if loaded.fused is not None:
            loaded.fused.use_lora(backend)
        texts = [self.texts[number][:tokens] for number, tokens in session.rows]
        adapters = {row: of_text[number] for row, (number, _) in enumerate(session.rows) if number in of_text}
        trial = Trial(loaded, texts, attention=attention, backend=backend, adapters=adapters)
        for iteration in session.iterations:
            batch = trial.batch(iteration.counts)
            everywhere = _places(batch, session)
            if iteration.some:
                _keep_some(batch)
            places = everywhere[batch.keep]
            with _added(loaded, backend, batch), routed(everywhere):
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
        return make(memory), {number: placed[of] for number, of in ADAPTER_OF.items()}


def _yardstick(loaded: LoadedModel, kernels: Kernels) -> Generator[None, None, _Yardstick]:
    """In parts"""
    check_room(loaded, room_bytes(loaded))
    lora = LoraLinears(loaded.linears, loaded.dtype, kernels, loaded.linear_groups)
    groups, matrices = lora.groups, _random_matrices(loaded, lora)
    texts = [
        text(count, stride=7 + 4 * number, first=3 + number, vocabulary=loaded.vocabulary)
        for number, count in enumerate(LENGTHS)
    ]
    tokens = sum(LENGTHS)
    truth = torch.empty(tokens, loaded.vocabulary, dtype=torch.float32, device=loaded.device)
    nothing = torch.empty(tokens, dtype=torch.float64, device=loaded.device)
    experts = SameExperts(tokens, choices_of(loaded.config))
    yardstick = _Yardstick(texts, groups, matrices, truth, experts, nothing, nothing.clone(), ALLOWED[loaded.dtype])
    bound = yardstick.bound(lambda _: _Truth(matrices, lora), loaded.device)
    dtype = wider(loaded.dtype)
    parts = _in_parts(WIDE_LOGIT_BYTES // (loaded.vocabulary * dtype.itemsize))
    computed = yardstick.computed(replace(loaded, dtype=dtype, fused=None), parts, bound, yardstick.experts.noted)
    while True:
        with wide(loaded, dtype):  # nothing else may be wide between two parts
            part = next(computed, None)
        if part is None:
            break
        places, logits = part
        truth[places] = logits.float()
        yardstick.least[places] = LEAST[loaded.dtype] ** 2 * torch.stack([_square(row.double()) for row in logits])
        del part, logits
        yield
    for places, squares in yardstick.errors(
        replace(loaded, fused=None),
        [PARTS._replace(iterations=[one._replace(some=False) for one in PARTS.iterations])],
        lambda memory: TorchBackend(groups, memory, loaded.dtype, copy_bytes=0),
    ):
        yardstick.own[places] = squares
        yield
    return yardstick


def _in_parts(most: int) -> _Session:
    """All texts, of which at most so many tokens are computed at a time"""
    rows = [row for row, tokens in WHOLE for _ in range(tokens)]
    most = max(1, most)
    return _Session(WHOLE, [_Iteration(Counter(rows[first : first + most])) for first in range(0, len(rows), most)])


def _keep_some(batch: FlatBatch) -> None:
    """Others are not computed, and none may be taken for another. The last token of each sequence is among them, since
    it depends on all that sequence, and so are the last of all: there, kernels have what no whole tile has."""
    random = torch.Generator().manual_seed(0)
    some = min(SOME, 3 * batch.tokens // 4)
    always = torch.from_numpy(np.diff(batch.line.sequence_of, append=-1) != 0)
    always[-(some // 4) :] = True
    order = torch.randperm(batch.tokens, generator=random)
    chosen = torch.cat([order[always[order]], order[~always[order]]])[:some]
    chosen = chosen[torch.randperm(len(chosen), generator=random)]
    batch.keep = batch.keep[chosen.to(batch.keep.device)]
    batch.choices = torch.empty(len(batch.keep), dtype=torch.int64)


def _places(batch: FlatBatch, session: _Session) -> torch.Tensor:
    """Of an iteration's tokens, among those of all texts"""
    line = batch.line
    firsts = np.cumsum([0, *LENGTHS])[[session.rows[row.number][0] for row in line.rows]]
    return torch.from_numpy(firsts[line.sequence_of] + line.positions).to(batch.keep.device)


def _square(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.square().mean()


def _root(squares: torch.Tensor) -> float:
    """Of the mean of the mean squares of rows"""
    return float(squares.mean().sqrt())


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
    return max(ALLOWED[dtype] * own, LEAST[dtype] * rms(truth))


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
