"""The state of one choice, from its first placement to its end. Pure: events in, effects out.

The client gets every token index once and in order, even if messages are repeated, late or lost, and then exactly one
end. A placement counts only if its epoch is higher than the last one. Messages of other epochs are dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from motet.api.v1 import common_pb2, runner_pb2
from motet.errors import (
    AdapterError,
    AdapterFetchFailed,
    AdapterUnproved,
    InvalidRequest,
    MotetError,
    UnsupportedParameter,
    from_proto,
)
from motet_gateway.loss_limits import Loss, LossCounter


class GenerationPhase(Enum):
    WAITING = "waiting"
    PLACED = "placed"
    ENDED = "ended"


class EndReason(StrEnum):
    """Why a choice ended well, in the words of the wire."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class RunnerPlacement:
    epoch: int
    instance: str
    incarnation: str
    address: str
    term: int
    promise: common_pb2.Promise = field(default_factory=common_pb2.Promise)
    base_digest: str = ""
    """Of the runner's base model. Empty: a scheduler of an earlier version does not say."""
    weight: int = 0
    """Of the tenant. 0: a scheduler of an earlier version does not say."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Send the prompt and the delivered tokens to the runner of this placement."""

    placement: RunnerPlacement


@dataclass(frozen=True, slots=True)
class CancelAtRunner:
    placement: RunnerPlacement
    why: str


@dataclass(frozen=True, slots=True)
class ReportLost:
    """Ask the scheduler to place it again."""

    epoch: int
    instance: str
    why: str


@dataclass(frozen=True, slots=True)
class ReportCancelled:
    """Tell the scheduler that a waiting choice is cancelled."""

    why: str


@dataclass(frozen=True, slots=True)
class ReportFinished:
    epoch: int
    reason: "common_pb2.FinishReason.ValueType"


@dataclass(slots=True)  # one per step: a frozen one takes three times as long to create
class Deliver:
    tokens: Sequence[int]
    logprobs: Sequence[runner_pb2.TokenLogprobs]


@dataclass(frozen=True, slots=True)
class DeliverScores:
    """Log probabilities of tokens of the prompt, in order: the first ones are those of its second token."""

    logprobs: Sequence[runner_pb2.TokenLogprobs]


@dataclass(frozen=True, slots=True)
class PromptFound:
    """Its runner had these many tokens of the prompt in its prefix cache."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Its runner has ended it and says where its time went."""

    split: common_pb2.TimeSplit


@dataclass(frozen=True, slots=True)
class FinishChoice:
    """The single end: why it ended, or its error."""

    how: EndReason | MotetError


@dataclass(frozen=True, slots=True)
class Dropped:
    """Count a message that was ignored."""

    why: str


Effect = (
    Submit
    | CancelAtRunner
    | ReportLost
    | ReportCancelled
    | ReportFinished
    | Deliver
    | DeliverScores
    | PromptFound
    | Measured
    | FinishChoice
    | Dropped
)

_NOTHING: tuple[Effect, ...] = ()
_STALE = (Dropped("stale epoch"),)
_DUPLICATE = (Dropped("duplicate index"),)
_GAP = "tokens are missing between two steps"
_GAP_IN_SCORES = "log probabilities of the prompt are missing between two steps"
_CANNOT_SCORE = (
    "the runner gives no log probabilities of prompts, as it is older than this gateway; leave this out, or try again "
    "when all runners have the same version"
)


class Generation:
    """The state of one choice. Every method returns what to do now; after the end, nothing."""

    __slots__ = (
        "alone",
        "avoid",
        "base",
        "delivered",
        "epoch",
        "losses",
        "phase",
        "placement",
        "scored",
        "scores_for",
        "to_score",
    )

    def __init__(self, *, base: str = "", to_score: int = 0, scores_for: Sequence[str] = ()) -> None:
        """`base`: the digest of the base model that the prompt was tokenised for; empty: not known. `to_score`: tokens
        of the prompt whose log probabilities are wanted, all of them or 0. `scores_for`: the fields that ask for
        them."""
        self.base = base
        self.phase = GenerationPhase.WAITING
        self.epoch = 0
        self.placement: RunnerPlacement | None = None
        self.delivered: list[int] = []
        self.to_score = to_score
        self.scores_for = scores_for
        self.scored = min(1, to_score)
        """Tokens of the prompt that are scored, from the first one on, which has no log probability."""
        self.avoid = ""
        """The instance that declined or lost it last."""
        self.alone = False
        """Whether its runner now computes only this sequence."""
        self.losses = LossCounter()

    def placed(self, placement: RunnerPlacement, *, engine_hung: bool = False) -> tuple[Effect, ...]:
        """The scheduler placed or moved it. On a move, the old runner is cancelled first (PU-17). `engine_hung`: the
        old engine hangs, which counts as the death of an engine."""
        if self.phase is GenerationPhase.ENDED:
            return (ReportFinished(placement.epoch, common_pb2.FINISH_REASON_CANCELLED),)
        if placement.epoch <= self.epoch:
            return _STALE
        old, alone = self.placement, self.alone
        self.phase, self.epoch, self.placement, self.alone = GenerationPhase.PLACED, placement.epoch, placement, False
        if old is not None and engine_hung and (last := self.losses.lost(Loss.ENGINE_HUNG, alone=alone)) is not None:
            return (CancelAtRunner(old, "its engine hangs"), *self._end(common_pb2.FINISH_REASON_FAILED, last))
        cancel = () if old is None else (CancelAtRunner(old, "moved"),)
        if self.base and placement.base_digest not in ("", self.base):
            return (*cancel, *self._lost("the runner has another base model"))
        return (*cancel, Submit(placement))

    def step(self, step: runner_pb2.SequenceStep) -> tuple[Effect, ...]:
        if step.epoch != self.epoch or self.phase is not GenerationPhase.PLACED:
            return _STALE
        if self.delivered and self.scored >= self.to_score:  # the frequent case
            return self._take(step)
        begins = not self.delivered and step.HasField("cached_tokens")
        news = self._step_with_scores(step) if self.scored < self.to_score else self._take(step)
        return (PromptFound(step.cached_tokens), *news) if begins else news

    def _step_with_scores(self, step: runner_pb2.SequenceStep) -> tuple[Effect, ...]:
        index, scores = step.prompt_index, step.prompt_logprobs
        if scores and index > self.scored:
            return self._lost(_GAP_IN_SCORES, cancel=True)
        news = scores[self.scored - index : self.to_score - index] if scores else []
        self.scored += len(news)
        if step.tokens and self.scored < self.to_score:
            error = UnsupportedParameter(f"{' and '.join(self.scores_for)}: {_CANNOT_SCORE}", param=self.scores_for[0])
            return (*self._leave("it gives no scores", common_pb2.FINISH_REASON_FAILED), FinishChoice(error))
        delivery: tuple[Effect, ...] = (DeliverScores(news),) if news else _NOTHING
        return (*delivery, *self._take(step))

    def _take(self, step: runner_pb2.SequenceStep) -> tuple[Effect, ...]:
        have = len(self.delivered)
        index = step.index
        tokens: Sequence[int] = list(step.tokens)  # a protobuf field is several times slower to read
        logprobs: Sequence[runner_pb2.TokenLogprobs] = step.logprobs
        reach = index + len(tokens)
        finish = step.finish
        if index > have or (reach < have and finish):
            return self._lost(_GAP, cancel=True)
        if index < have:
            if reach <= have and not finish:
                return _DUPLICATE
            tokens, logprobs = tokens[have - index :], logprobs[have - index :]
        if tokens:
            self.delivered.extend(tokens)
            if not finish:
                return (Deliver(tokens, logprobs),)
        delivery: tuple[Effect, ...] = (Deliver(tokens, logprobs),) if tokens else _NOTHING
        if not finish:
            return delivery
        measured: tuple[Effect, ...] = (Measured(step.split),) if step.HasField("split") else _NOTHING
        return (*delivery, *measured, *self._finish(finish, step))

    def _finish(self, finish: "common_pb2.FinishReason.ValueType", step: runner_pb2.SequenceStep) -> tuple[Effect, ...]:
        if finish == common_pb2.FINISH_REASON_STOP:
            return self._end(finish, EndReason.STOP)
        if finish == common_pb2.FINISH_REASON_LENGTH:
            return self._end(finish, EndReason.LENGTH)
        if finish == common_pb2.FINISH_REASON_CANCELLED:
            return self._lost("the runner cancelled it")
        if finish != common_pb2.FINISH_REASON_FAILED:
            # A newer runner may send it. The answer may be incomplete, so another runner goes on from here.
            return self._lost(f"the runner ended it for a reason ({finish}) that this gateway does not know")
        return self._failed(step.failure)

    def declined(self, epoch: int, failure: common_pb2.Failure) -> tuple[Effect, ...]:
        if epoch != self.epoch or self.phase is not GenerationPhase.PLACED:
            return _STALE
        error = from_proto(failure)
        if isinstance(error, AdapterFetchFailed | AdapterUnproved):
            return self._lost(error.message)  # the scheduler refuses it, unless another runner may have the adapter
        return self._failed(failure)

    def left(self, error: MotetError) -> tuple[Effect, ...]:
        """Its runner cannot do what it asks for, and may have begun."""
        placement = self.placement
        if placement is None or self.phase is not GenerationPhase.PLACED:
            return _NOTHING
        last = self.losses.ignored(error)
        more = self._lost(error.message) if last is None else self._end(common_pb2.FINISH_REASON_FAILED, last)
        return (CancelAtRunner(placement, error.message), *more)

    def is_placed_at(self, address: str) -> bool:
        return self.placement is not None and self.placement.address == address

    def _failed(self, failure: common_pb2.Failure) -> tuple[Effect, ...]:
        """Place it again after a failure, unless every other runner would fail in the same way."""
        error = from_proto(failure)
        error.message = error.message or failure.code or "The runner failed."
        last = error if isinstance(error, AdapterError | InvalidRequest) else self.losses.failed(error)
        return self._lost(error.message) if last is None else self._end(common_pb2.FINISH_REASON_FAILED, last)

    def unreachable(self, why: str) -> tuple[Effect, ...]:
        """The submission did not reach the runner."""
        return self._lost(why) if self.phase is GenerationPhase.PLACED else _NOTHING

    def runner_lost(self, why: str, loss: Loss = Loss.STREAM_BROKE) -> tuple[Effect, ...]:
        if self.phase is not GenerationPhase.PLACED:
            return _NOTHING
        last = self.losses.lost(loss, alone=self.alone)
        return self._lost(why) if last is None else self._end(common_pb2.FINISH_REASON_FAILED, last)

    def refused(self, epoch: int, error: MotetError) -> tuple[Effect, ...]:
        """The scheduler refuses to place or move it. `epoch` is the last placement that the scheduler knew. A refusal
        from before the current placement is stale."""
        if self.phase is GenerationPhase.ENDED or epoch < self.epoch:
            return _STALE
        placement = self.placement
        self.phase, self.placement = GenerationPhase.ENDED, None
        end = FinishChoice(error)
        return (end,) if placement is None else (CancelAtRunner(placement, "refused"), end)

    def stop(self) -> tuple[Effect, ...]:
        """A stop string is complete. Cancel the runner, which does not know stop strings."""
        if self.phase is GenerationPhase.ENDED:
            return _NOTHING
        return (*self._leave("stop string", common_pb2.FINISH_REASON_STOP), FinishChoice(EndReason.STOP))

    def cancel(self, why: str) -> tuple[Effect, ...]:
        """The client no longer wants it."""
        if self.phase is GenerationPhase.ENDED:
            return _NOTHING
        return self._leave(why, common_pb2.FINISH_REASON_CANCELLED)

    def _leave(self, why: str, reason: "common_pb2.FinishReason.ValueType") -> tuple[Effect, ...]:
        placement, phase = self.placement, self.phase
        self.phase, self.placement = GenerationPhase.ENDED, None
        if phase is GenerationPhase.WAITING or placement is None:
            return (ReportCancelled(why),)
        return (CancelAtRunner(placement, why), ReportFinished(self.epoch, reason))

    def _lost(self, why: str, *, cancel: bool = False) -> tuple[Effect, ...]:
        placement = self.placement
        assert placement is not None
        self.phase, self.placement, self.avoid = GenerationPhase.WAITING, None, placement.instance
        lost = ReportLost(self.epoch, placement.instance, why)
        return (CancelAtRunner(placement, why), lost) if cancel else (lost,)

    def _end(self, reason: "common_pb2.FinishReason.ValueType", how: EndReason | MotetError) -> tuple[Effect, ...]:
        self.phase, self.placement = GenerationPhase.ENDED, None
        return (ReportFinished(self.epoch, reason), FinishChoice(how))
