"""Measures how soon a scheduler that starts again knows everything and places the next request.

Its process is real, with gRPC on a Unix socket. Its peers are simulated, all in this process: 100 runners with 10,000
requests under way and 1,000 adapters, and four gateways, each with a request that waits. It is killed and starts again.
`takeover_s` is the time from the first stream to the new process until the last of those that waited has its place, and
`takeover_start_s` the time from the start of the process. `takeover_event_ms` is the longest that it takes a scheduler
to take in one message of these peers, from its bytes to the effects.

    python -m benchmarks.takeover [--runners 100] [--live 100] [--gateways 4] [--trials 5] [--json]
"""

import asyncio
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.driven import Stoppable
from benchmarks.harness import Result, arguments, report
from benchmarks.scheduler_catalog import ADAPTERS, CATALOG, GROUP, TENANTS, digest_of, identity
from motet.api.v1 import common_pb2, scheduler_pb2
from motet.disk import RealDisk
from motet.rpc import Link
from motet.runner_info import Capacity
from motet.settings import ProcessSettings
from motet.telemetry import configure_logging
from motet.transport import StreamMethod
from motet.transport.methods import ATTACH, EXPLAIN, SERVE
from motet.transport.over_grpc import GrpcNetwork
from motet_gateway.dispatcher import MAX_LIVE_IN_MESSAGE
from motet_scheduler import conversion
from motet_scheduler.catalog_file import CatalogFile
from motet_scheduler.garbage import full_collections_put_off
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.policy.values import SchedulerConfig

HELD = 10
"""Adapters of each runner."""
CAPACITY = Capacity(pages=4096, max_sequences=128, adapter_slots=2 * HELD)
PROMISE = common_pb2.Promise(pages=16, tokens=256)
MAX_SECONDS, MAX_EVENT_MS = 2.0, 10.0
PATIENCE_SECONDS = 60.0


class Peers:
    """What runners and gateways say when they connect."""

    def __init__(self, given: Namespace) -> None:
        self.gateways: int = given.gateways
        self._live = range(given.runners * given.live)
        self.each: int = given.live
        self.runners = [self._runner(runner) for runner in range(given.runners)]

    def request(self, number: int) -> str:
        return f"request-{number:06}-of-a-gateway"

    def _adapter(self, number: int) -> int:
        return (number // self.each * HELD + number % HELD) % ADAPTERS

    def _runner(self, runner: int) -> scheduler_pb2.AttachUp:
        return scheduler_pb2.AttachUp(
            hello=scheduler_pb2.RunnerHello(
                identity=identity(runner).to_proto(),
                address=f"10.0.0.{runner}:7101",
                capacity=CAPACITY.to_proto(),
                resident=[
                    common_pb2.ResidentAdapter(
                        digest=digest_of((runner * HELD + place) % ADAPTERS), tier=common_pb2.MEMORY_TIER_DEVICE
                    )
                    for place in range(HELD)
                ],
                live=[
                    common_pb2.RunnerRequest(
                        request=self.request(number),
                        epoch=1,
                        promise=PROMISE,
                        pages_used=8,
                        state=common_pb2.SEQUENCE_STATE_DECODE,
                        prompt_tokens=100,
                        output_tokens=20,
                        adapter_digest=digest_of(self._adapter(number)),
                        gateway=f"g{number % self.gateways}",
                        max_tokens=128,
                    )
                    for number in range(runner * self.each, (runner + 1) * self.each)
                ],
            )
        )

    def gateway(self, gateway: int) -> Iterator[scheduler_pb2.ServeUp]:
        numbers = self._live[gateway :: self.gateways]
        parts = [numbers[begin : begin + MAX_LIVE_IN_MESSAGE] for begin in range(0, len(numbers), MAX_LIVE_IN_MESSAGE)]
        for index, part in enumerate(parts):
            live, more = [self._live_request(number) for number in part], index + 1 < len(parts)
            if index:
                yield scheduler_pb2.ServeUp(live=scheduler_pb2.LiveRequests(requests=live, more=more))
            else:
                hello = scheduler_pb2.GatewayHello(
                    gateway=f"g{gateway}", live=live, live_follows=more, takes_changes=True
                )
                yield scheduler_pb2.ServeUp(hello=hello)
        yield scheduler_pb2.ServeUp(
            enqueue=scheduler_pb2.Enqueue(
                request=f"waits-{gateway}",
                tenant=f"tenant-{gateway}",
                group=GROUP,
                adapter=f"tenant-{gateway}/adapter-{gateway}",
                adapter_digest=digest_of(gateway),
                prompt_tokens=100,
                max_tokens=128,
                deadline_seconds=300,
            )
        )

    def _live_request(self, number: int) -> scheduler_pb2.LiveRequest:
        adapter = self._adapter(number)
        return scheduler_pb2.LiveRequest(
            request=self.request(number),
            epoch=1,
            instance=identity(number // self.each).instance,
            incarnation="1",
            promise=PROMISE,
            tenant=f"tenant-{adapter % TENANTS}",
            group=GROUP,
            adapter=f"tenant-{adapter % TENANTS}/adapter-{adapter}",
            adapter_digest=digest_of(adapter),
            prompt_tokens=100,
            max_tokens=128,
            delivered_tokens=20,
            age_seconds=3.0,
            deadline_seconds=300,
        )


@full_collections_put_off()
def longest_event(peers: Peers) -> float:
    """Seconds. As in the service, no collection of all garbage comes by itself."""
    scheduler, longest = Scheduler(SchedulerConfig(), now=0.0, saved=CATALOG), 0.0
    said: list[tuple[str, bytes]] = [("", one.SerializeToString()) for one in peers.runners]
    for gateway in range(peers.gateways):
        said += [(f"g{gateway}", one.SerializeToString()) for one in peers.gateway(gateway)]
    for number, (peer, message) in enumerate(said):
        began = time.thread_time()
        if not peer:
            scheduler.handle(
                conversion.runner_attached(scheduler_pb2.AttachUp.FromString(message).hello), 1e-3 * number
            )
        elif (up := scheduler_pb2.ServeUp.FromString(message)).HasField("hello"):
            scheduler.handle(conversion.gateway_connected(up.hello), 1e-3 * number)
        elif (event := conversion.serve_event(peer, up)) is not None:
            scheduler.handle(event, 1e-3 * number)
        longest = max(longest, time.thread_time() - began)
    return longest


class Cluster:
    """The links of all peers to the scheduler at an address."""

    def __init__(self, peers: Peers, address: str) -> None:
        self._peers = peers
        self._address = address
        self._network = GrpcNetwork()
        self._greetings = [list(peers.gateway(gateway)) for gateway in range(peers.gateways)]
        self.first_stream_at = 0.0
        self.placed: dict[str, float] = {}
        self._all_placed = asyncio.Event()

    def forget(self) -> None:
        self.first_stream_at = 0.0
        self.placed.clear()
        self._all_placed.clear()

    def links(self) -> Iterator[Link[Any, Any]]:
        for hello in self._peers.runners:
            yield self._link(ATTACH, [hello])
        for greeting in self._greetings:
            yield self._link(SERVE, greeting)

    def _link(self, method: StreamMethod[Any, Any], greeting: Sequence[Any]) -> Link[Any, Any]:
        return Link(
            "scheduler",
            self._address,
            method,
            network=self._network,
            greet=lambda: greeting,
            receive=self._receive,
            opened=self._opened,
        )

    async def all_placed(self) -> float:
        """When the last one had its place."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self._all_placed.wait()
        return max(self.placed.values())

    async def check_known(self) -> None:
        """The last request of each gateway, of those that were under way."""
        async with self._network.channel(self._address, "scheduler") as channel:
            for number in range(-self._peers.gateways, 0):
                name = self._peers.request(len(self._peers.runners) * self._peers.each + number)
                found = await channel.call(EXPLAIN, scheduler_pb2.ExplainRequest(request=name), seconds=10)
                if found.ended:
                    raise RuntimeError(f"the scheduler has ended {name}")

    def _opened(self) -> None:
        self.first_stream_at = self.first_stream_at or time.monotonic()

    def _receive(self, down: scheduler_pb2.ServeDown | scheduler_pb2.AttachDown) -> None:
        if isinstance(down, scheduler_pb2.ServeDown) and down.HasField("placed"):
            self.placed.setdefault(down.placed.request, time.monotonic())
            if len(self.placed) == self._peers.gateways:
                self._all_placed.set()


def scheduler_in(folder: Path, address: str) -> Stoppable:
    env = {"MOTET_SCHEDULER_ADDRESS": address, "MOTET_DATA_DIR": str(folder), "MOTET_LOG_LEVEL": "error"}
    env["MOTET_SUPERVISOR_ADDRESS"] = f"unix:{folder}/none.sock"
    return Stoppable("the scheduler", [sys.executable, "-P", "-m", "motet_scheduler"], env)


async def takeovers(peers: Peers, folder: Path, trials: int) -> Sequence[tuple[float, float]]:
    """Of each: seconds from the first stream, and from the start of the process."""
    address, found = f"unix:{folder}/s.sock", []
    (folder / "scheduler").mkdir()
    (folder / "scheduler.term").write_text("1")
    CatalogFile(folder / "scheduler" / "catalog.json", RealDisk()).write(CATALOG, 1)
    cluster = Cluster(peers, address)
    tasks = [asyncio.create_task(link.run()) for link in cluster.links()]
    try:
        for _ in range(trials + 1):
            cluster.forget()
            began = time.monotonic()
            with scheduler_in(folder, address):
                at = await cluster.all_placed()
                found.append((at - cluster.first_stream_at, at - began))
                await cluster.check_known()
                await asyncio.sleep(2.0)  # it saves which runners there are
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)
    return found[1:]  # the first one knew of no runner


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--runners", type=int, default=100)
    parser.add_argument("--live", type=int, default=100, help="requests under way on each runner")
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--trials", type=int, default=5)
    given = parser.parse_args()
    configure_logging("peers", ProcessSettings(log_level="error"))
    peers = Peers(given)
    event_ms = 1000 * longest_event(peers)
    with tempfile.TemporaryDirectory(prefix="mt", dir="/tmp") as folder:
        found = asyncio.run(takeovers(peers, Path(folder), given.trials))
    worst, from_start = (max(one) for one in zip(*found, strict=True))
    results = [
        Result("takeover_s", worst, "s", f"≤ {MAX_SECONDS:g} in each trial", worst <= MAX_SECONDS),
        Result("takeover_start_s", from_start, "s"),
        Result("takeover_event_ms", event_ms, "ms", f"≤ {MAX_EVENT_MS:g}", event_ms <= MAX_EVENT_MS),
    ]
    report("takeover", results, as_json=given.json)


if __name__ == "__main__":
    main()
