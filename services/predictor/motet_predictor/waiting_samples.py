"""Samples that wait until they are written, with equal room for each tenant. Pure."""

from collections import deque
from collections.abc import Iterable

from motet.store.length_samples import LengthSample


class WaitingSamples:
    """If there are more than `most`, the oldest of a tenant with more than its part is dropped. So a tenant with many
    answers does not take the room of the others. No sample takes longer where there are many tenants."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[str, deque[LengthSample]] = {}
        self._with: dict[int, dict[str, None]] = {}
        """The tenants that have this number of samples"""
        self._largest = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, sample: LengthSample) -> bool:
        """False if another one had to be dropped."""
        own = self._of.setdefault(sample.tenant, deque())
        own.append(sample)
        self._counted(sample.tenant, len(own) - 1, len(own))
        if self._count <= self._most:
            return True
        has_more = len(own) * len(self._of) > self._most
        self._drop_oldest(sample.tenant if has_more else next(iter(self._with[self._largest])))
        return False

    def take(self, count: int) -> list[LengthSample]:
        """The oldest of each tenant in turn."""
        taken: list[LengthSample] = []
        while self._of and len(taken) < count:
            tenant = next(iter(self._of))
            taken.append(self._of[tenant][0])
            self._drop_oldest(tenant)
            if tenant in self._of:
                self._of[tenant] = self._of.pop(tenant)  # behind the others
        return taken

    def put_back(self, samples: Iterable[LengthSample]) -> int:
        """Those that were taken and could not be written. Returns how many had to be dropped."""
        since = self.take(self._count)
        return [self.add(one) for one in (*samples, *since)].count(False)

    def _drop_oldest(self, tenant: str) -> None:
        own = self._of[tenant]
        own.popleft()
        self._counted(tenant, len(own) + 1, len(own))
        if not own:
            del self._of[tenant]

    def _counted(self, tenant: str, before: int, after: int) -> None:
        self._count += after - before
        if before:
            alike = self._with[before]
            del alike[tenant]
            if not alike:
                del self._with[before]
        if after:
            self._with.setdefault(after, {})[tenant] = None
        self._largest = max(self._largest, after)
        if self._largest not in self._with:
            self._largest = after  # no other tenant had as many, and it has one less now
