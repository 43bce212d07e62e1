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
        refused: list[tuple[int, TableRow, RowMask]] = []
        for at, row in enumerate(rows):
            if (mask := row.mask) is None or (token := samples.tokens[at]) is None:
                continue
            # One that is late belongs to another thread: its row runs again after a park, or in parts.
            if mask.late or not mask.take(token, row.output_tokens + missing):
                refused.append((at, row, mask))
        if not refused:
            return []
        self.threads.make((mask for _, _, mask in refused), spent=spent)
        late: list[int] = []
        for at, row, mask in refused:
            if mask.allowed is None:
                samples.tokens[at] = None
                samples.logprobs.pop(at, None)
                late.append(row.number)
                continue
            of_row = logits[at : at + 1]
            samples.tokens[at] = token = self.again(of_row, row, mask, mask.allowed, row.output_tokens + missing)
            if token is not None and at in samples.logprobs:
                samples.logprobs[at] = _logprobs(of_row, row, token)
        return late

    def again(self, logits: torch.Tensor, row: TableRow, mask: RowMask, bits: bytes, place: int) -> int | None:
        allowed = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=logits.shape[1], bitorder="little")
        forbidden = torch.from_numpy(allowed == 0).to(logits.device)
        token = self.sampler.sample_again(logits.float().masked_fill(forbidden, -torch.inf), row)
        return token if token is not None and mask.take(token, place) else None


def _logprobs(logits: torch.Tensor, row: TableRow, token: int) -> Logprobs:
    counts = alternatives([row], logits.shape[1])
    (found,) = read(best(logits.float(), torch.tensor([token], device=logits.device), max(counts)), counts)
    return found
