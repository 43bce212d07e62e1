"""Finds stop strings, also across tokens, and never shows a part of one. Pure."""

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string to complete.

    Text that may be the beginning of a stop string is held back until more text decides. How the text is cut into
    pieces does not change the whole output. The text held back is shorter than the longest stop string.
    """

    __slots__ = ("_held", "_include", "_stops", "found", "stopped")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include
        self._held = ""
        self.stopped = False
        self.found: str | None = None
        """The stop string that has ended the text."""

    def feed(self, text: str) -> str:
        """The text that may be shown now."""
        if not self._stops:
            return text
        text = self._held + text
        if (match := self._first_to_complete(text)) is not None:
            self._held = ""
            self.stopped = True
            start, end = match
            self.found = text[start:end]
            return text[: end if self._include else start]
        shown = self._first_undecided(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What was held back, now that no more text will come."""
        text, self._held = self._held, ""
        return text

    def _first_to_complete(self, text: str) -> tuple[int, int] | None:
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or (end, start) < (best[1], best[0]):
                best = (start, end)
        return best

    def _first_undecided(self, text: str) -> int:
        """Where the longest ending of `text` begins that is also the beginning of a stop string."""
        first = size = len(text)
        for stop in self._stops:
            # The text contains no complete stop string, so only a shorter ending can be its beginning. Only positions
            # before `first` matter.
            at = text.find(stop[0], max(0, size - len(stop) + 1), first)
            while at >= 0:
                if stop.startswith(text[at:]):
                    first = at
                    break
                at = text.find(stop[0], at + 1, first)
        return first
