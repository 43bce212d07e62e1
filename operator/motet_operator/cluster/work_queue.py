"""A queue that holds each key once, however often it is added. Pure: the caller passes the time.

Urgent keys come first. Otherwise namespaces take turns, so that a tenant's thousand adapters do not delay another
tenant's first one. A failed key is retried after a jittered wait that doubles up to a maximum.
"""

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

RoundRobin = OrderedDict[str, deque[Key]]
"""Keys by namespace, in the order in which namespaces take turns."""

FIRST_WAIT_SECONDS = 0.25
LAST_WAIT_SECONDS = 30.0


class WorkQueue(Generic[Key]):
    def __init__(self, *, first_wait: float = FIRST_WAIT_SECONDS, last_wait: float = LAST_WAIT_SECONDS) -> None:
        self._first, self._last = first_wait, last_wait
        self._urgent: RoundRobin[Key] = OrderedDict()
        self._rest: RoundRobin[Key] = OrderedDict()
        self._group_of: dict[Key, tuple[RoundRobin[Key], str]] = {}
        self._ready: set[Key] = set()
        self._busy: set[Key] = set()
        self._again: set[Key] = set()
        self._waiting: dict[Key, float] = {}
        self._alarms: list[tuple[float, int, Key]] = []
        self._counter = 0
        self._failures: dict[Key, int] = {}

    def __len__(self) -> int:
        """Keys that are ready or wait for a retry; not those being processed."""
        return len(self._ready) + len(self._waiting)

    @property
    def busy(self) -> int:
        return len(self._busy)

    def failures(self, key: Key) -> int:
        return self._failures.get(key, 0)

    def add(self, key: Key, group: str, *, urgent: bool = False) -> None:
        """Add a key. One that is being processed is processed once more; one that failed keeps its wait. A key must
        always be urgent or never."""
        self._group_of[key] = (self._urgent if urgent else self._rest, group)
        if key in self._busy:
            self._again.add(key)
        elif key not in self._waiting:
            self._enqueue(key)

    def drop(self, key: Key) -> None:
        """Remove a key that is not wanted any more."""
        self._again.discard(key)
        self._waiting.pop(key, None)
        self._failures.pop(key, None)
        if key in self._ready:
            self._ready.discard(key)
            groups, group = self._group_of[key]
            groups[group].remove(key)
        if key not in self._busy:
            self._group_of.pop(key, None)

    def pop(self, now: float) -> Key | None:
        """The next key; the caller must call `done` or `failed` afterwards."""
        self._wake(now)
        while groups := self._urgent or self._rest:
            group, keys = groups.popitem(last=False)
            if not keys:
                continue
            key = keys.popleft()
            if keys:
                groups[group] = keys  # at the end: the next namespace first
            self._ready.discard(key)
            self._busy.add(key)
            return key
        return None

    def next_due(self) -> float | None:
        """When the next waiting key is ready again."""
        while self._alarms and self._waiting.get(self._alarms[0][2]) != self._alarms[0][0]:
            heapq.heappop(self._alarms)
        return self._alarms[0][0] if self._alarms else None

    def done(self, key: Key) -> None:
        self._busy.discard(key)
        self._failures.pop(key, None)
        if key in self._again:
            self._again.discard(key)
            self._enqueue(key)
        else:
            self._group_of.pop(key, None)

    def failed(self, key: Key, now: float) -> float:
        """Returns how long it waits."""
        self._busy.discard(key)
        self._again.discard(key)
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        wait = min(self._last, self._first * 2.0 ** min(failures, 32)) * random.uniform(0.5, 1.0)  # noqa: S311
        self._waiting[key] = now + wait
        self._counter += 1
        heapq.heappush(self._alarms, (now + wait, self._counter, key))
        return wait

    def _wake(self, now: float) -> None:
        while (due := self.next_due()) is not None and due <= now:
            key = heapq.heappop(self._alarms)[2]
            del self._waiting[key]
            self._enqueue(key)

    def _enqueue(self, key: Key) -> None:
        if key not in self._ready:
            self._ready.add(key)
            groups, group = self._group_of[key]
            groups.setdefault(group, deque()).append(key)
