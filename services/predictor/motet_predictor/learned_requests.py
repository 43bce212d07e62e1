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

    def __contains__(self, request: str) -> bool:
        """One without a name never counts as learned."""
        return request in self._names

    def add(self, request: str) -> None:
        if request:
            self._names[request] = None
            if len(self._names) > MAX_LEARNED:
                del self._names[next(iter(self._names))]

    def recall(self, requests: Iterable[str]) -> None:
        """Requests of an earlier predictor, the oldest first."""
        known = self._names
        self._names = {}
        for request in (*requests, *known):
            self.add(request)
