"""A simulated network: it does what gRPC over TCP can do, and no more.

Messages of one stream keep their order in each direction. Their delays have a long tail. A stream may break and lose
what is under way; then each side notices at once, or up to ten seconds later. A partition stops one direction between
two hosts: messages wait, as in TCP, until it ends or until a side notices that its pings stay unanswered. After it they
are sent again, each stream's when its next attempt is due: those of one that was given up may come after the first of
its successor. A side whose peer does not read waits. A machine that is switched on refuses a connection where nobody
listens; one that is off, and one behind a partition, is silent.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from motet.health import Health
from motet.transport import (
    CallFailed,
    Down,
    DownloadMethod,
    Handlers,
    Method,
    StatusCode,
    StreamMethod,
    UnaryMethod,
    Up,
    spread,
)
from motet_simulator.world.ends import End
from motet_simulator.world.loop import ProcessLoop
from motet_simulator.world.server import SimulatedServer
from motet_simulator.world.statuses import REFUSED, SILENT
from motet_simulator.world.streams import Stream
from motet_simulator.world.wires import Wires

CONNECT_SECONDS = 20.0
"""When gRPC gives up a connection to a machine that is silent."""


class SimulatedChannel:
    def __init__(self, wires: Wires, host: str, loop: ProcessLoop, address: str) -> None:
        self._wires = wires
        self._host = host
        self._loop = loop
        self._address = address
        self.streams: list[End] = []

    def stream(self, method: StreamMethod[Up, Down]) -> End:
        return self._open(method)

    async def call(self, method: UnaryMethod[Up, Down], request: Up, *, seconds: float) -> Down:
        answers: list[Down] = []
        stream = self._open(method)
        try:
            async with asyncio.timeout(seconds):
                await stream.send(request)
                await stream.receive_all(answers.append)
        except TimeoutError:
            raise CallFailed(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        finally:
            stream.cancel()
        return answers[0]

    async def download(self, method: DownloadMethod[Up, Down], request: Up) -> AsyncGenerator[Down, None]:
        stream = self._open(method)
        try:
            await stream.send(request)
            async for answer in stream.messages():
                yield answer
        finally:
            stream.cancel()

    def _open(self, method: Method[Any, Any]) -> End:
        wires = self._wires
        host = wires.host(self._host)
        host.opened += 1
        name = f"{self._host} {method.name} {host.opened}"
        client = End(wires, self._host, self._loop, is_client=True)
        self.streams = [one for one in self.streams if one.status is None]
        self.streams.append(client)
        server = wires.server_at(self._address, name)
        if server is None:
            self._open_to_nobody(client, name, method)
            return client
        end = End(wires, server.host, server.loop, is_client=False)
        stream = Stream(wires, name, client, end, method)
        wires.opened(stream, self._host, server.host)
        client.out.send(server.open, end)
        return client

    def _open_to_nobody(self, client: End, name: str, method: Method[Any, Any]) -> None:
        """The machine at this address refuses, if it is there. A name for several addresses none of which is served is
        refused by the client's own machine."""
        wires = self._wires
        host = self._host if self._address in wires.aliases else self._address.rpartition(":")[0]
        nobody = End(wires, host, self._loop, is_client=False)
        wires.opened(Stream(wires, name, client, nobody, method), self._host)

        def arrive() -> None:
            if wires.host(host).off:
                wires.world.at(nobody.stream.began + CONNECT_SECONDS, client.breaks, SILENT)
            else:
                nobody.end_now(REFUSED)

        client.out.send(arrive)

    async def close(self, grace: float | None) -> None:
        live = [one for one in self.streams if one.status is None]
        if live and grace:
            await asyncio.sleep(grace)
        for one in live:
            one.cancel()


class SimulatedNetwork:
    """What one process has of the network."""

    def __init__(self, wires: Wires, host: str, loop: ProcessLoop) -> None:
        self._wires = wires
        self._host = host
        self._loop = loop
        self._random = Random(f"{wires.world.seed} {host} {loop.time()}")

    @asynccontextmanager
    async def channel(
        self, address: str, role: str = "", *, grace: float | None = None
    ) -> AsyncIterator[SimulatedChannel]:
        channel = SimulatedChannel(self._wires, self._host, self._loop, address)
        try:
            yield channel
        finally:
            await channel.close(grace)

    @asynccontextmanager
    async def serving(
        self,
        address: str,
        handlers: Handlers,
        *,
        ready: bool = True,
        grace: float = 0.5,
        process: Health | None = None,
    ) -> AsyncIterator[SimulatedServer]:
        server = SimulatedServer(self._wires, self._host, self._loop, address, handlers, process=process or Health())
        self._wires.listen(server)
        await server.set_ready(ready, "" if ready else "starting")
        try:
            yield server
        finally:
            await server.stop(grace)

    async def pause(self, address: str, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def spread(self, seconds: float) -> float:
        return spread(self._random, seconds)

    def explain_failure(self, why: str, role: str) -> str:
        return ""
