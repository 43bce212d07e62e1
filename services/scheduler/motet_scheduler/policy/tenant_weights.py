"""The weight of each tenant, as the pools of its group grant it."""

from collections.abc import Iterable

from motet.shares import DEFAULT_WEIGHT
from motet_scheduler.policy.values import EVERYBODY, GroupName, PoolSpec


class TenantWeights:
    def __init__(self) -> None:
        self._granted: dict[GroupName, dict[str, int]] = {}

    def state(self, pools: Iterable[PoolSpec]) -> bool:
        """Replace the weights. Returns whether they changed."""
        granted = {pool.group: dict(pool.weights) for pool in pools if pool.weights}  # the same in all pools of a group
        changed, self._granted = granted != self._granted, granted
        return changed

    def of(self, group: GroupName, tenant: str) -> int:
        granted = self._granted.get(group)
        if granted is None:
            return DEFAULT_WEIGHT
        return granted.get(tenant) or granted.get(EVERYBODY, DEFAULT_WEIGHT)
