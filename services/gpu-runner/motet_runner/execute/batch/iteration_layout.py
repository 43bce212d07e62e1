"""The order of an iteration's rows and tokens. It is kept while the same rows decode with the same adapters."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from motet.domain import Digest
from motet_runner.execute.batch.row_table import TableRow
from motet_runner.execute.batch.scored_rows import ScoredRow


@dataclass(slots=True)
class IterationLayout:
    """Arrays of the rows and tokens, and the batches made of them."""

    changes: int
    """The row table's `changes` when this was made"""
    adapters: dict[Digest, int]
    """Adapter → the first page of its run"""
    numbers: tuple[int, ...]
    """The rows' numbers in the table, in the order of the plan"""
    order: np.ndarray
    """[sequences] each sequence's index in the plan"""
    rows: list[TableRow]
    """Sorted by `order`, like all fields below"""
    table_rows: np.ndarray
    """The numbers of `rows` in the table"""
    counts: np.ndarray
    """Each sequence's number of new tokens"""
    firsts: np.ndarray
    """Where each sequence's new tokens begin"""
    sequence_of: np.ndarray
    """[tokens] the index of each token's sequence"""
    within: np.ndarray
    """[tokens] each token's index among the new tokens of its sequence"""
    keep: torch.Tensor
    sampled: list[TableRow]
    """In the order of the plan, like `keep`"""
    greedy: bool
    """True if some rows sample with temperature 0, and no prompt is scored"""
    scored: list[ScoredRow]
    """In `keep`, the scored rows follow `sampled`"""
    lora: Any
    attended: Any = None
    buffers: "DecodeBuffers | None" = None


class DecodeBuffers:
    """Buffers that each iteration of a decode-only layout overwrites, because making small arrays and tensors takes
    longer than filling them."""

    def __init__(self, layout: IterationLayout) -> None:
        count = len(layout.rows)
        self.tokens = np.empty(count, dtype=np.int64)
        self.positions = np.empty(count, dtype=np.int64)
        self.input_ids = torch.from_numpy(self.tokens)[None]
        self.position_ids = torch.from_numpy(self.positions)[None]
        self.choices = torch.empty(count, dtype=torch.int64) if layout.greedy else None
        places = layout.order.tolist()
        self.places = None if places == list(range(count)) else places
        """The rows' places in the plan; None: the rows are in the plan's order"""
