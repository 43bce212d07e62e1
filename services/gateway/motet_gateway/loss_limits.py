"""How often a lost request is placed again, by the cause of the loss. Pure.

Without limits, a request with non-finite numbers would go from runner to runner until its deadline. A request that
kills engines would break the streams of all other tenants on each of them.
"""

from enum import Enum

from motet.errors import Declined, EngineRestarted, MotetError, RequestKillsEngines

MAX_FAILURES = 1
"""A failure of this request alone (non-finite numbers, a defect) may come from a broken device, so another runner tries
once. A second failure there is not the device's fault."""

UNSUSPICIOUS_BREAKS = 1
"""Most broken streams are not the request's fault: a node goes away, a pod is killed. From the second break on, the
request is computed alone, as after an engine's death: an engine that dies may end the whole runner, and then no
message says so."""

MAX_LOSSES = 16
"""The limit for all causes together. Each placement computes the whole request again."""


class Loss(Enum):
    """Why a runner was lost."""

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
        """Engines that probably died or hung while they had the request. From one on the request is a suspect."""
        return self._deaths + max(0, self._breaks - UNSUSPICIOUS_BREAKS)

    def failed(self, error: MotetError) -> MotetError | None:
        """A runner reported a failure. Returns the error that ends the request, or None to place it again."""
        if error.mapping.retry_after > 0 or isinstance(error, Declined):
            return None  # no free capacity, or a drain: not the request's fault, and its deadline limits the attempts
        return self.ignored(error)

    def ignored(self, error: MotetError) -> MotetError | None:
        """Its runner would ignore what it asks for. The scheduler does not know which others would."""
        self._failures += 1
        return error if self._failures > MAX_FAILURES else None

    def lost(self, loss: Loss, *, alone: bool) -> MotetError | None:
        """Its runner is lost. Returns the error that ends the request, or None to place it again.

        `alone`: by its last message, the runner computed only this request.
        """
        if loss is Loss.STREAM_BROKE:
            self._breaks += 1
        else:
            self._deaths += 1
        lost = self._deaths + self._breaks
        if alone:
            return RequestKillsEngines(
                f"{lost} engines died or hung while they computed this request. The last one was computing only this "
                "request, so this request is the cause. Motet does not try it again. Other requests are not affected."
            )
        if lost > MAX_LOSSES:
            return EngineRestarted(
                f"{lost} runners died or lost their connection while they computed this request. Send it again."
            )
        return None
