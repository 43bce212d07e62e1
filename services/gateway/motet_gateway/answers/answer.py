"""Writes what comes of one call, as an ASGI response.

A stream's status 200 waits for the first tokens, at most two seconds, so that most errors get their own status. After
it the client gets exactly one finish reason per choice, or one error, and then the end of its API's streams.
"""

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from motet.errors import DeadlineExceeded, Internal, MotetError, NoRunner, Overloaded
from motet_gateway import direct_writes, ignored_fields, rate_limits, sse
from motet_gateway.answers.account import account
from motet_gateway.answers.api import Api
from motet_gateway.answers.call import Call
from motet_gateway.answers.changes import Changes
from motet_gateway.answers.choice import ChoiceText
from motet_gateway.answers.echo import EchoedPrompt
from motet_gateway.answers.prompt_logprobs import ScoredPrompt
from motet_gateway.answers.writer import WRITE_BYTES, Piece, in_parts
from motet_gateway.direct_writes import DirectWriter
from motet_gateway.errors import ClientGone, forget_frames
from motet_gateway.identity.caller import Caller
from motet_gateway.noted import Noted
from motet_gateway.parameters import AskingBody

if TYPE_CHECKING:
    from motet_gateway.gateway import Gateway

log = structlog.get_logger(__name__)

_QUEUE_COMMENT = re.compile(r"queued position=(?P<position>\d+)(?P<reason>.*)", re.DOTALL)
_JSON = [(b"content-type", b"application/json")]


class AnswerResponse(Response):
    def __init__(
        self,
        gateway: "Gateway",
        caller: Caller,
        api: Api[AskingBody],
        body: AskingBody,
        *,
        http_id: str = "",
        traceparent: str = "",
        take: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`http_id`, `traceparent`: of the HTTP request. `take` counts the bytes that the answer holds, and raises
        Overloaded if all requests hold too many."""
        self.background = None
        self.caller = caller
        self._gateway = gateway
        self._settings = gateway.settings
        self._clock = gateway.around.clock
        self._take = take
        self._streaming = bool(body.stream)
        self._changes = Changes()
        self._aborted: Exception | None = None
        self._client_gone = False
        self.call = Call(
            gateway,
            caller,
            api,
            body,
            http_id=http_id,
            traceparent=traceparent,
            take=take,
            hold=self._hold,
            changed=self._on_change,
            wake=self._changes.wake,
        )
        # What was sent to the client.
        self._opened = False
        self._wrote_at = 0.0
        self._writer = api.writer(self.call)
        self._direct: DirectWriter | None = None
        self._write_due = False
        """Whether `write_now` is called at the end of this turn of the event loop."""

    # ------------------------------------------------------------------------------------------------------- the whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._direct = direct_writes.offered(scope) if self._streaming else None
        listener = asyncio.create_task(self._listen(receive), name=f"listen {self.call.id}")
        self._changes.due_in(self._settings.hold_seconds)
        code, why = "499", "the client went away"  # also if the server cancels this task
        try:
            with self._gateway.answering(self):
                await self._answer(send)
            code = "200"
        except ClientGone:
            self._gateway.metrics.cancelled.inc()
        except MotetError as error:
            code, why = str(error.mapping.http), error.code
            if not any(choice.error is error for choice in self.call.choices):  # else it says so itself
                self.call.note(Noted.FAILED, error.code, error.message)
            await self._fail(error, send)
        except Exception as error:
            code, why = "500", Internal.mapping.code
            if not self._opened:
                raise
            log.exception("answer_failed")
            forget_frames(error)
            await self._fail(Internal("The gateway failed while it wrote this answer."), send)
        finally:
            listener.cancel()
            self._changes.close()
            self.call.cancel(why)
            self.call.end(code)
            account(self.call, code)
            self.call.let_go()

    def abort(self, error: MotetError) -> None:
        """End the answer with an error that the client gets."""
        self._aborted = error
        self.call.cancel(error.code)  # cancel now: the writer may wait long for a slow client
        self._changes.wake()

    async def _listen(self, receive: Receive) -> None:
        # `request.is_disconnected()` does not work reliably behind middleware.
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client_gone = True
        self.call.cancel("the client went away")  # cancel now: the writer may wait long for a slow client
        self._changes.wake()

    async def _answer(self, send: Send) -> None:
        call, wait = self.call, partial(self._wait, send)
        await call.begin(wait)
        complete = False
        while not complete:  # not `call.over`: choices may end while a write waits for a slow client
            await wait()
            if call.begin_again():
                self._writer.clear()
                await call.begin(wait)
            elif self._streaming:
                complete = await self._write(send)
            elif (error := call.error) is not None:
                raise error
            else:
                complete = call.over
        if not self._streaming:
            await self._write_whole(send)

    # --------------------------------------------------------------------------------------------------------- waiting

    async def _wait(self, send: Send) -> None:
        """Wait until something has changed. Meanwhile send keep-alive comments and check the deadline."""
        await self._changes.wait(partial(self._when_due, send))
        if self._client_gone:
            raise ClientGone
        if self._aborted is not None:
            raise self._aborted

    async def _when_due(self, send: Send) -> None:
        now, deadline = self._clock(), self._settings.deadline_seconds
        left = deadline - (now - self.call.timings.silent_since)
        if left <= 0:
            what = _in_words(self.call.waits_for) or "no tokens came"
            if self.call.no_runner:
                raise NoRunner(f"No runner was available within {deadline:g} s: {what}. Try again.")
            raise DeadlineExceeded(
                f"The request made no progress for {deadline:g} s: {what}. The gateway ended it. Send it again."
            )
        if self._streaming and not self._opened:
            await self._open(send)
        pause = self._settings.keep_alive_seconds
        if self._streaming:
            pause -= now - self._wrote_at
            if pause <= 0:
                await self._send(sse.comment(self.call.waits_for or "working"), send)
                pause = self._settings.keep_alive_seconds
        self._changes.due_in(min(pause, left))

    def _hold(self, size: int) -> None:
        """Count bytes that wait until they can be written."""
        try:
            self._take(size)
        except Overloaded as error:
            self.abort(error)

    def _on_change(self, choice: ChoiceText) -> None:
        if self._streaming:
            self._writer.add(choice)
        if choice.over:
            if choice.error is not None:  # cancel the others now: the writer may wait long for a slow client
                self.call.cancel(choice.error.code)
            self._changes.wake()
        elif self._direct is not None and self._opened and not self.call.echoes:
            if not self._write_due:
                self._write_due = True
                self._gateway.writes.add(self)
        elif self._streaming:
            self._changes.wake()

    # --------------------------------------------------------------------------------------------------------- writing

    def write_now(self) -> None:
        """Write what has come, if the task waits for changes and would only write. Otherwise leave it to the task."""
        self._write_due = False
        direct = self._direct
        if not self._changes.awaited or direct is None or not direct.ready:
            self._changes.wake()
            return
        try:
            if parts := self._writer.take():
                self._wrote_at = self._clock()
                direct.write(b"".join(parts))
        except Exception as error:  # the task raises it, and ends this answer alone
            self._aborted = error
            self._changes.wake()

    async def _write(self, send: Send) -> bool:
        """Write everything that has come since the last write, as one piece. Returns whether it was the last."""
        await self._encode_prompts()
        parts: list[Piece] = [*self._writer.take()]
        error = self.call.error
        over = error is None and self.call.over
        if over:
            parts += self._writer.last()
        if parts:
            if not self._opened:
                await self._open(send)
            await self._send_pieces(parts, send, more=not over)
        if error is not None:
            raise error
        return over

    async def _write_whole(self, send: Send) -> None:
        await self._encode_prompts()
        pieces = self._writer.whole()
        size = sum(map(len, pieces))
        headers = [*_JSON, (b"content-length", str(size).encode()), *self._own_headers()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._opened = True
        await self._send_pieces(pieces, send, more=False)

    async def _send_pieces(self, pieces: list[Piece], send: Send, *, more: bool) -> None:
        if sum(map(len, pieces)) > WRITE_BYTES:
            for body in in_parts(pieces):
                await self._send(body, send)
                await asyncio.sleep(0)
            pieces = []
            if more:
                return
        await self._send(b"".join(pieces), send, more=more)

    async def _encode_prompts(self) -> None:
        prompts: list[EchoedPrompt | ScoredPrompt] = [*self.call.echoes, *self.call.scored]
        for prompt in prompts:
            if prompt.complete:
                await asyncio.to_thread(prompt.encode)

    async def _open(self, send: Send) -> None:
        self._opened = True
        headers = [(name.encode(), value.encode()) for name, value in sse.HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers + self._own_headers()})

    async def _send(self, body: bytes, send: Send, *, more: bool = True) -> None:
        self._wrote_at = self._clock()
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _fail(self, error: MotetError, send: Send) -> None:
        if not self._opened:
            raise error
        forget_frames(error)
        await self._send(self._writer.failed(error), send, more=False)

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"x-motet-request", self.call.id.encode())]
        if self.call.length_source:
            headers.append((b"x-motet-length", self.call.length_source.encode()))
        if timing := self.call.timings.header():
            headers.append((b"server-timing", timing.encode()))
        if ignored := ignored_fields.header(self.call.body.unknown_fields()):
            headers.append((b"x-motet-ignored", ignored.encode()))
        limits = rate_limits.headers(self.call.started[0].record.accounts) if self.call.started else {}
        return headers + [(name.encode(), value.encode()) for name, value in limits.items()]


def _in_words(waiting_for: str) -> str:
    """What a stream's comment says, for an error message. Only the position in the queue is not in words there."""
    if (match := _QUEUE_COMMENT.fullmatch(waiting_for)) is None:
        return waiting_for
    return f"the request was number {match['position']} in the queue{match['reason']}"
