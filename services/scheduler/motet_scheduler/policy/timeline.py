"""What happened to each request, for `Explain`: all known requests, and the last that ended.

The number of ended requests is bounded. Timelines are kept in memory only.
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
        """Start a request's timeline, or continue the one it had."""
        history = self._ended.pop(request) if request in self._ended else _History(now)
        self._known[request] = history

    def end(self, request: RequestId) -> None:
        history = self._known.pop(request, None)
        if history is not None:
            self._keep(request, history)

    def note(self, request: RequestId, now: float, event: str, detail: str = "") -> None:
        history = self._known.get(request) or self._ended.get(request)
        if history is None:  # an event about an unknown request
            history = _History(now)
            self._keep(request, history)
        if len(history.entries) < ENTRIES_PER_REQUEST:
            history.entries.append((now - history.start, event, detail))

    def of(self, request: RequestId) -> list[tuple[float, str, str]] | None:
        """(seconds since the first entry, event, detail); None if the request is unknown or forgotten."""
        history = self._known.get(request) or self._ended.get(request)
        return None if history is None else list(history.entries)

    def _keep(self, request: RequestId, history: _History) -> None:
        self._ended[request] = history
        while len(self._ended) > self._most_ended:
            self._ended.popitem(last=False)
