"""What happened to a choice. It is kept until its end, for whoever asked. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from motet.api.v1 import common_pb2, runner_pb2, scheduler_pb2
from motet.errors import MotetError
from motet.time_split import PartSeconds, TimePart, TimeSplit
from motet.timeline import Timeline
from motet_gateway.generation import EndReason
from motet_gateway.noted import Noted

_NOTED = {
    common_pb2.SEQUENCE_STATE_WAITING: Noted.AT_RUNNER,
    common_pb2.SEQUENCE_STATE_LOADING: Noted.LOADS,
    common_pb2.SEQUENCE_STATE_PREFILL: Noted.READS,
    common_pb2.SEQUENCE_STATE_DECODE: Noted.WRITES,
    common_pb2.SEQUENCE_STATE_PARKED: Noted.PARKED,
}
_WITHOUT_NUMBERS = str.maketrans("", "", "0123456789")


@dataclass(slots=True)
class ChoiceRecord:
    split: TimeSplit
    promised_tokens: int = 0
    """When it was first placed: of prompt and answer. 0: it was not placed."""
    parks: int = 0
    cached_tokens: int | None = None
    """Of the prompt: those that the runner of its first token had in its prefix cache. None: no runner has said it."""
    timeline: Timeline = field(default_factory=Timeline)
    accounts: Sequence[scheduler_pb2.AccountLevel] = ()
    """That it draws from, as the scheduler said when it placed it."""
    _state: int = 0
    """Of the sequence, as its runner said last."""
    _waits_for: str = ""
    """As the scheduler said last."""

    def waits(self, position: int, why: str, now: float) -> None:
        """The scheduler says why. What differs only in numbers is no news: they change often."""
        if self._waits_for != (kind := why.translate(_WITHOUT_NUMBERS)):
            self._waits_for = kind
            self.timeline.note(now, Noted.TOLD, position, why or "its turn has not come")

    def without_scheduler(self, now: float) -> None:
        """What the next one says is news, also if the one before said the same."""
        self._waits_for = ""
        self.timeline.note(now, Noted.NO_SCHEDULER)

    def placed(self, placed: scheduler_pb2.Placed, moved: str, now: float) -> None:
        """`moved`: why it leaves another runner for this one."""
        self.accounts, self._waits_for, self._state = placed.accounts, "", 0
        if moved:
            self.timeline.note(now, Noted.MOVED, placed.instance, placed.epoch, moved)
        else:
            self.timeline.note(now, Noted.PLACED, placed.instance, placed.epoch)

    def progressed(self, progress: runner_pb2.SequenceProgress, adapter: str, now: float) -> None:
        """Its runner says what it does with it."""
        if progress.state != self._state:
            self._state = progress.state
            if (kind := _NOTED.get(progress.state)) is not None:
                self.timeline.note(now, kind, adapter)
        split = self.split
        if progress.HasField("split"):
            self.measured(progress.split, now)
        match progress.state:
            case common_pb2.SEQUENCE_STATE_PREFILL:
                split.enter(TimePart.GENERATION, now)
            case common_pb2.SEQUENCE_STATE_DECODE:
                split.got_token(now)
            case common_pb2.SEQUENCE_STATE_PARKED:
                split.enter(TimePart.PENALTY, now)
                self.parks += 1
            case _:
                split.enter(TimePart.QUEUE, now)

    def measured(self, split: common_pb2.TimeSplit, now: float) -> None:
        """By its runner."""
        seconds = PartSeconds(split.queue_seconds, split.generation_seconds, split.penalty_seconds)
        self.split.told(seconds, now)

    def ended(self, how: EndReason | MotetError, tokens: int, now: float) -> None:
        if isinstance(how, MotetError):
            self.timeline.note(now, Noted.FAILED, how.code, how.message)
        else:
            self.timeline.note(now, Noted.FINISHED, tokens, how)
