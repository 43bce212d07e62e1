"""The client's side of a stream. It opens the stream again whenever it breaks."""

import asyncio
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, TypeVar

import structlog

from motet.errors import MotetError, SetupError
from motet.rpc.message_failures import EndStream, handle
from motet.rpc.outbox import MAX_OUTBOX_BYTES, Outbox
from motet.rpc.packing import leader_redirect, next_packed, unpacked
from motet.rpc.sessions import OTHER_PROCESS_CODE
from motet.transport import (
    FIRST_RETRY_SECONDS,
    LAST_RETRY_SECONDS,
    CallFailed,
    Network,
    StatusCode,
    StreamMethod,
)

log = structlog.get_logger(__name__)

Up = TypeVar("Up")
Down = TypeVar("Down")

CONNECT_SECONDS = 5.0
_HAPPEN_AGAIN = (
    StatusCode.PERMISSION_DENIED,
    StatusCode.INVALID_ARGUMENT,
    StatusCode.INTERNAL,
)
"""With these a peer ends a stream because of what it was told. The next stream tells it the same."""

FIRST_REPLACED_SECONDS = 3.0
REPLACED_SECONDS = 60.0
"""How long a link waits, on average, whose stream ended because another process uses its name: the first time, and when
it happens again within `REPLACED_AGAIN_SECONDS`. Mostly the other one was started by mistake and ends soon. But if it
stays, the requests of the one move to the other with each change, so they must not change places often."""

REPLACED_AGAIN_SECONDS = 300.0

WARN_AFTER_SECONDS = 10.0
"""When a peer cannot be reached for longer than this, the link logs one warning."""


class Backoff:
    """Random waits whose mean doubles from `first` to `last`, and is `first` again after a success."""

    def __init__(
        self,
        spread: Callable[[float], float],
        first: float = FIRST_RETRY_SECONDS,
        last: float = LAST_RETRY_SECONDS,
    ) -> None:
        """`spread` makes a wait random."""
        self._spread = spread
        self._first, self._last, self._next = first, last, first

    def reset(self) -> None:
        self._next = self._first

    def next(self) -> float:
        wait, self._next = self._next, min(self._next * 2, self._last)
        return self._spread(wait)


def _is_being_cancelled() -> bool:
    """Whether this task has been cancelled, and not only the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class PeerTooSlow(Exception):
    """The peer reads so slowly that the outbox is full."""


class RedirectToLeader(Exception):
    """The peer does not lead. It names the address of the leader, or none while there is no leader."""

    def __init__(self, address: str) -> None:
        super().__init__(address or "not known yet")
        self.address = address


class Link(Generic[Up, Down]):
    """The client's side of one long-lived bidirectional stream. It opens the stream again whenever it breaks.

    `peer` is the role of the server at `address`. `greet` returns the first messages of each connection. `receive` is
    called with every message from the peer, in order, and must not block. A message that it cannot handle goes to
    `failed`, with the error; `motet.rpc.message_failures` lists what ends a connection. `opened` and `closed` are
    called when a connection begins and ends.

    When the first message of the peer is NotLeader, the link does not pass it to `receive`. It connects to the leader
    that the message names, and after that connection breaks, to `address` again.

    `run` ends only when it is cancelled. `send` drops the message and returns False while there is no connection. When
    more than `limit_bytes` wait to be written, the link closes the connection and opens another one.
    """

    def __init__(
        self,
        peer: str,
        address: str,
        method: StreamMethod[Up, Down],
        *,
        network: Network,
        greet: Callable[[], Iterable[Up]],
        receive: Callable[[Down], None],
        failed: Callable[[Down, MotetError], None] = lambda *_: None,
        opened: Callable[[], None] | None = None,
        closed: Callable[[str], None] | None = None,
        limit_bytes: int = MAX_OUTBOX_BYTES,
    ) -> None:
        self.peer = peer
        self.address = address
        self.connected_to = address
        """Where the last stream was: the leader, if `address` has named it."""
        self._warned_reason = ""
        self.down_since = math.inf
        """When the last connection ended, or `run` began, on the loop's clock."""
        self._redirected = False
        self._method = method
        self._network = network
        self._greet = greet
        self.receive = receive
        self.failed = failed
        self._opened = opened
        self._closed = closed
        self._limit = limit_bytes
        self.outbox: Outbox[Up] | None = None
        self._disconnect: Callable[[], object] = lambda: None

    @property
    def connected(self) -> bool:
        return self.outbox is not None

    def send(self, message: Up) -> bool:
        if self.outbox is None:
            return False
        self.outbox.put(message)
        if self.outbox.full:  # the next connection begins with the whole state
            self.outbox = None
            self._disconnect()
            return False
        return True

    async def run(self) -> None:
        backoff, redirect_backoff = Backoff(self._network.spread), Backoff(self._network.spread)
        now = asyncio.get_running_loop().time
        self.down_since = now()
        replaced_at = -math.inf
        address = self.address
        while True:
            here, address = address, self.address
            try:
                await self._run_stream(here, backoff)
                why = "the peer ended the stream"
            except RedirectToLeader as redirect:
                log.info("stream_redirected", link=self.peer, address=here, to=redirect.address)
                address = redirect.address or self.address
                # The first redirect is followed at once. Peers that redirect to each other, or to no address, are
                # asked less often.
                if self._redirected or not redirect.address:
                    await asyncio.sleep(redirect_backoff.next())
                else:
                    redirect_backoff.reset()
                self._redirected = True
                continue
            except CallFailed as error:
                why = str(error)
                if error.code is OTHER_PROCESS_CODE:
                    self._warn(why)
                    again = now() - replaced_at < REPLACED_AGAIN_SECONDS
                    replaced_at = now()
                    wait = REPLACED_SECONDS if again else FIRST_REPLACED_SECONDS
                    await asyncio.sleep(Backoff(self._network.spread, wait).next())
                    continue
                if error.code in _HAPPEN_AGAIN:  # warn, and wait longer
                    self._warn(why)
                    await asyncio.sleep(LAST_RETRY_SECONDS)
            except TimeoutError:
                why = "no answer"
            except PeerTooSlow as error:
                why = str(error)
                self._warn(why)
            except SetupError as error:
                why = error.message
                self._warn(why)
            except (EndStream, MotetError) as error:
                # The peer breaks the protocol, and will probably do it again.
                why = str(error)
                self._warn(why)
                await asyncio.sleep(LAST_RETRY_SECONDS)
            except Exception:
                # The connection could not begin as it should. The next one will probably fail in the same way.
                log.exception("stream_failed", link=self.peer, address=here)
                await asyncio.sleep(LAST_RETRY_SECONDS)
                continue
            log.debug("stream_retry", link=self.peer, address=here, reason=why)
            if reason := self._network.explain_failure(why, self.peer):
                self._warn(reason)
            elif not self._warned_reason and now() - self.down_since > WARN_AFTER_SECONDS:
                self._warn(why)
            await self._network.pause(here, backoff.next())

    def _warn(self, reason: str) -> None:
        """Log a warning, but not the same reason twice in a row: there are two attempts in each second."""
        if reason != self._warned_reason:
            log.warning("connect_failed", link=self.peer, address=self.address, reason=reason)
        self._warned_reason = reason

    async def _run_stream(self, address: str, backoff: Backoff) -> None:
        async with self._network.channel(address, self.peer) as channel:
            stream = channel.stream(self._method)
            outbox: Outbox[Up] = Outbox(self._limit)
            why = "the peer ended the stream"
            connected = False
            writer: asyncio.Task[None] | None = None
            slow, first = False, True

            def disconnect() -> None:
                nonlocal slow
                slow = True
                stream.cancel()

            def receive(message: Down) -> None:
                nonlocal first
                if first and (leader := leader_redirect(message)) is not None:
                    raise RedirectToLeader(leader)
                first = self._redirected = False
                for one in unpacked(message):
                    handle(one, self.receive, self.failed)
                # Only after a message was accepted: a refused stream connects, too.
                self._warned_reason = ""
                backoff.reset()

            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await stream.connected()
                connected = True
                for message in self._greet():
                    outbox.put(message)
                self.outbox, self._disconnect = outbox, disconnect
                self.connected_to = address
                writer = asyncio.create_task(stream.send_all(partial(next_packed, outbox)), name=f"{self.peer}: write")
                log.info("stream_connected", link=self.peer, address=address)
                if self._opened is not None:
                    self._opened()
                await stream.receive_all(receive)
            except RedirectToLeader as redirect:
                why = f"the leader is {redirect}"
                raise
            except asyncio.CancelledError as error:
                if not slow or _is_being_cancelled():
                    raise
                why = "the peer does not read"
                raise PeerTooSlow(why) from error
            except CallFailed as error:
                why = str(error)
                raise
            finally:
                self.outbox = None
                if connected:
                    self.down_since = asyncio.get_running_loop().time()
                if writer is not None:
                    writer.cancel()
                    await asyncio.gather(writer, return_exceptions=True)
                stream.cancel()
                if connected:
                    log.info("stream_disconnected", link=self.peer, address=address, reason=why)
                    self._tell_closed(why, address)

    def _tell_closed(self, why: str, address: str) -> None:
        """Whatever goes wrong there, it must not take the place of why the stream ended: that may be a cancellation."""
        try:
            if self._closed is not None:
                self._closed(why)
        except Exception:
            log.exception("stream_failed", link=self.peer, address=address)
