"""On a whole stack: whatever keeps a request, moves it or ends it, its own tenant reads the cause, and no other's name.

What is read here is what `motet why --json` prints. tests/scheduler/test_seeded_causes.py has more, of the scheduler
alone.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from math import inf
from time import monotonic
from typing import Any

import httpx2
import orjson
import pytest

from motet import keys
from motet.keys import ApiKey, KeyLimits, KeyScope
from motet.store import keys as kept
from motet.store import open_store
from testbed.local_stack import BUNDLED, LocalStack, copy_of_bundled, running_stack, write_adapter
from testbed.stack_links import StackLinks

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

BASE, WITHOUT_RUNNERS = "motet-demo", "without-runners"
OTHER = "umbrella"
"""A tenant whose name the others must not read."""
LIMITS: dict[str, dict[str, int]] = {
    "narrow": {"concurrency": 1},
    "slow": {"requestsPerMinute": 6},
    "short": {"tokensPerMinute": 60},
}
"""By tenant"""
TENANTS = ("acme", "third", OTHER, *LIMITS)
QUEUE_LIMIT = 4
ENGINE = '{"kvCacheMiB": 8, "maxConcurrentSequences": 3, "maxResidentAdapters": 1}'
PLACES, PAGES, PAGE_TOKENS = 3, 128, 16
FULL, LONG = PAGES * PAGE_TOKENS // 4, PAGES * PAGE_TOKENS * 3 // 4
"""Tokens of answers: three of the first fit a runner, and nothing much beside the second."""
WITHIN_S = 60.0
ENDED_WITHIN_S = 2.0
"""How long all processes take to say that a request has ended."""
TRIES = 4
"""On a busy machine what keeps a request may end before the request comes."""
ADAPTERS: dict[str, dict[str, Any]] = {"pirate": {}, "shouting": {}, "json": {"limits": {"concurrency": 1}}}
LIBRARY = "library"
"""The namespace whose adapters all may use"""


@dataclass
class Deployed:
    stack: LocalStack
    keys: Mapping[str, str]
    numbers: Iterator[int]

    def client(self, key: str) -> httpx2.AsyncClient:
        headers = {"authorization": f"Bearer {self.keys[key]}"}
        return httpx2.AsyncClient(
            base_url=self.stack.url, headers=headers, timeout=WITHIN_S, trust_env=False, verify=False
        )


@dataclass
class Asked:
    """A request, under the name that its client has given it."""

    deployed: Deployed
    key: str
    name: str

    async def said(self) -> str:
        """What its tenant reads of it: all texts, one after the other."""
        async with self.deployed.client(self.key) as client:
            found = await client.get(f"/motet/requests/{self.name}")
        return found.text if found.status_code == 200 else ""

    async def says(self, words: str) -> None:
        """Raises TooLate if it has ended without the words."""
        said, until, ended_at = "", monotonic() + WITHIN_S, inf
        while words.casefold() not in (said := await self.said() or said).casefold():
            if said and orjson.loads(said)["ended"]:
                ended_at = min(ended_at, monotonic())
            if monotonic() > ended_at + ENDED_WITHIN_S:
                raise TooLate(f"{words!r} is not in {said}")
            assert monotonic() < until, f"{words!r} is not in {said}"
            await asyncio.sleep(0.05)
        assert OTHER not in said, "it reads another tenant's name"


class TooLate(AssertionError):
    """What should have kept or moved the request had ended before: an answer takes half a second."""


class Seeds:
    """The requests of one cause. They end with it."""

    def __init__(self, deployed: Deployed, on: asyncio.TaskGroup) -> None:
        self.deployed, self.stack = deployed, deployed.stack
        self._on = on
        self.tasks: list[asyncio.Task[None]] = []

    def ask(self, key: str = "acme", **body: Any) -> Asked:
        """Send one."""
        asked = Asked(self.deployed, key, f"seeded-{next(self.deployed.numbers)}")
        self.tasks.append(self._on.create_task(self._send(asked, body, asyncio.Event())))
        return asked

    async def runs(self, key: str = "acme", **body: Any) -> Asked:
        """Send one that goes on until the end, and wait for its first token."""
        asked, began = Asked(self.deployed, key, f"seeded-{next(self.deployed.numbers)}"), asyncio.Event()
        self.tasks.append(self._on.create_task(self._send(asked, body, began)))
        async with asyncio.timeout(WITHIN_S):
            await began.wait()
        return asked

    @asynccontextmanager
    async def replaced(self, service: str) -> AsyncIterator[None]:
        """Until the service has another process: the status may call a stopped one ready for a while."""
        before = self.stack.service(service)["pid"]
        yield
        await asyncio.to_thread(self.stack.until, lambda: self.stack.service(service)["pid"] != before)

    async def _send(self, asked: Asked, body: Mapping[str, Any], began: asyncio.Event) -> None:
        document = {"model": BASE, "prompt": "Who rules Harrow?", "max_tokens": 32, "stream": True, "ignore_eos": True}
        headers = {"x-request-id": asked.name}
        async with (
            self.deployed.client(asked.key) as client,
            client.stream("POST", "/v1/completions", json=document | body, headers=headers) as answer,
        ):
            with suppress(httpx2.TransportError):  # its gateway may be killed
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        began.set()


@asynccontextmanager
async def seeds(deployed: Deployed) -> AsyncIterator[Seeds]:
    async with asyncio.TaskGroup() as on:
        made = Seeds(deployed, on)
        yield made
        for task in made.tasks:
            task.cancel()


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("causes")
    manifests = copy_of_bundled(folder / "manifests", adapters=[], engine=ENGINE)
    pool = orjson.loads((manifests / "pool.json").read_bytes())
    overrides = [{"namespace": tenant} | limits for tenant, limits in LIMITS.items()]
    pool["spec"] |= {"tenants": {"overrides": overrides}, "admission": {"coldWaitSeconds": 60}}
    (manifests / "pool.json").write_bytes(orjson.dumps(pool))
    without = pool | {"metadata": {"name": WITHOUT_RUNNERS}}
    without["spec"] = pool["spec"] | {"replicas": 0, "model": {"uri": "file://model", "servedName": WITHOUT_RUNNERS}}
    (manifests / "without.json").write_bytes(orjson.dumps(without))
    (manifests / "empty").mkdir()
    write_adapter(manifests, "broken", uri=(manifests / "empty").as_uri(), namespace=LIBRARY, share=["*"])
    for name, more in ADAPTERS.items():
        write_adapter(
            manifests, name, uri=(BUNDLED / "adapters" / name).as_uri(), namespace=LIBRARY, share=["*"], **more
        )
    env = {
        "MOTET_SCHEDULER_QUEUE_LIMIT": str(QUEUE_LIMIT),
        "MOTET_SCHEDULER_MAX_PASSED_OVER": "1",
        # A hung engine is waited for: a quarter of the usual time, which is still longer than any step here.
        "MOTET_SUPERVISOR_HANG_SECONDS": "5",
        "MOTET_OPERATOR_UNHEALTHY_SECONDS": "1",
    }
    with running_stack(folder, manifests=manifests, env=env) as stack:
        made = asyncio.run(make_keys(stack))
        # Before a gateway knows the first key, it admits every request.
        stack.until(lambda: needs_a_key(stack))
        yield Deployed(stack, made, count())


def needs_a_key(stack: LocalStack) -> bool:
    with stack.http() as client:
        return client.get("/v1/models").status_code == 401


async def make_keys(stack: LocalStack) -> dict[str, str]:
    """A key for each tenant, and `limited`: a second one of acme with a limit of its own."""
    made = {tenant: keys.new_key() for tenant in (*TENANTS, "limited")}
    async with open_store(f"sqlite+aiosqlite:///{stack.data}/motet.db") as store:
        for who, key in made.items():
            await kept.add(
                store,
                ApiKey(
                    id=key.id,
                    tenant="acme" if who == "limited" else who,
                    scopes=frozenset({KeyScope.USER}),
                    limits=KeyLimits(concurrency=1) if who == "limited" else KeyLimits(),
                    hash=key.hash,
                    created=datetime.now(UTC),
                ),
            )
    return {who: str(key) for who, key in made.items()}


# ---------------------------------------------------------------------------------------------------------- the causes


async def over_concurrency(given: Seeds) -> None:
    await given.runs("narrow", max_tokens=FULL)
    await given.ask("narrow").says("tenant narrow is over its concurrency 1")


async def over_a_rate(given: Seeds) -> None:
    for _ in range(2):
        given.ask("slow")
    await given.ask("slow").says("tenant slow is over its requestsPerMinute 6. Send the request again later.")


async def over_a_rate_in_batch(given: Seeds) -> None:
    for _ in range(2):
        given.ask("slow")
    await given.ask("slow", service_tier="flex", max_tokens=1).says("tenant slow is over its requestsPerMinute 6")


async def above_a_minutes_grant(given: Seeds) -> None:
    await given.ask("short", prompt="one " * 200).says("tenant short may use 60 in a minute")


async def over_the_limits_of_its_key(given: Seeds) -> None:
    await given.runs("limited", max_tokens=FULL)
    await given.ask("limited").says("is over its concurrency 1")


async def over_the_limits_of_its_adapter(given: Seeds) -> None:
    await given.runs(OTHER, model=f"{LIBRARY}/json", max_tokens=FULL)
    await given.ask(model=f"{LIBRARY}/json").says("is over its concurrency 1")


async def too_few_pages(given: Seeds) -> None:
    await given.runs(OTHER, max_tokens=LONG)
    await given.ask(max_tokens=FULL * 2).says("pages and")


async def full_batch(given: Seeds) -> None:
    for _ in range(PLACES):
        await given.runs(OTHER, max_tokens=FULL)
    await given.ask(max_tokens=1).says("every batch is full")


async def slots_in_use(given: Seeds) -> None:
    await given.runs(OTHER, model=f"{LIBRARY}/pirate", max_tokens=FULL)
    await given.ask(model=f"{LIBRARY}/shouting").says("all adapter slots are in use")


async def full_queue(given: Seeds) -> None:
    for _ in range(PLACES + 2 * QUEUE_LIMIT):
        given.ask(max_tokens=FULL)
    await asyncio.sleep(0.5)
    await given.ask().says("wait for this model. Send yours again in")


async def reserved_for_another(given: Seeds) -> None:
    await given.runs(OTHER, max_tokens=LONG)
    given.ask(OTHER, max_tokens=LONG)
    await asyncio.sleep(0.2)
    for _ in range(4):
        given.ask("third", max_tokens=1)
        await asyncio.sleep(0.1)
    await given.ask(max_tokens=64).says("reserved for another tenant")


async def cold_adapter(given: Seeds) -> None:
    await given.runs(OTHER, model=f"{LIBRARY}/pirate", max_tokens=1)
    await given.ask(model=f"{LIBRARY}/shouting", max_tokens=1).says("loads")


async def left_by_its_client(given: Seeds) -> None:
    left = await given.runs(max_tokens=FULL)
    given.tasks[-1].cancel()
    await left.says("cancelled")


async def its_runner_is_killed(given: Seeds) -> None:
    moved = await given.runs(max_tokens=FULL)
    async with given.replaced("runner"):
        given.stack.kill("runner")
        await moved.says("the stream to the runner broke")
        await given.ask(max_tokens=1).says("its runners are down")


async def its_runner_is_frozen(given: Seeds) -> None:
    moved = await given.runs(max_tokens=FULL)
    async with given.replaced("runner"):
        given.stack.kill("runner", signal.SIGSTOP)
        await moved.says("ping timeout")


async def its_engine_hangs(given: Seeds) -> None:
    moved = await given.runs(max_tokens=FULL)
    async with given.replaced("runner"):
        os.kill(given.stack.engine_of(int(given.stack.service("runner")["pid"])), signal.SIGSTOP)
        await moved.says("its engine has work and took no step")


async def no_runner(given: Seeds) -> None:
    await given.ask(model=WITHOUT_RUNNERS).says("waiting for a runner of without-runners")


async def its_adapter_is_refused(given: Seeds) -> None:
    await given.ask(model=f"{LIBRARY}/broken").says("adapter_config.json")


async def the_scheduler_starts_again(given: Seeds) -> None:
    before = await given.runs(max_tokens=LONG)
    async with given.replaced("scheduler"):
        given.stack.kill("scheduler")
        await before.says("when this scheduler heard of it")


async def it_is_cut_off_from_its_runner(given: Seeds) -> None:
    with StackLinks().between(given.stack) as links:
        moved = await given.runs(max_tokens=FULL)
        links.cut(str(given.stack.service("runner")["name"]))
        await moved.says("no stream to the runner")
        links.mend()


CAUSES: list[Callable[[Seeds], Awaitable[None]]] = [
    over_concurrency,
    over_a_rate,
    over_a_rate_in_batch,
    above_a_minutes_grant,
    over_the_limits_of_its_key,
    over_the_limits_of_its_adapter,
    too_few_pages,
    full_batch,
    slots_in_use,
    full_queue,
    reserved_for_another,
    cold_adapter,
    left_by_its_client,
    its_runner_is_killed,
    its_runner_is_frozen,
    its_engine_hangs,
    no_runner,
    its_adapter_is_refused,
    the_scheduler_starts_again,
    it_is_cut_off_from_its_runner,
]


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.__name__)
async def test_its_tenant_reads_the_cause(deployed: Deployed, cause: Callable[[Seeds], Awaitable[None]]) -> None:
    late: list[TooLate] = []
    while len(late) < TRIES:
        async with seeds(deployed) as given:
            await asyncio.to_thread(
                deployed.stack.until, lambda: all(one["ready"] for one in deployed.stack.status()["services"])
            )
            try:
                return await cause(given)
            except TooLate as error:
                late.append(error)
    raise late[-1]
