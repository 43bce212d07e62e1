"""How often a request that was lost is placed again, by what lost it. Pure.

Without bounds a request whose numbers are not finite would visit runner after runner until its deadline, and one that
kills engines would take every other tenant's streams down with each of them.
"""

from enum import Enum

from motet.errors import EngineRestarted, MotetError, RequestKillsEngines

MAX_FAILURES = 1
"""A failure of the request's own (numbers that are not finite, a defect) may come from one broken device: another
runner tries once. What happens there again is not the device's."""

UNSUSPICIOUS_BREAKS = 1
"""A stream breaks for many reasons that are not the request's: a node goes, a pod is killed. From the second one on the
request is computed alone, as after an engine's death: some deaths take the whole runner along, and nobody is left to
tell of them."""

MAX_LOSSES = 16
"""The last resort, whatever the reasons were. Each placement computes the whole request again; who has lost this many
runners is worth more work than it will ever bring."""


class Loss(Enum):
    """What took a runner away."""

    STREAM_BROKE = "stream broke"
    ENGINE_DIED = "engine died"
    ENGINE_HUNG = "engine hung"


class LossCounter:
    """The losses of one request so far."""

    __slots__ = ("_breaks", "_deaths", "_failures")

    def __init__(self) -> None:
        self._failures = self._breaks = self._deaths = 0

    @property
    def engines_lost(self) -> int:
        """Engines that died or hung while they had it, as far as anybody can tell; from one on it is a suspect."""
        return self._deaths + max(0, self._breaks - UNSUSPICIOUS_BREAKS)

    def failed(self, error: MotetError) -> MotetError | None:
        """A runner said that it cannot go on. Returns what ends the request; None: it is to be placed again."""
        if error.mapping.retry_after > 0:
            return None  # no room, or a drain: the request is innocent, and its deadline ends the search
        self._failures += 1
        return error if self._failures > MAX_FAILURES else None

    def lost(self, loss: Loss, *, alone: bool) -> MotetError | None:
        """Its runner is gone. Returns what ends the request; None: it is to be placed again.

        `alone` says that the runner computed this request and no other when it was last heard of.
        """
        if loss is Loss.STREAM_BROKE:
            self._breaks += 1
        else:
            self._deaths += 1
        lost = self._deaths + self._breaks
        if alone:
            return RequestKillsEngines(
                f"{lost} engines died or hung with this request, the last one while it computed only this request. "
                "The request is not tried again; other requests are not affected."
            )
        if lost > MAX_LOSSES:
            return EngineRestarted(f"{lost} runners were lost while they had this request; send it again.")
        return None
