"""Eight streams of 1,000 tokens while processes are killed: each token is right, none comes twice, and no stream waits.

Each kill comes while every stream is between its 8th and its 400th token. `make soak` tries more moments. The process
that would restart the killed one is stopped until all streams have continued, so waiting for a restart would not help.

In exact mode, in which `make soak` runs them, too, half of the streams are drawn, and each must have the very tokens
and logprobs that it has undisturbed. `MOTET_RUNNER_KERNELS=exact` runs all of this file so.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from motet.processes.linux import all_stats, is_alive, read_stat
from testbed.local_stack import REPORTS_AT_ONCE, LocalStack, running_stack
from tests.runner.random_models import EIGHT, llama
from tests.stack.concurrent_streams import ConcurrentStreams
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

STREAMS = 8
TOKENS = 1000
LATEST = 400
MORE = 50
"""Tokens that must come without the killed process: more than can have been in buffers when it died"""
KERNELS = os.environ.get("MOTET_RUNNER_KERNELS", "auto")
DRAWN = {"temperature": 0.8, "top_p": 0.95}
AWAY_S = 60
"""Seconds until the killed process may return, so that the test ends also if a stream waits for it"""


@dataclass
class Deployed:
    stack: LocalStack
    base: Path
    served_models: list[ServedModel]
    kernels: str
    undisturbed: list[StreamedAnswer]
    """In exact mode, the streams when nothing dies"""

    @property
    def exact(self) -> bool:
        return self.kernels == "exact"

    def streams(self, *, first: int) -> ConcurrentStreams:
        return ConcurrentStreams(
            self.stack.url,
            self.served_models,
            streams=STREAMS,
            tokens=TOKENS,
            first=first,
            last=LATEST,
            sampling=self._sampling,
        )

    def _sampling(self, stream: int) -> dict[str, float]:
        """Logprobs show what the tokens hide: the last digits of the logits."""
        if not self.exact:
            return {}
        return {"logprobs": 1} | (DRAWN | {"seed": stream} if self.drawn(stream) else {})

    def drawn(self, stream: int) -> bool:
        """In exact mode half of them are. Each model has greedy and drawn ones."""
        return self.exact and stream // 4 % 2 == 1


@pytest.fixture(scope="module")
def deployed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    kernels = getattr(request, "param", KERNELS)
    folder = tmp_path_factory.mktemp("survive")
    engine = {"kvCacheMiB": 64, "maxConcurrentSequences": 24}
    base, served_models = add_pool(
        folder / "manifests", "llama", engine=engine, specs=EIGHT[:3], config=llama(context=2048), replicas=2
    )
    env = REPORTS_AT_ONCE | {
        "MOTET_OPERATOR_SILENT_SECONDS": str(2 * AWAY_S),  # a stopped process is not killed
        "MOTET_SUPERVISOR_HANG_SECONDS": str(2 * AWAY_S),  # no engine is so slow that its streams are moved
        "MOTET_RUNNER_KERNELS": kernels,
    }
    with running_stack(folder, manifests=folder / "manifests", env=env) as stack:
        deployed = Deployed(stack, base, served_models, kernels, [])
        if deployed.exact:
            deployed.undisturbed += asyncio.run(deployed.streams(first=0).undisturbed())
        yield deployed


@dataclass
class Disturbance:
    """What happened in one run."""

    answers: list[StreamedAnswer]
    probe: StreamedAnswer
    """The answer to a request that came right after the kill."""
    placed_again: list[str]
    """The requests that left their runner since the kill, each with the reason."""
    without: list[int]
    """Tokens that came to each stream while the victim was kept away."""
    killed: float
    freed: float
    """When the victim was allowed to return."""
    back: float
    """When it was ready again."""


def restarts_and_pids(stack: LocalStack) -> dict[str, tuple[int, int]]:
    """How often each process was restarted, and its pid, by its name."""
    return {one["name"]: (one["restarts"], one["pid"]) for one in stack.status()["services"]}


def losses(stack: LocalStack) -> list[tuple[str, str]]:
    """Each request that has lost its runner and is placed again, with the reason, from the gateway's log."""
    lines = [json.loads(line) for line in stack.log("gateway").splitlines() if "request_lost" in line]
    return [(one["request"], one["reason"]) for one in lines]


def since(before: list[int], now: list[int]) -> list[int]:
    return [later - earlier for earlier, later in zip(before, now, strict=True)]


@contextmanager
def restarts_prevented(stack: LocalStack, name: str) -> Iterator[None]:
    """Stop the process that would restart the killed one: the operator, or the parent of the operator."""
    operator = int(stack.service("operator")["pid"])
    if name == "operator":
        found = read_stat(operator)
        assert found is not None
        parent = found.parent
    else:
        parent = operator
    os.kill(parent, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(parent, signal.SIGCONT)


async def disturbed(deployed: Deployed, victim: str, *, at: int) -> Disturbance:
    """Run the streams and kill the victim once each has `at` tokens. Send a new request. Prevent the victim's restart
    until all streams have continued; then wait for its return.

    The victim `runner` is the runner that has the streams.
    """
    concurrent = deployed.streams(first=at)
    async with asyncio.TaskGroup() as on:
        streams = on.create_task(concurrent.run())
        while True:
            await concurrent.in_the_middle()
            name = victim
            if victim == "runner":
                sequences = await asyncio.to_thread(deployed.stack.sequences)
                if sum(sequences.values()) != STREAMS:
                    continue  # streams that were started again have not left their runners yet
                name = max(sequences, key=lambda one: sequences[one])
            pid = int(deployed.stack.service(name)["pid"])
            services = restarts_and_pids(deployed.stack)
            engine = [stat.identity for stat in all_stats() if stat.parent == pid and victim == "runner"]
            if concurrent.all_in_the_middle:  # check again: the look-ups took time
                break
        with restarts_prevented(deployed.stack, name):
            lost = len(losses(deployed.stack))
            concurrent.disturb()
            before = concurrent.tokens_received
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            probe = on.create_task(
                stream_without_library(deployed.stack.url, deployed.served_models[0], prompt_of(99), 2)
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(AWAY_S):
                    while min(since(before, concurrent.tokens_received)) < MORE:
                        await asyncio.sleep(0.005)
                    if victim != "scheduler":  # only it can place a request
                        await asyncio.wait({probe})
            without, freed = since(before, concurrent.tokens_received), time.monotonic()

        def has_returned() -> bool:
            found = deployed.stack.service(name)
            return bool(found["ready"] and found["pid"] != pid)

        await asyncio.to_thread(deployed.stack.until, has_returned)
        back = time.monotonic()
    again, (restarts, _) = restarts_and_pids(deployed.stack), services.pop(name)
    assert again.pop(name)[0] == restarts + 1
    assert again == services, "another process than the killed one was restarted"
    assert bool(engine) == (victim == "runner")
    assert not any(map(is_alive, engine)), "the engine outlived its runner"
    names = {answer.request for answer in streams.result()}
    assert len(names) == STREAMS
    placed_again = [f"{request}: {why}" for request, why in losses(deployed.stack)[lost:] if request in names]
    return Disturbance(streams.result(), probe.result(), placed_again, without, killed, freed, back)


def assert_whole(deployed: Deployed, run: Disturbance, victim: str) -> None:
    for answer in run.answers:
        assert len(answer.tokens) == TOKENS
        assert answer.reasons == ["length"]
    if deployed.exact:
        for answer, undisturbed in zip(run.answers, deployed.undisturbed, strict=True):
            assert answer.tokens == undisturbed.tokens
            assert answer.logprobs == undisturbed.logprobs
            assert len(answer.logprobs) == TOKENS
    assert_right(deployed.base, [answer for index, answer in enumerate(run.answers) if not deployed.drawn(index)])
    if victim == "runner":
        assert run.placed_again
    else:
        assert run.placed_again == [], f"no stream leaves its runner because the {victim} died"
    assert_no_stream_waited(run, victim)


def assert_no_stream_waited(run: Disturbance, victim: str) -> None:
    """Every stream went on while the killed process was kept away, and a new request was answered."""
    first = run.probe.arrivals[0]
    print(f"{victim}: away for {run.freed - run.killed:.2f} s, ready again {run.back - run.freed:.2f} s later")
    print(f"{victim}: a new request had its first token {first - run.killed:.2f} s after the kill")
    assert min(run.without) >= MORE, f"tokens that came without the {victim}, by stream: {run.without}"
    if victim == "scheduler":  # a restarted scheduler places a request as fast as it starts
        assert first - run.freed <= 2 * (run.back - run.freed)
    else:
        assert first <= run.freed, f"a new request waited for the {victim}"


@pytest.mark.parametrize("victim", ["scheduler", "predictor", "supervisor", "operator"])
async def test_streams_continue_when_a_control_plane_process_dies(deployed: Deployed, victim: str) -> None:
    assert_whole(deployed, await disturbed(deployed, victim, at=20), victim)


async def test_the_streams_of_a_killed_runner_continue_elsewhere(deployed: Deployed) -> None:
    assert_whole(deployed, await disturbed(deployed, "runner", at=60), "runner")


@pytest.mark.soak
@pytest.mark.parametrize("at", [8, 90, 170, 250])
@pytest.mark.parametrize("victim", ["scheduler", "predictor", "supervisor", "operator", "runner"])
async def test_streams_continue_when_any_process_dies_at_any_moment(deployed: Deployed, victim: str, at: int) -> None:
    assert_whole(deployed, await disturbed(deployed, victim, at=at), victim)


@pytest.mark.soak
@pytest.mark.parametrize("deployed", ["exact"], indirect=True)
@pytest.mark.parametrize("at", [8, 250])
@pytest.mark.parametrize("victim", ["scheduler", "predictor", "supervisor", "operator", "runner"])
async def test_in_exact_mode_streams_are_the_same_whatever_dies(deployed: Deployed, victim: str, at: int) -> None:
    assert_whole(deployed, await disturbed(deployed, victim, at=at), victim)
