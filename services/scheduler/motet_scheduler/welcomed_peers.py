"""Which peers have been told our term: one that says it has seen this very term was told by us, or by somebody else."""

from collections import OrderedDict

GREETED = 16_384
"""More than ever are connected at once. One that was forgotten and comes back costs a new term, and nothing else."""


class WelcomedPeers:
    def __init__(self, most: int = GREETED) -> None:
        self._most = most
        self._peers: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def welcome(self, peer: str) -> bool:
        """Whether it had been greeted before; the longest unseen is forgotten when there are too many."""
        known = peer in self._peers
        self._peers[peer] = None
        self._peers.move_to_end(peer)
        if len(self._peers) > self._most:
            self._peers.popitem(last=False)
        return known
