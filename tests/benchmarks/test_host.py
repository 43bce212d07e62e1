"""`benchmarks.host` measures what is left of a step without the model call."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.harness import MISSED
from benchmarks.model_time import ModelTime
from tests.repo.tree import ROOT


@pytest.mark.soak
def test_it_says_the_hosts_share_and_the_same_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.host", "--json", f"--scratch={tmp_path}", "--pairs=1", "--steps=2"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode in (0, MISSED)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["benchmark"] == "host"
    figures = {result["name"]: result for result in said["results"]}
    assert figures["host_share_32"]["target"] == "<= 0.1"
    assert figures["host_share_32"]["against"]["baseline"] == "the same again"
    assert figures["host_share_32_sampled"]["against"]["baseline"] == "greedy"
    assert all(0 < result["value"] < 1 for result in said["results"])


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
