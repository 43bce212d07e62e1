"""Which adapters are to be proved before they serve, by which kernels they are proved, and whose turn it is.

A proof is a part of an adapter's load. If no sequence waits for the adapter, its load takes only what nobody uses, and
is given up when others need it. So under full load it could wait for ever: after `MAX_PLANS_WAITED` plans its turn
comes, and until it is proved it counts as if a sequence waited for it. Only one adapter at a time has such a turn, and
then the others have theirs for as long: each turn may take pages or a place from sequences.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from motet.domain import Digest
from motet_runner.adapters.proof import Proof

MAX_PLANS_WAITED = 256


@dataclass(slots=True, eq=False)
class _Asked:
    proved_by: set[str]
    proofs: dict[str, Proof] = field(default_factory=dict)
    """By this engine's kernels"""


class AdapterProofs:
    def __init__(self, max_plans_waited: int = MAX_PLANS_WAITED) -> None:
        self.kernels = ""
        """That serve"""
        self._max_waited = max_plans_waited
        self._asked: dict[Digest, _Asked] = {}
        self._since: dict[Digest, int] = {}
        """Those that wait for their proof → how many plans there were before, in this order"""
        self._plans = 0
        self._turn: Digest | None = None
        self._last_turn = 0

    def ask(self, digest: Digest, proved_by: Collection[str]) -> Proof | None:
        """The adapter is to be proved, unless by kernels in `proved_by`. → the proof, if they do not know of it."""
        asked = self._asked.setdefault(digest, _Asked(set()))
        asked.proved_by = {*proved_by}  # a kept proof may have been lost since it was last asked for
        if self.needs(digest):
            self._since.setdefault(digest, self._plans)
        else:
            self.stop_waiting(digest)
        return asked.proofs.get(self.kernels) if self.kernels not in proved_by else None

    def needs(self, digest: Digest) -> bool:
        """True if the adapter may not serve before these kernels have proved it."""
        asked = self._asked.get(digest)
        return asked is not None and self.kernels not in asked.proved_by and self.kernels not in asked.proofs

    @property
    def first(self) -> Digest | None:
        """The one that has waited for the longest time"""
        return next(iter(self._since), None)

    @property
    def turn(self) -> Digest | None:
        """The one that counts as if a sequence waited for it"""
        return self._turn

    def another_plan(self, loading: Digest | None) -> Digest | None:
        """→ the adapter whose turn begins: not while it loads, in pages that were promised to others"""
        self._plans += 1
        first = self.first
        if first is None or first == loading or self._turn is not None:
            return None
        if self._plans - max(self._since[first], self._last_turn) < self._max_waited:
            return None
        self._turn = first
        return first

    def proved(self, digest: Digest, proof: Proof) -> None:
        if (asked := self._asked.get(digest)) is not None:
            asked.proofs[proof.kernels] = proof
        self.stop_waiting(digest)

    def wait(self, digest: Digest) -> None:
        """It has arrived and is not proved."""
        self._since.setdefault(digest, self._plans)

    def stop_waiting(self, digest: Digest) -> None:
        """It is proved or has failed."""
        self._since.pop(digest, None)
        if self._turn == digest:
            self._turn, self._last_turn = None, self._plans

    def forget(self, digest: Digest) -> None:
        self._asked.pop(digest, None)
        self.stop_waiting(digest)

    def kernels_changed(self, kernels: str, resident: Iterable[Digest]) -> list[Digest]:
        """Other kernels serve. → those on the device that they must prove"""
        self.kernels = kernels
        for digest in [one for one in self._since if not self.needs(one)]:
            self.stop_waiting(digest)
        unproved = [one for one in resident if self.needs(one)]
        for digest in unproved:
            self._since.setdefault(digest, self._plans)
        return unproved

    def check(self, known: Collection[Digest]) -> None:
        assert self._asked.keys() <= {*known}, (self._asked, known)
        assert self._since.keys() <= self._asked.keys(), (self._since, self._asked)
        assert self._turn is None or self._turn in self._since, (self._turn, self._since)
        assert all(map(self.needs, self._since)), self._since
