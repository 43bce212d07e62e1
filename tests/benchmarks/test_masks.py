"""What `benchmarks.masks` counts."""

from itertools import pairwise

from benchmarks.masks import CONSTRAINED, ROWS, Measured, Step


def test_throughput_counts_the_tokens_of_steps() -> None:
    """Rows whose masks are late make steps shorter, and still get fewer tokens a second. Mutation: throughput from the
    times of steps."""
    measured = Measured()
    measured.add([Step(0.04, ROWS)] * 10)
    measured.add([Step(0.04, ROWS), Step(0.03, ROWS - CONSTRAINED)] * 5)
    assert all(before > after for before, after in pairwise(measured.tokens_a_second))
    assert measured.late == [0, CONSTRAINED / ROWS / 2]
