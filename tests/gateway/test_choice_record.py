"""What a choice's timeline says of its states, and how long each of them lasts."""

from typing import Any

from motet.api.v1 import common_pb2, runner_pb2, scheduler_pb2
from motet.clock import FakeClock
from motet.time_split import TimePart, TimeSplit
from motet_gateway.answers.timings import RequestTimings
from motet_gateway.choice_record import ChoiceRecord
from motet_gateway.explanations import document
from motet_gateway.generation import EndReason
from motet_gateway.histories import ChoiceHistory, History

FULL = "every batch is full"


class Recorded:
    """One choice, on a clock of its own."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.clock.advance(100.0)
        self.history = History("a" * 24, "", "acme", "", "tiny", RequestTimings(self.clock))
        self.record = ChoiceRecord(TimeSplit(TimePart.QUEUE, self.clock()))
        self.history.choices.append(ChoiceHistory("a" * 24, 3, 400, common_pb2.Estimate(), self.record))

    def placed(self, runner: str, moved: str = "") -> None:
        self.record.placed(scheduler_pb2.Placed(instance=runner, epoch=1), moved, self.clock())

    def state(self, state: common_pb2.SequenceState.ValueType) -> None:
        self.record.progressed(runner_pb2.SequenceProgress(state=state), "", self.clock())

    def lines(self) -> list[dict[str, Any]]:
        found = document(self.history, self.history.choices, {}, "", self.clock())
        lines: list[dict[str, Any]] = found["choices"][0]["timeline"]
        return lines


def test_reading_the_prompt_lasts_until_the_answer_is_written() -> None:
    one = Recorded()
    one.placed("r0")
    one.state(common_pb2.SEQUENCE_STATE_PREFILL)
    one.clock.advance(0.25)
    one.state(common_pb2.SEQUENCE_STATE_DECODE)
    one.clock.advance(20.0)
    one.record.ended(EndReason.STOP, 400, one.clock())
    _, reads, writes, _ = one.lines()
    assert (reads["detail"], reads["lasted"]) == ("the runner reads the prompt", 0.25)
    assert (writes["detail"], writes["lasted"]) == ("the runner writes the answer", 20.0)


def test_the_next_runner_says_its_state_though_it_is_the_same() -> None:
    one = Recorded()
    for runner, moved in (("r0", ""), ("r1", "r0 is drained")):
        one.placed(runner, moved)
        one.state(common_pb2.SEQUENCE_STATE_WAITING)
    assert [line["event"] for line in one.lines()] == ["placed", "waits", "moved", "waits"]


def test_no_scheduler_answers_only_until_the_next_one_gives_a_reason() -> None:
    one = Recorded()
    one.record.waits(3, FULL, one.clock())
    one.clock.advance(5.0)
    one.record.without_scheduler(one.clock())
    one.clock.advance(1.0)
    one.record.waits(4, FULL, one.clock())  # as the scheduler before
    one.clock.advance(60.0)
    one.record.waits(1, FULL, one.clock())
    waits = [(line["detail"], line["lasted"]) for line in one.lines()]
    assert waits == [
        (f"{FULL} (number 3)", 5.0),
        ("the scheduler does not answer", 1.0),
        (f"{FULL} (number 4)", 60.0),
    ]
