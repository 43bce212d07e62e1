"""Which adapters the runner holds, as the scheduler learns it: the first of them in a hello, the others behind it in
parts, and then only what has changed.

Thousands of adapters wait, so nothing here goes through all of them but a hello, or a report to a scheduler of an
earlier version.
"""

from collections.abc import Iterator
from heapq import nlargest

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.domain import Digest
from motet_runner.adapters.policy.adapter_policy import AdapterPolicy
from motet_runner.adapters.policy.life import AdapterLife

MAX_TOLD_AT_ONCE = 1024
"""In one message: a scheduler does nothing else until it has noted them all."""

_UNCLEAR = common_pb2.MEMORY_TIER_UNSPECIFIED


class Residency:
    def __init__(self, policy: AdapterPolicy) -> None:
        self._policy = policy
        self._told: dict[Digest, common_pb2.MemoryTier.ValueType] = {}

    def all(self) -> Iterator[common_pb2.ResidentAdapter]:
        """Every checked adapter that is not dropped, with its highest tier."""
        return (_entry(life, tier) for life in self._policy if (tier := life.tier) is not None)

    @property
    def count(self) -> int:
        """How many were told."""
        return len(self._told)

    def tell_all(self) -> list[common_pb2.ResidentAdapter]:
        """All of them, to replace what was told. The changes begin here."""
        return self._begin(list(self.all()))

    def tell_first(self) -> list[common_pb2.ResidentAdapter]:
        """To replace what was told: those on the device first. The others are the next changes."""
        found = self._begin(nlargest(MAX_TOLD_AT_ONCE, self.all(), key=lambda one: one.tier))
        if len(found) == MAX_TOLD_AT_ONCE:
            self._policy.changed |= {life.digest: None for life in self._policy if life.digest not in self._told}
        return found

    def _begin(self, found: list[common_pb2.ResidentAdapter]) -> list[common_pb2.ResidentAdapter]:
        self._policy.take_changed()
        self._told = {Digest(one.digest): one.tier for one in found}
        return found

    def changes(self) -> Iterator[scheduler_pb2.ResidencyChanged]:
        """What differs from what was told, in parts."""
        changed = scheduler_pb2.ResidencyChanged()
        for digest in self._policy.take_changed():
            life = self._policy.get(digest)
            tier = life.tier if life is not None else None
            if tier == self._told.get(digest):
                continue
            if len(changed.gone) + len(changed.resident) == MAX_TOLD_AT_ONCE:
                yield changed
                changed = scheduler_pb2.ResidencyChanged()
            if life is None or tier is None:
                del self._told[digest]
                changed.gone.append(digest)
            else:
                self._told[digest] = tier
                changed.resident.append(_entry(life, tier))
        if changed.gone or changed.resident:
            yield changed

    def tell_again(self, digest: Digest) -> None:
        """The scheduler was told something else of this adapter: the next changes say where it is."""
        self._told[digest] = _UNCLEAR
        self._policy.changed[digest] = None


def _entry(life: AdapterLife, tier: "common_pb2.MemoryTier.ValueType") -> common_pb2.ResidentAdapter:
    return common_pb2.ResidentAdapter(digest=life.digest, tier=tier, bytes=life.bytes)
