"""One Generate stream to every runner. Submissions wait for one that is being opened until it has been down for
`connect_seconds`, and at least for the next attempt."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

import structlog

from motet.api.v1 import runner_pb2
from motet.rpc import LAST_RETRY_SECONDS, Link
from motet.transport import Network
from motet.transport.methods import GENERATE
from motet_gateway.generation import RunnerPlacement

log = structlog.get_logger(__name__)

_FIELDS = frozenset(
    [field.name for field in runner_pb2.Sampling.DESCRIPTOR.fields if field.number > 24] + ["cache_salt"]
)
"""Of Sampling and Submit: what not every runner knows, but only those that say it"""

OnMessage = Callable[[str, runner_pb2.GenerateDown], None]
"""Called with a runner's address and each of its messages."""

OnStreamLost = Callable[[str, str], None]
"""Called with a runner's address and why its stream broke: everything placed there is on_stream_lost."""

OnUnreachable = Callable[[RunnerPlacement, str, str], None]
"""Called with a placement that never reached its runner, the request, and why."""


class RunnerStreams:
    def __init__(
        self,
        gateway: str,
        *,
        network: Network,
        on_message: OnMessage,
        on_stream_lost: OnStreamLost,
        on_unreachable: OnUnreachable,
        connect_seconds: float,
    ) -> None:
        self._open = partial(
            _Stream,
            gateway=gateway,
            network=network,
            on_message=on_message,
            on_stream_lost=on_stream_lost,
            on_unreachable=on_unreachable,
            connect_seconds=connect_seconds,
        )
        self.streams: dict[str, _Stream] = {}

    def set_addresses(self, addresses: Iterable[str], *, busy: Iterable[str] = ()) -> None:
        """Keep streams to these addresses and close all others, except those in `busy`."""
        wanted = dict.fromkeys(addresses)
        kept = wanted.keys() | set(busy)
        for address in wanted:
            self._stream(address)
        for address in [address for address in self.streams if address not in kept]:
            self.streams.pop(address).close()

    def submit(self, placement: RunnerPlacement, message: runner_pb2.Submit) -> None:
        self._stream(placement.address).submit(placement, message)

    def cancel(self, placement: RunnerPlacement, request: str, why: str) -> None:
        if (stream := self.streams.get(placement.address)) is not None:
            stream.cancel(placement, request, why)

    def welcomed(self, address: str, welcome: runner_pb2.GenerateWelcome) -> None:
        if (stream := self.streams.get(address)) is not None:
            stream.unknown = _FIELDS.difference(welcome.fields)

    def unknown_fields(self, address: str) -> frozenset[str]:
        """What the version of the runner there does not know, so that it would ignore it. Before it has said what it
        knows: nothing."""
        stream = self.streams.get(address)
        return frozenset() if stream is None else stream.unknown

    async def close(self) -> None:
        tasks = [stream.close() for stream in self.streams.values()]
        self.streams.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stream(self, address: str) -> "_Stream":
        if (stream := self.streams.get(address)) is None:
            stream = self.streams[address] = self._open(address)
        return stream


class _Stream:
    def __init__(
        self,
        address: str,
        *,
        gateway: str,
        network: Network,
        on_message: OnMessage,
        on_stream_lost: OnStreamLost,
        on_unreachable: OnUnreachable,
        connect_seconds: float,
    ) -> None:
        self._address = address
        self._on_unreachable = on_unreachable
        self._connect_seconds = connect_seconds
        self.unknown = frozenset[str]()
        """The fields of Submit and Sampling that the runner does not know, as far as it has said what it knows."""
        self._unsent: dict[str, tuple[RunnerPlacement, runner_pb2.Submit, asyncio.TimerHandle]] = {}
        self.link: Link[runner_pb2.GenerateUp, runner_pb2.GenerateDown] = Link(
            "runner",
            address,
            GENERATE,
            network=network,
            greet=lambda: [runner_pb2.GenerateUp(hello=runner_pb2.GenerateHello(gateway=gateway))],
            receive=lambda message: on_message(address, message),
            opened=self._send_waiting,
            closed=partial(self._lost, on_stream_lost),
        )
        self._task = asyncio.create_task(self.link.run(), name=f"runner {address}")

    def submit(self, placement: RunnerPlacement, message: runner_pb2.Submit) -> None:
        if not self.link.send(runner_pb2.GenerateUp(submit=message)):
            self._forget(message.request)
            loop = asyncio.get_running_loop()
            # A runner that is cut off from this gateway gets more requests, as the scheduler hears it well.
            left = max(LAST_RETRY_SECONDS, self.link.down_since + self._connect_seconds - loop.time())
            timer = loop.call_later(min(left, self._connect_seconds), self._give_up, message.request)
            self._unsent[message.request] = (placement, message, timer)

    def cancel(self, placement: RunnerPlacement, request: str, why: str) -> None:
        self._forget(request)
        message = runner_pb2.CancelGeneration(request=request, epoch=placement.epoch, reason=why)
        self.link.send(runner_pb2.GenerateUp(cancel=message))

    def close(self) -> "asyncio.Task[None]":
        for request in list(self._unsent):
            self._give_up(request)
        self._task.cancel()
        return self._task

    def _lost(self, on_stream_lost: OnStreamLost, why: str) -> None:
        self.unknown = frozenset()
        on_stream_lost(self._address, why)

    def _send_waiting(self) -> None:
        for _, message, timer in self._unsent.values():
            timer.cancel()
            self.link.send(runner_pb2.GenerateUp(submit=message))
        self._unsent.clear()

    def _forget(self, request: str) -> None:
        if (unsent := self._unsent.pop(request, None)) is not None:
            unsent[2].cancel()

    def _give_up(self, request: str) -> None:
        if (unsent := self._unsent.pop(request, None)) is not None:
            unsent[2].cancel()
            self._on_unreachable(unsent[0], request, f"no stream to the runner at {self._address}")
