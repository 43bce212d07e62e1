"""Holds sampled tokens against the masks of their rows.

A row chooses as it would without a mask. Only if its mask refuses the token, the mask is made, and the row chooses
again from the same logits, less what is forbidden. Greedily that is the token of masking first. A draw uses a second
number of the same position: without cuts the tokens have the same distribution as by masking first, and with cuts the
first draw's cuts know nothing of the mask. If the mask comes late, the row gets no token now, and computes its logits
again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from motet_runner.execute.batch.row_table import MaskedRow, TableRow
from motet_runner.execute.sample.host_sampler import CPU_GROUP, Sampler, Samples
from motet_runner.execute.sample.logprobs import alternatives, best, read
from motet_runner.interface import Logprobs
from motet_runner.mask_threads import MaskThreads

_LIMITS_OF_BYTE: npt.NDArray[np.void] = (
    np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
    .astype(np.float32)
    .view("V32")
    .reshape(256)
)
"""For the eight tokens of each byte of a mask: the most that their logits may be. NumPy finds the smaller of two
numbers many times faster than it chooses between two by a truth value."""


class _KeptMemory:
    """Memory for some rows, kept because allocating it takes longer than filling it."""

    def __init__(self) -> None:
        self._make(0, 0)

    def allowed_logits(self, logits: torch.Tensor, rows: Sequence[MaskedRow]) -> npt.NDArray[np.float32]:
        """Of these rows: less than any number where their masks forbid a token. It is overwritten by the next call."""
        count, vocabulary = len(rows), logits.shape[1]
        if count > len(self._logits) or vocabulary != self._logits.shape[1]:
            self._make(count, vocabulary)
        bits, limits = self._bits[:count], self._limits[:count]
        bits[:] = 0
        for number, one in enumerate(rows):
            allowed = np.frombuffer(one.mask.allowed or b"", dtype=np.uint8)[: bits.shape[1]]
            bits[number, : len(allowed)] = allowed
        _LIMITS_OF_BYTE.take(bits, out=limits, mode="clip")
        found = self._in_float32(logits, [one.at for one in rows])
        return np.minimum(found, limits.view(np.float32)[:, :vocabulary], out=found)

    def _make(self, rows: int, vocabulary: int) -> None:
        size = -(-vocabulary // 8)
        self._logits = np.empty((rows, vocabulary), dtype=np.float32)
        self._halves = np.empty((rows, vocabulary), dtype=np.uint16)
        self._limits = np.empty((rows, size), dtype=_LIMITS_OF_BYTE.dtype)
        self._bits = np.empty((rows, size), dtype=np.uint8)

    def _in_float32(self, logits: torch.Tensor, places: Sequence[int]) -> npt.NDArray[np.float32]:
        """With torch, another thread would take a part of it, and wait for a core that masks use."""
        found, halves = self._logits[: len(places)], self._halves[: len(places)]
        if logits.device.type != "cpu" or logits.dtype not in (torch.bfloat16, torch.float32):
            found[:] = logits[torch.tensor(places, device=logits.device)].float().cpu().numpy()
        elif logits.dtype is torch.float32:
            logits.numpy().take(places, axis=0, out=found, mode="clip")
        else:
            logits.view(torch.int16).numpy().view(np.uint16).take(places, axis=0, out=halves, mode="clip")
            np.left_shift(halves, 16, out=found.view(np.uint32), dtype=np.uint32)
        return found


@dataclass(frozen=True, slots=True)
class RowMasks:
    sampler: Sampler
    threads: MaskThreads
    _kept: _KeptMemory = field(default_factory=_KeptMemory)

    def hold(
        self,
        rows: Sequence[MaskedRow],
        logits: torch.Tensor,
        samples: Samples,
        *,
        missing: int = 0,
        spent: float = 0.0,
    ) -> list[int]:
        """Replaces the tokens that are refused, and their log probabilities, which stay the model's own. A row that
        may get no token at all gets None, and so does one whose mask is late → the numbers of such rows. `missing`: how
        many tokens each row has got since `masked_rows`. `spent`: the seconds of the iteration so far."""
        tokens = samples.tokens
        # One that is late belongs to another thread: its row runs again after a park, or in parts.
        refused = [
            one
            for one in rows
            if (token := tokens[one.at]) is not None and (one.mask.late or not one.mask.take(token, one.next + missing))
        ]
        if not refused:
            return []
        self.threads.make([one.mask for one in refused], spent=spent)
        late, in_time = list[int](), list[MaskedRow]()
        for one in refused:
            if one.mask.allowed is not None:
                in_time.append(one)
                continue
            tokens[one.at] = None
            samples.logprobs.pop(one.at, None)
            late.append(one.row.number)
        for one, token in zip(in_time, self._again(logits, in_time), strict=True):
            if token is None or not one.mask.take(token, one.next + missing):
                tokens[one.at] = None
                continue
            tokens[one.at] = token
            if one.at in samples.logprobs:
                samples.logprobs[one.at] = logprobs_of(logits[one.at : one.at + 1], one.row, token)
        return late

    def _again(self, logits: torch.Tensor, refused: Sequence[MaskedRow]) -> list[int | None]:
        """What the rows choose among the tokens that their masks allow"""
        again: list[int | None] = []
        size = max(1, CPU_GROUP // logits.shape[1])
        for first in range(0, len(refused), size):
            group = refused[first : first + size]
            chosen_from = self._kept.allowed_logits(logits, group)
            if self.sampler.chose_largest:
                tokens = chosen_from.argmax(axis=-1)
                finite = np.isfinite(chosen_from[np.arange(len(tokens)), tokens])
                again += [token if sane else None for token, sane in zip(tokens.tolist(), finite.tolist(), strict=True)]
            else:
                given = torch.from_numpy(chosen_from).to(logits.device)
                again += self.sampler.sample_again(given, [one.row for one in group])
        return again


def logprobs_of(logits: torch.Tensor, row: TableRow, token: int) -> Logprobs:
    counts = alternatives([row], logits.shape[1])
    (found,) = read(best(logits.float(), torch.tensor([token], device=logits.device), max(counts)), counts)
    return found
