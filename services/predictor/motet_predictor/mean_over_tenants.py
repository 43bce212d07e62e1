"""The lengths that a new tenant starts from: the mean of the distributions of all known tenants. Pure.

Each tenant counts the same, and so does the prior. So no tenant can decide what others start from, however many answers
it has."""

from collections.abc import Callable

import numpy as np

from motet.length_statistics import BucketShares

MAX_OUTDATED = 32
"""How many tenants may wait to be counted again. It bounds the time that an estimate takes: about 10 µs for each."""


class MeanOverTenants:
    """Keeps a sum up to date, because computing it again takes too long with thousands of tenants."""

    def __init__(self, prior: BucketShares, shares_of: Callable[[str], BucketShares]) -> None:
        """`shares_of` returns the present distribution of a tenant that was `changed`."""
        self._shares_of = shares_of
        self._sum = np.array(prior)
        self._counted: dict[str, BucketShares] = {}
        self._outdated: dict[str, None] = {}

    def __len__(self) -> int:
        """Whom `shares` has counted last, with the prior."""
        return len(self._counted) + 1

    def changed(self, tenant: str) -> None:
        self._outdated[tenant] = None
        if len(self._outdated) >= MAX_OUTDATED:
            self._update()

    def forget(self, tenant: str) -> None:
        self._outdated.pop(tenant, None)
        counted = self._counted.pop(tenant, None)
        if counted is not None:
            self._sum -= counted

    def shares(self) -> BucketShares:
        self._update()
        return self._sum / len(self)

    def _update(self) -> None:
        outdated, self._outdated = self._outdated, {}
        for tenant in outdated:
            self.forget(tenant)
            counted = self._counted[tenant] = self._shares_of(tenant)
            self._sum += counted
