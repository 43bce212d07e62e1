"""Samples that wait until they are written, with equal room for each tenant. Pure."""

from collections import deque
from collections.abc import Iterable

from motet.store.length_samples import LengthSample


class WaitingSamples:
    """If there are more than `most`, the oldest of a tenant with more than its part is dropped. So a tenant with many
    answers does not take the room of the others."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[str, deque[LengthSample]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, sample: LengthSample) -> bool:
        """False if another one had to be dropped."""
        own = self._of.setdefault(sample.tenant, deque())
        own.append(sample)
        self._count += 1
        if self._count <= self._most:
            return True
        most = own if len(own) * len(self._of) > self._most else max(self._of.values(), key=len)
        self._drop_oldest(most[0].tenant)
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
        self._of[tenant].popleft()
        self._count -= 1
        if not self._of[tenant]:
            del self._of[tenant]
