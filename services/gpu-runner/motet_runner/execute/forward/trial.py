"""Sequences without a request, on their own pages, for trials of a model and its kernels before they serve."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from motet.domain import BASE, PAGE_TOKENS, Digest, RequestId, pages_for
from motet_kernels import LoraBackend, PlacedAdapter
from motet_runner.execute.batch.flat_batch import FlatBatch, SequenceAttention
from motet_runner.execute.batch.flat_batch_builder import FlatBatchBuilder
from motet_runner.execute.batch.row_table import RowTable
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.interface import Sampling
from motet_runner.memory.paged import PagedStore
from motet_runner.plan import DecodeRows, RowJoin, RowStep, StepPlan

MakeAttention = Callable[[torch.Tensor], SequenceAttention | None]
"""Makes attention over pages in the layout of a PagedStore."""


class Trial:
    """A few texts. Each iteration computes a chosen number of tokens of each text."""

    def __init__(
        self,
        loaded: LoadedModel,
        texts: Sequence[Sequence[int]],
        *,
        attention: MakeAttention | None = None,
        backend: LoraBackend[Any] | None = None,
        adapters: Mapping[int, PlacedAdapter] | None = None,
        before: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """`attention`: reads pages in place; None for torch's. `backend`: adds `adapters`. `adapters`, `before`: by
        text. `before`: pages of other texts in place of the text's first pages, whose tokens are not computed."""
        self._loaded = loaded
        self._adapters = adapters or {}
        before = before or {}
        pages = sum(pages_for(len(tokens), PAGE_TOKENS) for tokens in texts) - sum(map(len, before.values()))
        store = PagedStore(pages, loaded.shape, loaded.dtype, loaded.device)
        self._table = RowTable()
        placed = {Digest(adapter.name): adapter for adapter in self._adapters.values()}
        self._builder = FlatBatchBuilder(
            self._table, store, loaded.device, placed=lambda digest, _: placed[digest], window=loaded.window
        )
        self._builder.use(backend, None if attention is None else attention(store.data))
        self._begun = [PAGE_TOKENS * len(before.get(row, ())) for row in range(len(texts))]
        join_texts(self._table, dict(enumerate(texts)), self._adapters, before)

    def batch(self, counts: Mapping[int, int], *, every_token: bool = True) -> FlatBatch:
        """The next tokens of these texts. `counts`: how many of each text; `every_token`: keep the logits of all
        tokens, not only of each text's last."""
        steps = [RowStep(row, self._begun[row], count, samples=True) for row, count in counts.items()]
        decodes = [step for step in steps if step.count == 1 and step.start]
        prefills = tuple(step for step in steps if step not in decodes)
        used = {Digest(self._adapters[row].name): 0 for row in counts if row in self._adapters}
        batch = self._builder.build(
            StepPlan(number=0, decodes=DecodeRows.of(decodes), prefills=prefills, adapters=used)
        )
        for row, count in counts.items():
            self._begun[row] += count
        if every_token:
            batch.keep = torch.arange(batch.tokens, device=self._loaded.device)
            batch.choices = torch.empty(batch.tokens, dtype=torch.int64)
        return batch

    def logits(self, counts: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """The logits [tokens, vocabulary] of the next tokens of these texts. `counts`: how many tokens of each text"""
        batch = self.batch(counts)
        numbers = [row.number for row in batch.line.rows]
        by_text = self._loaded.forward(batch).split([counts[number] for number in numbers])
        return dict(zip(numbers, by_text, strict=True))


def join_texts(
    table: RowTable,
    texts: Mapping[int, Sequence[int]],
    adapters: Mapping[int, PlacedAdapter],
    before: Mapping[int, Sequence[int]],
) -> None:
    """Adds rows for texts without a request, on pages of their own after those in `before`."""
    free = itertools.count()
    for row, tokens in texts.items():
        table.join(probe_row(row, tokens, Digest(adapters[row].name) if row in adapters else BASE))
        others = before.get(row, ())
        table.extend(row, [*others, *(next(free) for _ in range(pages_for(len(tokens), PAGE_TOKENS) - len(others)))])


def text(count: int, *, stride: int, first: int, vocabulary: int) -> list[int]:
    """Some tokens from the beginning of a vocabulary"""
    return [(stride * i + first) % min(vocabulary, 997) for i in range(count)]


def recorded_iteration(loaded: LoadedModel, rows: int, kept: int) -> FlatBatch:
    """An iteration of `rows` rows. The logits of `kept` of these rows are wanted."""
    counts = [rows - kept + 1] + [1] * (kept - 1)
    trial = Trial(loaded, [text(count, stride=7, first=3, vocabulary=loaded.vocabulary) for count in counts])
    return trial.batch(dict(enumerate(counts)), every_token=False)


def decode_probe(loaded: LoadedModel, paged: MakeAttention, rows: int) -> Callable[[], torch.Tensor]:
    """An iteration in which `rows` sequences get their next token. The result can be called repeatedly."""
    tokens = text(21, stride=7, first=3, vocabulary=loaded.vocabulary)
    trial = Trial(loaded, [tokens] * rows, attention=paged)
    loaded.forward(trial.batch(dict.fromkeys(range(rows), len(tokens) - 1), every_token=False))
    decodes = trial.batch(dict.fromkeys(range(rows), 1))
    return lambda: loaded.forward(decodes)


def probe_row(row: int, tokens: Sequence[int], adapter: Digest = BASE) -> RowJoin:
    """A row for tokens without a request."""
    return RowJoin(
        row=row,
        request=RequestId("probe"),
        tokens=tuple(tokens),
        prompt_tokens=len(tokens),
        adapter=adapter,
        sampling=Sampling(max_tokens=1),
        seed=0,
        choice=0,
    )
