"""Which adapters may have to be checked, and whose turn it is. Mostly there is none, of however many adapters."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from operator import attrgetter

from motet.domain import ObjectName
from motet_scheduler.policy.adapters.adapter import Adapter, Line


class CheckQueue:
    def __init__(self) -> None:
        self._waiting: dict[ObjectName, Adapter] = {}
        self._noted: dict[ObjectName, Adapter] = {}
        """Of these, those of which something has changed since they were looked at"""
        self._with_states: dict[ObjectName, Adapter] = {}
        """Of those that wait; the others wait for their first check: mostly, if there are many"""
        self._idle: dict[ObjectName, Adapter] = {}
        """Others, which have to be checked when a runner comes, or it is time for another attempt."""
        self.retry_times: list[tuple[float, ObjectName]] = []
        """When it is. A heap; each once, and some out of date."""
        self._known_retries: set[tuple[float, ObjectName]] = set()
        """The same. Each runner that comes or goes has all of them put aside anew."""
        self._turns: dict[Line, int] = {}
        """The last order to check, of those that have something to check"""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def note(self, adapter: Adapter) -> None:
        """Something has changed about it: it may have to be checked."""
        name = adapter.spec.ref.object
        self._noted[name] = adapter
        self._idle.pop(name, None)
        self._wait(name, adapter)

    def _wait(self, name: ObjectName, adapter: Adapter) -> None:
        self._waiting[name] = adapter
        if adapter.states:
            self._with_states[name] = adapter
        else:
            self._with_states.pop(name, None)

    def discard(self, name: ObjectName) -> None:
        """It has gone."""
        self._leave(name)
        self._noted.pop(name, None)
        self._idle.pop(name, None)

    def _leave(self, name: ObjectName) -> None:
        self._waiting.pop(name, None)
        self._with_states.pop(name, None)

    def put_aside(self, adapter: Adapter) -> None:
        name = adapter.spec.ref.object
        self._leave(name)
        self._idle[name] = adapter

    def retry_at(self, at: float, adapter: Adapter) -> None:
        retry = at, adapter.spec.ref.object
        if retry not in self._known_retries:
            self._known_retries.add(retry)
            heappush(self.retry_times, retry)

    def runners_changed(self) -> None:
        """Others may be asked."""
        for name, adapter in self._idle.items():
            self._wait(name, adapter)
        self._idle.clear()

    def look(self, now: float) -> None:
        """For some it is time. Of others nothing is left to check."""
        while self.retry_times and self.retry_times[0][0] <= now:
            self._known_retries.discard(retry := heappop(self.retry_times))
            _, name = retry
            if (adapter := self._idle.pop(name, None)) is not None:
                self._wait(name, adapter)
        for name, one in self._noted.items():  # not of all: each event looks, and thousands may wait
            if one.is_decided:
                self._leave(name)
        self._noted.clear()

    def with_states(self) -> list[Adapter]:
        return list(self._with_states.values())

    def in_turn(self) -> list[tuple[int, int, Line, Iterator[Adapter]]]:
        """By namespace: a heap, with the one first whose turn was longest ago. Of a namespace, first those that were
        not asked for the longest time: the orders of some may never be answered."""
        lines: defaultdict[Line, list[Adapter]] = defaultdict(list)
        for adapter in sorted(self._waiting.values(), key=attrgetter("asked_at")):
            lines[adapter.line].append(adapter)
        # Who comes, or comes again, goes before none that waits for a turn: else those who come could keep it waiting.
        newest = max((self._turns[line] for line in lines if line in self._turns), default=0)
        self._turns = {line: self._turns.get(line, newest) for line in lines}
        waiting = [(self._turns[line], place, line, iter(own)) for place, (line, own) in enumerate(lines.items())]
        heapify(waiting)
        return waiting

    def had_turn(self, line: Line, order: int) -> None:
        self._turns[line] = order

    def check(self, by_name: Mapping[ObjectName, Adapter]) -> None:
        """Recount those that may have to be checked, and those that were put aside."""
        waiting, idle = self._waiting.keys(), self._idle.keys()
        assert not waiting & idle, "an adapter is put aside and looked at"
        assert waiting | idle <= by_name.keys(), "an adapter that has gone is looked at"
        stated = {name for name, one in self._waiting.items() if one.states}
        assert self._with_states.keys() == stated, "an adapter that is checked, or was, is not looked at"
        for name, one in by_name.items():
            assert one.is_decided or name in waiting | idle, "nobody looks at an adapter that is not decided"
