"""Holds sampled tokens against the masks of their rows.

A row chooses as it would without a mask. Only if its mask refuses the token, the mask is made, and the row chooses
again from the same logits, less what is forbidden. Greedily that is the token of masking first. A draw uses a second
number of the same position: without cuts the tokens have the same distribution as by masking first, and with cuts the
first draw's cuts know nothing of the mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from motet_runner.execute.batch.row_table import TableRow
from motet_runner.execute.sample.host_sampler import Sampler, Samples
from motet_runner.execute.sample.logprobs import alternatives, best, read
from motet_runner.interface import Logprobs


@dataclass(frozen=True, slots=True)
class RowMasks:
    sampler: Sampler

    def hold(self, rows: Sequence[TableRow], logits: torch.Tensor, samples: Samples, *, missing: int = 0) -> None:
        """Replaces the tokens that are refused, and their log probabilities, which stay the model's own. A row that
        may get no token at all gets None. `missing`: how many of its tokens each row does not have yet."""
        for place, row in enumerate(rows):
            token = samples.tokens[place]
            if row.mask is None or token is None or row.mask.take(token, row.output_tokens + missing):
                continue
            samples.tokens[place] = token = self.again(logits[place : place + 1], row, row.output_tokens + missing)
            if token is not None and place in samples.logprobs:
                samples.logprobs[place] = _logprobs(logits[place : place + 1], row, token)

    def again(self, logits: torch.Tensor, row: TableRow, place: int) -> int | None:
        assert row.mask is not None
        bits = np.frombuffer(row.mask.allowed(), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=logits.shape[1], bitorder="little")
        forbidden = torch.from_numpy(allowed == 0).to(logits.device)
        token = self.sampler.sample_again(logits.float().masked_fill(forbidden, -torch.inf), row)
        return token if token is not None and row.mask.take(token, place) else None


def _logprobs(logits: torch.Tensor, row: TableRow, token: int) -> Logprobs:
    counts = alternatives([row], logits.shape[1])
    (found,) = read(best(logits.float(), torch.tensor([token], device=logits.device), max(counts)), counts)
    return found
