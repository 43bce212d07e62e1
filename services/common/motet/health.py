"""Whether a process is ready and alive. The answers over gRPC and over HTTP both come from here."""

from collections.abc import Callable

Check = Callable[[], str]
"""Returns what is wrong; empty if nothing is."""


class Health:
    """A process is not ready until `set_ready`, and not after `stop`. It is alive unless a liveness check fails."""

    def __init__(self) -> None:
        self._unready = "starting"
        self._stopping = False
        self._readiness_checks: list[Check] = []
        self._liveness_checks: list[Check] = []

    def set_ready(self, ready: bool, why: str = "") -> None:
        """Say whether the process takes new work, and if not, why."""
        self._unready = "" if ready else why or "not ready"

    def stop(self) -> None:
        self._stopping = True

    def add_readiness_check(self, check: Check) -> None:
        """The process is not ready while `check` returns a reason, whatever `set_ready` says."""
        self._readiness_checks.append(check)

    def add_liveness_check(self, check: Check) -> None:
        """The process counts as dead, and is restarted, while `check` returns a reason. The check must look at this
        process only: a restart does not help when another service is away, and makes a short outage longer."""
        self._liveness_checks.append(check)

    def unready_reason(self) -> str:
        return "stopping" if self._stopping else self._unready or _first(self._readiness_checks)

    def dead_reason(self) -> str:
        return _first(self._liveness_checks)


def _first(checks: list[Check]) -> str:
    return next((why for check in checks if (why := check())), "")
