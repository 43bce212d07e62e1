"""The texts on which the gate compares forward passes, in iterations like those of the running engine."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from motet.domain import PAGE_TOKENS, pages_for
from motet_runner.execute.batch.flat_batch import FlatBatch

LENGTHS = (40, 22, 23, 17, 1)
"""The texts' lengths: about 100 tokens, on several pages"""
FAR = len(LENGTHS)
"""The index of one more text. Only its last token is computed; the pages before this token repeat first pages of other
texts."""
FAR_POSITION = 4608
"""FAR's position, if the model has this position: beyond the usual windows, and beyond the first size of the tables of
cosines and sines"""
TOKENS = sum(LENGTHS) + 1
"""How many tokens of all texts are computed"""


class Iteration(NamedTuple):
    counts: Mapping[int, int]
    """How many tokens of each row are computed"""
    some: bool = False
    """True if only some tokens' logits are wanted, in any order"""


class Session(NamedTuple):
    """Rows on their own pages"""

    rows: Sequence[tuple[int, int]]
    """Each row's text, and how many of its tokens"""
    iterations: Sequence[Iteration]
    goes_far: bool = False
    """True if there is one more row, of the text FAR"""

    @property
    def texts(self) -> Sequence[int]:
        """Each row's text"""
        return [*(text for text, _ in self.rows), *([FAR] if self.goes_far else [])]

    @property
    def pages(self) -> int:
        return sum(pages_for(tokens, PAGE_TOKENS) for _, tokens in self.rows) + self.goes_far


WHOLE = tuple(enumerate(LENGTHS))
PARTS = Session(
    WHOLE,
    (
        Iteration({0: 17, 1: 20, 2: 16, 3: 15}),
        Iteration({0: 22, 1: 1, 2: 6, 3: 1, 4: 1}, some=True),  # chunks, decodes, and a prompt of one token
        Iteration({0: 1, 1: 1, 2: 1, 3: 1}),  # row 3's token is the first on its page
        Iteration({FAR: 1}),  # alone, with an adapter: the threads then share one row's work
    ),
    goes_far=True,
)
"""Computes each token once"""
_MANY = (*WHOLE, *((row % 4, PAGE_TOKENS) for row in range(26)))
CROWD = Session(_MANY, (Iteration({row: tokens for row, (_, tokens) in enumerate(_MANY)}, some=True),))
"""As many tokens as a usual chunk has, on few pages. Only fused forward passes compute it: modules would take long."""
CROWD_TOKENS = sum(tokens for _, tokens in _MANY)
SOME = 64
"""The most tokens whose logits are wanted in an iteration with `some`"""
ADAPTER_OF = {0: 0, 2: 1, 3: 0, FAR: 0}
"""Text → its adapter; the others have none."""
RANKS = (8, 3)
"""The adapters' ranks"""
CHANGES_EVERY = (1, 2)
"""The first adapter changes each linear, the second adapter every other linear."""


def in_parts(most: int) -> Session:
    """All texts, at most `most` tokens at a time"""
    rows = [row for row, tokens in (*WHOLE, (FAR, 1)) for _ in range(tokens)]
    most = max(1, most)
    iterations = [Iteration(Counter(rows[first : first + most])) for first in range(0, len(rows), most)]
    return Session(WHOLE, iterations, goes_far=True)


def far_position(max_positions: int) -> int:
    """FAR's position: always the first on a page"""
    return min(FAR_POSITION, max_positions - 1) // PAGE_TOKENS * PAGE_TOKENS


def pages_before(position: int, windows: Sequence[int]) -> list[int]:
    """The pages before FAR's last token: copies of text 0's first page, then of text 1's. The change is where the
    narrowest window begins, or half-way if every window reaches the beginning."""
    beyond = max(0, position - min(windows, default=position)) or position // 2
    first, second = 0, pages_for(LENGTHS[0], PAGE_TOKENS)
    return [first if page < beyond // PAGE_TOKENS else second for page in range(position // PAGE_TOKENS)]


def keep_some(batch: FlatBatch) -> None:
    """Keep the logits of some tokens, in random order, so that the gate notices a pass that gives the logits of other
    tokens. Among the kept tokens are the last token of each sequence, which depends on the whole sequence, and the last
    tokens of the batch, where kernels have partial tiles."""
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
    """The places of an iteration's tokens among all texts' tokens"""
    line = batch.line
    texts = np.array([session.texts[row.number] for row in line.rows])[line.sequence_of]
    within = np.where(texts == FAR, 0, line.positions)
    return torch.from_numpy(np.cumsum([0, *LENGTHS])[texts] + within).to(batch.keep.device)
