"""Whose turn it is while an engine has suspects, and what was announced about it.

A suspect is a sequence that an engine had when it died. It is computed alone, and this is announced before its
iteration begins: if the engine dies in it, the cause is certain. So no other thread makes a mask meanwhile, and if the
suspect's own mask is late, the announcement holds until the mask is there.
"""

from motet_runner.interface import StateChanged
from motet_runner.plan.composer import Iteration
from motet_runner.plan.sequence import Sequence


class SuspectTurns:
    def __init__(self) -> None:
        self.suspects_first = True
        """Suspects and the others take turns."""
        self._announced: Sequence | None = None

    @property
    def settled(self) -> bool:
        """True if no suspect is announced, and the latest iteration was for the others."""
        return self._announced is None and self.suspects_first

    def announce(self, iteration: Iteration) -> list[StateChanged]:
        """The announcements that must be sent before this iteration may begin: who is computed alone, and who no longer
        is. Empty if it may begin; its result ends its announcement."""
        suspect = iteration.suspect
        if self._announced is suspect:
            self._announced = None
            self.suspects_first = suspect is None
            return []
        return self._announce(suspect)

    def go_on(self, suspect: Sequence) -> list[StateChanged]:
        """The announcement after its iteration, if its mask is still being made: that may kill the engine, too."""
        self.suspects_first = True
        return self._announce(suspect)

    def _announce(self, suspect: Sequence | None) -> list[StateChanged]:
        told, self._announced = self._announced, suspect
        return [
            StateChanged(one.request, one.new.epoch, one.state, alone=one is suspect)
            for one in (told, suspect)
            if one is not None
        ]
