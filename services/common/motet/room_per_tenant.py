"""Items that wait until they are written or sent, with equal room for each tenant. Pure."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar


class _OfATenant(Protocol):
    @property
    def tenant(self) -> str: ...


Item = TypeVar("Item", bound=_OfATenant)


class RoomPerTenant(Generic[Item]):
    """If there are more than `most`, the oldest of a tenant with more than its part is dropped. So a tenant with many
    items does not take the room of the others. No item takes longer where there are many tenants, or many items."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: OrderedDict[str, deque[Item]] = OrderedDict()
        self._with: dict[int, dict[str, None]] = {}
        """The tenants that have this number of items"""
        self._largest = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, item: Item) -> bool:
        """False if another one had to be dropped."""
        own = self._of.setdefault(item.tenant, deque())
        own.append(item)
        self._counted(item.tenant, len(own) - 1, len(own))
        if self._count <= self._most:
            return True
        has_more = len(own) * len(self._of) > self._most
        self._drop_oldest(item.tenant if has_more else self._with_most())
        return False

    def take(self, count: int) -> list[Item]:
        """The oldest of each tenant in turn."""
        taken: list[Item] = []
        while self._of and len(taken) < count:
            tenant = next(iter(self._of))
            taken.append(self._of[tenant][0])
            self._drop_oldest(tenant)
            if tenant in self._of:
                self._of.move_to_end(tenant)  # behind the others
        return taken

    def put_back(self, items: Sequence[Item]) -> int:
        """Those that were taken and could not be written or sent. Returns how many had to be dropped."""
        for item in reversed(items):
            own = self._of.setdefault(item.tenant, deque())
            own.appendleft(item)
            self._of.move_to_end(item.tenant, last=False)
            self._counted(item.tenant, len(own) - 1, len(own))
        too_many = max(0, self._count - self._most)
        for _ in range(too_many):
            self._drop_oldest(self._with_most())
        return too_many

    def _with_most(self) -> str:
        """A tenant that has as many items as any."""
        return next(iter(self._with[self._largest]))

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
