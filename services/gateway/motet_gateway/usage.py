"""Tokens per tenant in the last two minutes. Each hello to a scheduler has them, which does not use them yet. Pure."""

from collections import deque
from collections.abc import Iterable

from motet.api.v1 import scheduler_pb2
from motet.clock import Clock

WINDOW_SECONDS = 120.0
SLICE_SECONDS = 10.0


class RecentUsage:
    """Counts in slices of ten seconds when choices end, so that a single token costs nothing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slices: deque[tuple[float, dict[str, list[int]]]] = deque()

    def add(self, tenant: str, prompt: int, output: int) -> None:
        """A choice has ended."""
        counts = self._now().setdefault(tenant, [0, 0])
        counts[0] += prompt
        counts[1] += output

    def report(self, running: Iterable[tuple[str, int, int]]) -> list[scheduler_pb2.TenantUsage]:
        """Per tenant; `running` are choices that have not ended: tenant, tokens of prompt and of output so far."""
        self._now()
        ended = [(tenant, prompt, output) for _, counts in self._slices for tenant, (prompt, output) in counts.items()]
        sums: dict[str, scheduler_pb2.TenantUsage] = {}
        for tenant, prompt, output in (*ended, *running):
            total = sums.setdefault(tenant, scheduler_pb2.TenantUsage(tenant=tenant))
            total.prompt_tokens += prompt
            total.output_tokens += output
        return list(sums.values())

    def _now(self) -> dict[str, list[int]]:
        now = self._clock()
        while self._slices and now - self._slices[0][0] > WINDOW_SECONDS:
            self._slices.popleft()
        if not self._slices or now - self._slices[-1][0] >= SLICE_SECONDS:
            self._slices.append((now, {}))
        return self._slices[-1][1]
