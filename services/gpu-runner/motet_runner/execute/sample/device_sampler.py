"""From logits to tokens on an asynchronous device. The host gets the tokens later.

Arithmetic and tokens are the same as in `host_sampler.py`. Nothing here asks the device for a value: the rows' options
tell which rows need what, and the uniform numbers depend on (seed, choice, position) alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from motet_runner.execute.batch.row_table import TableRow
from motet_runner.execute.sample.device_adjustments import Counted, DeviceAdjustments
from motet_runner.execute.sample.draw import draw_without_waiting, probabilities
from motet_runner.execute.sample.logprobs import Best, alternatives, best, read
from motet_runner.execute.sample.row_layout import RowLayout
from motet_runner.execute.sample.sampling_kind import GREEDY, Kind, cuts_of, temperatures, uniforms
from motet_runner.interface import Logprobs
from motet_runner.memory.link import Link
from motet_runner.memory.parcel import Parcel

NOT_FINITE = -1
"""Stands for the token of a row whose logits are not finite"""

_NUMBERS = "numbers"
"""The name of the uniform numbers in a parcel"""


class DeviceSampler:
    def __init__(self, link: Link, eos: frozenset[int], vocabulary: int) -> None:
        self._link = link
        self._vocabulary = vocabulary
        self._adjustments = DeviceAdjustments(link, eos, vocabulary)
        self._known: _Layout | None = None

    def leave(self, row: int) -> None:
        self._adjustments.leave(row)

    def prepare(self, rows: Sequence[TableRow], parcel: Parcel) -> "Sampling":
        """Prepares the sampling of these rows' next tokens. The newest tokens may be unknown, but not their places."""
        layout = self._known
        if layout is None or not layout.has(rows):
            layout = self._known = _Layout(rows, self._link, self._adjustments, self._vocabulary)
        drawn = [row for group in layout.groups if group.kind.drawn for row in group.rows]
        if drawn:
            parcel[_NUMBERS] = uniforms(drawn)
        follow = self._adjustments.follow([row for group in layout.adjusted for row in group.rows], parcel)
        return Sampling(self._adjustments, layout, follow)


@dataclass(slots=True)
class DeviceSamples:
    """Tokens and their log probabilities, on the device"""

    tokens: torch.Tensor
    """[rows] int64"""
    logprobs: list[Best] = field(default_factory=list)
    """For rows that ask for log probabilities: those of their tokens [rows], and of the best tokens [rows, most]"""

    def newest(self) -> torch.Tensor:
        """[rows] Each row's next input: token 0 if its logits are not finite, because then the row ends"""
        return self.tokens.clamp(min=0)

    @property
    def parts(self) -> list[torch.Tensor]:
        return [self.tokens, *(part for found in self.logprobs for part in found)]


@dataclass(frozen=True, slots=True)
class Sampling:
    """One iteration's sampling, before its logits exist."""

    _adjustments: DeviceAdjustments
    _layout: "_Layout"
    _follow: Any

    @property
    def greedy(self) -> bool:
        return self._layout.greedy

    @property
    def asks(self) -> bool:
        """True if some rows ask for log probabilities"""
        return bool(self._layout.asking)

    def sample(
        self, logits: torch.Tensor, sent: dict[str, torch.Tensor], largest: torch.Tensor | None = None
    ) -> DeviceSamples:
        """`sent`: the parcel of `prepare`. `largest` [rows]: `largest_tokens` of the logits, if known."""
        layout = self._layout
        if self._follow is not None:
            self._follow(sent)
        tokens = largest_tokens(logits) if largest is None else largest
        if layout.groups and largest is not None:
            tokens = tokens.clone()
        first = 0
        for group in layout.groups:
            numbers = None
            if group.kind.drawn:
                numbers = sent[_NUMBERS][first : first + len(group.rows)]
                first += len(group.rows)
            tokens.index_copy_(0, group.places, self._sample_group(logits, group, numbers))
        found = []
        if layout.asking:
            of_asking = tokens.index_select(0, layout.places).clamp(min=0)
            found.append(best(logits.index_select(0, layout.places), of_asking, max(layout.counts)))
        return DeviceSamples(tokens, found)

    def counted(self, samples: DeviceSamples) -> list[Counted]:
        """The changes that these tokens cause"""
        return [
            self._adjustments.counted(group.slots, samples.tokens.index_select(0, group.places).clamp(min=0))
            for group in self._layout.adjusted
        ]

    def count(self, counted: Sequence[Counted]) -> None:
        """Applies the changes. This allocates no memory."""
        for one in counted:
            self._adjustments.count(one)

    def logprobs(self, found: Sequence[torch.Tensor]) -> dict[int, Logprobs]:
        """`found`: `sample`'s, now on the host → row's place → its log probabilities"""
        layout = self._layout
        return dict(zip(layout.asking, read(found, layout.counts), strict=True)) if layout.asking else {}

    def _sample_group(self, logits: torch.Tensor, group: "_Group", numbers: torch.Tensor | None) -> torch.Tensor:
        logits = logits.index_select(0, group.places).float()
        if group.kind.adjusted:
            logits = self._adjustments.apply(logits, group.slots, repeats=group.kind.repeats)
        largest, tokens = logits.max(dim=-1, keepdim=True)
        finite = torch.isfinite(largest)
        tokens = tokens.squeeze(1)
        if numbers is not None:
            likely = probabilities(
                logits.masked_fill(~finite, 0.0), largest.masked_fill(~finite, 0.0), group.temperature
            )
            tokens = draw_without_waiting(likely, numbers, group.cuts)
        return torch.where(finite.squeeze(1), tokens, NOT_FINITE)


def largest_tokens(logits: torch.Tensor) -> torch.Tensor:
    """[rows] The token of each row's largest logit; NOT_FINITE if a logit is NaN or the largest is infinite"""
    values, tokens = logits.max(dim=-1)
    return torch.where(torch.isfinite(values), tokens, NOT_FINITE)


class _Group:
    """Rows of one kind"""

    def __init__(
        self, kind: Kind, rows: Sequence[TableRow], in_batch: Sequence[int], link: Link, vocabulary: int
    ) -> None:
        self.kind = kind
        self.rows = [rows[place] for place in in_batch]
        self.places = link.upload(np.array(in_batch, dtype=np.int64))
        asked = [row.sampling for row in self.rows]
        self.temperature = link.upload(temperatures(asked))
        self.cuts = cuts_of(asked, vocabulary, link.upload) if kind.cut else None
        self.slots = self.places
        """The rows' slots, if they are adjusted"""


class _Layout(RowLayout):
    def __init__(self, rows: Sequence[TableRow], link: Link, adjustments: DeviceAdjustments, vocabulary: int) -> None:
        super().__init__(rows, vocabulary)
        self.groups = [
            _Group(kind, rows, places, link, vocabulary) for kind, places in self.by_kind.items() if kind != GREEDY
        ]
        """The groups, without rows that want only the token of their largest logit"""
        self.adjusted = [group for group in self.groups if group.kind.adjusted]
        for group in self.adjusted:
            group.slots = link.upload(adjustments.slots_of(group.rows))
        self.counts = alternatives([rows[place] for place in self.asking], vocabulary)
        if self.asking:
            self.places = link.upload(np.array(self.asking, dtype=np.int64))
            """The places of the rows that ask for log probabilities"""
