"""Detects that an engine hangs: the engine has work and makes no progress. A slow engine does not hang."""

from motet.clock import Clock


class HangDetector:
    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds = seconds
        self._clock = clock
        self._progress = -1
        self._moved_at: float | None = None

    def observe(self, progress: int, *, work: bool) -> None:
        """Note the progress so far (see `EngineReport`), and whether the engine has work."""
        if progress != self._progress or not work or self._moved_at is None:
            self._progress, self._moved_at = progress, self._clock()

    def hung_reason(self) -> str:
        """Empty while the engine makes progress or has no work, and before its first report."""
        if self._moved_at is None:
            return ""
        still = self._clock() - self._moved_at
        if still <= self._seconds:
            return ""
        return f"the engine has work, and for {still:.0f} s it has completed no step and read no part of an adapter"
