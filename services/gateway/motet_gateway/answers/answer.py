"""One request for an answer, from its arrival to its last byte, as an ASGI response.

A stream's status 200 waits for the first tokens, at most two seconds, so that most errors get their own status. After
it the client gets exactly one finish reason per choice, or one error, and then [DONE].
"""

import asyncio
import re
import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from motet.api.v1 import common_pb2, predictor_pb2, runner_pb2
from motet.domain import Digest
from motet.errors import (
    BaseModelReplaced,
    DeadlineExceeded,
    Internal,
    ModelNotFound,
    MotetError,
    NoRunner,
    Overloaded,
)
from motet.prefix_hints import prefix_salt, prompt_hints
from motet.promises import LENGTH_OF_MAX_TOKENS
from motet.runner_info import RequestClass
from motet.time_split import PartSeconds
from motet_gateway import direct_writes, rate_limits, sse
from motet_gateway.answers.choice import ChoiceText
from motet_gateway.answers.echo import EchoedPrompt, echoed_prompts
from motet_gateway.answers.logprobs import Columns, CompletionLogprobs, LogprobsWriter
from motet_gateway.answers.prompts import UNKNOWN_CONTEXT, max_answer_tokens, tokenise
from motet_gateway.answers.response_formats import ChatFormat, CompletionFormat, Format, Piece, usage
from motet_gateway.answers.score_limits import check_scores, limited_by_scores
from motet_gateway.answers.timings import RequestTimings
from motet_gateway.catalog import Catalog, NotReadyReason, Target, Weights
from motet_gateway.choice_record import ChoiceRecord
from motet_gateway.direct_writes import DirectWriter
from motet_gateway.errors import ClientGone
from motet_gateway.estimator import longest
from motet_gateway.generation import EndReason
from motet_gateway.histories import ChoiceHistory, History
from motet_gateway.identity.caller import Caller
from motet_gateway.live_choice import GenerationRequest
from motet_gateway.middleware import request_id_of
from motet_gateway.noted import Noted
from motet_gateway.parameters import (
    Body,
    ChatBody,
    CompletionBody,
    StreamOptions,
    Tokens,
    request_class,
    samplings,
    with_prompt_logprobs,
)
from motet_gateway.tokens.detokenizer import detokenizer
from motet_gateway.tokens.stop_strings import StopStrings
from motet_gateway.tokens.text_model import ModelTokenizer

if TYPE_CHECKING:
    from motet_gateway.gateway import Gateway

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

_SEED_MASK = (1 << 64) - 1
_QUEUE_COMMENT = re.compile(r"queued position=(?P<position>\d+)(?P<reason>.*)", re.DOTALL)
MIN_TICK_SECONDS = 0.02
MAX_RESOLVE_RETRIES = 3
"""An adapter's revision or the base model may be replaced after the name was resolved and before the first token. If
that happens more often for one request, something else is wrong."""
_FINISH = {
    EndReason.STOP: common_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    None: common_pb2.FINISH_REASON_CANCELLED,
}
"""In an outcome. Choices without an end of their own were cancelled; those that failed are not reported."""
_REPLACED = ModelNotFound, BaseModelReplaced
"""With these the scheduler refuses a request whose name means other weights now."""
_JSON = [(b"content-type", b"application/json")]
SCORE_BYTES = 40
"""About what a log probability of a prompt takes until it is written."""
WRITE_BYTES = 256 * 1024
"""A long answer is written in pieces of this size, so that other streams go on meanwhile."""


class AnswerResponse(Response):
    def __init__(
        self,
        gateway: "Gateway",
        caller: Caller,
        body: Body,
        *,
        take: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`take` counts the bytes that the answer holds, and raises Overloaded if all requests hold too many."""
        self.background = None
        self._gateway = gateway
        self._settings = gateway.settings
        self._caller = caller
        self._body = body
        self._clock = gateway.around.clock
        self._take = take
        self._streaming = bool(body.stream)
        self._options = (body.stream_options if self._streaming else None) or StreamOptions()
        self._timings = RequestTimings(gateway.around.clock)
        self._history: History | None = None
        """From its start."""
        self._id = secrets.token_hex(12)
        self.choices: list[ChoiceText] = []
        self._requests: list[str] = []
        self._generation_requests: list[GenerationRequest] = []
        self._records: list[ChoiceRecord] = []
        self._prompts: list[Tokens] = []
        self._echoes: list[EchoedPrompt] = []
        """One for each prompt, if they come back."""
        self._score_bytes = 0
        """What is counted for their log probabilities: once, also when a replaced model makes them come again."""
        self._estimate = common_pb2.Estimate()
        self._class_name = ""
        """Of all choices; empty until it is known. It stays when a replaced model clears the choices."""
        self._target: Target | None = None
        self._refused: Weights | None = None
        """What the scheduler refused, until the name means something else, or another catalog has these weights again.
        After that the scheduler may serve them again."""
        self._refused_under: Catalog | None = None
        """The catalog of then, if the base model was replaced."""
        self._refusal_noted = False
        """Whether one of the choices was refused. What the others were refused later says nothing more."""
        self._forget_listener: Callable[[], None] = lambda: None
        self._resolve_retries = 0
        self._not_ready: NotReadyReason | None = None
        # What has changed since the writer last checked.
        self._waiter: asyncio.Future[None] | None = None
        self._dirty = False
        self._changed: dict[int, ChoiceText] = {}
        self._client_gone = False
        self._tokenising = False
        self._tick = False
        self._timer: asyncio.TimerHandle | None = None
        self._aborted: Exception | None = None
        # What was sent to the client.
        self._opened = False
        self._introduced: set[int] = set()
        self._wrote_at = 0.0
        self._form: Format | None = None
        self._direct: DirectWriter | None = None
        self._write_due = False
        """Whether `write_now` is called at the end of this turn of the event loop."""

    # ------------------------------------------------------------------------------------------------------- the whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._direct = direct_writes.offered(scope) if self._streaming else None
        listener = asyncio.create_task(self._listen(receive), name=f"listen {self._id}")
        self._arm(self._settings.hold_seconds)
        self._history = self._gateway.histories.begin(
            self._id, request_id_of(scope), self._caller, self._body.model, self._timings
        )
        code, why = "499", "the client went away"  # also if the server cancels this task
        try:
            with self._gateway.answering(self):
                await self._answer(send)
            code = "200"
        except ClientGone:
            self._gateway.metrics.cancelled.inc()
        except MotetError as error:
            code, why = str(error.mapping.http), error.code
            if not any(choice.error is error for choice in self.choices):  # else it says so itself
                self._note(Noted.FAILED, error.code, error.message)
            await self._fail(error, send)
        except Exception:
            code, why = "500", Internal.mapping.code
            if not self._opened:
                raise
            log.exception("answer_failed")
            await self._fail(Internal("The gateway failed while it wrote this answer."), send)
        finally:
            listener.cancel()
            if self._timer is not None:
                self._timer.cancel()
            self._cancel_all(why)
            self._forget_listener()
            self._end_history(code)
            self._account(code)

    @property
    def caller(self) -> Caller:
        return self._caller

    def abort(self, error: MotetError) -> None:
        """End the answer with an error that the client gets."""
        self._aborted = error
        self._cancel_all(error.code)  # cancel now: the writer may wait long for a slow client
        self._wake()

    async def _listen(self, receive: Receive) -> None:
        # `request.is_disconnected()` does not work reliably behind middleware.
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client_gone = True
        self._cancel_all("the client went away")  # cancel now: the writer may wait long for a slow client
        self._wake()

    async def _answer(self, send: Send) -> None:
        form = await self._begin(send)
        complete = False
        while not complete:  # not `_over()`: choices may end while a write waits for a slow client
            await self._wait_for_change(send)
            if self._weights_replaced():
                form = await self._begin(send)
            elif self._streaming:
                complete = await self._write(form, send)
            elif (error := self._error()) is not None:
                raise error
            else:
                complete = self._over()
        if not self._streaming:
            await self._write_whole(form, send)

    async def _begin(self, send: Send) -> Format:
        target, text = await self._resolved(send)
        self._target = target
        context = target.group.max_model_length or text.context_length or UNKNOWN_CONTEXT
        gateway = self._gateway
        tokenising = tokenise(self._body, text, gateway.renderer, gateway.encoder, context=context)
        self._prompts = await self._finished(tokenising, send)
        self._form = form = self._format(target)
        await self._start(target, form, text, context, send)
        return form

    # --------------------------------------------------------------------------------------------------------- waiting

    async def _wait_for_change(self, send: Send) -> None:
        """Wait until something has changed. Meanwhile send keep-alive comments and check the deadline."""
        while not self._dirty:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
            if self._tick:
                await self._on_tick(send)
        self._dirty = False
        if self._client_gone:
            raise ClientGone
        if self._aborted is not None:
            raise self._aborted

    async def _finished(self, work: Coroutine[Any, Any, Result], send: Send) -> Result:
        """The result of work on the prompt. It may wait behind others' work, and leaves when this answer ends."""
        task = asyncio.create_task(work, name=f"prompt {self._id}")
        try:
            self._tokenising = True
            task.add_done_callback(lambda _: self._wake())
            while not task.done():
                await self._wait_for_change(send)
            return task.result()
        finally:
            self._tokenising = False
            task.cancel()

    def _wake(self) -> None:
        self._dirty = True
        if (waiter := self._waiter) is not None and not waiter.done():
            waiter.set_result(None)

    def _arm(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._tick = True
        if (waiter := self._waiter) is not None and not waiter.done():
            waiter.set_result(None)
        else:
            self._arm(MIN_TICK_SECONDS)  # busy with a short task, such as a thread or the predictor: try again soon

    async def _on_tick(self, send: Send) -> None:
        self._tick = False
        now = self._clock()
        left = self._settings.deadline_seconds - (now - self._timings.silent_since)
        if left <= 0:
            what = _in_words(self._waits_for()) or "no tokens came"
            if self._not_ready is not None and not self._not_ready.runners:
                raise NoRunner(
                    f"No runner was available within {self._settings.deadline_seconds:g} s: {what}. Try again."
                )
            raise DeadlineExceeded(
                f"The request made no progress for {self._settings.deadline_seconds:g} s: {what}. "
                "The gateway ended it. Send it again."
            )
        if self._streaming and not self._opened:
            await self._open(send)
        pause = self._settings.keep_alive_seconds
        if self._streaming:
            pause -= now - self._wrote_at
            if pause <= 0:
                await self._comment(send)
                pause = self._settings.keep_alive_seconds
        self._arm(max(min(pause, left), MIN_TICK_SECONDS))

    def _waits_for(self) -> str:
        if (not_ready := self._not_ready) is not None:
            if not_ready.runners:
                return not_ready.why
            return f"queued position={self._gateway.held.position(self._id)} ({not_ready.why})"
        if self._tokenising:
            return "its prompt waits behind others for its tokens"
        return next((c.waiting_for for c in self.choices if c.waiting_for and not c.over), "")

    async def _resolved(self, send: Send) -> tuple[Target, ModelTokenizer]:
        """The model and its tokenizer. Waits if no runner has sent the tokenizer yet."""
        gateway = self._gateway
        if (ready := self._ready()) is not None:
            return ready
        stop_listening = gateway.listen(self._wake)
        try:
            while (ready := self._ready()) is None:
                await self._wait_for_change(send)
            return ready
        finally:
            stop_listening()
            gateway.held.leave(self._id)

    def _ready(self) -> tuple[Target, ModelTokenizer] | None:
        found = self._gateway.find(self._body.model, self._caller)
        if not isinstance(found, NotReadyReason) and found[0].weights == self._refused:
            found = NotReadyReason(f"{found[0].adapter_name or self._body.model} is changing to another revision")
        if not isinstance(found, NotReadyReason):
            self._not_ready = None
            self._timings.mark_ready()
            return found
        if self._not_ready is None or self._not_ready.why != found.why:
            self._note(Noted.HELD, found.why)
        self._not_ready = found
        self._timings.mark_held()
        if found.group:
            self._gateway.hold(self._id, found.group)
        else:
            self._gateway.held.leave(self._id)
        return None

    def _note_refusal(self, error: MotetError) -> None:
        """Call it when the refusal arrives: catalogs before and after it may be in the same message, and this answer's
        task runs only after all of them."""
        if self._refusal_noted or self._target is None:
            return
        self._refusal_noted = True
        self._refused = self._target.weights
        # The scheduler has published the new base model before it refuses. If a later catalog has the former one, that
        # one is back, although the catalog between may never have come.
        self._refused_under = self._gateway.catalog.current if isinstance(error, BaseModelReplaced) else None
        self._forget_listener = self._gateway.listen(self._check_refusal)
        self._check_refusal()

    def _check_refusal(self) -> None:
        later = self._refused_under is not None and self._gateway.catalog.current is not self._refused_under
        if later or self._refused != self._gateway.weights_of(self._body.model, self._caller):
            self._refused = None

    def _weights_replaced(self) -> bool:
        """Whether to resolve the name and tokenise again, because the adapter's revision or the base model was replaced
        before the first token. If so, cancels what was started for the old one."""
        if not isinstance(self._error(), _REPLACED) or any(choice.tokens for choice in self.choices):
            return False
        if self._target is None or self._resolve_retries == MAX_RESOLVE_RETRIES:
            return False
        self._refusal_noted = False
        self._resolve_retries += 1
        self._cancel_all("its model was replaced")
        self._note(Noted.REPLACED)
        self._timings.take_back(self._records[0].split)
        for started in (self.choices, self._generation_requests, self._records, self._requests, self._changed):
            started.clear()
        return True

    # -------------------------------------------------------------------------------------------------------- starting

    async def _start(self, target: Target, form: Format, text: ModelTokenizer, context: int, send: Send) -> None:
        body, gateway = self._body, self._gateway
        limits = limited_by_scores(body, [max_answer_tokens(body, prompt, context) for prompt in self._prompts])
        check_scores(body, self._prompts, limits)
        if isinstance(body, CompletionBody) and body.echo:
            if body.prompt_logprobs_wanted is not None:
                size = SCORE_BYTES * sum(map(len, self._prompts)) * (1 + body.prompt_logprobs_wanted)
                self._take(size - self._score_bytes)
                self._score_bytes = size
            writer = partial(CompletionLogprobs, text.token_bytes, self._top())
            echo = partial(echoed_prompts, body, self._prompts, text, writer=writer)
            self._echoes = await self._finished(gateway.encoder.run(sum(map(len, self._prompts)), echo), send)
        wanted = samplings(body, text, limits)
        wanted_class = request_class(body, target.max_class, target.max_class_of(self._caller.tenant))
        self._class_name = RequestClass.from_proto(wanted_class).name.lower()
        stops = body.stops()
        gateway.admission.check_choices(len(self._prompts) * body.choices)
        features: list[list[int]] = [[] for _ in limits]
        if body.options.get("ignore_eos"):  # nothing that was learned from others says how long these become
            estimates = [longest(max(1, limit)) for limit in limits]
        else:
            features = await self._features(limits, _numbers(body, wanted[0].temperature, len(stops)))
            estimates = await self._estimates(target, limits, features)
        self._estimate = estimates[0]
        salt = prefix_salt(Digest(target.base_digest), Digest(target.adapter_digest), self._caller.tenant)
        hints = [prompt_hints(salt, prompt) for prompt in self._prompts]
        gateway.metrics.estimates.labels(self._estimate.source.partition(":")[0]).inc()
        self._note(Noted.PREPARED, sum(map(len, self._prompts)))
        self._timings.mark_enqueued()
        seed = secrets.randbits(64) if body.seed is None else body.seed & _SEED_MASK
        # New ids, since late messages about the old ones may still arrive.
        name = f"{self._id}-{self._resolve_retries}" if self._resolve_retries else self._id
        hidden = frozenset(wanted[0].stop_token_ids) | (frozenset() if body.options.get("ignore_eos") else text.eos_ids)
        parent = ""
        for number in range(len(self._prompts) * body.choices):
            at, own = divmod(number, body.choices)
            request = f"{name}.{number}" if number else name
            parent = parent if own else ""
            generation_request = GenerationRequest(
                request=request,
                tenant=self._caller.tenant,
                group=target.group.group,
                adapter=target.adapter_name,
                adapter_digest=target.adapter_digest,
                base_digest=target.base_digest,
                request_class=wanted_class,
                prompt_ids=self._prompts[at],
                choice=own,
                sampling=wanted[at] if own else with_prompt_logprobs(wanted[at], body),
                seed=seed,
                estimate=estimates[at],
                deadline_seconds=self._settings.deadline_seconds,
                parent=parent,
                choices=body.choices,
                prefix_hints=hints[at],
                features=features[at],
                key=self._caller.account,
                scores_only=body.scores_only,
            )
            parent = parent or request
            choice = ChoiceText(
                number,
                detokenizer(
                    text.token_bytes, self._prompts[at], skip_special_tokens=body.skip_special_tokens is not False
                ),
                StopStrings(stops, include=bool(body.include_stop_str_in_output)) if stops else None,
                hidden_ids=hidden,
                min_tokens=wanted[at].min_tokens,
                logprobs=self._logprobs_writer(form, text, at),
                on_placed=self._timings.mark_placed,
                changed=self._on_change,
                stop_here=_stopper(gateway, request),
                score=self._echoes[at].score if self._echoes else _nobody_scores,
            )
            self.choices.append(choice)
            self._generation_requests.append(generation_request)
            self._requests.append(request)
            record = ChoiceRecord(self._timings.split.copy())
            self._records.append(record)
            if self._history is not None:
                self._history.choices.append(
                    ChoiceHistory(request, len(self._prompts[at]), limits[at], estimates[at], record)
                )
            gateway.dispatcher.start(generation_request, choice, record, asked_at=self._timings.enqueued)

    async def _features(self, limits: Sequence[int], numbers: Sequence[int]) -> list[list[int]]:
        features = []
        for prompt, limit in zip(self._prompts, limits, strict=True):
            features.append(self._gateway.features.of(prompt, (*numbers, limit.bit_length())).tolist())
            await asyncio.sleep(0)  # those of 128 prompts take 10 ms together
        return features

    async def _estimates(
        self, target: Target, limits: Sequence[int], features: Sequence[Sequence[int]]
    ) -> list[common_pb2.Estimate]:
        return await self._gateway.estimator.estimate(
            [
                predictor_pb2.Prompt(
                    request=self._id,
                    tenant=self._caller.tenant,
                    adapter=target.adapter_name,
                    prompt_tokens=len(prompt),
                    max_tokens=max(1, limit),
                    features=own,
                    feature_space=self._gateway.features.space,
                )
                for prompt, limit, own in zip(self._prompts, limits, features, strict=True)
            ],
            min_tokens=self._body.options.get("min_tokens", 0),
        )

    def _logprobs_writer(self, form: Format, text: ModelTokenizer, prompt: int) -> LogprobsWriter | None:
        if self._body.top_logprobs_wanted is None:
            return None
        if isinstance(form, CompletionFormat):
            characters = self._echoes[prompt].characters if self._echoes else None
            return form.logprobs(text.token_bytes, self._top(), hold=self._hold, characters=characters)
        return form.logprobs(text.token_bytes, self._top(), hold=self._hold)

    def _hold(self, size: int) -> None:
        """Count bytes that wait until they can be written."""
        try:
            self._take(size)
        except Overloaded as error:
            self.abort(error)

    def _cancel_all(self, why: str) -> None:
        for request in self._requests:
            self._gateway.dispatcher.cancel(request, why)

    def _on_change(self, choice: ChoiceText) -> None:
        if not choice.over:
            self._timings.mark_tokens()
        self._changed[choice.index] = choice
        if choice.over:
            if isinstance(choice.error, _REPLACED):
                self._note_refusal(choice.error)
            self._wake()
        elif self._direct is not None and self._opened and not self._echoes:
            if not self._write_due:
                self._write_due = True
                self._gateway.writes.add(self)
        elif self._streaming:
            self._wake()

    def _format(self, target: Target) -> Format:
        kind = ChatFormat if isinstance(self._body, ChatBody) else CompletionFormat
        in_chunks = self._options.include_usage or self._options.continuous_usage_stats
        return kind(self._id, self._body.model, target.fingerprint, usage_in_chunks=in_chunks)

    # --------------------------------------------------------------------------------------------------------- writing

    def _error(self) -> MotetError | None:
        return next((choice.error for choice in self.choices if choice.error is not None), None)

    def _over(self) -> bool:
        return all(choice.over for choice in self.choices)

    def write_now(self) -> None:
        """Write what has come, if the task waits for changes and would only write. Otherwise leave it to the task."""
        self._write_due = False
        waiter, direct = self._waiter, self._direct
        if waiter is None or waiter.done() or self._dirty or direct is None or not direct.ready:
            self._wake()
            return
        assert self._form is not None
        try:
            parts: list[bytes] = []
            usage_so_far = self._running_usage()
            for choice in self._changed.values():
                self._write_choice(choice, self._form, parts, usage_so_far)
            self._changed.clear()
            if parts:
                self._wrote_at = self._clock()
                direct.write(b"".join(parts))
        except Exception as error:  # the task raises it, and ends this answer alone
            self._aborted = error
            self._wake()

    async def _write(self, form: Format, send: Send) -> bool:
        """Write everything that has come since the last write, as one piece. Returns whether it was the last."""
        await self._encode_echoes()
        parts: list[bytes] = []
        ready = [choice for choice in self._changed.values() if (echo := self._echo_of(choice)) is None or echo.ready]
        usage_so_far = self._running_usage()
        for choice in ready:
            self._write_choice(choice, form, parts, usage_so_far)
            del self._changed[choice.index]
        error = self._error()
        over = error is None and self._over()
        if over:
            if self._options.include_usage:
                parts.append(form.usage_event(self._usage()))
            parts.append(sse.DONE)
        if parts:
            if not self._opened:
                await self._open(send)
            await self._send(b"".join(parts), send, more=not over)
        if error is not None:
            raise error
        return over

    def _write_choice(
        self, choice: ChoiceText, form: Format, parts: list[bytes], usage_so_far: dict[str, Any] | None
    ) -> None:
        piece = choice.take()
        logprobs = choice.logprobs.take() if choice.logprobs else None
        if (piece or logprobs or choice.finish is not None) and choice.index not in self._introduced:
            self._introduced.add(choice.index)
            parts.append(form.opening(choice.index))
            if (echo := self._echo_of(choice)) is not None:
                shown = _as_json(choice, echo.logprobs) if echo.logprobs else None
                parts.append(form.full_event(choice.index, echo.text, shown, None, usage_so_far))
        if logprobs or (piece and self._options.continuous_usage_stats):
            shown = _as_json(choice, logprobs) if logprobs else None
            parts.append(form.full_event(choice.index, piece, shown, None, usage_so_far))
        elif piece:
            parts.append(form.text_event(choice.index, piece))
        if choice.finish is not None:
            parts.append(form.full_event(choice.index, None, None, choice.finish, usage_so_far))

    async def _write_whole(self, form: Format, send: Send) -> None:
        await self._encode_echoes()
        pieces = form.whole([self._whole_choice(choice, form) for choice in self.choices], self._usage())
        size = sum(map(len, pieces))
        headers = [*_JSON, (b"content-length", str(size).encode()), *self._own_headers()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._opened = True
        if size > WRITE_BYTES:
            for body in _in_parts(pieces):
                await self._send(body, send)
                await asyncio.sleep(0)
            pieces = []
        await self._send(b"".join(pieces), send, more=False)

    def _whole_choice(self, choice: ChoiceText, form: Format) -> list[Piece]:
        echo, text = self._echo_of(choice), choice.take()
        text = text if echo is None else echo.text + text
        if choice.logprobs is None:
            return form.choice_whole(choice, text)
        prompt = {} if echo is None else echo.logprobs
        return form.choice_whole(choice, text, choice.logprobs.as_json(prompt, choice.logprobs.take(still_held=True)))

    async def _encode_echoes(self) -> None:
        for echo in self._echoes:
            if echo.complete:
                await asyncio.to_thread(echo.encode)

    def _echo_of(self, choice: ChoiceText) -> EchoedPrompt | None:
        return self._echoes[choice.index // self._body.choices] if self._echoes else None

    async def _open(self, send: Send) -> None:
        self._opened = True
        headers = [(name.encode(), value.encode()) for name, value in sse.HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers + self._own_headers()})

    async def _comment(self, send: Send) -> None:
        await self._send(sse.comment(self._waits_for() or "working"), send)

    async def _send(self, body: bytes, send: Send, *, more: bool = True) -> None:
        self._wrote_at = self._clock()
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _fail(self, error: MotetError, send: Send) -> None:
        if not self._opened:
            raise error
        await self._send(sse.error_event(error) + sse.DONE, send, more=False)

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"x-motet-request", self._id.encode())]
        if self._estimate.source:
            headers.append((b"x-motet-length", self._estimate.source.encode()))
        if timing := self._timings.header():
            headers.append((b"server-timing", timing.encode()))
        limits = rate_limits.headers(self._records[0].accounts) if self._records else {}
        return headers + [(name.encode(), value.encode()) for name, value in limits.items()]

    # -------------------------------------------------------------------------------------------------------- counting

    def _note(self, kind: Noted, *arguments: object) -> None:
        if self._history is not None:
            self._history.timeline.note(self._clock(), kind, *arguments)

    def _end_history(self, code: str) -> None:
        history = self._history
        if history is None:
            return
        # Of an attempt before, whose model was replaced, nobody got a token.
        for choice, of_choice in zip(self.choices, history.choices[-len(self.choices) :], strict=False):
            of_choice.tokens = choice.tokens
        self._gateway.histories.end(history, code)

    def _top(self) -> int:
        return self._body.top_logprobs_wanted or 0

    def _usage(self) -> dict[str, Any]:
        return usage(sum(len(prompt) for prompt in self._prompts), sum(choice.tokens for choice in self.choices))

    def _running_usage(self) -> dict[str, Any] | None:
        return self._usage() if self._options.continuous_usage_stats else None

    def _account(self, code: str) -> None:
        metrics, timings, target = self._gateway.metrics, self._timings, self._target
        adapter = target.adapter_name if target is not None else ""
        who = metrics.who(self._caller.tenant, adapter)
        duration = self._clock() - timings.arrived
        tokens = sum(choice.tokens for choice in self.choices)
        metrics.requests.labels(*who, code).inc()
        metrics.request_duration.labels(*who).observe(duration)
        if timings.placed:
            metrics.queue_duration.labels(self._class_name).observe(timings.placed - timings.enqueued)
        scored = self._body.scores_only and bool(self.choices) and self._over()
        if target is not None and (tokens or scored):
            metrics.tokens.labels(*who, "input").inc(sum(len(prompt) for prompt in self._prompts))
        if target is not None and tokens:
            base = target.group.served_name
            metrics.tokens.labels(*who, "output").inc(tokens)
            first = timings.first_token - timings.arrived
            metrics.time_to_first_token.labels(*who).observe(first)
            metrics.vllm_time_to_first_token.labels(base).observe(first)
            metrics.vllm_request_duration.labels(base).observe(duration)
            if (most := max(choice.tokens for choice in self.choices)) > 1:
                between = (timings.last_token - timings.first_token) / (most - 1)
                metrics.time_per_output_token.labels(*who).observe(between)
                metrics.vllm_time_per_output_token.labels(base).observe(between)
            for choice in self.choices:
                if choice.finish is not None:
                    metrics.vllm_success.labels(base, choice.finish).inc()
        self._count_choices()
        if not self._body.options.get("ignore_eos"):  # a length forced by ignore_eos says nothing about the model
            self._report_lengths()
        log.debug(
            "request_answered",
            code=code,
            tenant=self._caller.tenant,
            adapter=adapter,
            request_class=self._class_name,
            output_tokens=tokens,
            id=self._id,
        )

    def _count_choices(self) -> None:
        now = self._clock()
        for choice, order, record in zip(self.choices, self._generation_requests, self._records, strict=True):
            by_itself = choice.error is None and choice.finish is EndReason.STOP
            estimated = order.estimate.source != LENGTH_OF_MAX_TOKENS  # so it is with ignore_eos, too
            self._gateway.metrics.answers.count(
                order.tenant,
                record,
                now=now,
                prompt_tokens=len(order.prompt_ids),
                answer_tokens=choice.tokens,
                estimate=order.estimate if by_itself and estimated else None,
            )

    def _report_lengths(self) -> None:
        """Report the lengths that the predictor learns from."""
        for choice, generation_request, record in zip(
            self.choices, self._generation_requests, self._records, strict=True
        ):
            if choice.error is None and choice.tokens:
                self._gateway.estimator.observe(
                    predictor_pb2.Outcome(
                        request=generation_request.request,
                        tenant=generation_request.tenant,
                        adapter=generation_request.adapter,
                        prompt_tokens=len(generation_request.prompt_ids),
                        output_tokens=choice.tokens,
                        censored=choice.finish is not EndReason.STOP,
                        estimate=generation_request.estimate,
                        features=generation_request.features,
                        feature_space=self._gateway.features.space,
                        split=_split_message(record.split.until(self._clock())),
                        promised_tokens=record.promised_tokens,
                        parks=record.parks,
                        finish=_FINISH[choice.finish],
                    )
                )


def _numbers(body: Body, temperature: float, stops: int) -> tuple[int, ...]:
    """What else than its prompt says how long a request's answer will be: how many turns, and how it is sampled."""
    turns = len(body.messages) if isinstance(body, ChatBody) else 0
    return min(turns, 31), round(4 * min(max(temperature, 0.0), 2.0)), min(stops, 4)


def _split_message(split: PartSeconds) -> common_pb2.TimeSplit:
    return common_pb2.TimeSplit(
        queue_seconds=split.queue,
        generation_seconds=split.generation,
        penalty_seconds=split.penalty,
        overhead_seconds=split.overhead,
    )


def _as_json(choice: ChoiceText, logprobs: Columns) -> orjson.Fragment:
    assert choice.logprobs is not None
    return orjson.Fragment(b"".join(choice.logprobs.as_json(logprobs)))


def _in_parts(pieces: Sequence[Piece]) -> Iterator[bytes]:
    for piece in pieces:
        for start in range(0, len(piece), WRITE_BYTES):
            yield bytes(memoryview(piece)[start : start + WRITE_BYTES])


def _in_words(waiting_for: str) -> str:
    """What a stream's comment says, for an error message. Only the position in the queue is not in words there."""
    if (match := _QUEUE_COMMENT.fullmatch(waiting_for)) is None:
        return waiting_for
    return f"the request was number {match['position']} in the queue{match['reason']}"


def _nobody_scores(_logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None:
    """Only prompts that come back are scored."""


def _stopper(gateway: "Gateway", request: str) -> Callable[[], None]:
    return lambda: gateway.dispatcher.stop(request)
