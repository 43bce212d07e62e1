"""The truth for a few texts, and the modules' error of each token: the yardstick for other forward passes."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from motet_kernels import LinearGroup, LoraBackend, PlacedAdapter, TorchBackend
from motet_runner.execute.adapters.add_lora import AddLora
from motet_runner.execute.adapters.lora_linears import LoraLinears
from motet_runner.execute.forward.added_lora import added
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.trial import MakeAttention, Trial, text
from motet_runner.execute.forward.wide_modules import wide
from motet_runner.execute.gate.allowed_error import ALLOWED, LEAST, OF_ONE, wider
from motet_runner.execute.gate.memory_needs import check_room, room_bytes
from motet_runner.execute.gate.same_experts import SameExperts, choices_of
from motet_runner.execute.gate.texts import (
    ADAPTER_OF,
    LENGTHS,
    PARTS,
    RANKS,
    TOKENS,
    Session,
    far_position,
    in_parts,
    keep_some,
    pages_before,
    places_of,
)
from motet_runner.execute.gate.trial_adapters import Matrices, WideBackend, random_matrices

WIDE_LOGIT_BYTES = 64 * 1024 * 1024
"""The most bytes of wide logits that are computed at a time"""

_MakeBackend = Callable[[torch.Tensor], LoraBackend[Any]]
"""Gets the memory [bytes] with the adapters."""
_Bound = tuple[LoraBackend[Any], dict[int, PlacedAdapter]]
"""A back end, and text → its placed adapter"""


class Judged(Protocol):
    """Kernels, as the gate sees them"""

    @property
    def add_lora(self) -> AddLora: ...

    @property
    def attention(self) -> MakeAttention: ...


class Wrong(Exception):
    """Why a forward pass cannot serve"""


@dataclass(frozen=True)
class Yardstick:
    texts: Sequence[Sequence[int]]
    groups: Sequence[LinearGroup]
    matrices: Matrices
    truth: torch.Tensor
    """[tokens of all texts, vocabulary] logits, in float32 to save memory: the gate may keep them until a compiler
    ends."""
    experts: SameExperts
    least: torch.Tensor
    """[tokens] the mean square of an error that is always allowed"""
    own: torch.Tensor
    """[tokens] the mean square of the modules' errors"""
    times: float
    """The allowed multiple of the modules' errors"""

    def fault(self, places: torch.Tensor, squares: torch.Tensor) -> str:
        """Why rounding does not explain these tokens' errors; empty if it does. `squares`: the mean square of each
        token's error"""
        own, least = self.own[places], self.least[places]
        if not own.isfinite().all():
            return "not judged: the logits of the model's modules are not finite"
        off, most = _root(squares), max(self.times * _root(own), _root(least))
        if not off <= most:
            return f"its logits are off by {off:.2g}, and rounding explains {most:.2g}"
        of_one = OF_ONE**2 * torch.maximum(self.times**2 * own, least)
        worst = (squares - of_one).argmax()  # not by the quotient: 0/0 would be the largest
        off, most = float(squares[worst].sqrt()), float(of_one[worst].sqrt())
        return "" if off <= most else f"its logits are off by {off:.2g} for one token, and rounding explains {most:.2g}"

    def errors(
        self,
        loaded: LoadedModel,
        session: Session,
        make: _MakeBackend,
        attention: MakeAttention | None = None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Per iteration, its tokens' places in `truth`, and their mean square errors"""
        bound = self.bound(make, loaded.device)
        for places, logits in self.computed(loaded, session, bound, self.experts.followed, attention):
            right = self.truth[places]
            squares = [_square(ours.double() - known) for ours, known in zip(logits, right, strict=True)]
            yield places, torch.stack(squares)

    def computed(
        self,
        loaded: LoadedModel,
        session: Session,
        bound: _Bound,
        routed: Callable[[torch.Tensor], AbstractContextManager[None]],
        attention: MakeAttention | None = None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Per iteration, its tokens' places in `truth`, and their logits"""
        backend, of_text = bound
        if loaded.fused is not None:
            loaded.fused.use_lora(backend)
        texts = [self.texts[number][:tokens] for number, tokens in session.rows]
        adapters = {row: of_text[number] for row, number in enumerate(session.texts) if number in of_text}
        before = {}
        if session.goes_far:
            texts.append(self.texts[-1])
            before[len(session.rows)] = pages_before(len(self.texts[-1]) - 1, loaded.windows)
        trial = Trial(loaded, texts, attention=attention, backend=backend, adapters=adapters, before=before)
        for iteration in session.iterations:
            batch = trial.batch(iteration.counts)
            everywhere = places_of(batch, session)
            if iteration.some:
                keep_some(batch)
            places = everywhere[batch.keep]
            with added(loaded, backend, batch), routed(everywhere):
                logits = loaded.forward(batch)
            if len(logits) != len(places):
                raise Wrong("it gives logits of other tokens than those that are wanted")
            if batch.chosen is not None and not _are_largest(batch.chosen, logits):
                raise Wrong("it chooses tokens whose logits are not the largest")
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
            changed = {path: one for path, of_all in self.matrices.items() if (one := of_all[number]) is not None}
            for path, of_linear in changed.items():
                layout.write(run, path, *of_linear, 1.0)
            placed.append(PlacedAdapter(str(number), offset, layout.rank, frozenset(changed)))
            offset += layout.bytes
        return make(memory), {number: placed[of] for number, of in ADAPTER_OF.items()}


def find_yardstick(loaded: LoadedModel, kernels: Judged) -> Generator[None, None, Yardstick]:
    """Finds the yardstick, in parts."""
    check_room(loaded, room_bytes(loaded))
    lora = LoraLinears(loaded.linears, loaded.dtype, kernels.add_lora, loaded.linear_groups)
    groups, matrices = lora.groups, random_matrices(loaded, lora)
    texts = [
        text(count, stride=7 + 4 * number, first=3 + number, vocabulary=loaded.vocabulary)
        for number, count in enumerate((*LENGTHS, far_position(loaded.max_positions) + 1))
    ]
    truth = torch.empty(TOKENS, loaded.vocabulary, dtype=torch.float32, device=loaded.device)
    nothing = torch.empty(TOKENS, dtype=torch.float64, device=loaded.device)
    experts = SameExperts(TOKENS, choices_of(loaded.config))
    yardstick = Yardstick(texts, groups, matrices, truth, experts, nothing, nothing.clone(), ALLOWED[loaded.dtype])
    bound = yardstick.bound(lambda _: WideBackend(matrices, lora), loaded.device)
    dtype = wider(loaded.dtype)
    parts = in_parts(WIDE_LOGIT_BYTES // (loaded.vocabulary * dtype.itemsize))
    computed = yardstick.computed(replace(loaded, dtype=dtype, fused=None), parts, bound, yardstick.experts.noted)
    while True:
        with wide(loaded, dtype):  # not between two parts: there the engine may compute, in its own dtype
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
        PARTS._replace(iterations=[one._replace(some=False) for one in PARTS.iterations]),
        lambda memory: TorchBackend(groups, memory, loaded.dtype, copy_bytes=0),
    ):
        yardstick.own[places] = squares
        yield
    return yardstick


def _square(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.square().mean()


def _root(squares: torch.Tensor) -> float:
    """The root of the mean of the rows' mean squares"""
    return float(squares.mean().sqrt())


def _are_largest(chosen: torch.Tensor, logits: torch.Tensor) -> bool:
    return bool((chosen >= 0).all()) and torch.equal(
        logits.gather(1, chosen.clamp(min=0)[:, None])[:, 0], logits.max(1).values
    )
