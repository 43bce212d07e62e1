"""Which proofs the engine is ordered to make, and which of them it has not answered.

An adapter that was never proved is ready once the engine has proved it. One that was proved before, by other kernels or
another version, or by a runner like this one, serves meanwhile, and is proved beside the requests: a few at a time, as
one may need a place on the device. Those that have no place there hold up none that has one: the device may be full for
long.
"""

from collections.abc import Collection, Iterable

from motet.domain import Digest
from motet_runner.adapters.policy.life import AdapterLife
from motet_runner.adapters.policy.values import Order
from motet_runner.adapters.proof import ProofOrder

MAX_AGAIN = 2
"""How many orders the engine may have when it gets one that nobody waits for: for adapters on the device, and for the
others"""


class ProofOrders:
    def __init__(self, kernels: str | None, *, linears: bool = True) -> None:
        """`linears`: the engine proves linears; else it only compares recorded answers."""
        self.kernels = kernels
        """The engine's present ones; None: it proves and compares nothing."""
        self._linears = linears
        self._orders: dict[Digest, ProofOrder] = {}
        """Without an answer"""
        self._again: dict[Digest, None] = {}
        """Ready, and to be proved by the present kernels"""
        self._given_up: set[Digest] = set()
        """What the present kernels cannot prove again, while it serves on: they would find the same"""
        self._last = 0

    def may_serve(self, life: AdapterLife) -> bool:
        """Whether a revision is ready. Requests need not wait for that: the engine knows what may serve."""
        return life.checked is not None and (not self.concerns(life) or self._proved_somewhere(life))

    def _proved_somewhere(self, life: AdapterLife) -> bool:
        """Here, or by the same kernels where all but the machine is the same. Then its own proof follows."""
        return life.proved or (self.kernels is not None and life.proved_elsewhere(self.kernels))

    def decides(self, order: Order, life: AdapterLife) -> bool:
        """Whether an order can be answered. One to check it waits for a proof by this runner. One that refuses what
        differs from recorded answers waits for them to be compared here, also if the revision was proved before."""
        if not order.load and self.concerns(life) and not life.proved:
            return False
        asks = order.refuses_mismatch and life.checked is not None and life.checked.recorded and life.compared is None
        return self.may_serve(life) and not (asks and (life.digest in self._orders or self._needs(life)))

    def concerns(self, life: AdapterLife) -> bool:
        """True if there is something of the adapter to prove, or was."""
        if self.kernels is None or life.checked is None:
            return False
        return self._linears or life.checked.recorded

    def lacks(self, life: AdapterLife) -> bool:
        """True if it may not serve, or an order waits, and nothing will change that."""
        order = self._orders.get(life.digest)
        if order is not None:
            return not order.serves_meanwhile and self._proved_somewhere(life)
        return not self.may_serve(life) or (bool(life.orders) and self.concerns(life) and not life.proved)

    def order(self, life: AdapterLife) -> ProofOrder | None:
        """What is told to the engine with the adapter's files: the order without an answer, or a new one"""
        order, meanwhile = self._orders.get(life.digest), self._proved_somewhere(life)
        if (order is None and self._needs(life)) or (order is not None and meanwhile and not order.serves_meanwhile):
            self._last += 1
            order = self._orders[life.digest] = ProofOrder(
                self._last,
                serves_meanwhile=meanwhile,
                linears=self._linears,
                recorded=life.checked is not None and life.checked.recorded,
            )
        return order

    def awaits(self, digest: Digest, number: int) -> bool:
        """False if the answer is to an order that does not count any more."""
        order = self._orders.get(digest)
        return order is not None and order.number == number

    def answered(self, digest: Digest, number: int) -> bool:
        """The same, of an answer that has come"""
        if not self.awaits(digest, number):
            return False
        del self._orders[digest]
        return True

    def forget(self, digest: Digest) -> None:
        """The order was for other files."""
        self._orders.pop(digest, None)
        self._given_up.discard(digest)

    def give_up(self, digest: Digest) -> None:
        self._given_up.add(digest)

    def serve_with(self, kernels: str) -> None:
        self.kernels = kernels
        self._given_up.clear()

    def prove_again(self, lives: Iterable[AdapterLife]) -> None:
        """Some of these may need another proof."""
        self._again.update((life.digest, None) for life in lives if self._may_be_proved_again(life))

    def _may_be_proved_again(self, life: AdapterLife) -> bool:
        ended = life.digest in self._orders or life.digest in self._given_up
        return self._proved_somewhere(life) and self._needs(life) and not ended

    def next_again(self, here: Collection[Digest]) -> Digest | None:
        """The next one to be proved again, if the engine has little else to prove. `here`: those on the device"""
        if not self._again:
            return None
        ordered_here = sum(one in here for one in self._orders)
        digest = None
        if ordered_here < MAX_AGAIN:
            digest = next((one for one in here if one in self._again), None)
        if digest is None and len(self._orders) - ordered_here < MAX_AGAIN:
            digest = next((one for one in self._again if one not in here), None)
        if digest is not None:
            del self._again[digest]
        return digest

    def _needs(self, life: AdapterLife) -> bool:
        return self.concerns(life) and self.kernels not in life.kernels
