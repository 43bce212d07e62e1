"""One iteration as the model's input: the new tokens of all sequences concatenated, and the places of their KV.

There is no padding between sequences of different lengths (OR-03, S3-06).
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from motet_runner.execute.batch.page_groups import DecodeGroup, PromptChunk
from motet_runner.execute.batch.row_table import TableRow
from motet_runner.execute.batch.scored_rows import ScoredRow
from motet_runner.memory.paged import PagedStore

Watcher = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], None]
"""Called with module, query, key, value and options of an attention call."""


_NOWHERE = torch.empty(0, dtype=torch.int64)


class AttentionOverPages(Protocol):
    """Attention that reads pages in place"""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        batch: Any,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor: ...


class SequenceAttention(AttentionOverPages, Protocol):
    """An implementation for whole sequences, such as motet_kernels.cpp.PagedAttention, with its own type of batch."""

    def make_batch(self, table: npt.NDArray[np.int32], sequences: npt.NDArray[np.int64]) -> Any:
        """`table` [any, pages] holds page numbers. `sequences` [sequences, 4]: first row, number of rows, tokens before
        them, and the sequence's row of the table."""

    def follow(self, batch: Any, before: npt.NDArray[np.int64], longest: int) -> None:
        """The same sequences have grown. `before`: each sequence's number of tokens before its new tokens; `longest`:
        the tokens of the longest sequence, with its new tokens."""


class PagedRows(NamedTuple):
    """All rows, for attention that reads pages in place."""

    attention: AttentionOverPages
    batch: Any


class Line(NamedTuple):
    """Which sequence each of the iteration's tokens belongs to."""

    rows: list[TableRow]
    """In the order of the concatenated tokens"""
    sequence_of: np.ndarray
    """[tokens] the index in `rows` of each token's row"""
    positions: np.ndarray
    """[tokens] each token's position in its sequence"""


@dataclass(slots=True)
class FlatBatch:
    store: PagedStore
    input_ids: torch.Tensor
    positions: torch.Tensor
    keep: torch.Tensor
    """The batch's rows whose logits are wanted"""
    sampled: list[TableRow]
    """In the order of `keep`, which is the plan's"""
    scored: list[ScoredRow]
    """In the order of `keep`, after the sampled rows"""
    begun: list[int]
    """Pages that this iteration begins and does not fill. They are cleared before the model runs"""
    lora: Any
    """The batch of the LoRA back end; None if no row has an adapter"""
    tokens: int
    longest: int
    """The tokens of the longest sequence, with its new tokens"""
    line: Line
    paged: PagedRows | None = None
    writes: torch.Tensor = _NOWHERE
    """[layers, ...] see PagedStore.rows_of; empty, like `decodes` and `chunks`, if there are `paged` rows"""
    decodes: Sequence[DecodeGroup] = ()
    chunks: Sequence[PromptChunk] = ()
    head_rows: torch.Tensor | None = None
    """The rows that the head computes; None: the rows of `keep`"""
    choices: torch.Tensor | None = None
    """[sampled] memory for the token of each row's largest logit; None if these tokens are not wanted"""
    chosen: torch.Tensor | None = None
    """`choices`, once the model call has filled it: -1 where the logits are not finite"""
    calls: int = 0
    """The number of attention calls so far"""
    watcher: Watcher | None = None
    """Gets each attention call. Only the probe has a watcher"""

    @property
    def all_decode_together(self) -> bool:
        return len(self.decodes) == 1 and self.decodes[0].count == self.tokens and not self.decodes[0].scattered


CURRENT: ContextVar[FlatBatch] = ContextVar("motet_flat_batch")
"""The batch of the current model call."""
