"""The networks that must pass `test_networks.py`, each with how a test runs on it."""

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from typing import Any

from motet.transport import Network
from motet.transport.over_grpc import GrpcNetwork
from motet_simulator.world import Process, SimulatedNetwork, Wires, World
from tests.common.waiting import PATIENCE_S

Test = Callable[[Network, Network, str], Coroutine[Any, Any, None]]
"""Gets the network of a client, that of a server, and the server's address."""


def over_grpc(test: Test) -> None:
    with tempfile.TemporaryDirectory(prefix="mt", dir="/tmp") as folder:
        asyncio.run(test(GrpcNetwork(), GrpcNetwork(), f"unix:{folder}/s.sock"))


def simulated(test: Test) -> None:
    world = World(seed=0)
    wires = Wires(world)
    failures: list[str] = []

    async def main(process: Process) -> None:
        client, server = (SimulatedNetwork(wires, host, process.loop) for host in ("client", "server"))
        await test(client, server, "server:1")

    process = Process(world, wires, "test", 0, main, failed=failures.append)
    try:
        world.run(until=PATIENCE_S)
        process.raise_failure()
    finally:
        process.close()
    assert [one for one in failures if not one.startswith("the handler of ")] == [], "a handler may fail in a test"


NETWORKS: dict[str, Callable[[Test], None]] = {"grpc": over_grpc, "simulated": simulated}
