"""Live, in exact mode: names switch between two revisions again and again under requests, while gateways are stopped in
the middle of resolving names, and while runners come back with newer checks of adapters.

Each answer is wholly that of one revision, to the last digit of its log probabilities, and none fails.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from motet.digest import adapter_digest, hex_of
from motet.domain import Digest
from motet_runner.adapters.compatibility_check import CHECK_VERSION
from testbed.local_stack import LocalStack, running_stack, write_adapter
from tests.runner.random_models import EIGHT, llama
from tests.stack.second_gateway import second_gateway
from tests.stack.served_models import add_pool, prompt_of

pytestmark = [
    pytest.mark.soak,
    pytest.mark.stack,
    pytest.mark.timeout(7200),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

REQUESTS, REQUESTS_BESIDE_CHECKS = 10_000, 1_000
AT_ONCE = 24
SHAPES = 12
"""Different requests. Each is asked for many times."""
NAMES = ("first", "second", "third")
PAUSE_SECONDS, STOPPED_SECONDS = (0.2, 1.0), (0.1, 3.0)
SWITCH_SECONDS = 0.0, 1.0
"""Between two switches"""
TOKENS = 24

NEWER = """
import os, sys

if any(one.startswith("motet_runner") for one in sys.orig_argv) and os.path.exists({flag!r}):
    from motet_runner.adapters import compatibility_check

    compatibility_check.CHECK_VERSION += 1
"""
"""`sitecustomize`: a runner that starts once the flag is there has newer checks."""

Answer = tuple[str, tuple[float, ...]]


@dataclass
class Switching:
    stack: LocalStack
    gateways: dict[str, int]
    """Their pids, by URL"""
    revisions: tuple[Path, Path]
    flag: Path
    answers: list[dict[int, Answer]] = field(default_factory=list)
    """Of each revision, by shape"""
    seen: Counter[tuple[str, int]] = field(default_factory=Counter)
    """How many answers were of which revision, by name"""
    switches: int = 0
    stops: int = 0
    over: bool = False

    def digest(self, revision: int) -> Digest:
        return adapter_digest(self.revisions[revision])

    def declare(self, name: str, revision: int) -> None:
        uri = self.revisions[revision].as_uri()
        write_adapter(self.stack.folder / "manifests", name, uri=uri, poolRef={"name": "llama"})

    def serving(self, name: str) -> str:
        adapters = {one["name"]: one for one in self.stack.status()["adapters"]}
        return ((adapters.get(name) or {}).get("certificate") or {}).get("digest", "")

    async def serves(self, name: str, revision: int) -> None:
        await asyncio.to_thread(self.stack.until, lambda: self.serving(name) == self.digest(revision))

    async def record(self) -> None:
        async with client() as http:
            for revision in range(2):
                await asyncio.to_thread(self.declare, NAMES[0], revision)
                await self.serves(NAMES[0], revision)
                asked = (ask(http, self.stack.url, NAMES[0], shape) for shape in range(SHAPES))
                self.answers.append(dict(enumerate(await asyncio.gather(*asked))))
        for shape in range(SHAPES):
            assert self.answers[0][shape] != self.answers[1][shape], "what is mixed would not be seen"

    async def keep_asking(self, http: httpx2.AsyncClient, shapes: Iterator[int]) -> None:
        for number in shapes:
            name, url = NAMES[number % len(NAMES)], [*self.gateways][number % len(self.gateways)]
            shape = number // (len(NAMES) * len(self.gateways)) % SHAPES
            answer = await ask(http, url, name, shape)
            of = [revision for revision in range(2) if self.answers[revision][shape] == answer]
            assert of, f"{name} has answered {answer} to {shape}, which no revision does"
            self.seen[name, of[0]] += 1

    async def ask_all(self, requests: int) -> None:
        shapes = iter(range(requests))
        async with client() as http, asyncio.TaskGroup() as on:
            for _ in range(AT_ONCE):
                on.create_task(self.keep_asking(http, shapes))
        self.over = True

    async def switch(self) -> None:
        drawn, now = random.Random(0), dict.fromkeys(NAMES, 1)
        while not self.over:
            name = drawn.choice(NAMES)
            now[name] = 1 - now[name]
            await asyncio.to_thread(self.declare, name, now[name])
            if drawn.random() < 0.8:  # else the next one comes while it is checked
                await self.serves(name, now[name])
            self.switches += 1
            await asyncio.sleep(drawn.uniform(*SWITCH_SECONDS))

    async def stop_gateways(self) -> None:
        drawn = random.Random(1)
        while not self.over:
            await asyncio.sleep(drawn.uniform(*PAUSE_SECONDS))
            pid = drawn.choice([*self.gateways.values()])
            os.kill(pid, signal.SIGSTOP)
            try:
                self.stops += 1
                await asyncio.sleep(drawn.uniform(*STOPPED_SECONDS))
            finally:
                os.kill(pid, signal.SIGCONT)

    async def upgrade_runners(self) -> None:
        """One after the other ends, as told, and comes back with newer checks."""
        self.flag.touch()
        for number in range(2):
            runner = self.stack.service(f"runner-{number}")
            await asyncio.to_thread(self.stack.kill, f"runner-{number}", signal.SIGTERM)

            def is_back(before: dict[str, Any] = runner) -> bool:
                now = next((one for one in self.stack.status()["services"] if one["name"] == before["name"]), None)
                return now is not None and now["ready"] and now["pid"] != before["pid"]

            await asyncio.to_thread(self.stack.until, is_back, 300)

    def checkers(self) -> set[int]:
        """The versions of the checks that what serves has passed, as runners keep them"""
        found = set()
        for revision in range(2):
            folder = self.stack.data / "cache" / "adapters" / hex_of(self.digest(revision))
            found.add(orjson.loads((folder / "certificate.json").read_bytes())["certificate"]["checker"])
        return found


@asynccontextmanager
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    limits = httpx2.Limits(max_connections=2 * AT_ONCE)
    async with httpx2.AsyncClient(timeout=600, limits=limits, trust_env=False, verify=False) as http:
        yield http


async def ask(http: httpx2.AsyncClient, url: str, name: str, shape: int) -> Answer:
    body = {"model": name, "prompt": prompt_of(shape, spread=40), "max_tokens": TOKENS, "temperature": 0}
    answer = await http.post(f"{url}/v1/completions", json=body | {"ignore_eos": True, "logprobs": 1})
    assert answer.status_code == 200, f"{name}: {answer.status_code} {answer.text}"
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "length", choice
    return choice["text"], tuple(choice["logprobs"]["token_logprobs"])


@pytest.fixture
def switching(tmp_path: Path) -> Iterator[Switching]:
    manifests, flag, path = tmp_path / "manifests", tmp_path / "newer", tmp_path / "path"
    path.mkdir()
    (path / "sitecustomize.py").write_text(NEWER.format(flag=str(flag)))
    engine = {"kvCacheMiB": 16, "maxConcurrentSequences": 16, "maxResidentAdapters": 4}
    _, models = add_pool(manifests, "llama", engine=engine, specs=EIGHT[:2], config=llama(context=2048), replicas=2)
    revisions = tuple(one.adapter for one in models[1:] if one.adapter is not None)
    assert len(revisions) == 2
    for one in models[1:]:
        (manifests / f"{one.model}.json").unlink()
    for name in NAMES:
        write_adapter(manifests, name, uri=revisions[0].as_uri(), poolRef={"name": "llama"})
    env = {
        "PYTHONPATH": str(path),
        "MOTET_RUNNER_KERNELS": "exact",
        "MOTET_SCHEDULER_REVISION_SECONDS": "0",
        "MOTET_SUPERVISOR_HANG_SECONDS": "120",  # two cores have two engines, the services and the clients
        "MOTET_GATEWAY_DEADLINE_SECONDS": "600",
        "MOTET_OPERATOR_SILENT_SECONDS": "0",  # a stopped gateway goes on: it is not replaced
    }
    with (
        running_stack(tmp_path, manifests=manifests, env=env) as stack,
        second_gateway(stack, tmp_path / "second", log=tmp_path / "second.log") as (url, process),
    ):
        gateways = {stack.url: int(stack.service("gateway")["pid"]), url: process.pid}
        yield Switching(stack, gateways, revisions, flag)
        for pid in gateways.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def test_no_answer_is_mixed_and_none_fails_while_names_switch_and_gateways_stop(switching: Switching) -> None:
    began = time.monotonic()
    await switching.record()
    async with asyncio.TaskGroup() as on:
        on.create_task(switching.switch())
        on.create_task(switching.stop_gateways())
        on.create_task(switching.ask_all(REQUESTS))
    print(f"{switching.seen}, {switching.switches=}, {switching.stops=}, {time.monotonic() - began:.0f} s")
    assert switching.seen.total() == REQUESTS
    assert all(switching.seen[name, revision] for name in NAMES for revision in range(2))
    assert min(switching.switches, switching.stops) >= REQUESTS / 200


async def test_adapters_are_checked_anew_by_newer_checks_under_requests(switching: Switching) -> None:
    await switching.record()
    for number, name in enumerate(NAMES):
        switching.declare(name, number % 2)
        await switching.serves(name, number % 2)
    assert switching.checkers() == {CHECK_VERSION}
    upgraded = asyncio.Event()

    async def upgrade() -> None:
        await switching.upgrade_runners()
        upgraded.set()

    async with asyncio.TaskGroup() as on:
        on.create_task(upgrade())
        while not upgraded.is_set():
            await switching.ask_all(REQUESTS_BESIDE_CHECKS)
    await switching.ask_all(AT_ONCE)
    assert switching.checkers() == {CHECK_VERSION + 1}
    wanted = {(name, number % 2) for number, name in enumerate(NAMES)}
    assert {*switching.seen} == wanted
