"""Tokens per tenant of the last two minutes: what keeps shares fair across a scheduler's restart. Pure."""

from collections import deque

from motet.api.v1 import scheduler_pb2
from motet.clock import Clock

WINDOW_SECONDS = 120.0
SLICE_SECONDS = 10.0


class RecentUsage:
    """Counted in slices of ten seconds, so that forgetting costs nothing per token."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slices: deque[tuple[float, dict[str, list[int]]]] = deque()

    def add(self, tenant: str, *, prompt: int = 0, output: int = 0) -> None:
        counts = self._now().setdefault(tenant, [0, 0])
        counts[0] += prompt
        counts[1] += output

    def report(self) -> list[scheduler_pb2.TenantUsage]:
        self._now()
        sums: dict[str, list[int]] = {}
        for _, counts in self._slices:
            for tenant, (prompt, output) in counts.items():
                total = sums.setdefault(tenant, [0, 0])
                total[0] += prompt
                total[1] += output
        return [
            scheduler_pb2.TenantUsage(tenant=tenant, prompt_tokens=prompt, output_tokens=output)
            for tenant, (prompt, output) in sums.items()
        ]

    def _now(self) -> dict[str, list[int]]:
        now = self._clock()
        while self._slices and now - self._slices[0][0] > WINDOW_SECONDS:
            self._slices.popleft()
        if not self._slices or now - self._slices[-1][0] >= SLICE_SECONDS:
            self._slices.append((now, {}))
        return self._slices[-1][1]
