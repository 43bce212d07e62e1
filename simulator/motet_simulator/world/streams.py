"""A simulated stream: its two ends, and what becomes of it when the process of one side ends."""

from collections.abc import Callable
from functools import partial
from typing import Any

from motet.transport import Method, StreamMethod
from motet_simulator.world.ends import End
from motet_simulator.world.pipe import Pipe
from motet_simulator.world.statuses import RESET, UNANSWERED
from motet_simulator.world.wires import FASTEST_SECONDS, Wires


class Stream:
    def __init__(self, wires: Wires, name: str, client: End, server: End, method: Method[Any, Any]) -> None:
        self.name = name
        self.method = method
        self.client = client
        self.server = server
        self.began = wires.world.now
        self._wires = wires
        client.stream = server.stream = self
        client.out = server.into = Pipe(wires, f"{name} up", client, server)
        client.into = server.out = Pipe(wires, f"{name} down", server, client)
        encoded = isinstance(method, StreamMethod) and method.encoded
        client.encode, server.decode = _encoder(method.up), method.up.FromString
        server.encode, client.decode = bytes if encoded else _encoder(method.down), method.down.FromString

    def other(self, end: End) -> End:
        return self.server if end is self.client else self.client

    def side_ended(self, end: End) -> None:
        self._wires.host(end.host).streams.pop(self, None)

    def lose_all(self) -> None:
        self.client.out.lose()
        self.server.out.lose()

    def side_died(self, host: str, *, power: bool) -> None:
        """The process of one side has ended. Its kernel sends what it still has, or drops it, and closes."""
        mine, theirs = (self.client, self.server) if self.client.host == host else (self.server, self.client)
        world = self._wires.world
        mine.status = mine.status or RESET
        self.side_ended(mine)
        if power:
            mine.out.lose()
            world.after(self._wires.ping_seconds(self, theirs, world.now), theirs.breaks, UNANSWERED)
        elif world.draw("drops", self.name) < 0.5:
            mine.out.send(theirs.on_end, RESET, by_kernel=True)
        else:
            mine.out.lose()
            world.after(FASTEST_SECONDS, theirs.breaks, RESET)
        theirs.out.lose()


def _encoder(kind: type[Any]) -> Callable[[Any], bytes]:
    """Entries of maps in order: otherwise equal messages have other bytes in another process."""
    return partial(kind.SerializeToString, deterministic=True)
