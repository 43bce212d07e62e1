"""Whose turn it is while an engine has suspects, and what has been said about it.

A suspect is a sequence in whose company an engine has died. It is computed alone, and everybody outside knows so before
its iteration begins: when the engine dies in it, there is no doubt who did it.
"""

from motet_runner.interface import StateChanged
from motet_runner.plan.composer import Iteration
from motet_runner.plan.sequence import Sequence


class SuspectTurns:
    def __init__(self) -> None:
        self.suspects_first = True
        """Suspects and all others take turns."""
        self._announced: Sequence | None = None

    def announce(self, iteration: Iteration) -> list[StateChanged]:
        """What has to be out before this iteration may begin: who is computed alone, and who is not any more. Empty
        when it may begin; what it brings ends its announcement."""
        suspect = iteration.suspect
        if self._announced is suspect:
            self._announced = None
            self.suspects_first = suspect is None
            return []
        told, self._announced = self._announced, suspect
        return [
            StateChanged(one.request, one.new.epoch, one.state, alone=one is suspect)
            for one in (told, suspect)
            if one is not None
        ]
