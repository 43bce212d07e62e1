"""Which requests' outcomes have been learned. A gateway sends outcomes again if the call broke before it was answered:
perhaps they were learned, and by a predictor that then died. Pure."""

from collections.abc import Iterable

MAX_LEARNED = 8192
"""How many are remembered. A gateway has at most 64 outcomes on their way, and sends those first when it is connected
again, so that others' outcomes seldom come between."""


class LearnedRequests:
    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        """The oldest first"""

    def add(self, request: str) -> bool:
        """False if it has been learned before. One without a name never counts as learned."""
        if request in self._names:
            return False
        if request:
            self._names[request] = None
            if len(self._names) > MAX_LEARNED:
                del self._names[next(iter(self._names))]
        return True

    def recall(self, requests: Iterable[str]) -> None:
        """Requests of an earlier predictor, the oldest first."""
        known = self._names
        self._names = {}
        for request in (*requests, *known):
            self.add(request)
