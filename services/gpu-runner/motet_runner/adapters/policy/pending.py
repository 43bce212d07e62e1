"""Who waits for the answers to effects."""

from dataclasses import dataclass, field
from itertools import count

from motet.domain import Digest
from motet_runner.adapters.policy.life import AdapterLife
from motet_runner.adapters.policy.values import FetchRequest, Order


@dataclass(slots=True, eq=False)
class FetchJob:
    """A fetch that runs, and the orders that wait for it."""

    request: FetchRequest
    orders: dict[int, Order] = field(default_factory=dict)
    late: dict[int, Order] = field(default_factory=dict)
    """Orders that came after the fetch had begun, and want the present bytes: the source is read again for them."""

    def is_too_early_for(self, order: Order) -> bool:
        """Whether the source may have had other bytes when the fetch began than when this order was made. To read a
        folder again costs little; of other sources, an order for the same generation of the manifest is the same one.
        """
        if self.request.names_bytes:
            return False
        alike = ((one.manifest, one.ref.generation) for one in self.orders.values())
        return self.request.is_folder or (order.manifest, order.ref.generation) not in alike


@dataclass(slots=True, eq=False)
class Listing:
    """The disk cache is being listed, to evict surplus adapters."""

    cleared: bool = False
    """Slabs and interrupted fetches have left before. Those that are still there stay."""
    for_others: bool = False
    """Other runners of the cache wish for room."""


Asker = Order | FetchJob | AdapterLife | Listing
"""An order in its finding stage, a fetch, a digest, or the eviction."""


class Pending:
    """Number of an effect → who gets its answer."""

    def __init__(self) -> None:
        self.askers: dict[int, Asker] = {}
        self._numbers = count(1)

    def add(self, asker: Asker) -> int:
        number = next(self._numbers)
        self.askers[number] = asker
        return number

    def pop(self, number: int) -> Asker | None:
        return self.askers.pop(number, None)

    def number_of(self, asker: Asker) -> int | None:
        return next((number for number, one in self.askers.items() if one is asker), None)

    def cancel_order(self, order: int) -> None:
        """Of those without a folder"""
        for number, asker in list(self.askers.items()):
            match asker:
                case Order() if asker.number == order:
                    del self.askers[number]
                case FetchJob():
                    asker.orders.pop(order, None)
                    asker.late.pop(order, None)

    def may_bring(self, digest: Digest) -> bool:
        """True if a current order may result in this digest."""
        return any(_may_bring(asker, digest) for asker in self.askers.values())


def _may_bring(asker: Asker, digest: Digest) -> bool:
    match asker:
        case Order():
            return asker.fetch.expected == digest
        case FetchJob():
            return asker.request.expected == digest
        case AdapterLife():
            return asker.digest == digest and bool(asker.orders)
        case Listing():
            return False
