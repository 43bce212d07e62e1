"""Too little memory for all promises: sequences reach the end of theirs, and are extended, or parked and resumed."""

import asyncio
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from testbed.local_stack import LocalStack, running_stack
from tests.runner.random_models import EIGHT, llama
from tests.stack.served_models import (
    ServedModel,
    StreamedAnswer,
    add_pool,
    assert_right,
    prompt_of,
    stream_without_library,
)

pytestmark = [
    pytest.mark.stack,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

STREAMS = 16
TOKENS = 500
QUARTER_MIB = 2  # 16 streams of up to 545 tokens at 768 bytes a token need more than 6


@dataclass
class Deployed:
    stack: LocalStack
    base: Path
    served_models: list[ServedModel]
    trace: Path

    def lines(self) -> list[dict[str, object]]:
        """Of all iterations; there is no file before the first one."""
        return [json.loads(line) for line in self.trace.read_text().splitlines()] if self.trace.exists() else []


def counter_by_method(stack: LocalStack, metric: str) -> dict[str, float]:
    """A counter of the runner by its label `method`, from the gateway's /metrics."""
    with stack.http() as client:
        families = list(text_string_to_metric_families(client.get("/metrics").text))
    return {
        sample.labels["method"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == metric
    }


def parks_and_resumes(stack: LocalStack) -> tuple[dict[str, float], dict[str, float]]:
    return counter_by_method(stack, "motet_parks_total"), counter_by_method(stack, "motet_resumes_total")


def assert_parts_add_up(stack: LocalStack, *, parks: float) -> None:
    """The parts of all requests' time are their whole time (S3-20): the runner measured most of them, and another
    process the whole."""
    (figures,) = json.loads(stack.motet("status", "--json").stdout)["answers"]
    with stack.http() as client:
        families = text_string_to_metric_families(client.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
    (whole,) = (one.value for one in samples if one.name == "motet_request_duration_seconds_sum")
    parts = figures["seconds"]
    print(f"{whole} s, parts {parts}")
    assert sum(parts.values()) == pytest.approx(whole, rel=0.01)
    assert min(parts.values()) > 0
    assert figures["parks"] == parks


async def long_streams(deployed: Deployed) -> list[StreamedAnswer]:
    return await asyncio.gather(
        *(
            stream_without_library(
                deployed.stack.url,
                deployed.served_models[index % len(deployed.served_models)],
                prompt_of(index, spread=40),
                TOKENS,
            )
            for index in range(STREAMS)
        )
    )


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("quarter")
    engine = {"kvCacheMiB": QUARTER_MIB, "maxConcurrentSequences": 32}
    base, served_models = add_pool(
        folder / "manifests", "llama", engine=engine, specs=EIGHT[:3], config=llama(context=2048)
    )
    trace = folder / "trace.jsonl"
    # With torch's kernels this model's tokens take longer to compute again than to copy, so the host's memory is used
    # first. It does not hold all that are parked.
    env = {
        "MOTET_STEP_TRACE": str(trace),
        "MOTET_RUNNER_KERNELS": "torch",
        "MOTET_RUNNER_HOST_KV_MIB": "1",
        "MOTET_SCHEDULER_FORCE_PROMISE_PAGES": "1",  # as if all answers had been short before
    }
    with running_stack(folder, manifests=folder / "manifests", env=env) as stack:
        yield Deployed(stack, base, served_models, trace)


async def test_16_long_streams_are_right_with_parks_of_both_methods(deployed: Deployed) -> None:
    before = parks_and_resumes(deployed.stack)
    answers = await long_streams(deployed)
    assert all(len(answer.tokens) == TOKENS and answer.reasons == ["length"] for answer in answers)
    assert_right(deployed.base, answers)
    parks, resumes = parks_and_resumes(deployed.stack)
    print(f"parks {parks}, resumes {resumes}")
    assert_parts_add_up(deployed.stack, parks=sum(parks.values()))
    for method in ("swap", "recompute"):
        assert parks[method] > before[0].get(method, 0)
        assert resumes[method] > before[1].get(method, 0)


def test_the_length_header_names_the_source_of_the_estimate(deployed: Deployed) -> None:
    def source() -> str:
        body = {"model": deployed.served_models[1].model, "prompt": [5, 6, 7], "max_tokens": 50, "stop": ["w"]}
        with deployed.stack.http() as client:
            answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.headers["x-motet-length"])

    for _ in range(20):
        source()
    deployed.stack.until(lambda: source().startswith("model:"))
    stopped = deployed.stack.kill("predictor", signal.SIGSTOP)
    deployed.stack.until(lambda: source() == "tenant")
    deployed.stack.kill("predictor", signal.SIGKILL)
    deployed.stack.until(lambda: source().startswith("model:"))
    assert deployed.stack.service("predictor")["pid"] != stopped


async def test_a_promise_doubles_each_time_its_end_is_reached(deployed: Deployed) -> None:
    before = len(deployed.lines())
    answer = await stream_without_library(
        deployed.stack.url, deployed.served_models[0], prompt_of(1, shortest=6, spread=1), 100
    )
    assert_right(deployed.base, [answer])
    promises = [pages for line in deployed.lines()[before:] for pages in line.get("promises", {}).values()]  # type: ignore[attr-defined]
    # 106 tokens fit in seven pages: the last doubling is limited by the longest possible answer.
    assert promises == [1, 2, 4, 7]
