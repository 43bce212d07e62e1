"""What is computed to judge: a few texts, in iterations as they are served."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from motet.domain import PAGE_TOKENS, pages_for
from motet_runner.execute.batch.flat_batch import FlatBatch

LENGTHS = (40, 22, 23, 17, 1)
"""Of the texts: about 100 tokens, on several pages"""


class Iteration(NamedTuple):
    counts: Mapping[int, int]
    """How many tokens of each row are computed"""
    some: bool = False
    """Whether the logits of some tokens are wanted, in any order, and not those of all"""


class Session(NamedTuple):
    """Rows on pages of their own"""

    rows: Sequence[tuple[int, int]]
    """The text of each, and how many of its tokens"""
    iterations: Sequence[Iteration]

    @property
    def pages(self) -> int:
        return sum(pages_for(tokens) for _, tokens in self.rows)


WHOLE = tuple(enumerate(LENGTHS))
PARTS = Session(
    WHOLE,
    (
        Iteration({0: 17, 1: 20, 2: 16, 3: 15}),
        Iteration({0: 22, 1: 1, 2: 6, 3: 1, 4: 1}, some=True),  # chunks beside decodes and a prompt of one token
        Iteration({0: 1, 1: 1, 2: 1, 3: 1}),  # one of them is the first token on its page
    ),
)
"""Each token once"""
_MANY = (*WHOLE, *((row % 4, PAGE_TOKENS) for row in range(26)))
CROWD = Session(_MANY, (Iteration({row: tokens for row, (_, tokens) in enumerate(_MANY)}, some=True),))
"""For fused forward passes: as many rows as a usual chunk has, on few pages. The modules would take long for them."""
CROWD_TOKENS = sum(tokens for _, tokens in _MANY)
SOME = 64
"""Logits that are wanted of many tokens"""
ADAPTER_OF = {0: 0, 2: 1, 3: 0}
"""Text → its adapter; the others have none."""
RANKS = (8, 3)
"""Of the adapters"""


def in_parts(most: int) -> Session:
    """All texts, of which at most `most` tokens are computed at a time"""
    rows = [row for row, tokens in WHOLE for _ in range(tokens)]
    most = max(1, most)
    return Session(WHOLE, [Iteration(Counter(rows[first : first + most])) for first in range(0, len(rows), most)])


def keep_some(batch: FlatBatch) -> None:
    """Others are not computed, and none may be taken for another. The last token of each sequence is among them, since
    it depends on all that sequence, and so are the last of all: there, kernels have what no whole tile has."""
    random = torch.Generator().manual_seed(0)
    some = min(SOME, 3 * batch.tokens // 4)
    always = torch.from_numpy(np.diff(batch.line.sequence_of, append=-1) != 0)
    always[-(some // 4) :] = True
    order = torch.randperm(batch.tokens, generator=random)
    chosen = torch.cat([order[always[order]], order[~always[order]]])[:some]
    chosen = chosen[torch.randperm(len(chosen), generator=random)]
    batch.keep = batch.keep[chosen.to(batch.keep.device)]
    batch.choices = torch.empty(len(batch.keep), dtype=torch.int64)


def places_of(batch: FlatBatch, session: Session) -> torch.Tensor:
    """Of an iteration's tokens, among those of all texts"""
    line = batch.line
    firsts = np.cumsum([0, *LENGTHS])[[session.rows[row.number][0] for row in line.rows]]
    return torch.from_numpy(firsts[line.sequence_of] + line.positions).to(batch.keep.device)
