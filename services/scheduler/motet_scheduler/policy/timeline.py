"""What happened to each request, for people who ask why: to all that are known, and to the last ones that have ended.

Bounded by what is known, and by a number of ended ones; forgotten with the process.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from motet.domain import RequestId

ENTRIES_PER_REQUEST = 64


@dataclass(slots=True)
class _History:
    start: float
    entries: list[tuple[float, str, str]] = field(default_factory=list)


class Timelines:
    def __init__(self, ended: int) -> None:
        self._most_ended = ended
        self._known: dict[RequestId, _History] = {}
        self._ended: OrderedDict[RequestId, _History] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known) + len(self._ended)

    def begin(self, request: RequestId, now: float) -> None:
        """It is known from here on. One that comes again goes on with its old story."""
        history = self._ended.pop(request) if request in self._ended else _History(now)
        self._known[request] = history

    def end(self, request: RequestId) -> None:
        history = self._known.pop(request, None)
        if history is not None:
            self._keep(request, history)

    def note(self, request: RequestId, now: float, event: str, detail: str = "") -> None:
        history = self._known.get(request) or self._ended.get(request)
        if history is None:  # a word about one that is not on the books
            history = _History(now)
            self._keep(request, history)
        if len(history.entries) < ENTRIES_PER_REQUEST:
            history.entries.append((now - history.start, event, detail))

    def of(self, request: RequestId) -> list[tuple[float, str, str]] | None:
        """(seconds since the first entry, event, detail); None for a request that is not, or no longer, known."""
        history = self._known.get(request) or self._ended.get(request)
        return None if history is None else list(history.entries)

    def _keep(self, request: RequestId, history: _History) -> None:
        self._ended[request] = history
        while len(self._ended) > self._most_ended:
            self._ended.popitem(last=False)
