"""`benchmarks.host` measures what is left of a step without the model call."""

import time

import pytest
import torch

from benchmarks.model_time import ModelTime


class Sleeps(torch.nn.Module):
    def forward(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds


def test_the_time_of_all_calls_of_the_model_is_counted() -> None:
    model = Sleeps()
    timed = ModelTime()
    timed.watch_module(model)
    fused = timed.timed(time.sleep)  # type: ignore[arg-type]
    model(0.02)
    time.sleep(0.05)
    fused(0.03)  # type: ignore[arg-type]
    assert sum(timed.calls) == pytest.approx(0.05, abs=0.02)
