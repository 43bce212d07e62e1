"""What is between simulated machines, who listens there, and what goes wrong with it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from motet.errors import SetupError
from motet_simulator.world.statuses import RESET, UNANSWERED
from motet_simulator.world.time import World

if TYPE_CHECKING:
    from motet_simulator.world.ends import End
    from motet_simulator.world.server import SimulatedServer
    from motet_simulator.world.streams import Stream

FASTEST_SECONDS = 0.0001
SLOWEST_SECONDS = 0.3
TAIL = 0.6
"""Of the delays: the larger, the longer. With this, one of a hundred takes 16 times as long as the fastest."""

SLOW_FACTOR = 100.0
"""How much longer delays are on a slow way."""

PING_SECONDS = (5.0, 10.0)
"""When a side notices that its peer is gone: with pings every 5 s that may take 5 s."""

Record = Callable[[float, str, bytes], None]
"""Gets each message that is sent: when, on which stream and in which direction, and its bytes."""


@dataclass(slots=True)
class Host:
    """A machine. It outlives its processes."""

    name: str
    wall_error: float
    """By how much its wall clock is wrong: a fault may change it."""
    streams: "dict[Stream, None]" = field(default_factory=dict)
    opened: int = 0
    off: bool = False
    """It has no power. A process that starts there says that it has."""


@dataclass(frozen=True, slots=True)
class _Partition:
    source: str
    target: str
    began: float
    until: float


class Wires:
    """All hosts, and what is between them."""

    def __init__(self, world: World, record: Record = lambda *_: None) -> None:
        self.world = world
        self.record = record
        self._slow_until: dict[tuple[str, str], float] = {}
        self._hosts: dict[str, Host] = {}
        self._servers: dict[str, SimulatedServer] = {}
        self.aliases: dict[str, tuple[str, ...]] = {}
        """Addresses behind which there are several others: one of those that listen is taken."""
        self.lies: dict[str, Callable[[Any], Iterable[Any]]] = {}
        """What hosts say instead of a message, of those that lie."""
        self._partitions: dict[tuple[str, str], _Partition] = {}

    def host(self, name: str) -> Host:
        if name not in self._hosts:
            self._hosts[name] = Host(name, wall_error=10 * (self.world.draw("wall clock", name) - 0.5))
        return self._hosts[name]

    def server_at(self, address: str, *of: object) -> "SimulatedServer | None":
        behind = [one for one in self.aliases.get(address, (address,)) if one in self._servers]
        return self._servers[behind[int(self.world.draw("server", *of) * len(behind))]] if behind else None

    def listen(self, server: "SimulatedServer") -> None:
        if server.loop.dead:
            return  # what it does in the moment of its end
        if server.address in self._servers:
            raise SetupError(f"cannot listen on {server.address}: it is in use")
        self._servers[server.address] = server

    def stop_listening(self, server: "SimulatedServer") -> None:
        if self._servers.get(server.address) is server:
            del self._servers[server.address]

    # ----------------------------------------------------------------------------------------------------------- faults

    def host_died(self, name: str, *, power: bool = False) -> None:
        """All processes of the host have ended. Its kernel tells their peers, unless the whole machine is gone."""
        self.host(name).off = power
        for server in [one for one in self._servers.values() if one.host == name]:
            self.stop_listening(server)
        for stream in list(self.host(name).streams):
            stream.side_died(name, power=power)

    def partition(self, source: str, target: str, seconds: float) -> None:
        """Nothing that `source` sends reaches `target` for this long."""
        now, before = self.world.now, self._partitions.get((source, target))
        if before is not None and before.until > now:
            partition = _Partition(source, target, before.began, max(before.until, now + seconds))
        else:
            partition = _Partition(source, target, now, now + seconds)
        self._partitions[source, target] = partition
        for stream in self._between(source, target):
            self._pings_fail(stream, partition)

    def opened(self, stream: "Stream", *hosts: str) -> None:
        """A stream begins, which has a process on these hosts."""
        for name in hosts:
            self.host(name).streams[stream] = None
        one, other = stream.client.host, stream.server.host
        for way in ((one, other), (other, one)):
            partition = self._partitions.get(way)
            if partition is not None and partition.until > self.world.now:
                self._pings_fail(stream, partition)

    def _pings_fail(self, stream: "Stream", partition: _Partition) -> None:
        began = max(partition.began, stream.began)
        for end in (stream.client, stream.server):
            notices = began + self.ping_seconds(stream, end, began)
            if notices < partition.until:
                self.world.on_met("partition", f"{partition.source} {partition.target}")
                self.world.at(notices, end.breaks, UNANSWERED)

    def tells_truth(self, name: str) -> None:
        """Again."""
        self.lies.pop(name, None)

    def slow(self, source: str, target: str, seconds: float) -> None:
        """What `source` sends to `target` takes longer for this long."""
        self._slow_until[source, target] = max(self._slow_until.get((source, target), 0.0), self.world.now + seconds)

    def break_streams(self, one: str, other: str) -> bool:
        """All streams between two hosts break, and what is under way is lost. False: there is none."""
        streams = self._between(one, other)
        for stream in streams:
            stream.lose_all()
            for end in (stream.client, stream.server):
                late = self.world.draw("notices late", stream.name, end.is_client, self.world.now) < 0.5
                seconds = self.ping_seconds(stream, end, self.world.now) if late else FASTEST_SECONDS
                self.world.after(seconds, end.breaks, RESET)
        return bool(streams)

    def ping_seconds(self, stream: "Stream", end: "End", silent_since: float) -> float:
        """How long a side waits for its peer before it counts as gone."""
        low, high = PING_SECONDS
        return low + (high - low) * self.world.draw("ping", stream.name, end.is_client, silent_since)

    def _between(self, one: str, other: str) -> "list[Stream]":
        streams = self.host(one).streams | self.host(other).streams
        return [stream for stream in streams if {stream.client.host, stream.server.host} == {one, other}]

    def blocked_until(self, source: str, target: str) -> float:
        partition = self._partitions.get((source, target))
        return 0.0 if partition is None else partition.until

    def delay(self, source: str, target: str, *of: object) -> float:
        tail: float = (1.0 - self.world.draw(*of)) ** -TAIL
        if slow := self._slow_until.get((source, target), 0.0) > self.world.now:
            self.world.on_met("slow", f"{source} {target}")
        return min(FASTEST_SECONDS * tail, SLOWEST_SECONDS) * (SLOW_FACTOR if slow else 1.0)
