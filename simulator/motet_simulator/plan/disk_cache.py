"""The adapters on the disk of a simulated runner."""

from collections import OrderedDict
from collections.abc import Collection, Iterator

from motet.domain import Digest
from motet.runner_info import ResidentAdapter, Tier


class DiskCache:
    def __init__(self, *, adapter_bytes: int, most: int) -> None:
        self._adapter_bytes = adapter_bytes
        self._most = most
        self._adapters: OrderedDict[Digest, ResidentAdapter] = OrderedDict()
        """The least recently used one first, as reports show one that is only here."""

    def use(self, digest: Digest) -> bool:
        """Whether it was not here before."""
        if digest in self._adapters:
            self._adapters.move_to_end(digest)
            return False
        self._adapters[digest] = ResidentAdapter(digest=digest, tier=Tier.DISK, bytes=self._adapter_bytes)
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

    def resident(self, on_device: dict[Digest, int]) -> Iterator[ResidentAdapter]:
        """As a report lists them. `on_device`: the sequences that use each adapter there."""
        of_bytes = self._adapter_bytes
        there = {
            digest: ResidentAdapter(digest=digest, tier=Tier.DEVICE, bytes=of_bytes, live_sequences=live)
            for digest, live in on_device.items()
        }
        return (there.get(digest, on_disk) for digest, on_disk in self._adapters.items())
