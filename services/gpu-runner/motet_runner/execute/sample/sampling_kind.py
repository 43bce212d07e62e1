"""What rows need of the sampler: their kinds of work, and the parameters of their draws as arrays. Pure."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from motet_runner.execute.batch.row_table import TableRow
from motet_runner.execute.sample.adjustment import Adjustment
from motet_runner.execute.sample.cuts import ALL, Cuts
from motet_runner.interface import Sampling

_SECOND = 1 << 63
"""Beyond every position"""
COLDEST = 1e-4
"""Lower temperatures give practically the tokens of greedy sampling, and dividing by them would overflow."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a row needs."""

    adjusted: bool
    repeats: bool
    drawn: bool
    cut: bool

    @staticmethod
    def of(row: TableRow, vocabulary: int) -> "Kind":
        sampling = row.sampling
        adjusted = Adjustment.wanted(sampling, row.output_tokens)
        drawn = sampling.temperature > 0
        cut = 0 < sampling.top_k < vocabulary or sampling.top_p < 1 or sampling.min_p > 0
        return Kind(adjusted, sampling.repetition_penalty != 1, drawn, drawn and cut)


GREEDY = Kind(adjusted=False, repeats=False, drawn=False, cut=False)


def temperatures(asked: Sequence[Sampling]) -> npt.NDArray[np.float32]:
    """[rows, 1]"""
    return np.array([[max(one.temperature, COLDEST)] for one in asked], dtype=np.float32)


def cuts_of(asked: Sequence[Sampling], vocabulary: int, upload: Callable[[np.ndarray], torch.Tensor]) -> Cuts:
    """`upload` copies numbers to the logits' device."""
    top_k = np.array([[one.top_k if 0 < one.top_k < vocabulary else ALL] for one in asked], dtype=np.int64)
    top_p = np.array([[one.top_p if one.top_p < 1 else np.inf] for one in asked], dtype=np.float64)
    min_p = None
    if any(one.min_p > 0 for one in asked):
        min_p = upload(np.array([[one.min_p] for one in asked], dtype=np.float32))
    return Cuts(upload(top_k), upload(top_p), min_p)


def uniforms(rows: Sequence[TableRow], *, second: bool = False) -> npt.NDArray[np.float64]:
    """[rows, 1] The uniform number that draws each row's next token. `second`: after the first one drew a token that is
    forbidden"""
    first = _SECOND if second else 0
    return np.array([[uniform(row.seed, row.choice, first + len(row.tokens))] for row in rows], dtype=np.float64)


def uniform(seed: int, choice: int, position: int) -> float:
    """In [0, 1). The same three arguments give the same number on every machine."""
    key = seed.to_bytes(16, "little", signed=True) + choice.to_bytes(4, "little") + position.to_bytes(8, "little")
    # A float has 53 bits. With more bits, the largest numbers would be rounded to 1.
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) / 2.0**53
