"""Changes the logits of rows, before they draw, as `row_changes` says."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from motet_runner.external.vllm.row_changes import RowChange

_ADDED = torch.from_numpy(
    np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf)
).float()
"""To the logits of the eight tokens of each byte of a mask. To look it up takes a tenth of the time of the bits."""


def change_logits(logits: torch.Tensor, rows: Mapping[int, RowChange]) -> None:
    """`logits`: [rows, vocabulary], float32. `rows`: by their places there"""
    masks = {at: row.bits for at, row in rows.items() if row.bits is not None}
    if masks:
        _forbid(logits, masks)
    penalised = {at: row for at, row in rows.items() if len(row.tokens)}
    if penalised:
        _penalise(logits, penalised)


def _forbid(logits: torch.Tensor, masks: Mapping[int, npt.NDArray[np.uint8]]) -> None:
    device = logits.device
    bits = torch.from_numpy(np.stack(list(masks.values()))).to(device)
    added = _ADDED.to(device).index_select(0, bits.flatten().int()).view(len(masks), -1)
    logits.index_add_(0, torch.tensor(list(masks), device=device), added[:, : logits.shape[1]])


def _penalise(logits: torch.Tensor, rows: Mapping[int, RowChange]) -> None:
    device, each = logits.device, rows.values()
    counts = [len(row.tokens) for row in each]
    at = torch.from_numpy(np.repeat(list(rows), counts)).to(device)
    tokens = torch.from_numpy(np.concatenate([row.tokens for row in each])).to(device).long()
    amounts = torch.from_numpy(np.concatenate([row.amounts for row in each])).to(device)
    repetition = torch.from_numpy(np.repeat([row.repetition for row in each], counts).astype(np.float32)).to(device)
    # Ours come after the division, as with our own engine. If vLLM divides later, it is undone before.
    found = logits[at, tokens]
    reduced = torch.where(found > 0, found / repetition, found * repetition) - amounts
    logits[at, tokens] = torch.where(reduced > 0, reduced * repetition, reduced / repetition)
