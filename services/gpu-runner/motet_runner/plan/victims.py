"""Which sequence is parked when others need memory (PU-15): the newest of the lowest class."""

from collections.abc import Iterable

from motet_runner.interface import State
from motet_runner.plan.sequence import Sequence


def victim_among(sequences: Iterable[Sequence], *, holding_pages: bool = False) -> Sequence | None:
    """The victim among these, but never a sequence that was already parked too often."""
    candidates = [
        sequence
        for sequence in sequences
        if sequence.state is not State.PARKED and not sequence.is_spared and (sequence.pages or not holding_pages)
    ]
    return max(candidates, key=newest_of_the_lowest_class, default=None)


def newest_of_the_lowest_class(sequence: Sequence) -> tuple[int, int]:
    return sequence.new.priority, sequence.arrival
