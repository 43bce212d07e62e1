"""Which adapters leave the disk cache when it holds too many of them, or too many bytes.

Adapters that are used or awaited stay. Of the others, those that few requests use go first, and of these the ones that
were used longest ago. Adapters that the platform wants resident (`minReplicas`) go last.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from motet.domain import Digest
from motet_runner.adapters.policy.frequency import Frequency
from motet_runner.adapters.policy.values import CacheContents, Cached


@dataclass(frozen=True, slots=True)
class CacheLimits:
    adapters: int
    """How many adapters the disk cache may hold."""

    bytes: int | None = None
    """How many bytes they may have, with those of unfinished fetches. None: any number."""


class Eviction:
    """The cache is listed after orders were answered, and when a fetch asks for room. Then digests are tried one after
    the other, until none is surplus: a digest stays if this process or another one uses it.

    The digests of the orders that led to a listing are spared: their requests come next.
    """

    def __init__(self, limits: CacheLimits) -> None:
        self.limits = limits
        self.frequency = Frequency(limits.adapters)
        self._spared: set[Digest] = set()
        self._answered: set[Digest] = set()
        """The digests of orders answered since the last listing began: they need another listing."""
        self._candidates: list[Cached] = []
        self._tried: Cached | None = None
        self._adapters = 0
        self._bytes = 0
        self._running = False
        self._granted: dict[int, int] = {}
        """Fetch → the bytes that it may write."""
        self._asked: dict[int, int] = {}
        """Fetch → the bytes that it asks for."""
        self._considered: set[int] = set()
        """The fetches that had asked when the present listing began."""
        self._arrived = 0
        """The bytes of fetches that have ended since the present listing began: it may lack them."""

    # ---------------------------------------------------------------------------------------------------------- room

    @property
    def room(self) -> float:
        """How many bytes may be on the disk besides those of this runner's fetches that run, or ask for room."""
        wanted = self._granted | self._asked
        return inf if self.limits.bytes is None else self.limits.bytes - sum(wanted.values())

    def ask(self, fetch: int, size: int) -> bool:
        """A fetch asks for room for all its bytes. Returns whether to list the cache."""
        self._asked[fetch] = size
        return self._begin()

    def fetch_ended(self, fetch: int) -> None:
        self._asked.pop(fetch, None)
        self._arrived += self._granted.pop(fetch, 0)

    def decided(self) -> tuple[list[int], list[int]]:
        """The fetches that get the room that they asked for, and those that do not. A fetch that has asked since the
        listing began waits for the next one."""
        granted, refused = [], []
        for fetch, size in list(self._asked.items()):
            others = sum(self._granted.values()) - self._granted.get(fetch, 0)
            if self.limits.bytes is None or self._bytes + others + size <= self.limits.bytes:
                self._granted[fetch] = self._asked.pop(fetch)
                granted.append(fetch)
            elif fetch in self._considered:
                del self._asked[fetch]
                refused.append(fetch)
        return granted, refused

    # ------------------------------------------------------------------------------------------------------ a listing

    def answered(self, digest: Digest) -> bool:
        """An order was answered with this digest. Returns whether to list the cache."""
        self._answered.add(digest)
        return self._begin()

    def listed(self, contents: CacheContents, pinned: Callable[[Digest], bool]) -> None:
        self._adapters = len(contents.by_last_use)
        self._bytes = contents.bytes + self._arrived
        self._candidates = sorted(
            contents.by_last_use, key=lambda one: (pinned(one.digest), self.frequency.of(one.digest))
        )
        self._candidates.reverse()

    def removed(self) -> None:
        """The digest that was tried last has gone."""
        assert self._tried is not None
        self._adapters -= 1
        self._bytes -= self._tried.bytes

    def next(self, in_use: Callable[[Digest], bool]) -> Digest | None:
        """The next digest to remove. None: eviction is over."""
        while self._candidates and (self._adapters > self.limits.adapters or self._bytes > self.room):
            self._tried = self._candidates.pop()
            digest = self._tried.digest
            if digest not in self._spared and digest not in self._answered and not in_use(digest):
                return digest
        return None

    def ended(self) -> bool:
        """Returns whether to list the cache again, for orders that were answered meanwhile, or fetches that have
        asked."""
        self._running = False
        return bool(self._answered or self._asked) and self._begin()

    def _begin(self) -> bool:
        if self._running:
            return False
        self._running = True
        self._spared, self._answered = self._answered, set()
        self._considered, self._arrived = set(self._asked), 0
        return True
