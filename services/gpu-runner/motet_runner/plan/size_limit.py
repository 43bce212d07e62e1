"""How large a model call may be after one did not fit into memory: half as large, and after a while twice as large
again, up to the wanted size. Pure."""

CALLS_UNTIL_LARGER = 64
"""How many model calls must fit before a larger one is tried, so that few calls are tried in vain."""


class SizeLimit:
    def __init__(self, wanted: int, *, least: int = 1) -> None:
        self.size = wanted
        self._wanted = wanted
        self._least = least
        self._fitted = 0

    def did_not_fit(self, size: int) -> None:
        """A call of this size did not fit."""
        self.size = max(self._least, min(self.size, size) // 2)
        self._fitted = 0

    def fitted(self, calls: int) -> None:
        """An iteration was computed in `calls` calls, and all of them fitted at the first attempt."""
        if self.size >= self._wanted:
            return
        self._fitted += calls
        if self._fitted >= CALLS_UNTIL_LARGER:
            self.size = min(self._wanted, 2 * self.size)
            self._fitted = 0
