"""What happened to each of the last requests, for people who ask why. Bounded; forgotten with the process."""

from collections import OrderedDict
from dataclasses import dataclass, field

from motet.model import RequestId

ENTRIES_PER_REQUEST = 64


@dataclass(slots=True)
class _History:
    start: float
    entries: list[tuple[float, str, str]] = field(default_factory=list)


class Timelines:
    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._histories: OrderedDict[RequestId, _History] = OrderedDict()

    def note(self, request: RequestId, now: float, event: str, detail: str = "") -> None:
        history = self._histories.get(request)
        if history is None:
            history = self._histories[request] = _History(now)
            while len(self._histories) > self._requests:
                self._histories.popitem(last=False)
        if len(history.entries) < ENTRIES_PER_REQUEST:
            history.entries.append((now - history.start, event, detail))

    def of(self, request: RequestId) -> list[tuple[float, str, str]] | None:
        """(seconds since the first entry, event, detail); None for a request that is not, or no longer, known."""
        history = self._histories.get(request)
        return None if history is None else list(history.entries)
