"""`Passes` against its definition, on random histories: every placement is kept, and compared with each request."""

from dataclasses import dataclass
from random import Random

import pytest

from motet_scheduler.policy.passes import LESS_URGENT, Passes


@dataclass(eq=False)
class Waiting:
    given: float
    passes: int = 0
    passes_from: int = 0

    @property
    def head(self):
        return (self.given, 0.0, 0, self)


class History:
    def __init__(self, most):
        self.most, self.placed = most, []

    def overdue(self, one):
        """Those that passed it before, and those of the last ones that do, are as many as are allowed."""
        in_a_row = 0
        for number, order in reversed(self.placed):
            if number <= one.passes_from or order < one.head:
                break
            in_a_row += 1
        return one.passes + in_a_row >= self.most

    def count(self, one):
        if one.passes < self.most:
            passed = [order > one.head for number, order in self.placed[-self.most :] if number > one.passes_from]
            one.passes, one.passes_from = one.passes + sum(passed), self.placed[-1][0] if self.placed else 0


@pytest.mark.parametrize("most", [1, 2, 5, 64])
def test_all_that_passed_are_counted_and_no_others(most):
    chance, overdue = Random(most), 0
    for _ in range(60):
        passes, history = Passes(most), History(most)
        pairs = [(Waiting(given), Waiting(given)) for given in (0.5, 2.5, 2.5, 4.5)]
        for number in range(1, 300):
            given = chance.choice([1.0, 2.0, 3.0, 4.0, 2.5 + number / 100])
            order = (given, 0.0, number) if chance.random() < 0.9 else LESS_URGENT
            passes.add(number, order)
            history.placed.append((number, order))
            one, naive = chance.choice(pairs)
            if chance.random() < 0.5:
                found = history.overdue(naive)
                assert passes.overdue(one.head) == found
                overdue += found
                if found:
                    naive.passes = most
            elif chance.random() < 0.3:  # it gets a later turn
                passes.count([one.head], number)
                history.count(naive)
                one.given = naive.given = one.given + chance.random()
            elif chance.random() < 0.1:  # it gets a token
                one.passes = naive.passes = 0
                one.passes_from = naive.passes_from = number
            assert (one.passes, one.passes_from) == (naive.passes, naive.passes_from)
    assert overdue > 100
