"""Which adapters leave the disk cache when it holds too many of them, or too many bytes.

Slabs and interrupted fetches leave first, if that lets a fetch in. Adapters that are used or awaited stay. Of the
others, what nobody names goes first, then earlier revisions (`kept_revisions`), then what serves; of equals, those that
few requests use, and of these the ones that were used longest ago. Adapters that the platform wants resident
(`minReplicas`) go last, but beside them there is room for one other: else what a request brings would leave for them
before it serves.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf

from motet.domain import Digest
from motet_runner.adapters.policy.frequency import Frequency
from motet_runner.adapters.policy.kept_revisions import FIRST, Rank
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
        self._clearable = 0
        """The bytes of slabs and of interrupted fetches"""
        self._fixed = 0
        """The bytes that stay, whatever else is waited for: what requests use, or no digest names."""
        self._kept = 0
        """Those of them that somebody has a lease of: another process, or a fetch of this runner that has just ended
        and was not heard of."""
        self._running = False
        self._granted: dict[int, int] = {}
        """Fetch → the bytes that it may write."""
        self._asked: dict[int, int] = {}
        """Fetch → the bytes that it asks for."""
        self._brings_pinned: set[int] = set()
        """The fetches that have asked for room for a pinned adapter"""
        self._ahead: dict[int, frozenset[int]] = {}
        """Fetch that has asked → those that held room before"""
        self._considered: set[int] = set()
        """The fetches that had asked when the present listing began."""
        self._arrived = 0
        """The bytes of fetches that have ended since the present listing began: it may lack them."""
        self._spare: int | None = None
        """The bytes that the slab asks for: nothing leaves for it."""
        self._spare_considered = False
        self._spare_granted = 0
        """Only other slabs leave for it. If fetches take the room meanwhile, slabs leave once it is written."""
        self._surplus = False
        """The last slab did not fit any more, and no listing has begun since."""
        self._wish = 0
        """The most bytes that a fetch was refused because other runners keep what they may not use"""

    # ---------------------------------------------------------------------------------------------------------- room

    @property
    def room(self) -> float:
        """How many bytes may be on the disk besides those of this runner's fetches that run, or ask for room."""
        wanted = self._granted | self._asked
        return inf if self.limits.bytes is None else self.limits.bytes - sum(wanted.values()) - self._spare_granted

    def ask(self, fetch: int, size: int, *, pinned: bool = False) -> bool:
        """A fetch asks for room for all its bytes, of a `pinned` adapter. Returns whether to list the cache."""
        self._asked[fetch] = size
        if pinned:
            self._brings_pinned.add(fetch)
        self._ahead[fetch] = frozenset(self._granted)
        return self._begin()

    def fetch_ended(self, fetch: int) -> bool:
        """Any effect was answered. Returns whether to list the cache: a fetch has ended, and others ask for room."""
        ended = fetch in self._granted or fetch in self._asked
        self._asked.pop(fetch, None)
        self._ahead.pop(fetch, None)
        self._brings_pinned.discard(fetch)
        size = self._granted.pop(fetch, 0)
        self._arrived += size
        self._bytes += size
        return ended and self.waiting()

    def waiting(self) -> bool:
        """Returns whether to list the cache, because fetches wait for room."""
        return bool(self._asked) and self._begin()

    def granted(self) -> list[int]:
        """The fetches that get the room that they asked for. The others wait until fetches or orders end."""
        fitting = self._fitting(self._bytes)
        granted = [fetch for fetch, size in self._asked.items() if fitting.get(fetch) == size]
        for fetch in granted:
            self._granted[fetch] = self._asked.pop(fetch)
        return granted

    def _fitting(self, kept: int) -> dict[int, int]:
        """Fetch → the bytes that it may write if the cache keeps this many. A large one that waits is passed only by
        those that fit beside it once those before it have ended, so they do not delay it. But those that hold room, and
        may need still more, come first, each if it can: nobody else gets it before they end."""
        fitting = dict(self._granted)
        free, beside = self._limit - kept - sum(fitting.values()), inf
        for fetch, size in sorted(self._asked.items(), key=lambda one: one[0] not in self._granted):
            more = size - fitting.get(fetch, 0)
            if more > free:
                passing = sum(one for other, one in fitting.items() if other not in self._ahead[fetch])
                others = 0 if fetch in self._granted else self._limit - self._fixed - size - passing
                beside = min(beside, others)
            elif fetch in self._granted or more <= beside:
                fitting[fetch] = size
                free -= more
                beside -= more
        return fitting

    def ask_spare(self, size: int) -> bool:
        """The one slab that is written next asks for room that nobody else wants. Returns whether to list the cache."""
        self._spare, self._spare_considered = size, False
        return self._begin()

    def spare_granted(self) -> bool | None:
        """Whether the slab gets the room that it asked for. None: it has not asked, or the listing does not count."""
        if self._spare is None or not self._spare_considered:
            return None
        size, self._spare = self._spare, None
        free = self._limit - self._bytes - sum(self._granted.values())
        if self._asked or size > free:
            return False
        self._spare_granted = size
        return True

    def spare_ended(self, size: int) -> bool:
        """The slab is written, or never will be. Returns whether to list the cache, because fetches wait for room, or
        have got that of the slab: a listing of too many bytes removes slabs."""
        self._spare, self._spare_granted = None, 0
        self._arrived += size
        self._bytes += size
        self._surplus = size > 0 and self._bytes + sum(self._granted.values()) > self._limit
        return self.waiting() or (self._surplus and self._begin())

    def stuck(self) -> list[int]:
        """The youngest of the fetches that hold room, if all of them wait for more. One alone waits for what orders and
        calls use."""
        all_wait = self._granted.keys() <= self._asked.keys() & self._considered
        return self._refuse(list(self._granted)[1:][-1:]) if all_wait else []

    def refused(self) -> list[int]:
        """The fetches for which there would be no room even if all that may leave had left. A fetch that has asked
        since the listing began waits for the next one, and so do all if a fetch has perhaps stored what stays: that
        may leave later."""
        stored = min(self._kept, self._arrived + sum(self._granted.values()))
        stays = self._fixed - stored
        return self._refuse([fetch for fetch, size in self._asked.items() if stays + size > self._limit])

    def take_wish(self) -> int:
        """For how many bytes other runners are to be asked."""
        taken, self._wish = self._wish, 0
        return taken

    def others_wish(self) -> bool:
        """Returns whether to list the cache: they are asked in their turn for what waits here."""
        return self.limits.bytes is not None and not self._asked and self._begin()

    def listing_failed(self) -> list[int]:
        """Nothing is known about the cache. Returns the fetches that get no room for this reason."""
        self._candidates = []
        return self._refuse(list(self._asked))

    def _refuse(self, hopeless: list[int]) -> list[int]:
        refused = [fetch for fetch in hopeless if fetch in self._considered]
        for fetch in refused:
            size = self._asked.pop(fetch)
            if self._kept and self._fixed - self._kept + size <= self._limit:
                self._wish = max(self._wish, size)
        return refused

    @property
    def _limit(self) -> float:
        return inf if self.limits.bytes is None else self.limits.bytes

    @property
    def _too_many_bytes(self) -> bool:
        """Whether more must leave for the fetches that can run together."""
        return self._bytes + sum(self._fitting(self._fixed).values()) > self._limit

    # ------------------------------------------------------------------------------------------------------ a listing

    def answered(self, digest: Digest) -> bool:
        """An order was answered with this digest. Returns whether to list the cache."""
        self._answered.add(digest)
        return self._begin()

    def listed(
        self,
        contents: CacheContents,
        pinned: Callable[[Digest], bool],
        used: Callable[[Digest], bool],
        ranks: Mapping[Digest, Rank],
        *,
        cleared: bool = False,
    ) -> None:
        """`used`: by requests, so that nobody knows when it may leave. `ranks`: without one, an adapter is the `FIRST`.
        `cleared`: slabs and interrupted fetches that are still there stay."""
        self._adapters = len(contents.by_last_use)
        last = self._last_to_leave(contents.by_last_use, pinned)
        # What is pinned here does not leave for another runner: it would come again, and that one's leave for it.
        stay = {one.digest for one in contents.by_last_use if used(one.digest)} | (last if contents.wished else set())
        self._candidates = sorted(
            contents.by_last_use,
            key=lambda one: (one.digest in last, ranks.get(one.digest, FIRST), self.frequency.of(one.digest)),
        )
        self._candidates.reverse()
        slabs = 0 if cleared else sum(one.slabs for one in self._candidates)
        self._clearable = 0 if cleared else slabs + contents.partial
        of_those = sum(one.bytes - one.slabs * (not cleared) for one in self._candidates if one.digest in stay)
        fixed = contents.unfinished + contents.partial * cleared + of_those
        wished = contents.wished if fixed + contents.wished <= self._limit else 0  # else nothing that leaves would help
        self._bytes = contents.bytes + wished + self._arrived
        self._fixed, self._kept = fixed + wished, 0
        if contents.wished:
            self._candidates = [one for one in self._candidates if one.digest not in stay]

    def _last_to_leave(self, by_last_use: Iterable[Cached], pinned: Callable[[Digest], bool]) -> set[Digest]:
        """The pinned adapters that were used last. Beside them there is room for what comes, and for another one."""
        others: list[Cached] = []
        kept: list[Cached] = []
        for one in by_last_use:
            (kept if pinned(one.digest) else others).append(one)
        room = self._limit - max(self._asked.values(), default=0)
        if self._asked.keys() <= self._brings_pinned:
            room -= max((one.bytes for one in others), default=0)
        last: set[Digest] = set()
        for one in reversed(kept):
            if one.bytes <= room and len(last) < self.limits.adapters - 1:
                last.add(one.digest)
                room -= one.bytes
        return last

    def to_clear(self) -> int:
        """How many bytes of slabs and of interrupted fetches must leave for the fetches that can run together."""
        wanted = sum(self._fitting(self._fixed).values()) + self._spare_granted
        listed = self._bytes - self._arrived  # it may have listed what has arrived
        return int(min(max(listed + wanted - self._limit, 0), self._clearable))

    def removed(self) -> None:
        """The digest that was tried last has gone."""
        assert self._tried is not None
        self._adapters -= 1
        self._bytes -= self._tried.bytes

    def kept(self) -> None:
        """The digest that was tried last stays: somebody else has a lease of it."""
        assert self._tried is not None
        self._fixed += self._tried.bytes
        self._kept += self._tried.bytes

    def next(self, in_use: Callable[[Digest], bool]) -> Digest | None:
        """The next digest to remove. None: eviction is over."""
        while self._candidates and (self._adapters > self.limits.adapters or self._too_many_bytes):
            self._tried = self._candidates.pop()
            digest = self._tried.digest
            if digest not in self._spared and digest not in self._answered and not in_use(digest):
                return digest
        return None

    def ended(self) -> bool:
        """Returns whether to list the cache again, for orders that were answered meanwhile, or fetches that have
        asked."""
        self._running = False
        changed = self._arrived or self._spared or self._asked.keys() - self._considered
        again = self._answered or (self._asked and changed) or self._spare is not None or self._surplus
        return bool(again) and self._begin()

    def _begin(self) -> bool:
        if self._running:
            return False
        self._running = True
        self._surplus = False
        self._spared, self._answered = self._answered, set()
        self._considered, self._arrived = set(self._asked), 0
        self._spare_considered = self._spare is not None
        return True
