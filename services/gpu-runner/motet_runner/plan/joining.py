"""Which of the waiting sequences start next (OR-06, S3-05).

By arrival, the first sequence without room ends the choice: nobody overtakes it. Largest first fills memory better:
sequences without room are skipped, and smaller ones take what is left. That could pass over the same one for ever. So a
sequence that was passed over `PASSED_OVER_AT_MOST` times goes first, and ends the choice if it has no room.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Protocol, TypeVar

from motet_runner.plan.presets import UNBOUNDED, Preset

PASSED_OVER_AT_MOST = 32
"""In how many choices later sequences may start before a waiting one."""


class Waiting(Protocol):
    @property
    def arrival(self) -> int: ...

    @property
    def promise(self) -> int:
        """In pages"""

    @property
    def passed_over(self) -> int:
        """In how many choices a later sequence started instead."""


Candidate = TypeVar("Candidate", bound=Waiting)


def choose(waiting: Iterable[Candidate], preset: Preset, *, places: int, pages: int | None = None) -> list[Candidate]:
    """At most `places` waiting sequences whose promises together fit into `pages` (None: no limit).

    They are given by arrival. The choice is made in the order of the preset.
    """
    if pages is None and preset.order == "arrival":
        return list(islice(waiting, places))
    left = UNBOUNDED if pages is None else pages
    chosen: list[Candidate] = []
    for one, may_be_skipped in _in_order(list(waiting), preset):
        if len(chosen) >= places:
            break
        if one.promise <= left:
            chosen.append(one)
            left -= one.promise
        elif not may_be_skipped:
            break
    return chosen


def passed_over(waiting: Iterable[Candidate], starting: Iterable[Candidate]) -> list[Candidate]:
    """Sequences of `waiting` that do not start although a later one does."""
    started = {one.arrival for one in starting}
    newest = max(started, default=0)
    return [one for one in waiting if one.arrival < newest and one.arrival not in started]


def _in_order(waiting: list[Candidate], preset: Preset) -> Iterable[tuple[Candidate, bool]]:
    """Each sequence, and True if it may be skipped when it has no room."""
    if preset.order == "arrival":
        return ((one, False) for one in waiting)
    overdue = [one for one in waiting if one.passed_over >= PASSED_OVER_AT_MOST]
    others = [one for one in waiting if one.passed_over < PASSED_OVER_AT_MOST]
    others.sort(key=lambda one: -one.promise)  # stable: of two equal ones the older goes first
    return [(one, False) for one in overdue] + [(one, True) for one in others]
