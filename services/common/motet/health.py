"""Whether a process is ready for work, and whether it gets on with it: one truth, told over gRPC and over HTTP."""

from collections.abc import Callable

Check = Callable[[], str]
"""Says what is wrong; empty: nothing is."""


class Health:
    """Not ready until told so, and never again once it stops. Alive unless a check says otherwise."""

    def __init__(self) -> None:
        self._unready = "starting"
        self._stopping = False
        self._obstacles: list[Check] = []
        self._failings: list[Check] = []

    def set_ready(self, ready: bool, why: str = "") -> None:
        """Whether new work may come, and if not, what is in the way."""
        self._unready = "" if ready else why or "not ready"

    def stop(self) -> None:
        self._stopping = True

    def add_readiness_check(self, check: Check) -> None:
        """Beside what is set: not ready while `check` says why."""
        self._obstacles.append(check)

    def add_liveness_check(self, check: Check) -> None:
        """Count as dead, and be started again, while `check` says why. It must look at this process alone: one that
        ends because another is away makes an outage of a hiccup."""
        self._failings.append(check)

    def unready_reason(self) -> str:
        return "stopping" if self._stopping else self._unready or _first(self._obstacles)

    def dead_reason(self) -> str:
        return _first(self._failings)


def _first(checks: list[Check]) -> str:
    return next((why for check in checks if (why := check())), "")
