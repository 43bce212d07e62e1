"""Tenants that always have requests waiting, on runners that take a second for each token of an answer."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

from motet.domain import RequestId
from motet_scheduler.policy import effects, events
from tests.scheduler.builders import SchedulerDriver, ready

OUTPUT_COST = 2.0


@dataclass(kw_only=True)
class Ask:
    """One request. `answer`: its tokens, which nobody knows before its end."""

    prompt: int = 16
    answer: int = 16
    max_tokens: int = 64
    choices: int = 1
    how: dict[str, Any] = field(default_factory=dict)
    """Other fields of the message."""


class Load:
    def __init__(self, *, runners: int = 1, config: dict[str, Any] | None = None, **capacity: Any) -> None:
        self.driver: SchedulerDriver = ready(**(config or {}))
        self.driver.scheduler.check = lambda: None  # type: ignore[method-assign]  # it counts all requests
        for number in range(runners):
            self.driver.attach(f"r{number}", **({"pages": 10_000, "max_sequences": 8} | capacity))
        self.spent: Counter[str] = Counter()
        """By tenant: the cost of what was computed."""
        self.placed: Counter[str] = Counter()
        self.largest: Counter[str] = Counter()
        """By tenant: the longest prompt of those that were placed."""
        self._tenants: dict[str, str] = {}
        """The tenants of those that have several lines of requests."""
        self._asks: dict[str, Iterator[Ask]] = {}
        self._waiting: Counter[str] = Counter()
        self._backlog: dict[str, int] = {}
        self._of: dict[str, tuple[str, bool, Ask]] = {}
        """Tenant, and whether it is a further choice."""
        self._ends: list[tuple[float, int, str]] = []
        self._numbers = count()

    def tenant(self, name: str, asks: Callable[[], Iterator[Ask]], *, backlog: int = 20, of: str = "") -> None:
        """From now on, as many of its requests wait as long as it has some. `of`: its name is that of a further line of
        this tenant."""
        self._tenants[name] = of or name
        self._asks[name], self._backlog[name] = asks(), backlog

    def ask(self, tenant: str, ask: Ask) -> None:
        first = f"{tenant}-{next(self._numbers)}"
        for choice in range(ask.choices):
            name = f"{first}.{choice}" if choice else first
            how = {"parent": RequestId(first)} | ask.how if choice else ask.how
            self._of[name] = tenant, bool(choice), ask
            self._waiting[tenant] += 1
            self.driver.enqueue(
                name,
                tenant=self._tenants.get(tenant, tenant),
                prompt=ask.prompt,
                max_tokens=ask.max_tokens,
                choices=ask.choices,
                **how,
            )
            self._note()

    def run(self, seconds: float) -> None:
        end = self.driver.clock() + seconds
        self._fill()
        while self._ends and self._ends[0][0] <= end:
            at, _, name = heappop(self._ends)
            self.driver.clock.advance(max(0.0, at - self.driver.clock()))
            self._end(name)
            self._fill()
        self.driver.clock.advance(max(0.0, end - self.driver.clock()))

    def share(self, tenant: str) -> float:
        return self.spent[tenant] / sum(self.spent.values())

    def _end(self, name: str) -> None:
        tenant, further, ask = self._of.pop(name)
        placement = self.driver.scheduler.requests[RequestId(name)].placement
        assert placement is not None
        prompt = 0 if further else ask.prompt
        self.spent[tenant] += int(prompt + OUTPUT_COST * ask.answer)
        self.driver.send(events.RequestFinished("g0", RequestId(name), placement.epoch, ask.answer))
        self._note()

    def _fill(self) -> None:
        for tenant, asks in self._asks.items():
            while self._waiting[tenant] < self._backlog[tenant] and (ask := next(asks, None)) is not None:
                self.ask(tenant, ask)

    def _note(self) -> None:
        while True:
            for placed in self.driver.of(effects.SendPlaced):
                tenant, _, ask = self._of[placed.request]
                self._waiting[tenant] -= 1
                self.placed[tenant] += 1
                self.largest[tenant] = max(self.largest[tenant], ask.prompt)
                heappush(self._ends, (self.driver.clock() + ask.answer, next(self._numbers), placed.request))
            if not self.driver.scheduler.more_to_try:
                return
            self.driver.send(events.TryMore())
