"""From logits to tokens, for all rows of the batch together.

Randomness depends on (seed, choice, position) alone, so a sequence that was parked, moved or batched differently gets
the same tokens. One uniform number selects each token: see `draw.py`.

Rows that need the same work form a group. The groups are made when the rows of the batch change.
"""

from dataclasses import dataclass

import numpy as np
import torch

from motet_runner.execute.batch.row_table import TableRow
from motet_runner.execute.sample.draw import draw, probabilities
from motet_runner.execute.sample.host_adjustments import AdjustedLogits
from motet_runner.execute.sample.logprobs import alternatives, best, read
from motet_runner.execute.sample.row_layout import RowLayout
from motet_runner.execute.sample.sampling_kind import Kind, cuts_of, temperatures, uniforms
from motet_runner.interface import Logprobs

_INFINITY = 0x7F80
_MINUS_INFINITY = 0xFF80
"""The bits of both infinities in bfloat16"""

CPU_GROUP = 1 << 18
"""The most logits of a group on a CPU, so that its intermediate results stay in the cache."""


@dataclass(frozen=True, slots=True)
class Samples:
    tokens: list[int | None]
    """In the order of the rows; None for a row whose largest logit is not finite, or with a NaN"""
    logprobs: dict[int, Logprobs]
    """Place of a row that asks for log probabilities → its log probabilities"""


class Sampler:
    def __init__(self, eos: frozenset[int]) -> None:
        self._adjusted = AdjustedLogits(eos)
        self._batch: _Batch | None = None
        self._float32 = torch.empty(0, 0, dtype=torch.float32)
        """Memory for logits, kept because allocating it takes longer than filling it"""

    @property
    def chose_largest(self) -> bool:
        """True if all rows of the last `sample` wanted only the token of their largest logit. The same rows never want
        more later."""
        return self._batch is not None and self._batch.greedy

    def sample(self, logits: torch.Tensor, rows: list[TableRow], chosen: torch.Tensor | None = None) -> Samples:
        """Each row's next token, from its row of `logits`. `chosen`: the token of each row's largest logit, -1 where
        this is not finite or a logit is NaN; None: not known."""
        batch = self._batch
        if batch is None or not batch.has(rows):
            batch = self._batch = _Batch(list(rows), logits)
        if batch.greedy and chosen is not None:
            return Samples([None if token < 0 else token for token in chosen.tolist()], {})
        if batch.greedy and logits.dtype is torch.bfloat16 and logits.device.type == "cpu":
            return Samples(_largest_bfloats(logits), {})
        given = self._in_float32(logits)
        if batch.adjusted:
            self._adjusted.follow(batch.adjusted, given)
        chosen_tokens, tokens = self._sample_all(given, batch)
        return Samples(chosen_tokens, _logprobs(given, batch, tokens))

    def sample_again(self, logits: torch.Tensor, rows: list[TableRow]) -> list[int | None]:
        """Another token of each row, which `sample` has had, from its row of these logits, with its second number."""
        return self._sample_all(logits, _Batch(rows, logits), second=True)[0]

    def _in_float32(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.dtype is torch.float32 or logits.device.type != "cpu":
            return logits.float()
        rows, vocabulary = logits.shape
        if rows > len(self._float32) or vocabulary != self._float32.shape[1]:
            self._float32 = torch.empty(rows, vocabulary, dtype=torch.float32)
        return self._float32[:rows].copy_(logits)

    def _sample_all(
        self, logits: torch.Tensor, batch: "_Batch", *, second: bool = False
    ) -> tuple[list[int | None], torch.Tensor]:
        """Each row's token, None where its largest logit is not finite; the same as numbers"""
        if len(batch.groups) == 1:
            tokens, finite = self._sample_group(logits, batch.groups[0], second=second)
        else:
            tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
            finite = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
            for group in batch.groups:
                tokens[group.places], finite[group.places] = self._sample_group(
                    logits[group.places], group, second=second
                )
        drawn = zip(tokens.tolist(), finite.tolist(), strict=True)
        return [token if sane else None for token, sane in drawn], tokens

    def _sample_group(
        self, logits: torch.Tensor, group: "_Group", *, second: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if group.in_table is not None:
            logits = self._adjusted.apply(logits, group.in_table, repeats=group.repeats)
        largest, tokens, finite = _largest(logits)
        if group.temperature is not None:
            if not bool(finite.all()):
                logits = logits.masked_fill(~finite, 0.0)
                largest = largest.masked_fill(~finite, 0.0)
            numbers = torch.from_numpy(uniforms(group.rows, second=second)).to(logits.device)
            tokens = draw(probabilities(logits, largest, group.temperature), numbers, group.cuts)
        return tokens, finite.squeeze(1)


class _Rows:
    """Some rows of the batch."""

    def __init__(self, batch: list[TableRow], in_batch: list[int], device: torch.device) -> None:
        self.in_batch = in_batch
        self.rows = [batch[place] for place in in_batch]
        first, last = in_batch[0], in_batch[-1]
        # With a slice, nothing is copied.
        in_line = last - first == len(in_batch) - 1
        self.places = slice(first, last + 1) if in_line else torch.tensor(in_batch, device=device)


class _Group(_Rows):
    """Rows of one kind."""

    def __init__(self, batch: list[TableRow], in_batch: list[int], kind: Kind, like: torch.Tensor) -> None:
        """`like`: the logits of the batch."""
        device = like.device
        super().__init__(batch, in_batch, device)
        asked = [row.sampling for row in self.rows]
        self.repeats = kind.repeats
        self.in_table = torch.tensor([row.number for row in self.rows], device=device) if kind.adjusted else None
        self.temperature: torch.Tensor | None = None
        if kind.drawn:
            self.temperature = torch.from_numpy(temperatures(asked)).to(device)
        self.cuts = None
        if kind.cut:
            self.cuts = cuts_of(asked, like.shape[1], lambda numbers: torch.from_numpy(numbers).to(device))


class _Batch(RowLayout):
    def __init__(self, rows: list[TableRow], like: torch.Tensor) -> None:
        super().__init__(rows, like.shape[1])
        self.groups = [
            _Group(rows, places, kind, like)
            for kind, of_kind in self.by_kind.items()
            for places in (_split(of_kind, like) if kind.adjusted or kind.drawn else [of_kind])
        ]
        self.adjusted = [row for group in self.groups if group.in_table is not None for row in group.rows]
        self.with_logprobs = [_Rows(rows, places, like.device) for places in _split(self.asking, like)]


def _split(places: list[int], like: torch.Tensor) -> list[list[int]]:
    size = max(1, CPU_GROUP // like.shape[1]) if like.device.type == "cpu" else max(1, len(places))
    return [places[first : first + size] for first in range(0, len(places), size)]


def _largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each row's largest logit [rows, 1], NaN if any logit is NaN; its token [rows]; True if it is finite [rows, 1]."""
    # On a CPU, NumPy's search is many times faster than torch's.
    if logits.device.type == "cpu":
        numbers = logits.numpy()
        tokens = numbers.argmax(axis=-1)
        largest = numbers[np.arange(len(tokens)), tokens][:, None]
        return torch.from_numpy(largest), torch.from_numpy(tokens), torch.from_numpy(np.isfinite(largest))
    values, best = logits.max(dim=-1, keepdim=True)
    return values, best.squeeze(1), torch.isfinite(values)


def _largest_bfloats(logits: torch.Tensor) -> list[int | None]:
    """The token of each row's largest logit; None if a logit is NaN or the largest is infinite. Compares the bits of
    the logits, because a copy in float32 takes longer: read as integers, positive numbers keep their order and negative
    numbers stay below 0."""
    bits = logits.view(torch.int16).numpy()
    tokens = bits.argmax(axis=-1)
    largest = bits[np.arange(len(bits)), tokens]
    nan_with_sign = bits.view(np.uint16).max(axis=-1) > _MINUS_INFINITY
    chosen: list[int | None] = tokens.tolist()
    for row in np.flatnonzero((largest <= 0) | (largest >= _INFINITY) | nan_with_sign).tolist():
        numbers = logits[row].float().numpy()
        token = int(numbers.argmax())
        chosen[row] = token if np.isfinite(numbers[token]) else None
    return chosen


def _logprobs(logits: torch.Tensor, batch: _Batch, tokens: torch.Tensor) -> dict[int, Logprobs]:
    found: dict[int, Logprobs] = {}
    for group in batch.with_logprobs:
        counts = alternatives(group.rows, logits.shape[1])
        of_group = read(best(logits[group.places], tokens[group.places], max(counts)), counts)
        found |= zip(group.in_batch, of_group, strict=True)
    return found
