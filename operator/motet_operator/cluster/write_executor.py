"""Carries out the wanted writes: for each object the newest one, a few at a time, until the object is as wanted."""

import asyncio
from collections.abc import Callable, Mapping

import structlog

from motet.clock import monotonic
from motet.kube import Unreachable
from motet_operator.cluster.api import Api, ApiRefused, NotLeading
from motet_operator.cluster.cache import Cache
from motet_operator.cluster.obstacles import Obstacle, ObstacleLog, name_taken, permission, refusal
from motet_operator.cluster.work_queue import FIRST_WAIT_SECONDS, LAST_WAIT_SECONDS, WorkQueue
from motet_operator.cluster.writes import NameTaken, OwnerGone, Write, WriteKey
from motet_operator.metrics import ClusterMetrics

log = structlog.get_logger(__name__)

RETRY_UNKNOWN_SECONDS = 0.2
"""How often a leader that cannot be sure of its Lease checks it again. This does not count as a failed write."""

MAX_IMMEDIATE_RETRIES = 3
"""A write that fails more often in a row is reported as an obstacle. Conflicts usually pass by themselves."""

AUTHORIZERS = '" cannot '
"""All authorizers write this after the user's name. Admission also answers 403, but in other words."""


class WriteExecutor:
    def __init__(
        self,
        api: Api,
        cache: Cache,
        obstacle_log: ObstacleLog,
        metrics: ClusterMetrics,
        *,
        leading: Callable[[], bool],
        written: Callable[[Write], None],
        denied: Callable[[Write, Obstacle], None],
        time_scale: float = 1.0,
    ) -> None:
        self._api, self._cache, self._obstacle_log, self._metrics = api, cache, obstacle_log, metrics
        self._leading, self._written, self._denied = leading, written, denied
        self._queue: WorkQueue[WriteKey] = WorkQueue(
            first_wait=FIRST_WAIT_SECONDS * time_scale, last_wait=LAST_WAIT_SECONDS * time_scale
        )
        self._wanted: dict[WriteKey, Write] = {}
        self._work_added = asyncio.Event()

    @property
    def depth(self) -> int:
        return len(self._queue) + self._queue.busy

    def set_writes(self, writes: Mapping[WriteKey, Write]) -> None:
        """Replaces all wanted writes; earlier ones that are not among them are dropped."""
        for key in [key for key in self._wanted if key not in writes]:
            del self._wanted[key]
            self._queue.drop(key)
            self._obstacle_log.forget(key)
        for key, write in writes.items():
            if self._wanted.get(key) != write:
                self._wanted[key] = write
                self._enqueue(key)
        self._metrics.queue_depth.set(self.depth)

    async def run(self, workers: int) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(workers):
                group.create_task(self._work(), name=f"writer {number}")

    async def _work(self) -> None:
        while True:
            key = await self._next()
            # The API client would refuse the write. Leadership depends on the clock, so there is no event to wait for.
            while not self._leading():  # noqa: ASYNC110
                await asyncio.sleep(RETRY_UNKNOWN_SECONDS)
            write = self._wanted.get(key)
            if write is None or not write.needed(self._cache):
                self._finish(key, write)
            else:
                await self._carry_out(key, write)

    async def _next(self) -> WriteKey:
        while True:
            if (key := self._queue.pop(monotonic())) is not None:
                return key
            self._work_added.clear()
            due = self._queue.next_due()
            try:
                async with asyncio.timeout(None if due is None else max(0.0, due - monotonic())):
                    await self._work_added.wait()
            except TimeoutError:
                continue

    async def _carry_out(self, key: WriteKey, write: Write) -> None:
        outcome = "done"
        try:
            await write.carry_out(self._api, self._cache)
        except ApiRefused as error:
            outcome = _outcome(error)
            if outcome == "forbidden":
                self._block(key, write, permission(error))
            elif outcome != "gone":
                log.info("write_refused", write=str(key), status=error.status, error=error.message[:300])
            if outcome in ("conflict", "refused") and self._queue.failures(key) >= MAX_IMMEDIATE_RETRIES:
                self._block(key, write, refusal(error))
        except OwnerGone:
            outcome = "gone"
        except NotLeading:
            outcome = "unsure"
        except NameTaken as error:
            outcome = "foreign"
            self._block(key, write, name_taken(error))
        except Unreachable as error:
            outcome = "unreachable"
            log.debug("write_unanswered", write=str(key), error=str(error))
        except Exception:
            outcome = "error"
            log.exception("write_failed", write=str(key))
        self._metrics.writes.labels(key.what, outcome).inc()
        if outcome == "done":
            self._finish(key, write)
            self._written(write)
        elif outcome == "unsure":
            self._queue.done(key)
            if key in self._wanted:
                self._enqueue(key)  # not a failure: retry as soon as we lead again
        else:
            # Also if the object is gone. Usually the watch reports that soon, and the write is dropped. But an object
            # may outlive its namespace: then the wait keeps rounds from trying again and again.
            self._queue.failed(key, monotonic())
            self._work_added.set()  # a sleeping worker may have to wake earlier
        self._metrics.queue_depth.set(self.depth)

    def _block(self, key: WriteKey, write: Write, obstacle: Obstacle) -> None:
        if self._wanted.get(key) is not None and self._obstacle_log.block_write(key, obstacle):
            log.warning("write_blocked", write=str(key), reason=obstacle.reason, message=obstacle.message)
            self._denied(write, obstacle)

    def _finish(self, key: WriteKey, write: Write | None) -> None:
        self._obstacle_log.forget(key)
        if self._wanted.get(key) is write:
            self._wanted.pop(key, None)
        self._queue.done(key)
        if self._wanted.get(key) is not None:
            self._enqueue(key)  # a newer write was requested meanwhile

    def _enqueue(self, key: WriteKey) -> None:
        self._queue.add(key, key.object[0], urgent=key.urgent)
        self._work_added.set()


def _outcome(error: ApiRefused) -> str:
    if error.gone:
        return "gone"
    if error.forbidden:
        # A namespace that is being deleted accepts nothing new; no right is missing.
        if "because it is being terminated" in error.message:
            return "gone"
        return "forbidden" if AUTHORIZERS in error.message else "refused"
    if error.conflict:
        return "conflict"
    return "throttled" if error.status == 429 else "refused"
