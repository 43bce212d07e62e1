"""One Generate stream to every runner. Submissions wait for one that is being opened until it has been down for
`connect_seconds`, and at least for the next attempt."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

import structlog

from motet.api.v1 import runner_pb2
from motet.kept_prompts import KeptPrompts
from motet.rpc import LAST_RETRY_SECONDS, Link
from motet.transport import Network
from motet.transport.methods import GENERATE
from motet_gateway.generation import RunnerPlacement

log = structlog.get_logger(__name__)

_FIELDS = frozenset(
    [field.name for field in runner_pb2.Sampling.DESCRIPTOR.fields if field.number > 24] + ["cache_salt"]
)
"""Of Sampling and Submit: what not every runner knows, but only those that say it"""

_HERE = (0,)
"""In place of a prompt: of those that a runner has, a gateway keeps only the numbers."""

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
            on_lost=self._lost,
            on_unreachable=on_unreachable,
            connect_seconds=connect_seconds,
        )
        self._on_stream_lost = on_stream_lost
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
            stream.keeps_prompts = "prompt_number" in welcome.fields

    def unknown_fields(self, address: str) -> frozenset[str]:
        """What the version of the runner there does not know, so that it would ignore it. Before it has said what it
        knows: nothing."""
        stream = self.streams.get(address)
        return frozenset() if stream is None else stream.unknown

    def has_prompt(self, address: str, number: int) -> bool:
        """Whether the runner there has kept the prompt of this number."""
        stream = self.streams.get(address)
        return stream is not None and stream.keeps_prompts and number in stream.prompts

    def forget_prompts(self, address: str) -> None:
        """The runner there has declined something, perhaps as it had not kept a prompt: it gets each once more."""
        if (stream := self.streams.get(address)) is not None:
            stream.prompts = KeptPrompts()

    async def close(self) -> None:
        tasks = [stream.close() for stream in self.streams.values()]
        self.streams.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stream(self, address: str) -> "_Stream":
        if (stream := self.streams.get(address)) is None:
            stream = self.streams[address] = self._open(address)
        return stream

    def _lost(self, stream: "_Stream", why: str) -> None:
        if self.streams.get(stream.address) is stream:  # nothing is placed on one that was closed or replaced
            self._on_stream_lost(stream.address, why)


class _Stream:
    def __init__(
        self,
        address: str,
        *,
        gateway: str,
        network: Network,
        on_message: OnMessage,
        on_lost: "Callable[[_Stream, str], None]",
        on_unreachable: OnUnreachable,
        connect_seconds: float,
    ) -> None:
        self.address = address
        self._on_lost = on_lost
        self._on_unreachable = on_unreachable
        self._connect_seconds = connect_seconds
        self.unknown = frozenset[str]()
        """The fields of Submit and Sampling that the runner does not know, as far as it has said what it knows."""
        self.keeps_prompts = False
        self.prompts = KeptPrompts()
        self._unsent: dict[str, tuple[RunnerPlacement, runner_pb2.Submit, asyncio.TimerHandle]] = {}
        self.link: Link[runner_pb2.GenerateUp, runner_pb2.GenerateDown] = Link(
            "runner",
            address,
            GENERATE,
            network=network,
            greet=lambda: [runner_pb2.GenerateUp(hello=runner_pb2.GenerateHello(gateway=gateway))],
            receive=lambda message: on_message(address, message),
            opened=self._send_waiting,
            closed=self._lost,
        )
        self._task = asyncio.create_task(self.link.run(), name=f"runner {address}")

    def submit(self, placement: RunnerPlacement, message: runner_pb2.Submit) -> None:
        if not self._send(message):
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

    def _lost(self, why: str) -> None:
        self.unknown, self.keeps_prompts, self.prompts = frozenset(), False, KeptPrompts()
        for request in list(self._unsent):  # what came since the stream was full is lost with the rest
            self._forget(request)
        self._on_lost(self, why)

    def _send_waiting(self) -> None:
        for _, message, timer in self._unsent.values():
            timer.cancel()
            self._send(message)
        self._unsent.clear()

    def _send(self, message: runner_pb2.Submit) -> bool:
        if not self.link.send(runner_pb2.GenerateUp(submit=message)):
            return False
        self.prompts.note(message.prompt_number, _HERE)
        return True

    def _forget(self, request: str) -> None:
        if (unsent := self._unsent.pop(request, None)) is not None:
            unsent[2].cancel()

    def _give_up(self, request: str) -> None:
        if (unsent := self._unsent.pop(request, None)) is not None:
            unsent[2].cancel()
            self._on_unreachable(unsent[0], request, "no stream to the runner")
