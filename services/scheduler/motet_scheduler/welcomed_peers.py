"""Which peers this scheduler has welcomed in its term. Another peer that has seen the same term saw it from another
leader."""

from collections import OrderedDict

MAX_PEERS = 16_384
"""More than are ever connected at once. If a forgotten peer connects again, the term is raised; nothing else
happens."""


class WelcomedPeers:
    def __init__(self, max_peers: int = MAX_PEERS) -> None:
        self._max_peers = max_peers
        self._peers: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def welcome(self, peer: str) -> bool:
        """Whether it was welcomed before. If there are too many peers, the least recent one is forgotten."""
        known = peer in self._peers
        self._peers[peer] = None
        self._peers.move_to_end(peer)
        if len(self._peers) > self._max_peers:
            self._peers.popitem(last=False)
        return known
