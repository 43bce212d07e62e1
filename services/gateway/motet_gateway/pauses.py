"""How a request that lost its runner spends the time until its next token. Pure."""

from enum import StrEnum


class PausePart(StrEnum):
    """The parts of a pause, in their usual order."""

    NOTICE = "notice"
    """Its runner sends nothing more, and nobody has taken the request from it yet."""
    QUEUE = "queue"
    """It waits for a place at the scheduler."""
    RUNNER = "runner"
    """It is sent to its next runner and waits for a batch there."""
    ADAPTER = "adapter"
    """Its next runner loads the adapter."""
    RECOMPUTE = "recompute"
    """Its next runner computes the prompt and the delivered tokens again."""


class Pause:
    """From the last token of a lost runner to the first one of the next. It goes on if that one is lost, too."""

    __slots__ = ("_began", "_entered", "_part", "_seconds")

    def __init__(self, began: float) -> None:
        """`began`: when the last token came, or the request, if it has none."""
        self._began = self._entered = began
        self._part = PausePart.NOTICE
        self._seconds = dict.fromkeys(PausePart, 0.0)

    def enter(self, part: PausePart, now: float) -> None:
        self._seconds[self._part] += now - self._entered
        self._part, self._entered = part, now

    def end(self, now: float) -> dict[str, float]:
        """The seconds in all and of each part, as a line of the log has them."""
        self.enter(self._part, now)
        return {"seconds": round(now - self._began, 3)} | {
            f"{part}_seconds": round(seconds, 3) for part, seconds in self._seconds.items()
        }
