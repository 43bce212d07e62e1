"""The orders to prove adapters: each is answered once. Which adapters may serve, which proof goes on, whose turn it is.

An adapter is proved where it lies on the device. If no sequence waits for it, it is loaded for that only into what
nobody uses, and goes when others need it. So under full load its proof could wait for ever. One that serves meanwhile
may do so. Of the others, one has its turn after `MAX_PLANS_WAITED` plans: until it is proved it counts as if a sequence
waited for it. Only one adapter at a time has such a turn, and then the others have theirs for as long: each turn may
take pages or a place from sequences.

One proof goes on at a time. An attempt ends without a result when the adapter leaves the device, when other kernels
serve, or when a sequence waits for another proof. The order stays, and a later attempt begins anew.
"""

from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from motet.domain import Digest
from motet.errors import AdapterError, AdapterUnproved, MotetError
from motet_runner.adapters.proof import Proof, ProofOrder
from motet_runner.interface import ProofEnded

MAX_PLANS_WAITED = 256


@dataclass(slots=True, eq=False)
class _Ordered:
    order: ProofOrder
    since: int
    """How many plans there were before"""
    place: int
    """In the order in which they came"""

    @property
    def number(self) -> int:
        return self.order.number


class Attempt(NamedTuple):
    number: int
    """Unique per attempt"""
    digest: Digest
    order: ProofOrder


class AdapterProofs:
    def __init__(self, max_plans_waited: int = MAX_PLANS_WAITED) -> None:
        self._max_waited = max_plans_waited
        self._orders: dict[Digest, _Ordered] = {}
        """Without an answer, in the order in which they came"""
        self._held: dict[Digest, None] = {}
        """May not serve before they are proved"""
        self._refused: dict[Digest, MotetError] = {}
        """Those of them whose order was answered with an error"""
        self._attempt: Attempt | None = None
        self._attempts = 0
        self._plans = 0
        self._came = 0
        """How many orders"""
        self._turn: Digest | None = None
        self._last_turn = 0

    def register(self, digest: Digest, order: ProofOrder | None, *, new: bool) -> ProofEnded | None:
        """`order`: None if the adapter may serve as it is. `new`: it was not known; one that serves goes on serving. →
        the answer to a former order that this one replaces"""
        before = self._orders.get(digest)
        if order is not None and before is not None and before.number == order.number:
            return None  # told again
        if order is None or order.serves_meanwhile:
            self._held.pop(digest, None)
        elif new:
            self._held[digest] = None
        self._refused.pop(digest, None)
        answer = self._give_up(digest, "another order has replaced this one")
        if order is not None:
            self._came += 1
            self._orders[digest] = _Ordered(order, self._plans, self._came)
        return answer

    def forget(self, digest: Digest) -> ProofEnded | None:
        """The adapter is dropped."""
        self._held.pop(digest, None)
        self._refused.pop(digest, None)
        return self._give_up(digest, "the adapter was dropped")

    def end(self, digest: Digest, found: Proof | MotetError) -> ProofEnded | None:
        """Answer an adapter's order, if it has one."""
        ordered = self._orders.pop(digest, None)
        if ordered is None:
            return None
        if self._turn == digest:
            self._turn, self._last_turn = None, self._plans
        if self._attempt is not None and self._attempt.digest == digest:
            self._attempt = None
        if isinstance(found, Proof):
            self._held.pop(digest, None)
        else:
            if isinstance(found, AdapterUnproved):
                self._held[digest] = None
            if digest in self._held:
                self._refused[digest] = found
        return ProofEnded(ordered.number, digest, found)

    def doubt(self, digest: Digest) -> None:
        """What was on the device is wrong, and may have been read wrongly: another attempt decides. Until then the
        adapter serves nobody."""
        self._held[digest] = None
        self._attempt = None

    def _give_up(self, digest: Digest, why: str) -> ProofEnded | None:
        answer = self.end(digest, AdapterError(f"The proof of this adapter was given up: {why}."))
        self._refused.pop(digest, None)
        return answer

    # -- what there is -----------------------------------------------------------------------------------------------

    def may_serve(self, digest: Digest) -> bool:
        return digest not in self._held

    def refusal(self, digest: Digest) -> MotetError | None:
        """Why no sequence can use the adapter until there is another order for it"""
        return self._refused.get(digest)

    def __iter__(self) -> Iterator[Digest]:
        """Those that are to be proved"""
        return iter(self._orders)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._orders

    def __bool__(self) -> bool:
        return bool(self._orders)

    def first_outside(self, resident: Container[Digest]) -> Digest | None:
        """The one that waits for a place on the device for the longest time"""
        return next((one for one in self._orders if one not in resident), None)

    # -- turns -------------------------------------------------------------------------------------------------------

    @property
    def turn(self) -> Digest | None:
        """The one that counts as if a sequence waited for it"""
        return self._turn

    def another_plan(self, resident: Container[Digest]) -> Digest | None:
        """→ the adapter whose turn begins: not one that lies or loads in pages that were promised to others"""
        self._plans += 1
        if not self._orders or self._turn is not None:
            return None
        first = next((one for one in self._orders if one in self._held and one not in resident), None)
        if first is None or self._plans - max(self._orders[first].since, self._last_turn) < self._max_waited:
            return None
        self._turn = first
        return first

    # -- attempts ----------------------------------------------------------------------------------------------------

    def attempt(self, here: Collection[Digest], awaited: Callable[[Digest], bool]) -> Attempt | None:
        """The attempt that goes on now. `here`: the ones on the device, of those to be proved; `awaited`: by a
        sequence. One that sequences wait for comes first, then the one that goes on already."""
        present = self._attempt
        if present is not None and present.digest not in here:
            present = self._attempt = None
        if not here or (present is not None and self._urgent(present.digest, awaited)):
            return present
        able = sorted(here, key=lambda one: self._orders[one].place)
        best = next((one for one in able if self._urgent(one, awaited)), present.digest if present else able[0])
        if present is None or present.digest != best:
            self._attempts += 1
            self._attempt = Attempt(self._attempts, best, self._orders[best].order)
        return self._attempt

    def yields(self, digest: Digest, awaited: Callable[[Digest], bool]) -> bool:
        """True if its proof makes way for what sequences wait for. Not for ever."""
        return not self._urgent(digest, awaited) and self._plans - self._orders[digest].since < self._max_waited

    def _urgent(self, digest: Digest, awaited: Callable[[Digest], bool]) -> bool:
        return digest == self._turn or (digest in self._held and awaited(digest))

    def attempt_ended(self, number: int) -> Digest | None:
        """→ the adapter; None if the attempt was given up meanwhile"""
        present = self._attempt
        return present.digest if present is not None and present.number == number else None

    def restart(self) -> None:
        """Other kernels serve: what the present attempt has found is that of others."""
        self._attempt = None

    def check(self, known: Collection[Digest]) -> None:
        assert self._orders.keys() <= {*known}, (self._orders, known)
        assert self._held.keys() <= {*known}, (self._held, known)
        assert self._turn is None or self._turn in self._orders, (self._turn, self._orders)
        assert self._attempt is None or self._attempt.digest in self._orders, (self._attempt, self._orders)
        unanswered = self._held.keys() - self._orders.keys()
        assert unanswered == self._refused.keys(), (unanswered, self._refused)
