"""How often a request is placed again, by the cause of the loss."""

import pytest

from motet.errors import (
    Declined,
    EngineRestarted,
    Internal,
    MotetError,
    NoRunner,
    NotFinite,
    Overloaded,
    StructuredOutputUnavailable,
)
from motet_gateway.loss_limits import MAX_LOSSES, Loss, LossCounter


@pytest.mark.parametrize(
    "error", [Declined("full"), StructuredOutputUnavailable("on a GPU"), Overloaded("paused often"), NoRunner("away")]
)
def test_declines_and_missing_runners_do_not_count_against_the_request(error: MotetError) -> None:
    losses = LossCounter()
    assert all(losses.failed(error) is None for _ in range(1000))
    assert losses.engines_lost == 0


@pytest.mark.parametrize("error", [NotFinite("infinite"), Internal("a defect")])
def test_a_failure_that_the_request_may_cause_is_tried_on_one_other_runner(error: MotetError) -> None:
    losses = LossCounter()
    assert losses.failed(error) is None
    assert losses.failed(error) is error


def test_an_engines_death_makes_suspects_and_a_second_death_alone_ends_the_request() -> None:
    guilty, innocent = LossCounter(), LossCounter()
    assert guilty.lost(Loss.ENGINE_DIED, alone=False) is None
    assert innocent.lost(Loss.ENGINE_DIED, alone=False) is None
    assert (guilty.engines_lost, innocent.engines_lost) == (1, 1)
    assert innocent.lost(Loss.ENGINE_DIED, alone=False) is None
    end = guilty.lost(Loss.ENGINE_DIED, alone=True)
    assert end is not None
    assert (end.code, end.retry_after) == ("request_kills_engines", 0)
    assert "2 engines" in end.message


def test_one_broken_stream_does_not_count_against_a_request_but_a_second_one_does() -> None:
    losses = LossCounter()
    losses.lost(Loss.STREAM_BROKE, alone=False)
    assert losses.engines_lost == 0
    losses.lost(Loss.STREAM_BROKE, alone=False)
    assert losses.engines_lost == 1


@pytest.mark.parametrize("loss", list(Loss))
def test_the_number_of_placements_is_limited(loss: Loss) -> None:
    losses = LossCounter()
    ends = [losses.lost(loss, alone=False) for _ in range(MAX_LOSSES + 1)]
    assert ends[:-1] == [None] * MAX_LOSSES
    assert isinstance(ends[-1], EngineRestarted)
