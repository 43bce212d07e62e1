"""Stop strings, found wherever they fall across token borders, and never shown in part. Pure."""

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string to complete.

    Text that might be the beginning of one is held back until it is decided. How the text is cut into pieces makes no
    difference to what comes out in all.
    """

    __slots__ = ("_held", "_include", "_prefixes", "_stops", "stopped")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        # Beginnings from the longest: the first that fits is the most that has to be held back.
        beginnings = {stop[:size] for stop in self._stops for size in range(1, len(stop))}
        self._prefixes = tuple(sorted(beginnings, key=len, reverse=True))
        self._include = include
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that may be shown now."""
        if not self._stops:
            return text
        text = self._held + text
        self._held = ""
        if (match := self._first_to_complete(text)) is not None:
            self.stopped = True
            start, end = match
            return text[: end if self._include else start]
        for prefix in self._prefixes:
            if text.endswith(prefix):
                self._held = prefix
                return text[: -len(prefix)]
        return text

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
