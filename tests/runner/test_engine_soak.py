"""An engine under random work keeps its memory, and every stream is the one that its request gets alone."""

import json
import subprocess
import sys
from typing import Any

import pytest

RSS_GROWTH_MIB = 20


def soak(seconds: int, **options: int) -> dict[str, Any]:
    """In a process of its own, so that its memory is only the engine's."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "tests.runner.engine_soak", f"--seconds={seconds}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps({**result, "wrong": len(result["wrong"])}))
    return result


def check(result: dict[str, Any]) -> None:
    assert result["wrong"] == []
    assert result["pages_not_free"] == 0
    assert {"length", "parked", "resumed", "loads"} <= result["happened"].keys()


def test_a_few_seconds_of_random_work() -> None:
    check(soak(4, seed=1, plan_ahead=1))


@pytest.mark.soak
@pytest.mark.parametrize("plan_ahead", [0, 1])
def test_ten_minutes_of_random_work(plan_ahead: int) -> None:
    result = soak(600, seed=plan_ahead, plan_ahead=plan_ahead)
    check(result)
    assert result["rss_growth_mib"] <= RSS_GROWTH_MIB
