"""Which adapters the runner holds, as the scheduler learns it: all of them in a hello, and then only what has changed.

Thousands of adapters wait, so nothing here goes through all of them but a hello, or a report to a scheduler of an
earlier version.
"""

from collections.abc import Iterator

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.domain import Digest
from motet_runner.adapters.policy.adapter_policy import AdapterPolicy
from motet_runner.adapters.policy.life import AdapterLife

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
        self._policy.take_changed()
        found = list(self.all())
        self._told = {Digest(one.digest): one.tier for one in found}
        return found

    def changes(self) -> scheduler_pb2.ResidencyChanged | None:
        """What differs from what was told. None: nothing does."""
        changed = scheduler_pb2.ResidencyChanged()
        for digest in self._policy.take_changed():
            life = self._policy.get(digest)
            tier = life.tier if life is not None else None
            if tier == self._told.get(digest):
                continue
            if life is None or tier is None:
                del self._told[digest]
                changed.gone.append(digest)
            else:
                self._told[digest] = tier
                changed.resident.append(_entry(life, tier))
        return changed if changed.gone or changed.resident else None

    def tell_again(self, digest: Digest) -> None:
        """The scheduler was told something else of this adapter: the next changes say where it is."""
        self._told[digest] = _UNCLEAR
        self._policy.changed[digest] = None


def _entry(life: AdapterLife, tier: "common_pb2.MemoryTier.ValueType") -> common_pb2.ResidentAdapter:
    return common_pb2.ResidentAdapter(digest=life.digest, tier=tier, bytes=life.bytes)
