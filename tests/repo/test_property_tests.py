"""Property tests try new examples in every run, on the build server as elsewhere, and do not forget what failed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from testbed.tree import ROOT

SCRIPT = """
import contextlib, json
import tests.conftest
from hypothesis import given, strategies

tried = []

@given(strategies.integers())
def always_holds(number):
    tried.append(number)

@given(strategies.integers())
def fails_from_1000_on(number):
    tried.append(number)
    assert number < 1000

always_holds()
found, tried = tried, []
with contextlib.suppress(AssertionError):
    fails_from_1000_on()
print(json.dumps({"found": found, "first": tried[0]}))
"""


def run(cache: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={**os.environ, "CI": "true", "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


def test_under_ci_new_examples_are_tried_and_what_failed_is_tried_first(tmp_path: Path) -> None:
    one, other = run(tmp_path), run(tmp_path)
    assert one["found"] != other["found"]
    assert other["first"] == 1000, "what failed last time"
