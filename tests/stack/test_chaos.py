"""Live, in exact mode: services are killed, stopped and ended for minutes under 200 streams on three runners.

Every stream has the very tokens and logprobs that it has undisturbed, once each, and one end. Only those may break that
a gateway had which was killed, ended, or stopped until it was replaced: up to there they are right. In the end nothing
is left: no request, no page, no process and no file descriptor.
"""

import asyncio
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from motet.processes.lifecycle import LifecycleConfig
from testbed.local_stack import LocalStack, running_stack
from tests.runner.random_models import EIGHT, llama
from tests.stack.served_models import ServedModel, StreamedAnswer, add_pool, prompt_of, stream_without_library

pytestmark = [
    pytest.mark.soak,
    pytest.mark.stack,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SECONDS = 300.0
RUNNERS, STREAMS = 3, 200
SHAPES = 45
"""Different requests. Each is asked for many times."""
DRAWN = {"temperature": 0.8, "top_p": 0.95}
PAUSE_SECONDS = 1.0, 4.0
"""Between two strikes."""
STOPPED_SECONDS = 0.5, 6.0
REPLACED_AFTER_SECONDS = LifecycleConfig().stopped_seconds
"""A process that is stopped for this long may be killed and started again."""
DRAIN_SECONDS, GATEWAY_AWAY_SECONDS = 4.0, 12.0
"""How long after a strike at a gateway its clients may be sent away: it drains, and it starts again."""
STRIKES = [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM]
KINDS = ["gateway", "operator", "predictor", "runner", "scheduler", "supervisor"]
ALL_STRIKES = [(kind, how) for kind in KINDS for how in STRIKES if (kind, how) != ("operator", signal.SIGTERM)]
"""An operator that is told to end ends all that it has started."""
MORE_DESCRIPTORS = 8
"""Than at the beginning, of one process: connections come and go."""
ADAPTERS = "/cache/adapters/"
"""A runner keeps the folder of each adapter open that it has on its disk. In the end it may have all."""
EMPTY = (
    "motet_live_requests",
    "motet_known_requests",
    "motet_queued_requests",
    "motet_ledger_promised_pages",
    "motet_ledger_parked_requests",
    "motet_kv_pages_promised",
    "motet_sequences_running",
    "motet_sequences_waiting",
    "motet_sequences_parked",
)
"""Metrics that are 0 when there is no request."""
FREE, ALL = "motet_kv_pages_free", "motet_kv_pages"


def tokens_of(shape: int) -> int:
    return 40 + 37 * shape % 260


def opened(descriptor: Path) -> str:
    """What it is, without its number."""
    with suppress(FileNotFoundError):
        return str(descriptor.readlink()).partition(":")[0]
    return "closed meanwhile"


@dataclass
class Chaos:
    stack: LocalStack
    served_models: list[ServedModel]
    undisturbed: list[StreamedAnswer] = field(default_factory=list)
    strikes: Counter[tuple[str, str]] = field(default_factory=Counter)
    whole: int = 0
    broken: int = 0
    gateway_struck_at: float = -GATEWAY_AWAY_SECONDS
    over: bool = False

    async def ask(self, shape: int, came: list[StreamedAnswer] | None = None) -> StreamedAnswer:
        """Half of them are drawn. Logprobs show what the tokens hide: the last digits of the logits. `came`: gets what
        came, also if the stream breaks."""
        served = self.served_models[shape % len(self.served_models)]
        note = (lambda answer: came.append(answer) if not came else None) if came is not None else None
        how: dict[str, Any] = {"logprobs": 1} | (DRAWN | {"seed": shape} if shape % 2 else {})
        return await stream_without_library(
            self.stack.url, served, prompt_of(shape, spread=40), tokens_of(shape), on_chunk=note, **how
        )

    async def keep_asking(self, number: int) -> None:
        for turn in itertools.count():
            if self.over:
                return
            shape = (number + 7 * turn) % SHAPES
            came: list[StreamedAnswer] = []
            how = "it ends early"
            try:
                await self.ask(shape, came)
            except OSError as error:
                how = repr(error)
            except AssertionError as error:
                how = str(error)
            for answer in came:
                expected = self.undisturbed[shape]
                assert answer.tokens == expected.tokens[: len(answer.tokens)]
                assert answer.logprobs == expected.logprobs[: len(answer.logprobs)]
            if came and came[0].reasons:
                assert (len(came[0].tokens), came[0].reasons) == (tokens_of(shape), ["length"])
                self.whole += 1
                continue
            assert self.gateway_struck_at + GATEWAY_AWAY_SECONDS > time.monotonic(), f"no gateway was struck: {how}"
            self.broken += 1
            await asyncio.sleep(0.1)

    async def strike(self, seconds: float) -> None:
        drawn, end = random.Random(0), time.monotonic() + seconds
        left: list[tuple[str, signal.Signals]] = []
        while time.monotonic() < end:
            await asyncio.sleep(drawn.uniform(*PAUSE_SECONDS))
            services = (await asyncio.to_thread(self.stack.status))["services"]
            up = [one for one in services if one["ready"] and one["pid"]]
            if not up:
                continue
            left = left or drawn.sample(ALL_STRIKES, len(ALL_STRIKES))
            kind, how = left[-1]
            of_kind = [one for one in up if one["kind"] == kind]
            if not of_kind:  # it starts again
                continue
            left.pop()
            pid = int(drawn.choice(of_kind)["pid"])
            stopped = drawn.uniform(*STOPPED_SECONDS) if how is signal.SIGSTOP else 0.0
            with suppress(ProcessLookupError):
                if kind == "gateway" and (not stopped or stopped >= REPLACED_AFTER_SECONDS):
                    self.gateway_struck_at = time.monotonic() + stopped
                os.kill(pid, how)
                self.strikes[kind, how.name] += 1
                if stopped:
                    await asyncio.sleep(stopped)
                    os.kill(pid, signal.SIGCONT)
        self.over = True

    async def run(self, seconds: float) -> None:
        async with asyncio.TaskGroup() as on:
            on.create_task(self.strike(seconds))
            for number in range(STREAMS):
                on.create_task(self.keep_asking(number))

    def descriptors(self) -> dict[str, list[str]]:
        """What each service has open."""
        services = self.stack.status()["services"]
        return {one["name"]: sorted(map(opened, Path(f"/proc/{one['pid']}/fd").iterdir())) for one in services}

    def left(self) -> dict[str, float]:
        with self.stack.http() as client:
            families = list(text_string_to_metric_families(client.get("/metrics").text))
        values = {(one.name, str(one.labels)): one.value for family in families for one in family.samples}
        unknown = {*EMPTY, FREE, ALL} - {name for name, _ in values}
        assert not unknown, f"no such metric: {unknown}"
        used = {key: values[ALL, key[1]] - free for key, free in values.items() if key[0] == FREE}
        left = {key: value for key, value in values.items() if key[0] in EMPTY} | used
        return {f"{name} {labels}": value for (name, labels), value in left.items() if value}


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Chaos]:
    engine = {"kvCacheMiB": 16, "maxConcurrentSequences": 24, "maxResidentAdapters": 6}
    _, served_models = add_pool(
        tmp_path / "manifests", "llama", engine=engine, specs=EIGHT, config=llama(context=2048), replicas=RUNNERS
    )
    env = {
        "MOTET_RUNNER_KERNELS": "exact",
        "MOTET_SUPERVISOR_HANG_SECONDS": "120",  # two cores have three engines, the services and 200 clients
        "MOTET_GATEWAY_DEADLINE_SECONDS": "600",
        "MOTET_GATEWAY_DRAIN_SECONDS": str(DRAIN_SECONDS),
    }
    with running_stack(tmp_path, manifests=tmp_path / "manifests", env=env) as stack:
        yield Chaos(stack, served_models)


async def test_streams_are_right_whatever_happens_to_services_for_minutes(chaos: Chaos) -> None:
    chaos.undisturbed = [await chaos.ask(shape) for shape in range(SHAPES)]
    processes, descriptors = len(chaos.stack.processes()), chaos.descriptors()
    await chaos.run(SECONDS)
    print(f"{chaos.whole} whole streams, {chaos.broken} broken by a gateway, strikes {dict(chaos.strikes)}")
    assert chaos.whole > STREAMS
    assert set(chaos.strikes) == {(kind, how.name) for kind, how in ALL_STRIKES}
    await asyncio.to_thread(chaos.stack.until, lambda: all(one["ready"] for one in chaos.stack.status()["services"]))
    await asyncio.to_thread(chaos.stack.until, lambda: not chaos.left())
    assert len(chaos.stack.processes()) == processes
    for name, now in chaos.descriptors().items():
        more = Counter(now) - Counter(descriptors[name])
        assert all(many == 1 for one, many in more.items() if ADAPTERS in one), f"{name}: {more}"
        assert sum(many for one, many in more.items() if ADAPTERS not in one) <= MORE_DESCRIPTORS, f"{name}: {more}"
    again = [await chaos.ask(shape) for shape in range(SHAPES)]
    assert [one.tokens for one in again] == [one.tokens for one in chaos.undisturbed]
