"""How long a source is not asked after a failed fetch. The time grows with each failure, separately for each origin."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from motet.runner_info import Failure
from motet_runner.adapters.policy.values import FetchRequest
from motet_runner.sources.fetch_errors import NO_ROOM, NO_SPACE, RETRY_LATER_SECONDS

MAX_PER_NAMESPACE = 256
"""How many failures of a namespace are remembered. With more, the namespace's oldest failure is forgotten."""


@dataclass(frozen=True, slots=True)
class _Failed:
    times: int
    until: float
    failure: Failure


class SourceFailures:
    """`spread` gives a factor near 1, so that runners do not try again together; `scale` is the time scale."""

    def __init__(self, *, spread: Callable[[], float] = lambda: 1.0, scale: float = 1.0) -> None:
        self._spread = spread
        self._scale = scale
        self._of_namespace: dict[str, OrderedDict[tuple[object, ...], _Failed]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of_namespace.values()))

    def blocking(self, request: FetchRequest, now: float) -> Failure | None:
        """The failure because of which this source is not asked now; None: it may be asked. Only orders for requests
        are held back, because requests order an adapter again and again; the check of a new revision never is."""
        failures = self._of_namespace.get(request.namespace)
        failed = failures.get(_key(request)) if failures is not None else None
        return failed.failure if failed is not None and request.digest_verified and now < failed.until else None

    def note(self, request: FetchRequest, failure: Failure, now: float) -> Failure:
        """The same failure, with the time after which the next attempt is made."""
        failures = self._of_namespace.setdefault(request.namespace, OrderedDict())
        before = failures.pop(_key(request), None)
        own = failure.reason != NO_SPACE  # the runner's disk is full, which says nothing about the source
        times = before.times + own if before is not None else 1
        after = min(failure.retry_after * 2 ** min(times - 1, 10), max(RETRY_LATER_SECONDS, failure.retry_after))
        reason = NO_SPACE if failure.reason == NO_ROOM else failure.reason
        failure = replace(failure, reason=reason, retry_after=after * self._spread() * self._scale)
        until = now + (failure.retry_after or RETRY_LATER_SECONDS * self._scale)
        failures[_key(request)] = _Failed(times, until, failure)
        if len(failures) > MAX_PER_NAMESPACE:
            failures.popitem(last=False)
        return failure

    def forget(self, request: FetchRequest) -> None:
        failures = self._of_namespace.get(request.namespace)
        if failures is not None:
            failures.pop(_key(request), None)
            if not failures:
                del self._of_namespace[request.namespace]

    def expire(self, now: float) -> None:
        """Forget sources whose next attempt was due, and was not made in time."""
        for namespace, failures in list(self._of_namespace.items()):
            for key in [key for key, one in failures.items() if now > one.until + RETRY_LATER_SECONDS * self._scale]:
                del failures[key]
            if not failures:
                del self._of_namespace[namespace]


def _key(request: FetchRequest) -> tuple[object, ...]:
    return (request.origin, request.expected)
