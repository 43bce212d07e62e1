"""Runner.Generate: takes requests from gateways and sends them tokens, one message per gateway and engine step, or per
interval of steps.

The service decides which requests this runner accepts (terms, epochs, adapters, drain), and sends the engine's outputs
to the gateways. The engine decides what fits.
"""

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from motet.api.v1 import common_pb2, runner_pb2, scheduler_pb2
from motet.clock import Clock
from motet.domain import BASE, Digest, RequestId
from motet.errors import Declined, InvalidRequest, MotetError
from motet.grammars.grammar import MAX_GRAMMAR_BYTES, Grammar
from motet.kept_prompts import KeptPrompts
from motet.prefix_hints import prefix_salt
from motet.promises import LENGTH_OF_MAX_TOKENS
from motet.rpc import Session, Sessions, known_error
from motet.runner_info import RequestClass
from motet.shares import weight_said
from motet.trace_context import in_log
from motet_runner.accepted_requests import AcceptedRequest, AcceptedRequests
from motet_runner.adapters.registry import AdapterRegistry
from motet_runner.engine_messages import Add, Cancel, Command, EngineOutputs
from motet_runner.interface import NewSequence, Sampling
from motet_runner.metrics import Metrics
from motet_runner.settings import Settings
from motet_runner.step_outbox import StepOutbox

log = structlog.get_logger(__name__)

_FIELDS = [field.name for kind in (runner_pb2.Submit, runner_pb2.Sampling) for field in kind.DESCRIPTOR.fields]


@dataclass(frozen=True, slots=True)
class GatewayStream:
    """One connection of a gateway. A gateway that reconnects has another stream. A request belongs to one stream."""

    number: int
    gateway: str
    prompts: KeptPrompts = field(default_factory=KeptPrompts, compare=False)


GatewaySession = Session[GatewayStream, bytes | runner_pb2.GenerateDown]


class GenerateService:
    def __init__(
        self,
        *,
        identity: common_pb2.RunnerIdentity,
        base_digest: Digest,
        accepted: AcceptedRequests,
        adapters: AdapterRegistry,
        post: Callable[[Command], None],
        metrics: Metrics,
        model: str,
        settings: Settings,
        time_scale: float,
        clock: Clock,
        declined: Callable[[scheduler_pb2.RunnerDeclined], None],
    ) -> None:
        self._identity = identity
        self._base_digest = base_digest
        self._accepted = accepted
        self._adapters = adapters
        self._post = post
        self._clock = clock
        self._metrics = metrics
        self._model = model
        self._grace = settings.gateway_grace_seconds * time_scale
        self._adapter_wait = settings.adapter_wait_seconds * time_scale
        self._declined = declined
        self.streams: Sessions[GatewayStream, runner_pb2.GenerateUp, bytes | runner_pb2.GenerateDown] = Sessions(
            hello=lambda up: GatewayStream(next(self._numbers), up.hello.gateway) if up.hello.gateway else None,
            key=lambda stream: stream.number,
            received=self._on_message,
            failed=self._on_failure,
            closed=self._on_gateway_disconnected,
            outbox=lambda: StepOutbox(
                settings.outbox_kib << 10,
                metrics.merged_steps.inc,
                clock=clock,
                interval_seconds=settings.stream_interval_seconds,
            ),
        )
        self._numbers = itertools.count(1)
        self._waiting: dict[tuple[str, int], asyncio.Task[None]] = {}
        """Requests that wait for their adapter."""
        self.asked_to_drain = False
        """True if the scheduler's last message about draining asks this runner to drain."""
        self.ending = False
        """True if the process is about to end. No scheduler's message changes this."""

    @property
    def refusal_reason(self) -> str:
        """Why this runner accepts no new requests; empty while it does."""
        return "this runner is draining and takes no new requests" if self.ending or self.asked_to_drain else ""

    async def wait_flushed(self, seconds: float, *, nothing_left: bool = False) -> None:
        """Wait until gRPC has taken all messages to gateways and, with `nothing_left`, until no request is left."""

        def waits() -> bool:
            return (nothing_left and len(self._accepted) > 0) or not all(one.flushed for one in self.streams)

        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while waits():  # noqa: ASYNC110 - other tasks change the condition
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)  # time for gRPC to write what it has taken

    # -------------------------------------------------------------------------------------------------------- streams

    def _on_message(self, session: GatewaySession, up: runner_pb2.GenerateUp) -> None:
        match up.WhichOneof("message"):
            case "hello":
                self._metrics.gateway_streams.set(len(self.streams))
                welcome = runner_pb2.GenerateWelcome(runner=self._identity, fields=_FIELDS)
                session.send(runner_pb2.GenerateDown(welcome=welcome))
            case "submit":
                self._submit(session.peer, up.submit)
            case "cancel":
                self._accepted.check_owner(up.cancel.request, session.peer.gateway)
                self.cancel(up.cancel.request, up.cancel.epoch)
            case _:
                pass  # a message of a later version

    def _on_failure(self, session: GatewaySession, up: runner_pb2.GenerateUp, error: MotetError) -> None:
        if up.HasField("submit"):
            self._refuse(session.peer.number, up.submit.request, up.submit.epoch, up.submit.term, error)

    def _on_gateway_disconnected(self, session: GatewaySession) -> None:
        """A gateway's stream has ended. In the grace period it may submit its requests again on another stream."""
        stream = session.peer
        self._metrics.gateway_streams.set(len(self.streams))

        def drop() -> None:
            orphans = [request for request in self._accepted if request.stream == stream.number]
            for orphan in orphans:
                self.cancel(orphan.request, orphan.epoch)
            if orphans:
                log.info("gateway_requests_dropped", gateway=stream.gateway, requests=len(orphans))

        asyncio.get_running_loop().call_later(self._grace, drop)

    # -------------------------------------------------------------------------------------------------------- requests

    def _submit(self, stream: GatewayStream, submit: runner_pb2.Submit) -> None:
        try:
            prompt = stream.prompts.note(submit.prompt_number, tuple(submit.prompt_ids))
            if self.refusal_reason:
                raise Declined(self.refusal_reason)
            self._accepted.check_owner(submit.request, stream.gateway)
            self._accepted.check(submit)
            sequence = sequence_of(submit, prompt, base_digest=self._base_digest)
        except MotetError as error:  # also an impossible term: the gateway's other requests may have a possible term
            self._refuse(stream.number, submit.request, submit.epoch, submit.term, error)
            return
        old = self._accepted.get(submit.request)
        if old is not None:
            # A gateway that submits the request on another stream has lost the first stream, even if this runner does
            # not know that yet.
            if (old.epoch, old.stream) == (submit.epoch, stream.number):
                log.warning("duplicate_submit", **_named(old), epoch=submit.epoch)
                return
            self.cancel(old.request, old.epoch)
        placement = AcceptedRequest(
            request=sequence.request,
            epoch=submit.epoch,
            promise=submit.promise,
            prompt_tokens=len(sequence.prompt),
            delivered_tokens=len(sequence.delivered),
            tenant=submit.tenant,
            adapter=sequence.adapter,
            request_class=submit.request_class,
            gateway=stream.gateway,
            stream=stream.number,
            max_tokens=sequence.sampling.max_tokens,
            term=submit.term,
            received=self._clock(),
            traceparent=submit.traceparent,
        )
        self._accepted.add(placement)
        try:
            if sequence.adapter == BASE or self._adapters.for_request(sequence.adapter) is not None:
                self._start(placement, sequence)
                return
        except Exception:
            self._close(placement.request, placement.epoch, placement.stream)
            raise
        key = (submit.request, submit.epoch)
        task = asyncio.create_task(
            self._start_with_adapter(placement, sequence, submit.adapter), name=f"adapter for {key[0]}"
        )
        self._waiting[key] = task
        task.add_done_callback(lambda done: self._waiting.pop(key) if self._waiting.get(key) is done else None)

    def _start(self, placement: AcceptedRequest, sequence: NewSequence) -> None:
        self._post(Add(sequence, placement.stream, placement.received))
        placement.in_engine = True
        self._metrics.vllm_prompt_tokens.labels(self._model).inc(placement.prompt_tokens)

    async def _start_with_adapter(self, placement: AcceptedRequest, sequence: NewSequence, adapter: str) -> None:
        """Wait for the adapter, then start. The scheduler ordered the adapter before it placed the request, but the
        fetch of the files may still run."""
        step = runner_pb2.Step()
        state = common_pb2.SEQUENCE_STATE_LOADING
        step.progress.add(request=placement.request, epoch=placement.epoch, state=state)
        self.streams.send(placement.stream, runner_pb2.GenerateDown(step=step))
        failure: MotetError
        try:
            async with asyncio.timeout(self._adapter_wait):
                await self._adapters.wait_for(placement.adapter, adapter)
            if self._adapters.for_request(placement.adapter) is not None:
                self._start(placement, sequence)
                return
            failure = Declined(f"The adapter {placement.adapter} was removed before the request could start.")
        except TimeoutError:
            failure = Declined(f"The adapter {placement.adapter} did not arrive within {self._adapter_wait:g} s.")
        except Exception as error:  # no other code sees this task's errors
            failure = known_error(error, **_named(placement))
        self._close(placement.request, placement.epoch, placement.stream)
        self._decline(placement, failure)

    def cancel(self, request: str, epoch: int) -> None:
        """End a request on this runner, if the accepted placement has this epoch."""
        placement = self._accepted.get(request)
        if placement is None or placement.epoch != epoch:
            return
        if placement.in_engine:
            self._post(Cancel(placement.request, epoch, placement.stream, self._clock()))
            return
        if (task := self._waiting.get((request, epoch))) is not None:
            task.cancel()
        self._close(request, epoch, placement.stream)
        step = runner_pb2.Step()
        step.sequences.add(
            request=request,
            epoch=epoch,
            index=placement.delivered_tokens,
            finish=common_pb2.FINISH_REASON_CANCELLED,
        )
        self.streams.send(placement.stream, runner_pb2.GenerateDown(step=step))

    def _decline(self, placement: AcceptedRequest, error: MotetError) -> None:
        """A placement that was accepted cannot stay. The scheduler hears that, too."""
        request, epoch = placement.request, placement.epoch
        self._refuse(placement.stream, request, epoch, placement.term, error)
        if not self._accepted.is_anothers(request, placement.gateway):
            self._declined(scheduler_pb2.RunnerDeclined(request=request, epoch=epoch, failure=error.to_proto()))

    def _refuse(self, stream: int, request: str, epoch: int, term: int, error: MotetError) -> None:
        """Only the gateway hears why its Submit does not count: its request need not be the one that it names."""
        self._metrics.declines.labels(error.code).inc()
        declined = runner_pb2.SubmitDeclined(request=request, epoch=epoch, failure=error.to_proto(), term=term)
        self.streams.send(stream, runner_pb2.GenerateDown(declined=declined))

    def _close(self, request: str, epoch: int, stream: int) -> AcceptedRequest | None:
        placement = self._accepted.remove(request, epoch, stream)
        if placement is not None and placement.adapter != BASE:
            self._adapters.request_ended(placement.adapter)
        return placement

    # ---------------------------------------------------------------------------------------------------------- engine

    def on_batch(self, batch: EngineOutputs) -> None:
        for stream, step in batch.steps.items():
            self.streams.send(stream, step)
        for refused in batch.refused:
            placement = self._close(refused.request, refused.epoch, refused.stream)
            if placement is not None:  # else the request was submitted again, and that submit has its own answer
                self._decline(placement, refused.error)
        for ended in batch.ended:
            self._metrics.requests.labels(ended.finish.value).inc()
            self._close(ended.request, ended.epoch, ended.stream)
        for one in batch.unknown:
            lost = self._close(one.request, one.epoch, one.stream)
            if lost is not None:  # else the request's end was sent before the engine got the cancel
                log.error("request_lost", **_named(lost), epoch=one.epoch)
                self._decline(lost, Declined(f"The request {one.request} never reached the engine."))
        if batch.generated:
            self._metrics.vllm_generation_tokens.labels(self._model).inc(batch.generated)
        for seconds in batch.cancel_seconds:
            self._metrics.cancel_seconds.observe(seconds)

    def engine_died(self, why: str) -> None:
        """Accept no more requests, and tell every gateway why its stream will end."""
        self.ending = True
        for session in self.streams:
            session.send(runner_pb2.GenerateDown(engine_died=runner_pb2.EngineDied(why=why)))

    async def close(self) -> None:
        waiting = list(self._waiting.values())
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def sequence_of(submit: runner_pb2.Submit, prompt: tuple[int, ...], *, base_digest: Digest) -> NewSequence:
    """The one sequence of a Submit to a runner of this base. Raises InvalidRequest if no runner could accept it, and
    Declined if only a runner of another base could."""
    if submit.base_digest not in ("", base_digest):
        raise Declined(f"This runner has the base model {base_digest}, but the request is for {submit.base_digest}.")
    if not submit.request:
        raise InvalidRequest("request is empty. A Submit must name its request.", param="request")
    if len(submit.choices) != 1:
        raise InvalidRequest(
            f"A Submit must have one choice, not {len(submit.choices)}. Send one Submit for each choice.",
            param="choices",
        )
    grammar = Grammar.from_proto(submit.sampling)
    if grammar is not None and len(grammar.text) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"The grammar has more than {MAX_GRAMMAR_BYTES} bytes.", param="response_format")
    choice, adapter = submit.choices[0], Digest(submit.adapter_digest)
    return NewSequence(
        request=RequestId(submit.request),
        epoch=submit.epoch,
        choice=choice.choice,
        prompt=prompt,
        delivered=tuple(choice.delivered_ids),
        scored=choice.scored,
        adapter=adapter,
        promise=submit.promise.pages,
        quantiles=_quantiles(submit.estimate),
        sampling=Sampling.from_proto(submit.sampling),
        seed=submit.seed,
        seed_is_drawn=submit.seed_is_drawn,
        priority=RequestClass.from_proto(submit.request_class),
        tenant=submit.tenant,
        weight=weight_said(submit.weight),
        engines_lost=submit.engines_lost,
        parent=RequestId(submit.parent) if submit.parent else None,
        prefix_salt=prefix_salt(base_digest, adapter, submit.tenant, submit.cache_salt),
        grammar=grammar,
    )


def _named(placement: AcceptedRequest) -> dict[str, str]:
    """In a log line"""
    return {"request": placement.request, **in_log(placement.traceparent)}


def _quantiles(estimate: common_pb2.Estimate) -> tuple[int, int, int, int] | None:
    """None if the numbers are not positive and ascending: earlier gateways send zeros. None, too, if they are only
    `max_tokens`: a law through them would say that half of such answers end before."""
    if estimate.source == LENGTH_OF_MAX_TOKENS:
        return None
    quantiles = (estimate.q50, estimate.q80, estimate.q90, estimate.q95)
    return quantiles if quantiles[0] > 0 and list(quantiles) == sorted(quantiles) else None
