"""The harness says what it measured, and nothing that it did not."""

import json
import time

import pytest

from benchmarks.harness import Pairs, Result, alternate, percentile, report, watching


async def test_sides_alternate_so_that_a_slowing_machine_meets_both_alike() -> None:
    order = ""

    async def a() -> float:
        nonlocal order
        order += "A"
        return 3.0

    async def b() -> float:
        nonlocal order
        order += "B"
        return 2.0

    pairs = await alternate(a, b, pairs=4, attempts=4)
    assert order == "ABBAABBA"
    assert len(pairs.a) + pairs.discarded == 4
    assert pairs.ratio == 1.5
    assert pairs.difference == 1.0


async def test_a_machine_that_is_never_quiet_gives_its_least_disturbed_pairs() -> None:
    async def one() -> float:
        return 1.0

    pairs = await alternate(one, one, pairs=2, quiet_share=-1.0)
    assert pairs.disturbed
    assert (len(pairs.a), pairs.discarded) == (2, 4)
    assert "never quiet" in str(pairs)


def test_our_own_work_is_not_foreign() -> None:
    with watching() as foreign:
        until = time.process_time() + 0.2
        while time.process_time() < until:
            pass
    assert 0 <= foreign.share <= 1


def test_the_spread_of_ratios_is_shown() -> None:
    pairs = Pairs([1, 2, 3, 4, 10], [1, 1, 1, 1, 1], [0.0] * 5)
    assert pairs.spread == (1, 10)
    assert percentile([5], 0.99) == 5


def test_the_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    report("demo", [Result("speed", 2.0, "µs", "≤ 3", True), Result("plain", 1.0, "s")], as_json=True)
    lines = capsys.readouterr().out.splitlines()
    last = json.loads(lines[-1])
    assert last["benchmark"] == "demo"
    assert last["machine"]["cores"] > 0
    assert last["results"][0] == {"name": "speed", "value": 2.0, "unit": "µs", "target": "≤ 3", "holds": True}
    assert last["results"][1]["holds"] is None
    assert "holds" in lines[0]
