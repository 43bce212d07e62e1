"""When a less urgent class goes first: so that it gets a floor of all placements while more urgent requests wait.

When it is its turn, room beside the last places of runners mostly comes free, which is for it before the others. Where
none does, as those may have the last places whose turn it is not, it is late, and may have these, too.
"""

from collections.abc import Collection, Mapping

from motet.runner_info import RequestClass

DUE = 1 - 1e-9
"""Sums of floors are not exact."""


class ClassTurns:
    def __init__(self, floors: Mapping[RequestClass, float]) -> None:
        """`floors`: of each class, the part of all placements that it gets at least while it waits."""
        self._floors = floors
        self._owed = dict.fromkeys(floors, 0.0)
        """Placements that each class has not had, up to one and that during which it was late: what it could not use is
        not saved up."""
        self.came = False
        """Whether a class has become early or late since this was last set to False."""

    def early(self) -> list[RequestClass]:
        """The classes whose turn it is before that of more urgent ones."""
        return [one for one, owed in self._owed.items() if owed >= DUE]

    def late(self) -> tuple[RequestClass, ...]:
        """Those of them that have missed their turn: another request was placed instead."""
        late: tuple[RequestClass, ...] = ()
        for one, owed in self._owed.items():  # no comprehension: it is asked with each placement
            if owed >= DUE + self._floors[one]:
                late += (one,)
        return late

    def placed(self, request_class: RequestClass, waiting: Collection[RequestClass]) -> None:
        """A request of this class was placed, and of these some still wait."""
        for one, floor in self._floors.items():
            if one is request_class:
                self._owed[one] = max(0.0, self._owed[one] + floor - 1)
            elif one in waiting:
                before = self._owed[one]
                owed = self._owed[one] = min(1.0 + floor, before + floor)
                self.came |= before < DUE <= owed or before < DUE + floor <= owed
            else:
                self._owed[one] = 0.0

    def left(self, request_class: RequestClass) -> None:
        """None of this class waits any more, as the last one has left without a place."""
        if request_class in self._owed:
            self._owed[request_class] = 0.0
