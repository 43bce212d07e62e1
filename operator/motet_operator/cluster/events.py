"""Posts Kubernetes Events for transitions; repeated ones are merged, and excess ones are dropped.

The status has all information, an Event only tells when it changed. So an Event may be lost and never delays a status.
"""

import asyncio
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import structlog

from motet.clock import Clock, monotonic
from motet.kube import ApiError
from motet_operator.cluster.api import Api, RequestLimiter
from motet_operator.cluster.kinds import EVENTS, Kind, Object, key_of, uid_of
from motet_operator.cluster.writes import OWNED_MANAGER
from motet_operator.metrics import ClusterMetrics

log = structlog.get_logger(__name__)

REPEAT_SECONDS = 300.0
"""The same event of one object is posted once in this time; repetitions are only counted."""

MAX_REMEMBERED = 4096
MAX_PENDING = 256


@dataclass(slots=True)
class _PostedEvent:
    name: str
    first: datetime
    posted_at: float
    count: int = 0
    merged: int = 0


class EventWriter:
    def __init__(
        self,
        api: Api,
        metrics: ClusterMetrics,
        reporter: str,
        *,
        per_second: float = 5.0,
        clock: Clock = monotonic,
        time_scale: float = 1.0,
    ) -> None:
        self._api, self._metrics, self._reporter = api, metrics, reporter
        self._limiter = RequestLimiter(per_second, per_second * 5, clock)
        self._clock = clock
        self._repeat = REPEAT_SECONDS * time_scale
        self._posted: OrderedDict[tuple[str, str], _PostedEvent] = OrderedDict()
        self._pending: asyncio.Queue[Object] = asyncio.Queue(MAX_PENDING)

    def post(self, kind: Kind, it: Object, type_: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        now, key = self._clock(), (uid_of(it), reason)
        posted = self._posted.get(key)
        if posted is None:
            posted = self._posted[key] = _PostedEvent(
                f"{it['metadata']['name']}.{uuid.uuid4().hex[:16]}", datetime.now(UTC), now
            )
            while len(self._posted) > MAX_REMEMBERED:
                self._posted.popitem(last=False)
        elif now - posted.posted_at < self._repeat:
            posted.merged += 1
            self._metrics.events.labels("merged").inc()
            return
        posted.count += 1 + posted.merged
        posted.merged, posted.posted_at = 0, now
        try:
            self._pending.put_nowait(_event(kind, it, type_, reason, message, posted, self._reporter))
        except asyncio.QueueFull:
            self._metrics.events.labels("dropped").inc()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            event = await self._pending.get()
            await self._limiter.take()
            try:
                await self._api.apply(EVENTS, event, manager=OWNED_MANAGER)
                self._metrics.events.labels("posted").inc()
            except ApiError as error:
                self._metrics.events.labels("dropped").inc()
                log.debug("event_dropped", reason=event["reason"], error=str(error))


def _event(  # noqa: PLR0917
    kind: Kind, it: Object, type_: str, reason: str, message: str, posted: _PostedEvent, reporter: str
) -> Object:
    namespace, name = key_of(it)
    now = datetime.now(UTC)
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.name,
        "metadata": {"name": posted.name, "namespace": namespace or "default"},
        "involvedObject": {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "namespace": namespace,
            "name": name,
            "uid": uid_of(it),
        },
        "type": type_,
        "reason": reason,
        "message": message[:1024],
        "source": {"component": "motet-operator"},
        "reportingComponent": "motet.dev/operator",
        "reportingInstance": reporter,
        "firstTimestamp": posted.first.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lastTimestamp": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "count": posted.count,
    }
