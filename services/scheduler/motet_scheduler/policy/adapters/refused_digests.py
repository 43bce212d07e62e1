"""May this start of a runner serve this adapter? Placement, `minReplicas`, `maxReplicas`, requests that were declined,
and the status all ask here.

A proof is about bytes, so what a runner has refused for its proof it refuses under every name. What it has refused for
what one manifest asks for, such as recorded answers, it refuses under that name alone.
"""

from collections.abc import Container

from motet.domain import Digest
from motet.errors import AdapterUnproved
from motet.runner_info import Failure

MAX_REFUSED = 4096
"""The number of adapters of which it is remembered that a runner refuses them: the newest ones"""

_ANY = ""
"""The name of every adapter with these bytes"""


class RefusedDigests:
    """Of one start of a runner."""

    def __init__(self) -> None:
        self.failures: dict[Digest, dict[str, Failure]] = {}
        """By digest and name. Mostly there are none, and each request and runner asks: so it is no call."""

    def refuse(self, digest: Digest, adapter: str, failure: Failure) -> bool:
        """`adapter`: as namespace/name. → True if it was not refused before"""
        of_digest = self.failures.pop(digest, {})
        name = _ANY if failure.code == AdapterUnproved.mapping.code else adapter
        new = name not in of_digest
        self.failures[digest] = of_digest | {name: failure}
        if len(self.failures) > MAX_REFUSED:
            del self.failures[next(iter(self.failures))]
        return new

    def accept(self, digest: Digest, adapter: str) -> bool:
        """The runner has certified it since. → True if it was refused"""
        return self._take(digest, _ANY, adapter)

    def forget(self, digest: Digest, adapter: str) -> bool:
        """The manifest of this name asks for something else by now, or for other bytes. → True if it was refused for
        that"""
        return self._take(digest, adapter)

    def _take(self, digest: Digest, *names: str) -> bool:
        of_digest = self.failures.get(digest, {})
        left = {name: failure for name, failure in of_digest.items() if name not in names}
        if left:
            self.failures[digest] = left
        else:
            self.failures.pop(digest, None)
        return len(left) < len(of_digest)

    def not_among(self, digests: Container[Digest]) -> list[Digest]:
        """Those of which it has not said again that it refuses them for its proof."""
        return [digest for digest, names in self.failures.items() if _ANY in names and digest not in digests]

    def why(self, digest: Digest, adapter: str) -> Failure | None:
        """None: it may serve it, as far as is known"""
        of_digest = self.failures.get(digest, {})
        return of_digest.get(_ANY) or of_digest.get(adapter)
