"""Holds sampled tokens against the masks of their rows.

A row chooses as it would without a mask. Only if its mask refuses the token, the mask is made, and the row chooses
again from the same logits, less what is forbidden. Greedily that is the token of masking first. A draw uses a second
number of the same position: without cuts the tokens have the same distribution as by masking first, and with cuts the
first draw's cuts know nothing of the mask. If the mask comes late, the row gets no token now, and computes its logits
again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from motet_runner.execute.batch.row_table import TableRow
from motet_runner.execute.sample.host_sampler import Sampler, Samples
from motet_runner.execute.sample.logprobs import alternatives, best, read
from motet_runner.interface import Logprobs
from motet_runner.mask_threads import MaskThreads
from motet_runner.row_mask import RowMask

_Refused = tuple[int, TableRow, RowMask]
"""A row's place in the batch, the row and its mask"""


@dataclass(frozen=True, slots=True)
class RowMasks:
    sampler: Sampler
    threads: MaskThreads

    def hold(
        self,
        rows: Sequence[TableRow],
        logits: torch.Tensor,
        samples: Samples,
        *,
        missing: int = 0,
        spent: float = 0.0,
    ) -> list[int]:
        """Replaces the tokens that are refused, and their log probabilities, which stay the model's own. A row that
        may get no token at all gets None, and so does one whose mask is late → the numbers of such rows. `missing`: how
        many of its tokens each row does not have yet. `spent`: the seconds of the iteration so far."""
        refused: list[_Refused] = []
        for at, row in enumerate(rows):
            if (mask := row.mask) is None or (token := samples.tokens[at]) is None:
                continue
            # One that is late belongs to another thread: its row runs again after a park, or in parts.
            if mask.late or not mask.take(token, row.output_tokens + missing):
                refused.append((at, row, mask))
        if not refused:
            return []
        self.threads.make((mask for _, _, mask in refused), spent=spent)
        late, in_time = list[int](), list[_Refused]()
        for at, row, mask in refused:
            if mask.allowed is not None:
                in_time.append((at, row, mask))
                continue
            samples.tokens[at] = None
            samples.logprobs.pop(at, None)
            late.append(row.number)
        for (at, row, mask), token in zip(in_time, self._again(logits, in_time), strict=True):
            if token is None or not mask.take(token, row.output_tokens + missing):
                samples.tokens[at] = None
                continue
            samples.tokens[at] = token
            if at in samples.logprobs:
                samples.logprobs[at] = logprobs_of(logits[at : at + 1], row, token)
        return late

    def _again(self, logits: torch.Tensor, refused: Sequence[_Refused]) -> list[int | None]:
        """What the rows choose among the tokens that their masks allow"""
        if not refused:
            return []
        vocabulary = logits.shape[1]
        bits = np.zeros((len(refused), -(-vocabulary // 8)), dtype=np.uint8)
        chosen_from = np.empty((len(refused), vocabulary), dtype=np.float32)
        for number, (at, _, mask) in enumerate(refused):
            allowed = np.frombuffer(mask.allowed or b"", dtype=np.uint8)[: bits.shape[1]]
            bits[number, : len(allowed)] = allowed
            torch.from_numpy(chosen_from[number]).copy_(logits[at])
        # With torch, another thread would take a part of it, and wait for a core that masks use.
        forbidden = np.unpackbits(~bits, axis=1, count=vocabulary, bitorder="little").view(np.bool_)
        np.copyto(chosen_from, -np.inf, where=forbidden)
        rows = [row for _, row, _ in refused]
        return self.sampler.sample_again(torch.from_numpy(chosen_from).to(logits.device), rows)


def logprobs_of(logits: torch.Tensor, row: TableRow, token: int) -> Logprobs:
    counts = alternatives([row], logits.shape[1])
    (found,) = read(best(logits.float(), torch.tensor([token], device=logits.device), max(counts)), counts)
    return found
