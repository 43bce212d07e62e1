"""Which adapters leave the disk cache when it holds too many: the least recently used one goes first."""

from collections.abc import Callable

from motet.domain import Digest


class Eviction:
    """The cache is listed after orders were answered. Then digests are tried one after the other, until none is
    surplus: a digest stays if this process or another one uses it.

    The digests of the orders that led to a listing are spared: their requests come next.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._spared: set[Digest] = set()
        self._answered: set[Digest] = set()
        """The digests of orders answered since the last listing began: they need another listing."""
        self._candidates: list[Digest] = []
        self._excess = 0
        self._running = False

    def answered(self, digest: Digest) -> bool:
        """An order was answered with this digest. Returns whether to list the cache."""
        self._answered.add(digest)
        return self._begin()

    def listed(self, digests: tuple[Digest, ...]) -> None:
        self._excess = len(digests) - self.capacity
        self._candidates = list(reversed(digests))

    def removed(self) -> None:
        self._excess -= 1

    def next(self, in_use: Callable[[Digest], bool]) -> Digest | None:
        """The next digest to remove. None: eviction is over."""
        while self._excess > 0 and self._candidates:
            digest = self._candidates.pop()
            if digest not in self._spared and digest not in self._answered and not in_use(digest):
                return digest
        return None

    def ended(self) -> bool:
        """Returns whether to list the cache again, for orders that were answered meanwhile."""
        self._running = False
        return bool(self._answered) and self._begin()

    def _begin(self) -> bool:
        if self._running:
            return False
        self._running = True
        self._spared, self._answered = self._answered, set()
        return True
