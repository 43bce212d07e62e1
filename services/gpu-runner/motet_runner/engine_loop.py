"""The loop around an engine: takes commands, runs one iteration, and returns `EngineOutputs` (OR-01).

The loop uses no sockets and no torch. Each stream's tokens are encoded once, straight from the engine's output.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import assert_never

import structlog
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from motet.api.v1 import common_pb2, runner_pb2
from motet.clock import Clock
from motet.domain import RequestId
from motet.errors import AdapterUnproved, Declined, MotetError
from motet.rpc.message_failures import known_error
from motet.time_split import TimePart, TimeSplit
from motet_runner.engine_messages import (
    Add,
    Cancel,
    Command,
    DropAdapter,
    EngineOutputs,
    Extend,
    LoadAdapter,
    Park,
    ReportNow,
    Resume,
    SequenceEnded,
    SequenceRefused,
    SetOvercommit,
    SetSupervised,
    WriteSlab,
)
from motet_runner.free_levels import FreeLevels
from motet_runner.grammar_thread import CompileThread
from motet_runner.interface import (
    AdapterEvicted,
    AdapterFailed,
    AdapterLeftHost,
    AdapterLoaded,
    DecodedTokens,
    Engine,
    Event,
    Finish,
    Logprobs,
    OrderRefused,
    OverflowAhead,
    ParkedNow,
    ProofEnded,
    ResumedNow,
    SequenceOutput,
    SlabWritten,
    State,
    StateChanged,
)
from motet_runner.row_mask import RowMask

log = structlog.get_logger(__name__)

ENDED_REMEMBERED = 16_384
"""Requests. One that comes again comes soon: its gateway has lost a stream, or the scheduler has moved it back."""

UNPRODUCTIVE_WAIT_SECONDS = 0.002
"""Seconds to wait after an iteration that computed nothing, because all sequences wait for an order or an adapter. A
command ends the wait."""

REPORT_AT_ONCE = (ParkedNow, ResumedNow, AdapterFailed)
"""After these, pages that others wait for may be free, or an adapter may be of no use. The other events tell all that
has changed, to whoever must know it at once: a report lists every request and adapter, and there would be one for each
overflow and each load."""

FINISHES = {one: common_pb2.FinishReason.Value(f"FINISH_REASON_{one.name}") for one in Finish}
STATES = {one: common_pb2.SequenceState.Value(f"SEQUENCE_STATE_{one.name}") for one in State}


@dataclass(slots=True)
class _LiveSequence:
    """A sequence whose tokens still go to a gateway."""

    epoch: int
    choice: int
    stream: int
    first_index: int
    next_index: int
    split: TimeSplit
    reported_state: tuple[State, int, bool] | None = None

    @property
    def reported_alone(self) -> bool:
        return self.reported_state is not None and self.reported_state[2]


class EngineLoop:
    def __init__(self, engine: Engine, *, clock: Clock, grammars: CompileThread | None = None) -> None:
        """`grammars`: None: masks are made between two iterations, if this engine has any."""
        self._engine = engine
        self._grammars = grammars
        self._clock = clock
        self._live: dict[RequestId, _LiveSequence] = {}
        self._last_numbers = OrderedDict[RequestId, int]()
        """Of the promises of requests that have ended here. If one is placed again, its numbers go on from there:
        an order that was decided for its first life must not mean a promise of its second."""
        self._batch = EngineOutputs()
        self._messages: dict[int, runner_pb2.GenerateDown] = {}
        self._report_wanted = False
        self._free_levels = FreeLevels(clock())
        self._productive = True
        self._idle_wait: float | None = 0.0
        """The seconds after which the engine wants `idle` to be called again; None: not before it has had work"""
        self._handlers: dict[type[Command], Callable[..., object]] = {
            Add: self._add,
            Cancel: self._cancel,
            Extend: lambda c: engine.extend(c.request, c.epoch, c.promise, c.extended, number=c.number),
            Park: lambda c: engine.park(c.request, c.epoch, c.promise, c.wanted, c.method, number=c.number),
            Resume: lambda c: engine.resume(c.request, c.epoch, c.promise, number=c.number),
            SetSupervised: lambda c: engine.set_supervised(c.supervised),
            SetOvercommit: lambda c: engine.set_overcommit(c.factor),
            LoadAdapter: lambda c: engine.load_adapter(c.digest, c.layout, pinned=c.pinned, proof=c.proof),
            DropAdapter: lambda c: engine.drop_adapter(c.digest),
            WriteSlab: lambda c: engine.write_slab(c.number, c.layout),
            ReportNow: self._want_report,
        }

    def apply(self, commands: Iterable[Command]) -> None:
        """Take commands between two iterations. A command that the engine refuses changes nothing else. An unexpected
        error ends only the request or the adapter of its command."""
        for command in commands:
            try:
                done = self._handlers[type(command)](command)
                if done is False and isinstance(command, Extend | Park | Resume):
                    self._on_event(OrderRefused(command.request, command.epoch, command.number))
            except MotetError as error:
                log.warning("command_refused", command=type(command).__name__, reason=error.message)
                self._answer_proof(command, error)
            except Exception as error:
                self._give_up(command, known_error(error, command=type(command).__name__))

    def _give_up(self, command: Command, error: MotetError) -> None:
        """An error raised here ends the engine: a sequence that cannot be cancelled would keep its pages for ever."""
        match command:
            case Add(new, stream):
                self._engine.cancel(new.request, new.epoch)
                self._batch.refused.append(SequenceRefused(new.request, new.epoch, stream, error))
            case Cancel(request, epoch) | Extend(request, epoch) | Park(request, epoch) | Resume(request, epoch):
                self._cancel_in_engine(request, epoch)
                live = self._live.get(request)
                if live is not None and live.epoch == epoch:
                    message = self._say_end(request, live, Finish.FAILED)
                    message.failure.CopyFrom(error.to_proto())
            case LoadAdapter(digest):
                self._answer_proof(command, error)
                self._on_event(AdapterFailed(digest, error))
            case WriteSlab(number):
                self._on_event(SlabWritten(number, 0))
            case DropAdapter() | SetSupervised() | SetOvercommit() | ReportNow():
                pass
            case _:
                assert_never(command)

    def _answer_proof(self, command: Command, error: MotetError) -> None:
        """Before an AdapterFailed: that one says that the engine has answered what it can."""
        if isinstance(command, LoadAdapter) and command.proof is not None:
            self._on_event(ProofEnded(command.proof.number, command.digest, error))

    def turn(self) -> EngineOutputs | None:
        """Run one iteration if there is work. Return what has happened since the last turn, or None if nothing has."""
        if self._grammars:
            for command, found in self._grammars.done():
                self._compiled(command, found)
        if self._engine.has_work():
            began = self._clock()
            output = self._engine.step()
            now = self._clock()
            self._batch.number = output.number
            self._mark_states(output.events, began, now)
            if output.decoded is not None:
                self._encode_decoded(output.decoded)
            self._encode(output.others)
            for event in output.events:
                self._on_event(event)
            self._productive = bool(output.decoded or output.others or output.events or output.late)
            self._report_wanted |= self._free_levels.ask_for_a_report(now, self._engine.free_share)
            self._idle_wait = 0.0
        else:
            self._idle_wait = self._engine.idle()
        for written in self._engine.slabs_written():
            self._on_event(written)
        return self.take()

    def take(self) -> EngineOutputs | None:
        """What has happened since the last turn, or None if nothing has."""
        batch = self._batch
        if self._report_wanted:
            self._report_wanted = False
            batch.report = self._engine.report()
        for stream, down in self._messages.items():
            down.step.number = batch.number
            batch.steps[stream] = down.SerializeToString()
        if not self._anything_to_tell():
            return None
        self._messages = {}
        self._batch = EngineOutputs()
        return batch

    def command_wait_seconds(self) -> float | None:
        """How long to wait for commands before the next turn. None: without limit, because there is nothing to do."""
        if not self._engine.has_work():
            return UNPRODUCTIVE_WAIT_SECONDS if self._grammars else self._idle_wait
        return 0.0 if self._productive else UNPRODUCTIVE_WAIT_SECONDS

    # ------------------------------------------------------------------------------------------------------- commands

    def _add(self, command: Add) -> None:
        new = command.sequence
        old = self._live.get(new.request)
        if old is not None:
            if old.epoch > new.epoch:
                late = Declined(f"The request {new.request} was placed again as epoch {old.epoch}.")
                self._batch.refused.append(SequenceRefused(new.request, new.epoch, command.stream, late))
                return
            # The request was placed again and still runs here: its old placement ends first, to free pages (PU-17).
            self._cancel_in_engine(new.request, old.epoch)
            self._end(new.request, old, Finish.CANCELLED)
        if (number := self._last_numbers.get(new.request, 0)) > 0:
            command = replace(command, sequence=(new := replace(new, promise_number=number + 1)))
        try:
            if new.bound and self._grammars is not None:
                self._grammars.begin(command)
            else:
                self._engine.add(new)
        except MotetError as error:
            self._batch.refused.append(SequenceRefused(new.request, new.epoch, command.stream, error))
            return
        split = TimeSplit(TimePart.PENALTY if new.delivered else TimePart.QUEUE, command.received)
        first = len(new.delivered)
        self._live[new.request] = _LiveSequence(new.epoch, new.choice, command.stream, first, first, split)

    def _compiled(self, command: Add, found: RowMask | MotetError) -> None:
        new = command.sequence
        live = self._live.get(new.request)
        if live is None or live.epoch != new.epoch:
            return  # it was cancelled or placed again meanwhile
        try:
            if isinstance(found, MotetError):
                raise found
            self._engine.add(replace(new, mask=found))
        except MotetError as error:
            del self._live[new.request]
            self._batch.refused.append(SequenceRefused(new.request, new.epoch, command.stream, error))
        except Exception as error:
            del self._live[new.request]
            self._give_up(command, known_error(error, command="Add"))

    def _cancel(self, command: Cancel) -> None:
        live = self._live.get(command.request)
        if live is None or live.epoch != command.epoch:
            self._batch.unknown.append(command)
            return
        self._cancel_in_engine(command.request, command.epoch)
        self._batch.cancel_seconds.append(self._clock() - command.sent)
        self._say_end(command.request, live, Finish.CANCELLED)

    def _cancel_in_engine(self, request: RequestId, epoch: int) -> None:
        self._note_last_number(request, self._engine.cancel(request, epoch))

    def _note_last_number(self, request: RequestId, number: int) -> None:
        if number == 0:  # it waited for its grammar, and nobody has heard of a promise
            return
        self._last_numbers[request] = number
        self._last_numbers.move_to_end(request)
        if len(self._last_numbers) > ENDED_REMEMBERED:
            self._last_numbers.popitem(last=False)

    def _want_report(self, _: ReportNow) -> None:
        self._report_wanted = True

    # ------------------------------------------------------------------------------------------------------------ time

    def _mark_states(self, events: Iterable[Event], began: float, now: float) -> None:
        """Note new states before an iteration's outputs are encoded, because an answer may begin and end in one
        iteration.

        Prefill and park count from the iteration's beginning. Decoding counts from the first token, or from the next
        token after a park. With plan-ahead, a sequence that was parked by swap counts as decoding one iteration
        earlier.
        """
        for event in events:
            if not isinstance(event, StateChanged):
                continue
            live = self._live.get(event.request)
            if live is None or live.epoch != event.epoch:
                continue
            match event.state:
                case State.LOADING | State.WAITING:
                    live.split.enter(TimePart.QUEUE, now)
                case State.PREFILL:
                    live.split.enter(TimePart.GENERATION, began)
                case State.DECODE:
                    live.split.got_token(now)
                case State.PARKED:
                    live.split.enter(TimePart.PENALTY, began)
                case _:
                    assert_never(event.state)

    def _write_split(self, message: common_pb2.TimeSplit, live: _LiveSequence) -> None:
        split = live.split.until(self._clock())
        message.queue_seconds, message.generation_seconds = split.queue, split.generation
        message.penalty_seconds = split.penalty

    # ---------------------------------------------------------------------------------------------------------- output

    def _encode_decoded(self, decoded: DecodedTokens) -> None:
        """Like `_encode` for the usual iteration, without an object per sequence."""
        live_of = self._live
        steps: dict[int, RepeatedCompositeFieldContainer[runner_pb2.SequenceStep]] = {}
        iterations = decoded.iterations
        columns = zip(decoded.requests, decoded.epochs, decoded.first_indices, decoded.tokens, strict=True)
        for request, epoch, first, token in columns:
            live = live_of.get(request)
            if live is None or live.epoch != epoch:
                continue  # cancelled or placed again while its last iteration ran
            sequences = steps.get(live.stream)
            if sequences is None:
                sequences = steps[live.stream] = self._step_for(live.stream).sequences
            index = first + iterations
            message = sequences.add()
            message.request, message.epoch, message.index = request, epoch, index
            message.tokens.append(token)
            if live.choice:
                message.choice = live.choice
            live.next_index = index + 1
            self._batch.generated += 1

    def _encode(self, outputs: list[SequenceOutput]) -> None:
        """Encode the tokens of one iteration. The loop's body runs for every sequence in every iteration, so it is
        short."""
        live_of = self._live
        steps: dict[int, runner_pb2.Step] = {}
        generated = 0
        for output in outputs:
            request, tokens = output.request, output.tokens
            live = live_of.get(request)
            if live is None or live.epoch != output.epoch:
                continue  # cancelled or placed again while its last iteration ran
            if output.error is not None and self._declines(output, live):
                continue
            step = steps.get(live.stream)
            if step is None:
                step = steps[live.stream] = self._step_for(live.stream)
            message = step.sequences.add()
            message.request = request
            message.epoch = live.epoch
            message.index = index = output.index
            message.tokens.extend(tokens)
            if output.choice:
                message.choice = output.choice
            if output.logprobs:
                _add_logprobs(message.logprobs, output.logprobs)
            if output.prompt_logprobs:
                message.prompt_index = output.prompt_index
                _add_logprobs(message.prompt_logprobs, output.prompt_logprobs)
            if output.cached_tokens is not None:
                message.cached_tokens = output.cached_tokens
            count = len(tokens)
            generated += count
            live.next_index = index + count
            if output.finish is not None or output.error is not None:
                self._finish(output, live, message)
        self._batch.generated += generated

    def _declines(self, output: SequenceOutput, live: _LiveSequence) -> bool:
        """Another runner may compute right what this one does not: until it has given a token, it declines."""
        if not isinstance(output.error, AdapterUnproved) or live.next_index != live.first_index:
            return False
        del self._live[output.request]
        self._note_last_number(output.request, output.promise_number)
        refused = SequenceRefused(output.request, live.epoch, live.stream, output.error)
        self._batch.refused.append(refused)
        self._batch.report_now |= live.reported_alone
        return True

    def _finish(self, output: SequenceOutput, live: _LiveSequence, message: runner_pb2.SequenceStep) -> None:
        finish = output.finish
        if finish is None or output.error is not None:
            finish = Finish.FAILED
        message.finish = FINISHES[finish]
        self._write_split(message.split, live)
        if output.error is not None:
            message.failure.CopyFrom(output.error.to_proto())
        self._note_last_number(output.request, output.promise_number)
        self._end(output.request, live, finish)

    def _on_event(self, event: Event) -> None:
        self._batch.events.append(event)
        match event:
            case StateChanged(request, epoch, state, percent, alone):
                self._report_state(request, epoch, (state, percent, alone))
            case ParkedNow(request, epoch):
                self._report_state(request, epoch, (State.PARKED, 0, False))
            case OverflowAhead() | ResumedNow() | OrderRefused():
                pass  # gateways do not need these
            case AdapterLoaded() | ProofEnded() | AdapterEvicted() | AdapterLeftHost() | AdapterFailed():
                pass  # gateways do not need these
            case SlabWritten():
                pass
            case _:
                assert_never(event)
        if isinstance(event, REPORT_AT_ONCE):
            self._report_wanted = True

    def _report_state(self, request: RequestId, epoch: int, now: tuple[State, int, bool]) -> None:
        live = self._live.get(request)
        if live is None or live.epoch != epoch or live.reported_state == now:
            return
        state, percent, alone = now
        self._batch.report_now |= alone or live.reported_alone
        live.reported_state = now
        progress = self._step_for(live.stream).progress.add(
            request=request, epoch=epoch, state=STATES[state], percent=percent, alone=alone
        )
        self._write_split(progress.split, live)

    def _step_for(self, stream: int) -> runner_pb2.Step:
        down = self._messages.get(stream)
        if down is None:
            down = self._messages[stream] = runner_pb2.GenerateDown()
        return down.step

    def _say_end(self, request: RequestId, live: _LiveSequence, finish: Finish) -> runner_pb2.SequenceStep:
        """The end of a sequence outside an iteration."""
        message = self._step_for(live.stream).sequences.add(
            request=request, choice=live.choice, epoch=live.epoch, index=live.next_index, finish=FINISHES[finish]
        )
        self._write_split(message.split, live)
        self._end(request, live, finish)
        return message

    def _end(self, request: RequestId, live: _LiveSequence, finish: Finish) -> None:
        del self._live[request]
        if self._grammars:
            self._grammars.forget(request)
        self._batch.report_now |= live.reported_alone
        split = live.split.until(self._clock())
        self._batch.ended.append(SequenceEnded(request, live.epoch, live.stream, live.next_index, finish, split))

    def _anything_to_tell(self) -> bool:
        return self._report_wanted or self._anything_else_to_tell()

    def _anything_else_to_tell(self) -> bool:
        batch = self._batch
        return bool(batch.steps or batch.refused or batch.ended or batch.unknown or batch.events or batch.report)

    # ------------------------------------------------------------------------------------------------ simulated engines

    @property
    def may_leap(self) -> bool:
        """True if no message is due after the next iteration."""
        return not self._messages and not self._anything_to_tell()

    @property
    def owes_only_a_report(self) -> bool:
        """True if a report is due after the next iteration, and no other message."""
        return self._report_wanted and not self._messages and not self._anything_else_to_tell()

    def quiet_at(self, free_share: float) -> bool:
        """True if a check of the free pages would ask for no report at this share."""
        return self._free_levels.quiet_at(free_share)

    def leapt(self, ends: Iterable[float]) -> None:
        """The engine has computed iterations by itself, which ended at these times. They gave only tokens, which no
        gateway needs, and after each the free pages were `quiet_at`."""
        self._free_levels.leapt(ends)


def _add_logprobs(to: "RepeatedCompositeFieldContainer[runner_pb2.TokenLogprobs]", logprobs: list[Logprobs]) -> None:
    for one in logprobs:
        to.add(
            logprob=one.logprob,
            top_ids=[token for token, _ in one.top],
            top_logprobs=[value for _, value in one.top],
            rank=one.rank,
        )
