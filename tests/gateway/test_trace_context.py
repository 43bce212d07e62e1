"""`traceparent`: what fits W3C's form reaches the runner and the log lines about the request, and nothing else does."""

import asyncio

from structlog.testing import capture_logs

from motet.trace_context import traceparent_of
from tests.gateway.conftest import Served, eventually
from tests.support.for_each import for_each

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{PARENT}-01"
BODY = {"model": "tiny", "prompt": "Hello there", "max_tokens": 4}


async def at_runner(served: Served, *headers: str) -> str:
    """What a runner gets of a request with these headers `traceparent`."""
    answer = await served.http.post("/v1/completions", json=BODY, headers=[("traceparent", one) for one in headers])
    assert answer.status_code == 200, answer.text
    return served.cluster.runners[0].submits[-1].traceparent


async def test_a_trace_reaches_the_runner_and_what_is_said_of_the_request(served: Served) -> None:
    assert await at_runner(served, GOOD) == GOOD
    found = await served.http.post("/v1/completions", json=BODY, headers={"traceparent": GOOD})
    name = found.headers["x-motet-request"]
    assert (await served.http.get(f"/motet/requests/{name}")).json()["trace"] == TRACE
    plain = await served.http.post("/v1/completions", json=BODY)
    assert (await served.http.get(f"/motet/requests/{plain.headers['x-motet-request']}")).json()["trace"] is None


@for_each(
    "headers",
    [
        (),
        ("",),
        ("x" * 4000,),
        (GOOD.upper(),),
        (f"{GOOD}-more",),
        (f"{GOOD}x",),
        (GOOD, GOOD),
        (f"ff-{TRACE}-{PARENT}-01",),
        (f"00-{'0' * 32}-{PARENT}-01",),
        (f"00-{TRACE}-{'0' * 16}-01",),
        (f"00-{TRACE[1:]}-{PARENT}-01",),
        (f"01-{TRACE}-{PARENT}-01more",),
    ],
)
async def test_what_does_not_fit_the_form_is_ignored(served: Served, headers: tuple[str, ...]) -> None:
    assert await at_runner(served, *headers) == ""


def test_of_a_later_version_what_this_one_knows_counts() -> None:
    assert traceparent_of([f"01-{TRACE}-{PARENT}-ff-more"]) == f"00-{TRACE}-{PARENT}-03"
    assert traceparent_of([f"00-{TRACE}-{PARENT}-00"]) == f"00-{TRACE}-{PARENT}-00"


async def test_log_lines_name_the_trace(served: Served) -> None:
    served.cluster.runners[0].step_seconds = 0.01
    with capture_logs() as logs:
        asking = asyncio.create_task(
            served.http.post("/v1/completions", json={**BODY, "max_tokens": 40}, headers={"traceparent": GOOD})
        )
        await eventually(
            lambda: any(choice.generation.delivered for choice in served.gateway.dispatcher.choices.values())
        )
        await served.cluster.runners[0].restart()
        await asking
    lost = [line["trace"] for line in logs if line["event"] == "request_lost"]
    assert set(lost) == {TRACE}, "on a busy machine it is lost again before the runner is back"
