"""Whose bytes leave the disk cache first: what no adapter names, then earlier revisions, then what serves.

An adapter's last three revisions are kept while there is room, as its source may have lost the earlier ones by the time
somebody wants to go back. Of earlier ones those leave first whose tenant has most of them, the oldest first: a tenant
gains no room over others by many revisions, or by many adapters.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum

from motet.domain import BASE, Digest

MAX_KEPT = 3
"""Revisions of an adapter, with the one that serves."""

MAX_MANIFESTS = 4096
"""Of how many adapters revisions are remembered: of those that orders and drops were about last."""


class Standing(IntEnum):
    """The least leaves first."""

    UNNAMED = 0
    EARLIER = 1
    SERVES = 2


Rank = tuple[Standing, int]

FIRST: Rank = (Standing.UNNAMED, 0)


class KeptRevisions:
    """Of each manifest (namespace/name) the revision that serves, or BASE if this runner has not been told of it, and
    those before, the newest first."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, tuple[Digest, ...]] = OrderedDict()
        self._names: dict[Digest, dict[str, None]] = {}
        """The manifests that name a digest"""

    def __len__(self) -> int:
        return len(self._of)

    def of(self, manifest: str) -> tuple[Digest, ...]:
        return self._of.get(manifest, ())

    @property
    def named(self) -> int:
        """How many digests are named"""
        return len(self._names)

    def serves(self, manifest: str, digest: Digest) -> None:
        """This revision was ordered, and is right."""
        self._put(manifest, (digest, *(one for one in self.of(manifest) if one not in (digest, BASE))))

    def replaced(self, manifest: str, digest: Digest) -> None:
        """The manifest serves another revision by now."""
        newest, *earlier = self.of(manifest) or (BASE,)
        if newest == digest:
            self._put(manifest, (BASE, digest, *earlier))
        elif digest not in earlier:
            self._put(manifest, (newest, digest, *earlier))

    def gone(self, manifest: str) -> None:
        """The manifest was removed."""
        for digest in self._of.pop(manifest, ()):
            self._forget(manifest, digest)

    def ranks(self, by_last_use: Sequence[Digest], serves: Callable[[Digest], bool]) -> Mapping[Digest, Rank]:
        """`serves`: what the runner has been told to serve, beside what is remembered here. Others are `FIRST`."""
        ranks: dict[Digest, Rank] = {}
        earlier = Counter[str]()
        for digest in reversed(by_last_use):
            names = self._names.get(digest, {})
            if serves(digest) or any(self._of[name][0] == digest for name in names):
                ranks[digest] = (Standing.SERVES, 0)
            elif names:
                namespace = next(iter(names)).partition("/")[0]
                earlier[namespace] += 1
                ranks[digest] = (Standing.EARLIER, -earlier[namespace])
        return ranks

    def _put(self, manifest: str, revisions: tuple[Digest, ...]) -> None:
        before, now = self._of.pop(manifest, ()), revisions[:MAX_KEPT]
        self._of[manifest] = now
        for digest in before:
            if digest not in now:
                self._forget(manifest, digest)
        for digest in now:
            if digest != BASE:
                self._names.setdefault(digest, {})[manifest] = None
        if len(self._of) > MAX_MANIFESTS:
            self.gone(next(iter(self._of)))

    def _forget(self, manifest: str, digest: Digest) -> None:
        if (names := self._names.get(digest)) is not None:
            names.pop(manifest, None)
            if not names:
                del self._names[digest]
