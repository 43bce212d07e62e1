"""The next decode-only iteration, made from the previous one.

In most iterations the same rows compute one more token each. Their batch is kept: only its tokens and positions change.
No TableRow is read or written, because after a model call these objects are no longer in the CPU's cache. They get
their tokens when a different iteration comes.
"""

from collections.abc import Collection, Sequence

import numpy as np

from motet.domain import PAGE_TOKENS
from motet_runner.execute.batch.flat_batch import FlatBatch, SequenceAttention
from motet_runner.execute.batch.row_table import UNKNOWN_TOKEN, RowTable, masked_rows
from motet_runner.plan import DecodeRows, StepPlan


class NextDecode:
    def __init__(self, plan: StepPlan, batch: FlatBatch, table: RowTable, attention: SequenceAttention) -> None:
        """`batch`: of this decode-only plan, after the model call. Its rows have their tokens."""
        assert batch.paged is not None
        self.batch = batch
        self._decodes: DecodeRows = plan.decodes
        self._table = table
        self._changes = table.changes
        self._attention, self._attended = attention, batch.paged.batch
        self._iterations = plan.decodes.iterations
        self._tokens: np.ndarray = batch.input_ids.numpy().reshape(-1)
        self._positions: np.ndarray = batch.positions.numpy().reshape(-1)
        self._choices: np.ndarray | None = None if batch.chosen is None else batch.chosen.numpy()
        rows = batch.line.rows
        place_of = {row.number: place for place, row in enumerate(batch.sampled)}
        order = [place_of[row.number] for row in rows]
        self._order = None if order == list(range(len(order))) else order
        """For each token of the batch, its row's index in the plan; None: the orders are equal"""
        self._write([row.tokens[-1] for row in batch.sampled])
        self.masked = masked_rows(batch.sampled)
        self._columns: list[Sequence[int]] = []
        """Tokens that are not yet in the rows, in the order of the plan"""
        self._beginning: list[list[tuple[int, int]]] = [[] for _ in range(PAGE_TOKENS)]
        """Number of iterations from now → each row that then begins a page, and the number of this page"""
        for row, position in zip(rows, self._positions.tolist(), strict=True):
            self._beginning[-position % PAGE_TOKENS].append((row.number, -(-position // PAGE_TOKENS)))
        self._passed = 0

    def is_followed_by(self, plan: StepPlan) -> bool:
        """True if this plan computes one more token of each of these rows, and changes nothing else. Such a plan has no
        copies, so no adapter has moved."""
        decodes = plan.decodes
        return (
            plan.only_decodes
            and decodes.iterations == self._iterations + 1
            and decodes.rows == self._decodes.rows
            and decodes.first_starts == self._decodes.first_starts
            and self._table.changes == self._changes
            # Otherwise the page table grows, and its address changes.
            and self.batch.longest < self._table.pages.shape[1] * PAGE_TOKENS
        )

    def follow(self, plan: StepPlan) -> FlatBatch:
        """Updates the batch for this plan → the same object."""
        batch = self.batch
        for row, new_pages in plan.decodes.new_pages.items():
            self._table.extend(row, new_pages)
        self._iterations += 1
        self._passed += 1
        turns, turn = divmod(self._passed, PAGE_TOKENS)
        self._positions += 1
        batch.begun = [int(self._table.pages[row, page + turns]) for row, page in self._beginning[turn]]
        batch.longest += 1
        batch.calls = 0
        batch.chosen = None
        self._attention.follow(self._attended, self._positions, batch.longest)
        return batch

    @property
    def missing(self) -> int:
        """How many tokens the rows do not have yet"""
        return len(self._columns)

    @property
    def chooses(self) -> bool:
        """True if the model's call chooses the tokens."""
        return self._choices is not None

    def chosen(self) -> list[int | None]:
        """The tokens that the model's call has chosen, in the order of the plan; None for a row whose logits are not
        finite"""
        assert self._choices is not None
        tokens: list[int] = self._choices.tolist()
        return [None if token < 0 else token for token in tokens]

    def take(self, tokens: Sequence[int | None]) -> None:
        """Takes the tokens that the rows have sampled, in the order of the plan."""
        column = [UNKNOWN_TOKEN if token is None else token for token in tokens]
        self._write(column)
        self._columns.append(column)

    def write_back(self, late: Collection[int] = ()) -> None:
        """Appends the missing tokens to the rows. `late`: those whose last one is not a token. After this, the object
        must not be used."""
        for place, row in enumerate(self.batch.sampled):
            columns = self._columns[:-1] if row.number in late else self._columns
            row.tokens += [column[place] for column in columns]

    def _write(self, newest: list[int]) -> None:
        """Sets the next iteration's inputs: the newest token of each row, in the order of the plan"""
        self._tokens[:] = newest if self._order is None else [newest[place] for place in self._order]
