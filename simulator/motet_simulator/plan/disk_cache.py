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

    def use(self, digest: Digest) -> bool:
        """Whether it was not here before."""
        if digest in self._adapters:
            self._adapters.move_to_end(digest)
            return False
        self._adapters[digest] = None
        return True

    def drop(self, digest: Digest) -> None:
        self._adapters.pop(digest, None)

    def make_room(self, in_use: Collection[Digest]) -> Digest | None:
        """Drop the least recently used one that nobody uses, if there are too many."""
        if len(self._adapters) <= self._most:
            return None
        idle = next((digest for digest in self._adapters if digest not in in_use), None)
        if idle is not None:
            del self._adapters[idle]
        return idle

    def resident(self, on_device: Collection[Digest]) -> dict[Digest, Tier]:
        """As a report lists them. `on_device`: those that are there, too."""
        return {digest: Tier.DEVICE if digest in on_device else Tier.DISK for digest in self._adapters}
