"""The log says how each resumed request spent its pause."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from motet_gateway.pauses import Pause, PausePart
from motet_simulator.fake_engine import SlowEngines
from tests.support.in_process_runner import short_folder
from tests.support.in_process_services import until
from tests.support.in_process_system import in_process_system
from tests.support.real_dispatcher import ask, dispatcher_of

PROMPT = (1, 2, 3)


@given(st.lists(st.tuples(st.sampled_from(PausePart), st.floats(0, 10))), st.floats(0, 10))
def test_the_stages_add_up_to_the_pause(entered: list[tuple[PausePart, float]], last: float) -> None:
    now = 1000.0
    pause = Pause(now)
    for part, seconds in entered:
        now += seconds
        pause.enter(part, now)
    said = pause.end(now + last)
    assert said.pop("seconds") == pytest.approx(now + last - 1000.0, abs=1e-3)
    assert sum(said.values()) == pytest.approx(now + last - 1000.0, abs=1e-2)


def test_a_part_that_is_entered_again_goes_on() -> None:
    pause = Pause(1.0)
    for at, part in [
        (2.0, PausePart.QUEUE),
        (2.5, PausePart.RUNNER),
        (3.0, PausePart.QUEUE),
        (5.0, PausePart.RECOMPUTE),
    ]:
        pause.enter(part, at)
    assert pause.end(5.25) == {
        "seconds": 4.25,
        "notice_seconds": 1.0,
        "queue_seconds": 2.5,
        "runner_seconds": 0.5,
        "adapter_seconds": 0.0,
        "recompute_seconds": 0.25,
    }


async def test_a_request_that_lost_its_runner_says_how_long_it_waited_for_what() -> None:
    with capture_logs() as logs, short_folder() as folder:
        await resume_elsewhere(folder, away=0.2)
    lost = next(line for line in logs if line["event"] == "request_lost")
    (resumed,) = (line for line in logs if line["event"] == "request_resumed")
    assert resumed["request"] == lost["request"]
    assert resumed["epoch"] == lost["epoch"] + 1
    assert resumed["instance"] == "r1"
    assert resumed["tokens"] > len(PROMPT)
    assert resumed["queue_seconds"] >= 0.2, "the second runner came so much later"
    assert resumed["seconds"] == pytest.approx(sum(resumed[f"{part}_seconds"] for part in PausePart), abs=1e-2), (
        "nothing is left out"
    )


async def resume_elsewhere(folder: Path, *, away: float) -> None:
    async with in_process_system(folder) as system, dispatcher_of(system) as dispatcher:
        await system.runner("r0", first := SlowEngines())
        client = ask(dispatcher, "a", PROMPT, max_tokens=60)
        await until(lambda: client.tokens)
        await system.runners["r0"].stop()
        await asyncio.sleep(away)
        await system.runner("r1", second := SlowEngines())
        for engines in (first, second):
            engines.hurry()
        await client.over()
