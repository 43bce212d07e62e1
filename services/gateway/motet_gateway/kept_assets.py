"""What a gateway has read of files that runners have sent, and why the files of some digests could not be used. Pure.

Strangers may make more of it, so what was wanted longest ago leaves.
"""

from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

from motet.errors import MotetError

Asset = TypeVar("Asset")


class KeptAssets(Generic[Asset]):
    def __init__(self, *, most_bytes: float, most_of_namespace: float) -> None:
        self._most_bytes = most_bytes
        self._most_of_namespace = most_of_namespace
        self._found: dict[str, Asset] = {}
        self._sizes: dict[str, tuple[str, int]] = {}
        """Of these: namespace and bytes"""
        self._failures: dict[str, tuple[float, MotetError]] = {}
        """With the time from which on a fetch may try again."""
        self._wanted: dict[str, float] = {}
        """When each was wanted last: no runner may have the files of a base model that an adapter names."""

    @property
    def wanted(self) -> Iterable[str]:
        return self._wanted.keys()

    def want(self, digest: str, now: float) -> None:
        self._wanted[digest] = now

    def find(self, digest: str) -> Asset | None:
        return self._found.get(digest)

    def failure(self, digest: str, now: float) -> MotetError | None:
        until, failure = self._failures.get(digest, (0.0, None))
        return failure if now < until else None

    def is_decided(self, digest: str, now: float) -> bool:
        return digest in self._found or self.failure(digest, now) is not None

    def failed(self, digest: str, error: MotetError, *, until: float) -> None:
        self._failures[digest] = until, error

    def keep(self, digest: str, asset: Asset, namespace: str, size: int) -> None:
        self._failures.pop(digest, None)
        self._found[digest], self._sizes[digest] = asset, (namespace, size)
        of_namespace = [one for one, (whose, _) in self._sizes.items() if whose == namespace]
        self._shrink(digest, of_namespace, self._most_of_namespace)
        self._shrink(digest, list(self._sizes), self._most_bytes)

    def forget_unwanted(self, before: float, but: Collection[str]) -> None:
        """What was wanted last before this time, and is read again if it is wanted later"""
        for digest in [one for one, at in self._wanted.items() if at < before and one not in but]:
            del self._wanted[digest]
            self._drop(digest)
            self._failures.pop(digest, None)

    def _shrink(self, newest: str, digests: list[str], most: float) -> None:
        """Drop those of them that were wanted longest ago"""
        total = sum(self._sizes[one][1] for one in digests)
        if total <= most:
            return
        for one in sorted(digests, key=lambda one: self._wanted.get(one, 0.0)):
            if total > most and one != newest:
                total -= self._sizes[one][1]
                self._drop(one)

    def _drop(self, digest: str) -> None:
        self._found.pop(digest, None)
        self._sizes.pop(digest, None)
