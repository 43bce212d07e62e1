"""Penalties, bias and forbidden EOS tokens of all rows, counted on the host and kept as tensors.

Two buffers persist between steps: what is added to each logit, and the divisors of repeated logits. They have a row per
row of the table. A step changes only the few numbers that the newest tokens change.
"""

from collections.abc import Sequence

import torch

from motet_runner.execute.batch.row_table import TableRow
from motet_runner.execute.sample.adjustment import Adjustment

_FIRST_ROWS = 16


class AdjustedLogits:
    def __init__(self, eos: frozenset[int]) -> None:
        self._eos = eos
        self._added = torch.empty(0, 0, dtype=torch.float32)
        self._divisors = torch.empty(0, 0, dtype=torch.float32)

    def follow(self, rows: Sequence[TableRow], like: torch.Tensor) -> None:
        """Count the rows' new tokens. `like`: their logits."""
        try:
            self._follow(rows, like)
        except BaseException:
            # Such as out of memory. These rows begin anew, so no change is lost.
            for row in rows:
                row.adjustment = None
            raise

    def _follow(self, rows: Sequence[TableRow], like: torch.Tensor) -> None:
        added: list[tuple[int, int, float]] = []
        divisors: list[tuple[int, int, float]] = []
        vocabulary = like.shape[1]
        for row in rows:
            sampling = row.sampling
            repeats = sampling.repetition_penalty != 1
            adjustment = row.adjustment
            if not isinstance(adjustment, Adjustment):
                adjustment = row.adjustment = Adjustment(
                    sampling, row.prompt_tokens, self._eos | sampling.stop_token_ids
                )
                self._added = _with_row(self._added, row.number, like)
                self._added[row.number] = 0.0
                if repeats:
                    self._divisors = _with_row(self._divisors, row.number, like)
                    self._divisors[row.number] = 1.0
            changes, new = adjustment.follow(row.tokens)
            added += [(row.number, token, value) for token, value in changes.items() if token < vocabulary]
            if repeats:
                divisors += [(row.number, token, sampling.repetition_penalty) for token in set(new)]
        _write(self._added, added)
        _write(self._divisors, divisors)

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, *, repeats: bool) -> torch.Tensor:
        """`rows`: the rows' numbers in the table. `repeats`: True if some rows have a repetition penalty. This penalty
        counts prompt and output, and comes first, as in transformers."""
        return adjusted(logits, self._added[rows], self._divisors[rows] if repeats else None)


def adjusted(logits: torch.Tensor, added: torch.Tensor, divisors: torch.Tensor | None) -> torch.Tensor:
    """All tensors are [rows, vocabulary]. `divisors`: None if no row has a repetition penalty."""
    if divisors is not None:
        # One of the two clamped parts is 0. `where`, which branches, takes five times as long.
        logits = torch.addcmul(logits.clamp(min=0).div_(divisors), logits.clamp(max=0), divisors)
    return logits + added


def _with_row(buffer: torch.Tensor, row: int, like: torch.Tensor) -> torch.Tensor:
    """A buffer that has this row. A buffer that is too small doubles, so copies are rare."""
    rows = len(buffer)
    if row < rows:
        return buffer
    size = max(row + 1, 2 * rows, _FIRST_ROWS), like.shape[1]
    larger = torch.empty(size, device=like.device, dtype=torch.float32)
    if rows:
        larger[:rows] = buffer
    return larger


def _write(buffer: torch.Tensor, entries: list[tuple[int, int, float]]) -> None:
    if entries:
        rows, tokens, values = zip(*entries, strict=True)
        where = torch.tensor((rows, tokens), device=buffer.device)
        buffer[where[0], where[1]] = torch.tensor(values, device=buffer.device, dtype=buffer.dtype)
