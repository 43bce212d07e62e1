"""Iterations that only decode keep their layout until something changes that it depends on."""

from typing import Any

import pytest
import torch

from motet.domain import BASE, Digest, KVShape, RequestId
from motet_kernels import PlacedAdapter
from motet_runner.execute.batch.flat_batch import FlatBatch
from motet_runner.execute.batch.flat_batch_builder import FlatBatchBuilder
from motet_runner.execute.batch.row_table import RowTable
from motet_runner.interface import Sampling
from motet_runner.memory.paged import PagedStore
from motet_runner.plan import DecodeRows, RowJoin, RowStep, StepPlan

X = Digest("x")


class Backend:
    """Its batches are the segments that it gets."""

    def order(self, adapter: PlacedAdapter) -> int:
        return adapter.offset

    def make_batch(self, segments: list[Any]) -> list[tuple[int, int, int]]:
        return [(one.start, one.stop, one.adapter.offset) for one in segments]


class Rows:
    """Two sequences that decode, the second with an adapter."""

    def __init__(self) -> None:
        self.table = RowTable()
        store = PagedStore(8, KVShape(1, 1, 4, 4), torch.float32, torch.device("cpu"))
        placed = lambda digest, page: PlacedAdapter(digest, page, 8, frozenset())  # noqa: E731
        self.builder = FlatBatchBuilder(self.table, store, torch.device("cpu"), placed=placed)
        self.builder.use(Backend(), None)  # type: ignore[arg-type] # it is only called
        self.lengths = {0: 3, 1: 5}
        self.join(0, BASE, "a")
        self.join(1, X, "b")

    def join(self, row: int, adapter: Digest, request: str, first_token: int = 10) -> None:
        tokens = tuple(range(first_token, first_token + self.lengths[row]))
        self.table.join(
            RowJoin(
                row=row,
                request=RequestId(request),
                tokens=tokens,
                prompt_tokens=1,
                adapter=adapter,
                sampling=Sampling(max_tokens=9),
                seed=0,
                choice=0,
            )
        )
        self.table.extend(row, (row, row + 2))

    def decode(self, *rows: int, page: int = 7) -> FlatBatch:
        steps = tuple(RowStep(row, self.lengths[row] - 1, 1, samples=True) for row in rows)
        batch = self.builder.build(StepPlan(number=1, decodes=DecodeRows.of(steps), adapters={X: page}))
        for row in rows:
            self.table[row].tokens.append(50 + self.lengths[row])
            self.lengths[row] += 1
        return batch


def seen(batch: FlatBatch) -> tuple[list[int], list[int], list[str]]:
    return batch.input_ids[0].tolist(), batch.positions[0].tolist(), [row.request for row in batch.sampled]


def test_the_same_rows_go_on_with_their_newest_tokens() -> None:
    rows = Rows()
    first, second = rows.decode(0, 1), rows.decode(0, 1)
    assert seen(first) == ([14, 12], [4, 2], ["a", "b"]), "rows with adapters lie first"
    assert seen(second) == ([55, 53], [5, 3], ["a", "b"])
    assert first.keep.tolist() == second.keep.tolist() == [1, 0]
    assert second.lora is first.lora


@pytest.mark.parametrize("adapter", [BASE, X])
def test_a_row_that_changes_hands_is_another_sequence(adapter: Digest) -> None:
    rows = Rows()
    rows.decode(0, 1)
    rows.table.leave(0)
    rows.join(0, adapter, "c", first_token=30)
    batch = rows.decode(0, 1)
    assert {row.request for row in batch.sampled} == {"b", "c"}
    assert sorted(batch.input_ids[0].tolist()) == [33, 55]
    assert len(batch.lora) == 1 + (adapter == X)


def test_other_rows_are_laid_out_anew() -> None:
    rows = Rows()
    rows.decode(0, 1)
    assert seen(rows.decode(1)) == ([55], [5], ["b"])
    assert seen(rows.decode(1, 0)) == ([56, 53], [6, 3], ["b", "a"])


def test_an_adapter_that_was_moved_is_found_where_it_is_now() -> None:
    rows = Rows()
    assert rows.decode(0, 1).lora == [(0, 1, 7)]
    assert rows.decode(0, 1, page=3).lora == [(0, 1, 3)]


def test_page_tables_that_have_grown_lie_elsewhere() -> None:
    rows = Rows()
    first = rows.decode(0, 1)
    rows.table.extend(0, range(20))
    assert rows.decode(0, 1).lora is not first.lora, "what attention was told is old, too"


def test_a_page_is_cleared_when_its_first_token_comes() -> None:
    rows = Rows()
    begun = [rows.decode(0, 1).begun for _ in range(16)]
    assert begun == [[3] if step == 12 else [2] if step == 14 else [] for step in range(16)]
