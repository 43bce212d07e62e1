"""The log probabilities of a token and of the alternatives that its row asks for, in the model's own distribution:
before temperature, penalties and cuts."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from motet_runner.execute.batch.row_table import TableRow
from motet_runner.interface import Logprobs


class Best(NamedTuple):
    """Log probabilities, on the logits' device"""

    chosen: torch.Tensor
    """[rows]"""
    values: torch.Tensor
    """[rows, alternatives]"""
    ids: torch.Tensor
    """[rows, alternatives]"""


def best(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Best:
    """`tokens` [rows]; `count`: the most alternatives of a row"""
    logs = logits.float().log_softmax(dim=-1)
    values, ids = logs.topk(count, dim=-1)
    return Best(logs.gather(1, tokens[:, None]).squeeze(1), values, ids)


def alternatives(rows: Sequence[TableRow], vocabulary: int) -> list[int]:
    """The number of alternatives that each row asks for"""
    return [min(row.sampling.top_logprobs, vocabulary) for row in rows]


def read(found: Sequence[torch.Tensor], counts: Iterable[int]) -> list[Logprobs]:
    """`found`: `best`'s result in memory that the host may read; `counts`: see `alternatives`"""
    rows = zip(*(numbers.tolist() for numbers in found), counts, strict=True)
    return [
        Logprobs(chosen, tuple(zip(ids[:count], values[:count], strict=True))) for chosen, values, ids, count in rows
    ]
