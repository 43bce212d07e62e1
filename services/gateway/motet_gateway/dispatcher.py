"""Sends choices to the scheduler and to runners and brings their tokens back: carries out the effects of `Generation`.

There is one stream to the scheduler and one to every runner. Any stream may break at any time. The hello of a new
scheduler stream lists what runs, and waiting choices are enqueued again. If a runner's stream breaks, its choices are
lost there and the scheduler places them again.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVarTuple

import structlog

from motet.api.v1 import common_pb2, runner_pb2, scheduler_pb2
from motet.clock import Clock
from motet.errors import Internal, MotetError, RequestKillsEngines, StructuredOutputUnavailable, from_proto
from motet.rpc import EndStream, Link, known_error
from motet.runner_info import RequestClass
from motet.terms import check_leaders_term, check_term
from motet.time_split import TimePart, TimeSplit
from motet.trace_context import in_log
from motet.transport import Network
from motet.transport.methods import SERVE
from motet_gateway import choice_messages, rate_limits
from motet_gateway.account_levels import AccountLevels
from motet_gateway.catalog import Catalog, CurrentCatalog
from motet_gateway.choice_record import ChoiceRecord
from motet_gateway.generation import (
    CancelAtRunner,
    Deliver,
    DeliverScores,
    Dropped,
    Effect,
    FinishChoice,
    GenerationPhase,
    Measured,
    PromptFound,
    ReportCancelled,
    ReportFinished,
    ReportLost,
    RunnerPlacement,
    Submit,
)
from motet_gateway.held_requests import HeldRequests
from motet_gateway.live_choice import GenerationRequest, LiveChoice, TokenSink
from motet_gateway.loss_limits import Loss
from motet_gateway.metrics import Metrics
from motet_gateway.noted import Noted
from motet_gateway.pauses import Pause, PausePart
from motet_gateway.runner_streams import RunnerStreams

log = structlog.get_logger(__name__)

Arguments = TypeVarTuple("Arguments")

MAX_LIVE_IN_MESSAGE = 128
"""Requests that one message tells a scheduler of: it takes in a message as a whole, and everybody else waits then."""

NO_SCHEDULER = "waiting for the scheduler"


class Dispatcher:
    def __init__(
        self,
        gateway: str,
        scheduler_address: str,
        catalog: CurrentCatalog,
        metrics: Metrics,
        *,
        network: Network,
        connect_seconds: float,
        held: HeldRequests,
        clock: Clock,
    ) -> None:
        self._gateway = gateway
        self.catalog = catalog
        self._metrics = metrics
        self._held = held
        self._clock = clock
        self.term = 0
        self.max_live_in_message = MAX_LIVE_IN_MESSAGE
        self._scheduler_takes_parts = self._tells_in_parts = False
        """Whether the last scheduler could hear in parts what runs, and whether this one is told so."""
        self.choices: dict[str, LiveChoice] = {}
        self.levels = AccountLevels(clock)
        self.runners = RunnerStreams(
            gateway,
            network=network,
            on_message=self.from_runner,
            on_stream_lost=self._runner_lost,
            on_unreachable=self._unreachable,
            connect_seconds=connect_seconds,
        )
        self.scheduler: Link[scheduler_pb2.ServeUp, scheduler_pb2.ServeDown] = Link(
            "scheduler",
            scheduler_address,
            SERVE,
            network=network,
            greet=self._hello,
            receive=self._from_scheduler,
            failed=self._on_scheduler_failure,
            closed=self._scheduler_lost,
        )

    async def run(self) -> None:
        """Keep the streams open. Ends by cancellation."""
        try:
            await self.scheduler.run()
        finally:
            await self.runners.close()

    @property
    def live(self) -> int:
        return len(self.choices)

    # ------------------------------------------------------------------------------------------ called by the HTTP side

    def start(
        self,
        order: GenerationRequest,
        sink: TokenSink,
        record: ChoiceRecord | None = None,
        *,
        asked_at: float | None = None,
    ) -> None:
        """`record` is kept until the end. `asked_at`: when its answer was first enqueued, if it was before, for another
        model. It keeps its age."""
        now = self._clock()
        record = record or ChoiceRecord(TimeSplit(TimePart.QUEUE, now))
        record.split.enter(TimePart.QUEUE, now)
        record.timeline.note(now, Noted.SENT, RequestClass.from_proto(order.request_class).name.lower())
        live = LiveChoice(order, sink, now if asked_at is None else asked_at, record)
        self.choices[order.request] = live
        self._metrics.live_requests.set(len(self.choices))
        # If the scheduler is disconnected, the next hello enqueues everything that waits.
        if not self.scheduler.send(scheduler_pb2.ServeUp(enqueue=choice_messages.enqueue(live, self._clock()))):
            record.without_scheduler(now)
            sink.waiting(NO_SCHEDULER)

    def report_held(self) -> None:
        """Tell the scheduler how many requests are held."""
        self.scheduler.send(self._held_message())

    def stop(self, request: str) -> None:
        """A stop string has completed the text."""
        if (live := self.choices.get(request)) is not None:
            self._carry_out(live, live.generation.stop())

    def cancel(self, request: str, why: str) -> None:
        if (live := self.choices.get(request)) is not None:
            self._note(live, Noted.CANCELLED, why)
            self._carry_out(live, live.generation.cancel(why))
            self._forget(live)

    # ------------------------------------------------------------------------------------------ from the scheduler -

    def _hello(self) -> Iterator[scheduler_pb2.ServeUp]:
        hello = scheduler_pb2.GatewayHello(gateway=self._gateway, highest_term=self.term, takes_changes=True)
        running, waiting = [], []
        for live in self.choices.values():
            if live.generation.placement is not None:
                running.append(choice_messages.live_request(live, live.generation.placement, self._clock()))
            else:
                waiting.append(live)
        size = self.max_live_in_message if self._scheduler_takes_parts else max(1, len(running))
        hello.live.extend(running[:size])
        parts = [running[begin : begin + size] for begin in range(size, len(running), size)]
        hello.live_follows = self._tells_in_parts = bool(parts)
        yield scheduler_pb2.ServeUp(hello=hello)
        for number, part in enumerate(parts, 1):
            yield scheduler_pb2.ServeUp(live=scheduler_pb2.LiveRequests(requests=part, more=number < len(parts)))
        yield from self.levels.messages()
        if self._held or self._held.templates():
            yield self._held_message()
        for live in waiting:
            yield scheduler_pb2.ServeUp(enqueue=choice_messages.enqueue(live, self._clock()))

    def _scheduler_lost(self, _why: str) -> None:
        for live in list(self.choices.values()):
            if live.generation.phase is GenerationPhase.WAITING:
                self._alone(live, self._without_scheduler, live)

    def _without_scheduler(self, live: LiveChoice) -> Iterable[Effect]:
        live.record.without_scheduler(self._clock())
        live.sink.waiting(NO_SCHEDULER)
        return ()

    def _from_scheduler(self, message: scheduler_pb2.ServeDown) -> None:
        match message.WhichOneof("message"):
            case "placed":
                self._placed(message.placed)
            case "position":
                if (live := self.choices.get(message.position.request)) is not None:
                    self._told(live, message.position)
            case "moved":
                moved = message.moved
                self._placed(moved.placement, moved=moved.reason, engine_hung=moved.engine_hung)
            case "refused":
                self._refused(message.refused)
            case "catalog":
                self._replace_catalog(Catalog.of(message.catalog))
            case "catalog_changes":
                self._replace_catalog(self.catalog.current.changed(message.catalog_changes))
            case "welcome":
                check_leaders_term(message.welcome.term, self.term, "the scheduler")
                self.term = max(self.term, message.welcome.term)
                self._scheduler_takes_parts = message.welcome.takes_parts
                if self._tells_in_parts and not self._scheduler_takes_parts:
                    raise EndStream(Internal("this scheduler is of an earlier version and has not heard all requests"))
            case unknown:
                log.debug("message_unknown", sender="scheduler", kind=unknown)

    def _told(self, live: LiveChoice, position: scheduler_pb2.Position) -> None:
        why = f" ({position.why})" if position.why else ""
        live.admitted |= position.admitted
        live.record.waits(position.position, position.why, self._clock())
        live.sink.waiting(f"queued position={position.position}{why}")

    def _note(self, live: LiveChoice, kind: Noted, *arguments: object) -> None:
        live.record.timeline.note(self._clock(), kind, *arguments)

    def _replace_catalog(self, catalog: Catalog) -> None:
        self.catalog.replace(catalog)
        busy = [live.generation.placement.address for live in self.choices.values() if live.generation.placement]
        self.runners.set_addresses(catalog.runner_addresses(), busy=busy)

    def _on_scheduler_failure(self, message: scheduler_pb2.ServeDown, error: MotetError) -> None:
        """End the choice that the message was about. A catalog is about none: the last one stays."""
        match message.WhichOneof("message"):
            case "placed":
                request = message.placed.request
            case "moved":
                request = message.moved.placement.request
            case "refused":
                request = message.refused.request
            case "position":
                request = message.position.request
            case _:
                return
        if (live := self.choices.get(request)) is not None:
            self._break_off(live, error)

    def _is_stale_term(self, term: int) -> bool:
        if term < self.term:
            self._metrics.dropped.labels("stale term").inc()
            return True
        check_term(term, self.term, "the scheduler")
        self.term = term
        return False

    def _refused(self, refused: scheduler_pb2.Refused) -> None:
        live = self.choices.get(refused.request)
        if live is not None and not self._is_stale_term(refused.term):
            self.levels.note_refused(refused)
            error = from_proto(refused.failure)
            error.headers = rate_limits.headers(refused.accounts)
            self._carry_out(live, live.generation.refused(refused.epoch, error))

    def _placed(self, placed: scheduler_pb2.Placed, *, moved: str = "", engine_hung: bool = False) -> None:
        if self._is_stale_term(placed.term):
            return
        self.levels.note_placed(placed)
        placement = RunnerPlacement(
            placed.epoch,
            placed.instance,
            placed.incarnation,
            placed.address,
            placed.term,
            placed.promise,
            placed.base_digest,
            placed.weight,
        )
        if (live := self.choices.get(placed.request)) is not None:
            if placed.epoch > live.generation.epoch:  # otherwise it comes late
                live.admitted = True
                live.record.placed(placed, moved, self._clock())
                if live.generation.placement is not None:  # the scheduler moves it
                    self._interrupted(live)
            self._carry_out(live, live.generation.placed(placement, engine_hung=engine_hung))
        else:
            # It ended while the scheduler placed it. Release the promise now, not at the runner's next report.
            finished = scheduler_pb2.Finished(
                request=placed.request, epoch=placed.epoch, reason=common_pb2.FINISH_REASON_CANCELLED
            )
            self.scheduler.send(scheduler_pb2.ServeUp(finished=finished))

    # --------------------------------------------------------------------------------------------- from the runners -

    def from_runner(self, address: str, message: runner_pb2.GenerateDown) -> None:
        match message.WhichOneof("message"):
            case "step":
                now = self._clock()
                for sequence in message.step.sequences:
                    if (live := self.choices.get(sequence.request)) is None:
                        self._metrics.dropped.labels("ended").inc()
                    elif self._is_from_its_runner(live, sequence.epoch, address):
                        live.heard_at = now
                        self._alone(live, live.generation.step, sequence)
                for progress in message.step.progress:
                    self._progress(progress, address)
            case "declined":
                declined = message.declined
                self.runners.forget_prompts(address)
                live = self.choices.get(declined.request)
                if live is None or not self._is_from_its_runner(live, declined.epoch, address):
                    return
                placed = live.generation.placement
                if placed is not None and 0 < declined.term < placed.term:
                    self._metrics.dropped.labels("stale term").inc()
                else:
                    self._alone(live, live.generation.declined, declined.epoch, declined.failure)
            case "engine_died":
                self._runner_gone(address, f"the engine died: {message.engine_died.why}", Loss.ENGINE_DIED)
            case "welcome":
                self._runner_is(address, message.welcome.runner.incarnation)
                self.runners.welcomed(address, message.welcome)
                for live in list(self.choices.values()):
                    if live.generation.is_placed_at(address):
                        self._leave_if_ignored(live, address)
            case unknown:
                log.debug("message_unknown", sender="runner", kind=unknown)

    def _is_from_its_runner(self, live: LiveChoice, epoch: int, address: str) -> bool:
        """Whether it is placed there under this epoch. Nobody else can say anything of it, also while it waits."""
        placed = live.generation.placement
        if placed is not None and placed.epoch == epoch and placed.address == address:
            return True
        current = placed is not None and placed.epoch == epoch
        self._metrics.dropped.labels("other runner" if current else "stale epoch").inc()
        return False

    def _progress(self, progress: runner_pb2.SequenceProgress, address: str) -> None:
        live = self.choices.get(progress.request)
        if live is not None and self._is_from_its_runner(live, progress.epoch, address):
            self._alone(live, self._progressed, live, progress)

    def _progressed(self, live: LiveChoice, progress: runner_pb2.SequenceProgress) -> Iterable[Effect]:
        live.generation.alone = progress.alone
        live.record.progressed(progress, live.order.adapter, self._clock())
        if live.pause is not None and (part := _PARTS.get(progress.state)) is not None:
            live.pause.enter(part, self._clock())
        live.sink.waiting(choice_messages.waiting_for(progress, live.order))
        return ()

    def _runner_is(self, address: str, incarnation: str) -> None:
        """If another process listens at the address now, requests placed on the old one are lost."""
        if incarnation:
            self._runner_gone(address, "the runner was restarted", unless_incarnation=incarnation)

    def _runner_lost(self, address: str, why: str) -> None:
        self._runner_gone(address, f"the stream to the runner broke: {why}")

    def _runner_gone(
        self, address: str, why: str, loss: Loss = Loss.STREAM_BROKE, *, unless_incarnation: str = ""
    ) -> None:
        for live in list(self.choices.values()):
            placement = live.generation.placement
            if placement is None or placement.address != address:
                continue
            if unless_incarnation and placement.incarnation in ("", unless_incarnation):
                continue
            self._alone(live, live.generation.runner_lost, why, loss)

    def _unreachable(self, placement: RunnerPlacement, request: str, why: str) -> None:
        live = self.choices.get(request)
        if live is not None and live.generation.epoch == placement.epoch:
            self._alone(live, live.generation.unreachable, why)

    # ------------------------------------------------------------------------------------------------------- carry out

    def _carry_out(self, live: LiveChoice, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if type(effect) is Deliver:  # the frequent case; a match is slower
                self._deliver(live, effect)
                continue
            match effect:
                case Dropped(why):
                    self._metrics.dropped.labels(why).inc()
                case Submit(placement):
                    live.sink.placed()
                    live.record.split.submitted(self._clock())
                    live.record.promised_tokens = live.record.promised_tokens or placement.promise.tokens
                    if live.pause is not None:
                        live.pause.enter(PausePart.RUNNER, self._clock())
                    if not self._leave_if_ignored(live, placement.address):
                        has_prompt = self.runners.has_prompt(placement.address, live.order.prompt_number)
                        submission = choice_messages.submission(live, placement, with_prompt=not has_prompt)
                        self.runners.submit(placement, submission)
                case DeliverScores(logprobs):
                    live.sink.score(logprobs)
                case PromptFound(tokens):
                    live.record.cached_tokens = min(tokens, len(live.order.prompt_ids))
                case Measured(split):
                    live.record.measured(split, self._clock())
                case FinishChoice(how):
                    live.record.ended(how, live.counted_tokens, self._clock())
                    if isinstance(how, RequestKillsEngines):
                        log.error("request_kills_engines", tenant=live.order.tenant, **_named(live))
                    self._forget(live)
                    self._log_failure(live, lambda how=how: live.sink.end(how))  # type: ignore[misc]
                case ReportFinished(epoch, reason):
                    self._send(finished=choice_messages.finished(live, epoch, reason))
                case CancelAtRunner(placement, why):
                    self.runners.cancel(placement, live.order.request, why)
                case ReportCancelled(why):
                    self._send(
                        cancel=scheduler_pb2.CancelRequest(
                            request=live.order.request, epoch=live.generation.epoch, reason=why
                        )
                    )
                case ReportLost(epoch, instance, why):
                    self._report_lost(live, epoch, instance, why)

    def _leave_if_ignored(self, live: LiveChoice, address: str) -> bool:
        """If its runner would ignore what it asks for, look for another one. A runner says what it knows before it
        sends anything else, so no answer has begun."""
        order = live.order
        if not (unknown := self.runners.unknown_fields(address)):
            return False
        asked = [field.name for field, _ in order.sampling.ListFields()] + ["cache_salt"] * bool(order.cache_salt)
        if not (ignored := [name for name in asked if name in unknown]):
            return False
        error = StructuredOutputUnavailable(
            f"Runners are of an earlier version than this gateway, and do not know {', '.join(ignored)}. Leave it out, "
            "or send the request when all have the same version."
        )
        self._carry_out(live, live.generation.left(error))
        return True

    def _deliver(self, live: LiveChoice, delivery: Deliver) -> None:
        if live.pause is not None:
            self._resumed(live, live.pause)
        if live.order.scores_only:
            return
        live.sink.deliver(delivery.tokens, delivery.logprobs)

    def _log_failure(self, live: LiveChoice, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            log.exception("request_end_failed", **_named(live))

    def _alone(self, live: LiveChoice, call: Callable[[*Arguments], Iterable[Effect]], *arguments: *Arguments) -> None:
        """Carry out what the call returns. An error ends this choice, and not the message or stream that others use,
        too."""
        try:
            self._carry_out(live, call(*arguments))
        except Exception as error:
            self._break_off(live, known_error(error, **_named(live)))

    def _break_off(self, live: LiveChoice, error: MotetError) -> None:
        """End one choice with an error."""
        generation = live.generation
        if generation.phase is not GenerationPhase.ENDED:
            self._log_failure(live, lambda: self._carry_out(live, generation.cancel("the gateway failed")))
        elif live.order.request in self.choices:  # its last message failed before the scheduler heard of its end
            self._send(finished=choice_messages.finished(live, generation.epoch, common_pb2.FINISH_REASON_FAILED))
        live.record.ended(error, live.counted_tokens, self._clock())
        self._forget(live)
        self._log_failure(live, lambda: live.sink.end(error))

    def _resumed(self, live: LiveChoice, pause: Pause) -> None:
        """Its first token since it lost its runner."""
        live.pause = None
        live.record.split.got_token(self._clock())
        generation, order = live.generation, live.order
        paused = pause.end(self._clock())
        self._note(live, Noted.RESUMED, paused["seconds"])
        log.info(
            "request_resumed",
            **_named(live),
            epoch=generation.epoch,
            instance=generation.placement.instance if generation.placement is not None else "",
            tokens=len(order.prompt_ids) + len(generation.delivered),
            **paused,
        )

    def _report_lost(self, live: LiveChoice, epoch: int, instance: str, why: str) -> None:
        request = live.order.request
        self._interrupted(live).enter(PausePart.QUEUE, self._clock())
        self._note(live, Noted.LOST, instance, why)
        log.info("request_lost", **_named(live), epoch=epoch, instance=instance, reason=why)
        self._metrics.replacements.inc()
        live.sink.waiting("moving to another runner")
        delivered = len(live.generation.delivered)
        self._send(lost=scheduler_pb2.Lost(request=request, epoch=epoch, why=why, delivered_tokens=delivered))

    def _interrupted(self, live: LiveChoice) -> Pause:
        """It loses its runner: its pause began with the last that it heard, if it has not begun yet."""
        if live.pause is None:
            live.pause = Pause(live.heard_at)
        live.record.split.enter(TimePart.PENALTY if live.generation.delivered else TimePart.QUEUE, live.heard_at)
        return live.pause

    def _send(
        self,
        *,
        finished: scheduler_pb2.Finished | None = None,
        cancel: scheduler_pb2.CancelRequest | None = None,
        lost: scheduler_pb2.Lost | None = None,
    ) -> None:
        """Send it if the scheduler is connected. If not, it is dropped: the next hello describes the state."""
        self.scheduler.send(scheduler_pb2.ServeUp(finished=finished, cancel=cancel, lost=lost))

    def _forget(self, live: LiveChoice) -> None:
        if self.choices.pop(live.order.request, None) is not None:
            live.record.split.end(self._clock())
            self._metrics.live_requests.set(len(self.choices))

    # -------------------------------------------------------------------------------------------------------- messages

    def _held_message(self) -> scheduler_pb2.ServeUp:
        requests, templates = self._held.by_group(), self._held.templates()
        groups = [
            scheduler_pb2.HeldGroup(group=group, requests=requests.get(group, 0), templates=templates.get(group, ()))
            for group in requests.keys() | templates.keys()
        ]
        return scheduler_pb2.ServeUp(held=scheduler_pb2.Held(groups=groups))


def _named(live: LiveChoice) -> dict[str, str]:
    """In a log line"""
    return {"request": live.order.request, **in_log(live.order.traceparent)}


_PARTS = {
    common_pb2.SEQUENCE_STATE_WAITING: PausePart.RUNNER,
    common_pb2.SEQUENCE_STATE_LOADING: PausePart.ADAPTER,
    common_pb2.SEQUENCE_STATE_PREFILL: PausePart.RECOMPUTE,
}
