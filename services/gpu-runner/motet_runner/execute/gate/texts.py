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
FAR = len(LENGTHS)
"""One more text, of which only the last token is computed. Before it there are the first pages of other texts, again
and again."""
FAR_POSITION = 4608
"""Of that token, if the model has that position: beyond the usual windows, and where tables of positions have grown"""
TOKENS = sum(LENGTHS) + 1
"""That are computed of all texts"""


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
    goes_far: bool = False
    """Whether there is one more row, of the text FAR"""

    @property
    def texts(self) -> Sequence[int]:
        """Of each row"""
        return [*(text for text, _ in self.rows), *([FAR] if self.goes_far else [])]

    @property
    def pages(self) -> int:
        return sum(pages_for(tokens) for _, tokens in self.rows) + self.goes_far


WHOLE = tuple(enumerate(LENGTHS))
PARTS = Session(
    WHOLE,
    (
        Iteration({0: 17, 1: 20, 2: 16, 3: 15}),
        Iteration({0: 22, 1: 1, 2: 6, 3: 1, 4: 1}, some=True),  # chunks beside decodes and a prompt of one token
        Iteration({0: 1, 1: 1, 2: 1, 3: 1}),  # one of them is the first token on its page
        Iteration({FAR: 1}),  # alone, with an adapter: then threads share out what else one of them does
    ),
    goes_far=True,
)
"""Each token once"""
_MANY = (*WHOLE, *((row % 4, PAGE_TOKENS) for row in range(26)))
CROWD = Session(_MANY, (Iteration({row: tokens for row, (_, tokens) in enumerate(_MANY)}, some=True),))
"""For fused forward passes: as many rows as a usual chunk has, on few pages. The modules would take long for them."""
CROWD_TOKENS = sum(tokens for _, tokens in _MANY)
SOME = 64
"""Logits that are wanted of many tokens"""
ADAPTER_OF = {0: 0, 2: 1, 3: 0, FAR: 0}
"""Text → its adapter; the others have none."""
RANKS = (8, 3)
"""Of the adapters"""
CHANGES_EVERY = (1, 2)
"""The first adapter changes each linear, the second one every other."""


def in_parts(most: int) -> Session:
    """All texts, of which at most `most` tokens are computed at a time"""
    rows = [row for row, tokens in (*WHOLE, (FAR, 1)) for _ in range(tokens)]
    most = max(1, most)
    iterations = [Iteration(Counter(rows[first : first + most])) for first in range(0, len(rows), most)]
    return Session(WHOLE, iterations, goes_far=True)


def far_position(max_positions: int) -> int:
    """The first one on a page"""
    return min(FAR_POSITION, max_positions - 1) // PAGE_TOKENS * PAGE_TOKENS


def pages_before(position: int, windows: Sequence[int]) -> list[int]:
    """What the text FAR reads: the first page of text 0 where the narrowest window does not reach, or in the first half
    where each reaches, and then that of text 1."""
    beyond = max(0, position - min(windows, default=position)) or position // 2
    first, second = 0, pages_for(LENGTHS[0])
    return [first if page < beyond // PAGE_TOKENS else second for page in range(position // PAGE_TOKENS)]


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
    texts = np.array([session.texts[row.number] for row in line.rows])[line.sequence_of]
    within = np.where(texts == FAR, 0, line.positions)
    return torch.from_numpy(np.cumsum([0, *LENGTHS])[texts] + within).to(batch.keep.device)
