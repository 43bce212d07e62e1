"""The adapters on the disk of a simulated runner."""

from collections import OrderedDict
from collections.abc import Collection

from motet.domain import Digest
from motet.runner_info import Tier


class DiskCache:
    def __init__(self, most: int) -> None:
        self._most = most
        self._adapters: OrderedDict[Digest, None] = OrderedDict()
        """The least recently used one first, as reports show one that is only here."""
        self._resident: dict[Digest, Tier] | None = {}
        """As the last report listed them. None: one has come or gone since."""
        self._on_device: Collection[Digest] = ()

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._adapters

    def use(self, digest: Digest) -> bool:
        """Whether it was not here before."""
        if digest in self._adapters:
            self._adapters.move_to_end(digest)
            return False
        self._adapters[digest] = self._resident = None
        return True

    def drop(self, digest: Digest) -> None:
        self._adapters.pop(digest, None)
        self._resident = None

    def make_room(self, in_use: Collection[Digest]) -> Digest | None:
        """Drop the least recently used one that nobody uses, if there are too many."""
        if len(self._adapters) <= self._most:
            return None
        idle = next((digest for digest in self._adapters if digest not in in_use), None)
        if idle is not None:
            del self._adapters[idle]
            self._resident = None
        return idle

    def resident(self, on_device: Collection[Digest]) -> dict[Digest, Tier]:
        """As a report lists them: the same object while nothing changes. `on_device`: those that are there, too."""
        if self._resident is None or on_device != self._on_device:
            self._on_device = on_device
            self._resident = {one: Tier.DEVICE if one in on_device else Tier.DISK for one in self._adapters}
        return self._resident
