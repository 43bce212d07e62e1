"""When requests that wait give up.

Most get a place long before. Their entries are left where they are, since taking one out of a heap's middle costs its
length, and swept out together once they are more than half.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from motet_scheduler.policy.requests import Request

SLACK = 64
"""Entries that are not worth sweeping."""


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        if request.deadline_at is not None:
            heappush(self._heap, (request.deadline_at, next(self._numbers), request))

    def sweep(self, waiting: int) -> None:
        """Forget those that wait no longer; `waiting` is how many do."""
        if len(self._heap) > 2 * waiting + SLACK:
            self._heap = [entry for entry in self._heap if _stands(*entry)]
            heapify(self._heap)

    def expired(self, now: float) -> Iterator[Request]:
        while self._heap and self._heap[0][0] <= now:
            entry = heappop(self._heap)
            if _stands(*entry):
                yield entry[2]


def _stands(at: float, _number: int, request: Request) -> bool:
    return request.deadline_at == at
