"""Which sequence has which row of the worker's table, and which changes the worker does not know yet."""

from motet_runner.plan.composer import Work
from motet_runner.plan.sequence import Sequence
from motet_runner.plan.step_plan import RowJoin, RowStep


class RowAssignment:
    def __init__(self) -> None:
        self._free: list[int] = []
        self._count = 0
        self._leaves: list[int] = []
        self._joins: list[RowJoin] = []

    def step_of(self, work: Work) -> RowStep:
        """The worker's orders for this work. A sequence without a row gets one."""
        row, new_pages = self.row_of(work.sequence)
        return RowStep(row, work.start, work.count, work.samples, new_pages)

    def row_of(self, sequence: Sequence) -> tuple[int, tuple[int, ...]]:
        """Its row, and the pages that the worker does not know yet. A sequence without a row gets one."""
        if sequence.row is None:
            self._join(sequence)
        assert sequence.row is not None
        known = sequence.row_pages == sequence.left_pages + len(sequence.pages)  # mostly
        return sequence.row, () if known else self.new_pages_of(sequence)

    @staticmethod
    def new_pages_of(sequence: Sequence) -> tuple[int, ...]:
        """The sequence's pages that the worker does not know yet. It has a row, and they count as known from now on."""
        pages = sequence.left_pages + len(sequence.pages)
        if pages == sequence.row_pages:
            return ()
        new_pages = tuple(sequence.pages[sequence.row_pages - sequence.left_pages :])
        sequence.row_pages = pages
        return new_pages

    def release(self, sequence: Sequence) -> None:
        if sequence.row is not None:
            self._leaves.append(sequence.row)
            self._free.append(sequence.row)
            sequence.row, sequence.row_pages = None, 0

    def take_changes(self) -> tuple[tuple[int, ...], tuple[RowJoin, ...]]:
        """Rows that have lost their sequences since the last call, and rows that have got one."""
        changes = tuple(self._leaves), tuple(self._joins)
        self._leaves.clear()
        self._joins.clear()
        return changes

    def _join(self, sequence: Sequence) -> None:
        assert not sequence.pending, "the worker would miss a token"
        if not self._free:
            self._free.append(self._count)
            self._count += 1
        sequence.row = self._free.pop()
        sequence.row_pages = sequence.left_pages
        new = sequence.new
        self._joins.append(
            RowJoin(
                row=sequence.row,
                request=new.request,
                tokens=tuple(sequence.tokens),
                prompt_tokens=sequence.prompt_tokens,
                left_pages=sequence.left_pages,
                adapter=new.adapter,
                sampling=new.sampling,
                seed=new.seed,
                seed_is_drawn=new.seed_is_drawn,
                choice=new.choice,
                to_score=None if sequence.scored else sequence.to_score,
                mask=new.mask,
                prefix_salt=new.prefix_salt,
            )
        )
