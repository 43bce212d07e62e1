"""What rows of vLLM need before they draw their next tokens: the bits of a mask, and penalties.

vLLM got what was delivered of an answer as a part of its prompt, so it cannot count those tokens. The engine's process
writes between two iterations. A logits processor reads at the beginning of one, maybe in a worker's process: so both
have the same memory, which has no name in any folder and ends with the last process. No vllm, no torch.
"""

import os
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from motet_runner.external.vllm.driven import Ask, Produced

COUNTS = 3
MAX_OWNER = (1 << 31) - 1
NOBODY = 0
KEY = "motet_row"
"""In the `extra_args` of a request whose row is changed"""

_Bytes = npt.NDArray[np.uint8]
_Tokens = npt.NDArray[np.int32]
_Amounts = npt.NDArray[np.float32]


class _Sizes(NamedTuple):
    rows: int
    mask_bytes: int
    tokens: int


class _Memory:
    """A row has: whether it is masked, how many tokens it penalises, whose it is, the mask's bits, these tokens, and
    the amounts."""

    def __init__(self, path: str, sizes: _Sizes) -> None:
        rows, mask_bytes, tokens = sizes
        whole: _Bytes = np.asarray(np.memmap(path, np.uint8, mode="r+"))
        counts, amounts, numbers, bits = np.split(
            whole, np.cumsum([rows * 4 * COUNTS, rows * tokens * 4, rows * tokens * 4])
        )
        self.counts: _Tokens = counts.view(np.int32).reshape(rows, COUNTS)
        self.amounts: _Amounts = amounts.view(np.float32).reshape(rows, tokens)
        self.tokens: _Tokens = numbers.view(np.int32).reshape(rows, tokens)
        self.bits = bits.reshape(rows, mask_bytes)


@dataclass(slots=True)
class _Written:
    """A row of the memory that a request has"""

    number: int
    presence: float
    frequency: float
    times: dict[int, list[int]] = field(default_factory=dict)
    """By token of the answer: its place in the row, and how often it came"""


class RowChanges:
    """The side that writes."""

    def __init__(self, rows: int, vocabulary: int, max_length: int) -> None:
        """`rows`: of requests that run at once"""
        self._sizes = _Sizes(rows, (vocabulary + 7) // 8, max_length)
        file = os.memfd_create("motet-rows")
        weakref.finalize(self, os.close, file)
        os.truncate(file, rows * (4 * COUNTS + 8 * max_length + self._sizes.mask_bytes))
        self._path = f"/proc/{os.getpid()}/fd/{file}"
        self._memory = _Memory(self._path, self._sizes)
        self._free = list(range(rows))
        self._rows: dict[str, _Written] = {}
        """By the names of their requests"""
        self._owner = NOBODY

    def begin(self, ask: Ask) -> dict[str, Any] | None:
        """The `extra_args` of its request; None: it draws from the logits as they are."""
        presence, frequency = ask.penalties
        if not (ask.masked or presence or frequency):
            return None
        row = self._rows[ask.name] = _Written(self._free.pop(), presence, frequency)
        self._owner = self._owner % MAX_OWNER + 1
        self._memory.counts[row.number] = ask.masked, 0, self._owner
        if presence or frequency:
            for token in ask.tokens[len(ask.tokens) - ask.output_tokens :]:
                self._count(row, token)
        return {KEY: [self._path, *self._sizes, row.number, self._owner]}

    def allow(self, name: str, allowed: bytes) -> None:
        """The tokens that may come next: a bit for each, the first one in the lowest bit"""
        bits = self._memory.bits[self._rows[name].number]
        given = np.frombuffer(allowed, np.uint8)[: len(bits)]
        bits[: len(given)] = given
        bits[len(given) :] = 0

    def take(self, produced: Iterable[Produced]) -> None:
        """Before the next iteration"""
        if not self._rows:
            return
        for one in produced:
            row = self._rows.get(one.name)
            if row is not None and one.ended:
                self.end([one.name])
            elif row is not None and (row.presence or row.frequency):
                self._count(row, one.token)

    def end(self, names: Iterable[str]) -> None:
        for name in names:
            if (row := self._rows.pop(name, None)) is not None:
                self._memory.counts[row.number] = 0, 0, NOBODY
                self._free.append(row.number)

    def _count(self, row: _Written, token: int) -> None:
        memory, number = self._memory, row.number
        known = row.times.setdefault(token, [len(row.times), 0])
        known[1] += 1
        place, times = known
        memory.tokens[number, place] = token
        memory.amounts[number, place] = row.presence + times * row.frequency
        memory.counts[number, 1] = len(row.times)


class RowChange(NamedTuple):
    """What one iteration does to a row"""

    bits: _Bytes | None
    """Of its mask; None: it has none."""
    tokens: _Tokens
    amounts: _Amounts
    """What the logits of these tokens lose"""
    repetition: float
    """By which vLLM divides these logits afterwards; 1: it does not"""


@dataclass(frozen=True, slots=True)
class ChangedRow:
    _memory: _Memory
    _number: int
    _owner: int
    _repetition: float

    @property
    def ended(self) -> bool:
        """Its request is no more, and another one may have the row."""
        return int(self._memory.counts[self._number, 2]) != self._owner

    def read(self) -> RowChange:
        """To be called before the forward pass. Of several workers, one may still have to draw when the first has drawn
        and the engine's process writes for the next iteration. But none has drawn before all are in the forward pass.
        """
        memory, number = self._memory, self._number
        masked, count, _ = memory.counts[number].tolist()
        tokens, amounts = memory.tokens[number, :count].copy(), memory.amounts[number, :count].copy()
        return RowChange(memory.bits[number].copy() if masked else None, tokens, amounts, self._repetition)


class ChangedRows:
    """The side that reads."""

    def __init__(self) -> None:
        self._memories: dict[str, _Memory] = {}

    def row_of(self, extra_args: Mapping[str, Any] | None, repetition: float = 1.0) -> ChangedRow | None:
        """None: this request's row is not changed."""
        told = None if extra_args is None else extra_args.get(KEY)
        if told is None:
            return None
        path, rows, mask_bytes, tokens, number, owner = told
        if path not in self._memories:
            self._memories[path] = _Memory(path, _Sizes(rows, mask_bytes, tokens))
        return ChangedRow(self._memories[path], number, owner, repetition)
