"""Choices of one call and prompts with the same beginning, with the real scheduler, real runner services and the real
dispatcher: they meet on one runner, and the scheduler's ledger charges shared pages once."""

from typing import Any

import pytest

from motet.domain import PAGE_TOKENS, InstanceName, RequestId
from motet_gateway.generation import EndReason
from motet_simulator.fake_engine import SlowEngines, tokens_of
from tests.support.in_process_runner import short_folder
from tests.support.in_process_services import until
from tests.support.in_process_system import InProcessSystem, in_process_system
from tests.support.real_dispatcher import SEED, Client, ask, dispatcher_of

LENGTH = 60
PROMPT = tuple(range(3 * PAGE_TOKENS + 5))
PROMISE, SHARED = 7, 3
"""Pages. All choices of a call share the full pages of their prompt."""


def ledger(system: InProcessSystem, instance: str) -> dict[Any, int]:
    return dict(system.control.scheduler.runners[InstanceName(instance)].ledger)


def where(system: InProcessSystem, request: str) -> str:
    placement = system.control.scheduler.requests[request].placement  # type: ignore[index]
    return placement.instance if placement is not None else ""


def placed(system: InProcessSystem, request: str) -> str:
    entries = system.control.scheduler.timelines.of(RequestId(request)) or []
    return next(detail for _, event, detail in entries if event == "placed")


async def finished(clients: list[Client], prompt: tuple[int, ...] = PROMPT) -> None:
    for client in clients:
        assert await client.over() is EndReason.LENGTH
        assert client.tokens == tokens_of(prompt, SEED, LENGTH)


@pytest.mark.parametrize(
    ("preset", "charges"),
    [
        ("paged-promises", [PROMISE - SHARED, PROMISE - SHARED, PROMISE]),
        ("paged-chunk", None),  # parts of a forecast, of which only the sum is known
    ],
)
async def test_choices_of_a_call_run_on_one_runner_and_shared_pages_are_charged_once(
    preset: str, charges: list[int] | None
) -> None:
    engines = SlowEngines(preset=preset)
    with short_folder() as folder:
        async with in_process_system(folder) as system, dispatcher_of(system) as dispatcher:
            for name in ("r0", "r1"):
                await system.runner(name, engines)
            await until(lambda: dispatcher.catalog.current.groups[0].base_digest)
            clients = [
                ask(dispatcher, f"a.{n}" if n else "a", PROMPT, max_tokens=LENGTH, parent="a" if n else "", choices=3)
                for n in range(3)
            ]
            await until(lambda: all(client.tokens for client in clients))
            (name,) = {where(system, request) for request in ("a", "a.1", "a.2")}
            await until(lambda: sum(ledger(system, name).values()) == 3 * PROMISE - 2 * SHARED)
            assert charges in (None, sorted(ledger(system, name).values()))
            engines.hurry()
            await finished(clients)
            await until(lambda: not ledger(system, name))
            await system.ledgers_agree()


async def test_a_prompt_goes_to_the_runner_that_has_its_beginning_in_its_cache() -> None:
    engines = SlowEngines()
    with short_folder() as folder:
        async with in_process_system(folder) as system, dispatcher_of(system) as dispatcher:
            await system.runner("r0", engines)
            await until(lambda: dispatcher.catalog.current.groups[0].base_digest)
            engines.hurry()
            await finished([ask(dispatcher, "first", PROMPT, max_tokens=LENGTH)])
            await until(lambda: system.control.scheduler.runners[InstanceName("r0")].cached_prefixes)
            await system.runner("r1", engines)
            alike, other = (*PROMPT[: 2 * PAGE_TOKENS], 7, 7, 7), (7, *PROMPT)
            # Nothing runs when each of them comes: without a hint, the highest name wins.
            for name, prompt, runner in [
                ("again", PROMPT, "r0"),
                ("begins-alike", alike, "r0"),
                ("other", other, "r1"),
            ]:
                await until(lambda: not system.control.scheduler.requests)
                await finished([ask(dispatcher, name, prompt, max_tokens=LENGTH)], prompt)
                assert f"runner {runner} " in placed(system, name)
