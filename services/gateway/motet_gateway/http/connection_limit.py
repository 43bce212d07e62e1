"""How many connections may be open, in all and from one address, and what may wait in all of them together."""

from collections import Counter

from motet.errors import Overloaded

MAX_WAITING_BYTES = 32 * 1024 * 1024
"""Of all connections together, what the application cannot take yet: heads of which a part is missing, and requests
that came before the answer to the one before them. Honest clients mostly send whole heads, one after an answer."""


class ConnectionLimit:
    def __init__(self, most: int, *, most_per_address: int = 0, most_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        """`most_per_address`: 0 for no limit."""
        self.open = 0
        self.waiting_bytes = 0
        """Connections count here what waits in them."""
        self._most_waiting_bytes = most_waiting_bytes
        self._most = most
        self._most_per_address = most_per_address
        self._by_address: Counter[str] = Counter()

    def enter(self, address: str) -> None:
        """Count a new connection. Raises Overloaded, and counts nothing, if there are too many. Its `reason` is a label
        of the metric."""
        if self.open >= self._most:
            raise Overloaded(
                f"The gateway has {self.open} open connections and takes no more. Try again soon.", reason="all"
            )
        if self._most_per_address:
            if self._by_address[address] >= self._most_per_address:
                raise Overloaded(
                    f"Your address has {self._most_per_address} open connections to the gateway, which is the most. "
                    "Close some, or use one for several requests.",
                    reason="address",
                )
            self._by_address[address] += 1
        self.open += 1

    @property
    def too_much_waits(self) -> bool:
        return self.waiting_bytes > self._most_waiting_bytes

    def leave(self, address: str) -> None:
        """Count a connection that entered as closed."""
        self.open -= 1
        if self._most_per_address:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]
