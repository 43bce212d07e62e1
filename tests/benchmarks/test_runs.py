"""The benchmarks come to their end: each once, as short as can be. What they find is not looked at."""

import json
import subprocess
import sys

import pytest

from benchmarks.harness import MISSED
from testbed.tree import ROOT

ENGINE = """--requests=2 --prompt=8 --output=4 --layers=1 --width=64 --vocabulary=128 --kv-mib=8 --adapters=2 --ragged=4
--lengths 4 16 --ragged-pairs=1 --long-prompt=64"""
ADAPTERS = """--registered=20 --requests=2 --output=4 --prompt=8 --layers=1 --width=64 --adapters=40 --slots=20
--churn=8 --churn-requests=8 --churn-adapters=20 --first-tokens=8 --seconds=1 --neighbour-tokens=40 --hostile=2
--herd=20 --herd-tokens=2 --dora-requests 2 --dora-output=2"""
SERVED = "--requests=2 --prompt=8 --output=4 --layers=1 --width=64 --vocabulary=128 --kv-mib=8 --adapters=2"


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("engine", f"{ENGINE} --cases kept"),
        ("gateway", "--requests=32"),
        ("runner_stream", "--seconds=0.1"),
        ("scheduler", "--decisions=20 --scans=5 --many-runners=20 --many-queued=500"),
        *(
            pytest.param(*one, marks=pytest.mark.soak)
            for one in (
                ("adapters", ADAPTERS),
                ("attention", "--calls=1 --turns=1 --rotated=1"),
                ("engine", ENGINE),
                ("gemm", "--rows=1 --bytes=1000"),
                ("host", "--steps=2"),
                ("http_protocol", "--requests=10 --tokens=10"),
                ("masks", "--steps=2"),
                ("lora_op", "--calls=2 --turns=1 --width=64 --rotated=1"),
                ("prediction", "--only times --calls=3"),
                ("prefix", "--shared=64 --sequences=4 --tokens=8 --width=128 --layers=2"),
                ("sampling", "--vocabulary=3000 --layers=1 --width=64"),
                ("served", SERVED),
            )
        ),
    ],
)
def test_a_benchmark_prints_its_figure_and_its_baseline(name: str, how: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", "--pairs=1", *how.split()]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode in (0, MISSED)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["benchmark"] == name
    assert (done.returncode == MISSED) == any(result["holds"] is False for result in said["results"])
    assert any(result.get("against", {}).get("baseline") for result in said["results"])
