"""The rows that sample together, grouped by their needs. Both samplers keep the layout while the rows are the same."""

import operator
from collections import defaultdict
from collections.abc import Sequence

from motet_runner.execute.batch.row_table import TableRow
from motet_runner.execute.sample.sampling_kind import GREEDY, Kind


class RowLayout:
    def __init__(self, rows: Sequence[TableRow], vocabulary: int) -> None:
        self._rows = list(rows)
        self.by_kind: dict[Kind, list[int]] = defaultdict(list)
        """Kind → the places of its rows"""
        for place, row in enumerate(rows):
            self.by_kind[Kind.of(row, vocabulary)].append(place)
        self.asking = [place for place, row in enumerate(rows) if row.sampling.logprobs]
        """The places of the rows that ask for log probabilities"""
        self.greedy = self.by_kind.keys() <= {GREEDY} and not self.asking
        """True if all rows want only the token of their largest logit"""

    def has(self, rows: Sequence[TableRow]) -> bool:
        """True if these are the layout's rows. A row that has left and joined again is a different row."""
        return len(rows) == len(self._rows) and all(map(operator.is_, rows, self._rows))
