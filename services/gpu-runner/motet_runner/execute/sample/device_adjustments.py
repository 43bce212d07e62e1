"""Penalties, bias and forbidden EOS tokens of all rows that have some, counted on the device.

What is added to a row's logits changes with its newest token, which the host does not know yet. So the device counts by
itself, like `Adjustment` on the host, with the same arithmetic: float64, rounded once.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from motet_runner.execute.batch.row_table import TableRow
from motet_runner.execute.sample.adjustment import Adjustment
from motet_runner.execute.sample.host_adjustments import adjusted
from motet_runner.memory.link import Link
from motet_runner.memory.parcel import Parcel

_FIRST_SLOTS = 16
_FIRST_TOKENS = 4
_NO_TOKEN = -1

_OF_TOKENS = {"_ends": _NO_TOKEN, "_biased": _NO_TOKEN, "_bias": 0}
"""Buffers with a column for each EOS or biased token of a slot → the value of unused columns"""
_BUFFERS = ("_added", "_divisors", "_times", "_presence", "_frequency", "_repetition", "_forbids", *_OF_TOKENS)
"""All buffers, each with a row per slot"""
_BYTES_OF_A_TOKEN = 12
"""Bytes per slot and token of the first three buffers. The other buffers are small."""


class _Slot(NamedTuple):
    number: int
    row: TableRow
    ends: tuple[int, ...]


class Counted(NamedTuple):
    """The next tokens of some rows: their places in the slots' tables, and the new values there"""

    places: torch.Tensor
    times: torch.Tensor
    divisors: torch.Tensor
    added: torch.Tensor


class DeviceAdjustments:
    """Each row that is adjusted has a slot, from its first sampled token until it leaves."""

    def __init__(self, link: Link, eos: frozenset[int], vocabulary: int) -> None:
        self._link = link
        self._eos = eos
        self._vocabulary = vocabulary
        self._slots: dict[int, _Slot] = {}
        """Row number → its slot"""
        self._forbidding: set[int] = set()
        """Numbers of rows whose EOS tokens are still forbidden"""
        self._free: list[int] = []
        f32, f64, i64 = torch.float32, torch.float64, torch.int64
        self._added = self._empty(0, vocabulary, dtype=f32)
        self._divisors = self._empty(0, vocabulary, dtype=f32)
        self._times = self._empty(0, vocabulary, dtype=torch.int32)
        """How often each token is in the output"""
        self._presence, self._frequency = self._empty(0, dtype=f64), self._empty(0, dtype=f64)
        self._repetition = self._empty(0, dtype=f32)
        self._forbids = self._empty(0, dtype=torch.bool)
        self._ends = self._empty(0, _FIRST_TOKENS, dtype=i64)
        self._biased = self._empty(0, _FIRST_TOKENS, dtype=i64)
        self._bias = self._empty(0, _FIRST_TOKENS, dtype=f64)

    def leave(self, row: int) -> None:
        slot = self._slots.pop(row, None)
        self._forbidding.discard(row)
        if slot is not None:
            self._free.append(slot.number)

    def slots_of(self, rows: Sequence[TableRow]) -> np.ndarray:
        """[rows] Each row's slot. A row without a slot gets one; the host must know all tokens of this row."""
        return np.array([self._slot(row) for row in rows], dtype=np.int64)

    def follow(self, rows: Sequence[TableRow], parcel: Parcel) -> Callable[[dict[str, torch.Tensor]], None] | None:
        """Allows EOS tokens in rows that are now long enough: adds these rows to the parcel, and returns the function
        to call when the parcel has arrived. None: no row, as in most iterations."""
        allowed = [
            row for row in rows if row.number in self._forbidding and row.output_tokens >= row.sampling.min_tokens
        ]
        if not allowed:
            return None
        slots = [self._slots[row.number] for row in allowed]
        parcel["allowed"] = np.array([slot.number for slot in slots], dtype=np.int64)
        places = [(slot.number, end) for slot in slots for end in slot.ends]
        parcel["allowed_ends"] = np.array(places, dtype=np.int64).reshape(-1, 2)

        def arrived(sent: dict[str, torch.Tensor]) -> None:
            self._forbids.index_fill_(0, sent["allowed"], value=False)
            self._allow(*sent["allowed_ends"].unbind(1))
            self._forbidding.difference_update(row.number for row in allowed)

        return arrived

    def apply(self, logits: torch.Tensor, slots: torch.Tensor, *, repeats: bool) -> torch.Tensor:
        """`repeats`: True if some of these rows have a repetition penalty"""
        divisors = self._divisors.index_select(0, slots) if repeats else None
        return adjusted(logits, self._added.index_select(0, slots), divisors)

    def counted(self, slots: torch.Tensor, tokens: torch.Tensor) -> Counted:
        """The changes that each row's next token causes"""
        places = slots * self._vocabulary + tokens
        times = self._times.view(-1).index_select(0, places) + 1
        added = self._added_to(slots, tokens, times)
        return Counted(places, times, self._repetition.index_select(0, slots), added)

    def count(self, counted: Counted) -> None:
        """Applies the changes. This allocates no memory."""
        self._times.view(-1).index_copy_(0, counted.places, counted.times)
        self._divisors.view(-1).index_copy_(0, counted.places, counted.divisors)
        self._added.view(-1).index_copy_(0, counted.places, counted.added)

    def _allow(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        places = slots * self._vocabulary + tokens
        added = self._added_to(slots, tokens, self._times.view(-1).index_select(0, places))
        self._added.view(-1).index_copy_(0, places, added)

    def _added_to(self, slots: torch.Tensor, tokens: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """What is added to the logits of tokens that have come `times` times; see `Adjustment`"""
        of_token = self._biased.index_select(0, slots) == tokens[:, None]
        bias = torch.where(of_token, self._bias.index_select(0, slots), 0.0).sum(dim=1)
        penalty = self._presence.index_select(0, slots) + times * self._frequency.index_select(0, slots)
        added = (bias - torch.where(times > 0, penalty, 0.0)).float()
        forbidden = self._forbids.index_select(0, slots)
        forbidden = forbidden & (self._ends.index_select(0, slots) == tokens[:, None]).any(dim=1)
        return added.masked_fill(forbidden, float("-inf"))

    def _slot(self, row: TableRow) -> int:
        known = self._slots.get(row.number)
        if known is not None and known.row is row:
            return known.number
        sampling, ends = row.sampling, self._eos | row.sampling.stop_token_ids
        ends = frozenset(end for end in ends if end < self._vocabulary)
        added, tokens = Adjustment(sampling, row.prompt_tokens, ends).follow(row.tokens)
        bias = {token: value for token, value in sampling.logit_bias.items() if token < self._vocabulary}
        self._make_room(max(len(ends), len(bias)))
        number = self._free.pop()
        try:
            self._write(number, row, sorted(ends), bias, added, tokens)
        except BaseException:  # such as out of memory: the row's slot is made again later
            self._free.append(number)
            raise
        self._slots[row.number] = _Slot(number, row, tuple(ends))
        if row.output_tokens < sampling.min_tokens:
            self._forbidding.add(row.number)
        return number

    def _write(  # noqa: PLR0917 what a row has
        self,
        slot: int,
        row: TableRow,
        ends: Sequence[int],
        bias: dict[int, float],
        added: dict[int, float],
        tokens: Sequence[int],
    ) -> None:
        sampling, width = row.sampling, self._ends.shape[1]
        penalised = bool(sampling.presence_penalty or sampling.frequency_penalty)
        times = Counter(row.tokens[row.prompt_tokens :]) if penalised else {}
        added = {token: value for token, value in added.items() if token < self._vocabulary}
        parcel = Parcel()
        for name, numbers in (("added", added), ("times", times)):
            parcel[name] = np.array(list(numbers), dtype=np.int64)
            parcel[f"{name}_values"] = np.array(list(numbers.values()), dtype=np.float64)
        repeated = {token for token in tokens if token < self._vocabulary} if sampling.repetition_penalty != 1 else ()
        parcel["repeated"] = np.array(sorted(repeated), dtype=np.int64)
        none = [_NO_TOKEN] * width
        parcel["ends"] = np.array([*ends, *none][:width], dtype=np.int64)
        parcel["biased"] = np.array([*bias, *none][:width], dtype=np.int64)
        parcel["bias"] = np.array([*bias.values(), *none][:width], dtype=np.float64)
        sent = parcel.send(self._link)
        self._added[slot].zero_().index_copy_(0, sent["added"], sent["added_values"].float())
        self._times[slot].zero_().index_copy_(0, sent["times"], sent["times_values"].int())
        self._divisors[slot].fill_(1.0).index_fill_(0, sent["repeated"], sampling.repetition_penalty)
        self._ends[slot].copy_(sent["ends"])
        self._biased[slot].copy_(sent["biased"])
        self._bias[slot].copy_(sent["bias"])
        self._presence[slot].fill_(sampling.presence_penalty)
        self._frequency[slot].fill_(sampling.frequency_penalty)
        self._repetition[slot].fill_(sampling.repetition_penalty)
        self._forbids[slot].fill_(row.output_tokens < sampling.min_tokens)

    def _make_room(self, tokens: int) -> None:
        """Make room for one more slot, and for `tokens` EOS or biased tokens per slot. Sizes double."""
        slots, width = self._ends.shape
        more_tokens = max(tokens - width, width) if tokens > width else 0
        more_slots = 0 if self._free else max(slots, _FIRST_SLOTS)
        if not more_tokens and not more_slots:
            return
        buffers = {name: getattr(self, name) for name in _BUFFERS}
        if more_tokens:
            for name, nothing in _OF_TOKENS.items():
                buffers[name] = _wider(buffers[name], more_tokens, nothing)
        if more_slots:
            buffers = {name: _longer(buffer, more_slots) for name, buffer in buffers.items()}
        # Set all together, because any allocation may fail.
        for name, buffer in buffers.items():
            setattr(self, name, buffer)
        self._free += range(slots, slots + more_slots)

    def _empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._link.device)


def adjustment_bytes(rows: int, vocabulary: int) -> int:
    """The bytes of `rows` rows on the device. While the number of slots grows, the old buffers still exist."""
    slots = _FIRST_SLOTS
    while slots < rows:
        slots *= 2
    each = _BYTES_OF_A_TOKEN * vocabulary
    return slots * each + (slots // 2 * each if slots > _FIRST_SLOTS else 0)


def _wider(buffer: torch.Tensor, more: int, value: int) -> torch.Tensor:
    return torch.cat((buffer, buffer.new_full((len(buffer), more), value)), dim=1)


def _longer(buffer: torch.Tensor, more: int) -> torch.Tensor:
    return torch.cat((buffer, buffer.new_zeros((more, *buffer.shape[1:]))))
