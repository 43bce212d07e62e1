"""The lifecycle of one choice with all failures, without a network."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.api.v1 import common_pb2, runner_pb2
from motet.errors import AdapterIncompatible, NoRunner, NotFinite, RequestKillsEngines, StructuredOutputUnavailable
from motet_gateway.generation import (
    CancelAtRunner,
    Deliver,
    Dropped,
    EndReason,
    FinishChoice,
    Generation,
    GenerationPhase,
    PromptFound,
    ReportCancelled,
    ReportFinished,
    ReportLost,
    RunnerPlacement,
    Submit,
)
from motet_gateway.loss_limits import MAX_LOSSES, Loss

ANSWER = [10, 11, 12, 13, 14, 15, 16, 17]


def place(epoch: int, instance: str = "a", base: str = "") -> RunnerPlacement:
    return RunnerPlacement(epoch, instance, f"{instance}-1", f"unix:/{instance}", term=1, base_digest=base)


def step(epoch: int, index: int, tokens: Sequence[int], finish: int = 0) -> runner_pb2.SequenceStep:
    return runner_pb2.SequenceStep(request="r", epoch=epoch, index=index, tokens=tokens, finish=finish)


def placed_once() -> Generation:
    generation = Generation()
    generation.placed(place(1))
    return generation


def kinds(effects: Sequence[object]) -> list[type]:
    return [type(effect) for effect in effects]


def test_a_placement_is_submitted_once() -> None:
    generation = Generation()
    assert kinds(generation.placed(place(1))) == [Submit]
    assert kinds(generation.placed(place(1))) == [Dropped]


def test_a_higher_epoch_moves_it_and_stops_the_old_runner_first() -> None:
    generation = placed_once()
    assert kinds(generation.placed(place(2, "b"))) == [CancelAtRunner, Submit]
    assert kinds(generation.step(step(1, 0, [10]))) == [Dropped]
    assert kinds(generation.step(step(2, 0, [10]))) == [Deliver]


def test_a_placement_on_another_base_model_is_not_submitted() -> None:
    generation = Generation(base="sha256:old")
    assert kinds(generation.placed(place(1, base="sha256:old"))) == [Submit]
    cancelled, lost = generation.placed(place(2, "b", base="sha256:new"))
    assert isinstance(cancelled, CancelAtRunner)
    assert cancelled.placement.instance == "a"
    assert lost == ReportLost(2, "b", "the runner has another base model")
    assert generation.avoid == "b"
    assert kinds(generation.placed(place(3, "c"))) == [Submit], "an older scheduler does not say"


def test_tokens_that_came_before_are_not_delivered_again() -> None:
    generation = placed_once()
    generation.step(step(1, 0, [10, 11]))
    assert kinds(generation.step(step(1, 0, [10, 11]))) == [Dropped]
    (delivery,) = generation.step(step(1, 1, [11, 12]))
    assert isinstance(delivery, Deliver)
    assert list(delivery.tokens) == [12]


def test_a_gap_counts_as_a_loss_and_stops_the_runner() -> None:
    generation = placed_once()
    assert kinds(generation.step(step(1, 3, [13]))) == [CancelAtRunner, ReportLost]
    assert generation.phase is GenerationPhase.WAITING


def test_the_end_comes_with_the_last_tokens() -> None:
    generation = placed_once()
    effects = generation.step(step(1, 0, [10], common_pb2.FINISH_REASON_LENGTH))
    assert kinds(effects) == [Deliver, ReportFinished, FinishChoice]
    assert effects[-1] == FinishChoice(EndReason.LENGTH)
    assert kinds(generation.step(step(1, 1, [11]))) == [Dropped]


def test_a_declined_request_is_placed_again_unless_its_adapter_failed() -> None:
    generation = placed_once()
    lost = generation.declined(1, NoRunner("not here").to_proto())
    assert kinds(lost) == [ReportLost]
    assert generation.avoid == "a"
    generation.placed(place(2, "b"))
    ended = generation.declined(2, AdapterIncompatible("wrong base").to_proto())
    assert kinds(ended) == [ReportFinished, FinishChoice]


def test_a_runner_that_would_ignore_a_part_is_left_and_a_second_one_ends_the_request() -> None:
    """The scheduler does not know which others would: without an end, it could go round for ever."""
    generation, unknown = placed_once(), StructuredOutputUnavailable("do not know ebnf")
    assert kinds(generation.left(unknown)) == [CancelAtRunner, ReportLost]
    assert generation.left(unknown) == ()
    generation.placed(place(2, "b"))
    assert kinds(generation.left(unknown)) == [CancelAtRunner, ReportFinished, FinishChoice]


def test_a_cancel_goes_to_the_scheduler_from_the_queue_and_to_the_runner_from_a_runner() -> None:
    assert kinds(Generation().cancel("gone")) == [ReportCancelled]
    assert kinds(placed_once().cancel("gone")) == [CancelAtRunner, ReportFinished]
    assert kinds(placed_once().stop()) == [CancelAtRunner, ReportFinished, FinishChoice]


def test_a_refusal_ends_a_waiting_request_and_one_that_should_move() -> None:
    assert kinds(Generation().refused(0, NoRunner("none"))) == [FinishChoice]
    assert kinds(placed_once().refused(1, NoRunner("none"))) == [CancelAtRunner, FinishChoice]
    assert kinds(placed_once().refused(2, NoRunner("none"))) == [CancelAtRunner, FinishChoice]


def test_a_refusal_from_before_the_last_placement_changes_nothing() -> None:
    running = placed_once()
    assert kinds(running.refused(0, NoRunner("none"))) == [Dropped]
    running.runner_lost("broken")
    assert kinds(running.refused(0, NoRunner("none"))) == [Dropped]
    assert kinds(running.refused(1, NoRunner("none"))) == [FinishChoice]
    assert kinds(running.refused(1, NoRunner("none"))) == [Dropped]


def test_losing_the_runner_of_an_ended_choice_changes_nothing() -> None:
    generation = placed_once()
    generation.cancel("gone")
    assert generation.runner_lost("broken") == ()
    assert generation.cancel("gone") == ()


events = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(-1, 1), st.integers(0, 8), st.integers(0, 4)),
        st.tuples(st.just("place"), st.integers(-1, 2)),
        st.tuples(st.just("lose")),
        st.tuples(st.just("decline"), st.integers(-1, 1)),
        st.tuples(st.just("progress"), st.integers(1, 4)),
    ),
    max_size=60,
)


@settings(max_examples=100)
@given(events)
def test_every_index_is_delivered_once_in_order_and_then_there_is_one_end(script: list[tuple]) -> None:
    generation = Generation()
    delivered: list[int] = []
    ends = 0

    def see(effects: Sequence[object]) -> None:
        nonlocal ends
        for effect in effects:
            # If the scheduler places it nevertheless, the gateway says that it ended, and sends nothing else.
            assert not ends or isinstance(effect, Dropped | ReportFinished)
            if isinstance(effect, Deliver):
                delivered.extend(effect.tokens)
            ends += isinstance(effect, FinishChoice)
        assert delivered == ANSWER[: len(delivered)]
        assert generation.delivered == delivered

    def say(epoch: int, index: int, count: int) -> None:
        tokens = ANSWER[index : index + count]
        finish = common_pb2.FINISH_REASON_STOP if index + len(tokens) >= len(ANSWER) else 0
        see(generation.step(step(epoch, index, tokens, finish)))

    for event in script:
        epoch = generation.epoch
        match event:
            case ("step", drift, index, count):
                say(max(epoch + drift, 0), index, count)
            case ("place", drift):
                see(generation.placed(place(max(epoch + drift, 0))))
            case ("lose",):
                see(generation.runner_lost("broken"))
            case ("decline", drift):
                see(generation.declined(max(epoch + drift, 0), NoRunner("no").to_proto()))
            case ("progress", count):
                say(epoch, len(delivered), count)
    # After any events, a runner that behaves well finishes it.
    if generation.phase is not GenerationPhase.ENDED:
        see(generation.placed(place(generation.epoch + 1)))
        while generation.phase is not GenerationPhase.ENDED:
            say(generation.epoch, len(delivered), 3)
    assert delivered == ANSWER or script.count(("lose",)) > MAX_LOSSES
    assert ends == 1


@pytest.mark.parametrize("finish", [common_pb2.FINISH_REASON_CANCELLED, common_pb2.FINISH_REASON_FAILED, 77])
def test_a_request_leaves_a_runner_that_gives_it_up(finish: int) -> None:
    generation = placed_once()
    assert kinds(generation.step(step(1, 0, [], finish))) == [ReportLost]


def test_a_second_numerical_failure_ends_the_request_with_its_error() -> None:
    generation = placed_once()
    failed = step(1, 0, [], common_pb2.FINISH_REASON_FAILED)
    failed.failure.CopyFrom(NotFinite("infinite").to_proto())
    assert kinds(generation.step(failed)) == [ReportLost]
    generation.placed(place(2, "b"))
    failed.epoch = 2
    report, end = generation.step(failed)
    assert kinds([report, end]) == [ReportFinished, FinishChoice]
    assert isinstance(end, FinishChoice)
    assert isinstance(end.how, NotFinite)


def test_a_move_away_from_a_hanging_engine_counts_as_its_death() -> None:
    generation = placed_once()
    assert kinds(generation.placed(place(2, "b"))) == [CancelAtRunner, Submit]
    assert generation.losses.engines_lost == 0  # for example by a drain
    assert kinds(generation.placed(place(3, "c"), engine_hung=True)) == [CancelAtRunner, Submit]
    assert generation.losses.engines_lost == 1
    generation.alone = True
    cancel, finished, end = generation.placed(place(4, "d"), engine_hung=True)
    assert cancel == CancelAtRunner(place(3, "c"), "its engine hangs")
    assert finished == ReportFinished(4, common_pb2.FINISH_REASON_FAILED)
    assert isinstance(end, FinishChoice)
    assert isinstance(end.how, RequestKillsEngines)
    assert generation.phase is GenerationPhase.ENDED


def test_an_engine_death_with_one_request_alone_ends_that_request() -> None:
    generation = placed_once()
    assert kinds(generation.runner_lost("died", Loss.ENGINE_DIED)) == [ReportLost]
    generation.placed(place(2, "b"))
    generation.alone = True
    generation.placed(place(3, "c"))
    assert kinds(generation.runner_lost("died", Loss.ENGINE_DIED)) == [ReportLost]
    generation.placed(place(4, "d"))
    generation.alone = True
    assert kinds(generation.runner_lost("died", Loss.ENGINE_DIED)) == [ReportFinished, FinishChoice]


def test_the_runner_of_the_first_token_says_what_it_found_of_the_prompt() -> None:
    generation = placed_once()
    first = step(1, 0, [10])
    first.cached_tokens = 48
    assert generation.step(first)[0] == PromptFound(48)
    generation.placed(place(2, "b"))
    resumed = step(2, 1, [11])
    resumed.cached_tokens = 64
    assert kinds(generation.step(resumed)) == [Deliver]
