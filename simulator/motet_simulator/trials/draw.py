"""What a seed draws: the requests and adapters of its plan. `draw_faults` draws the rest."""

from dataclasses import replace
from random import Random

from motet.runner_info import RequestClass
from motet_simulator.trials.draw_faults import draw_faults, draw_lies, with_enough
from motet_simulator.trials.draw_grants import draw_grants
from motet_simulator.trials.plan import (
    CONTEXT_TOKENS,
    GATEWAYS,
    PAGE_TOKENS,
    RUNNERS,
    SECONDS,
    AdapterChange,
    Ask,
    Plan,
    TrialSettings,
)

LYING_SEEDS = 0, 5
"""In their plans, of eight each, somebody lies."""


def draw_plan(seed: int) -> Plan:
    random = Random(seed)
    settings = TrialSettings(
        pages=random.choice((32, 64, 128)),
        max_sequences=random.choice((2, 4, 8, 20)),
        queue_limit=random.choice((2, 20, 10_000)),
        max_passed_over=random.choice((2, 8, 64)),
        step_seconds=random.choice((0.02, 0.03, 0.05)),
        host_pages=random.choice((0, 4, 64)),
        plan_ahead=random.choice((0, 1)),
        overcommit=random.choice((1.0, 1.0, 1.5)),
        force_promise_pages=random.choice((0, 0, 2)),
        adapter_pages=random.choice((1, 2, 8)),
        adapter_slots=random.choice((1, 2, 8)),
        cached_adapters=random.choice((1, 2, 8)),
        shrinks=seed % 6 == 3,
        local=random.random() < 0.3,
    )
    changes = _draw_changes(random)
    adapters = tuple(dict.fromkeys(one.name for one in changes))
    asks = _draw_asks(random, settings, adapters)
    slow = {adapter for adapter in adapters if random.random() < 0.25}
    changes = [replace(change, slow=change.name in slow) for change in changes]
    faults = draw_faults(random, settings, changes)
    preset = "paged-promises" if seed % 4 == 3 else "paged-chunk"
    settings = replace(settings, hang_seconds=random.choice((6.0, 20.0)), preset=preset)
    if random.random() < 0.25:
        asks = _for_adapters_only(random, asks, settings, adapters)
        # Else one runner may get all that three can do.
        changes = [replace(change, max_replicas=RUNNERS) for change in changes]
    asks = _make_some_too_large(random, asks, settings)
    grants = draw_grants(Random(f"grants {seed}"), asks, settings.step_seconds)
    faults = with_enough(random, faults)
    if seed % 8 in LYING_SEEDS:
        faults = sorted([*faults, *draw_lies(Random(f"lies {seed}"))], key=lambda fault: fault.at)
    return Plan(seed, tuple(asks), tuple(faults), settings, tuple(changes), grants)


def _draw_changes(random: Random) -> list[AdapterChange]:
    """A life for each adapter: what is there from the start, later revisions, and sometimes a deletion between."""
    changes = []
    contents = random.choice((3, 12))
    for adapter in range(random.choice((0, 1, 2, 5))):
        at, in_place = 0.0, random.random() < 0.3
        for number in range(random.choice((1, 2, 4, 8))):
            at += random.expovariate(1 / 4) if number else random.choice((0.0, 0.0, 5 * random.random()))
            if at > SECONDS:
                break
            least = random.choice((0, 0, 1, RUNNERS))
            changes.append(
                AdapterChange(
                    at=at,
                    name=f"a{adapter}",
                    number=number,
                    deleted=number > 0 and random.random() < 0.2,
                    content=random.randrange(contents) + (AdapterChange.BROKEN if random.random() < 0.1 else 0),
                    in_place=in_place,
                    min_replicas=least,
                    max_replicas=max(least, random.choice((1, RUNNERS, RUNNERS))),
                )
            )
    return changes


def _draw_asks(random: Random, settings: TrialSettings, adapters: tuple[str, ...]) -> list[Ask]:
    count = random.randint(60, 110)
    at_once = min(settings.max_sequences, settings.pages * PAGE_TOKENS // 150)
    steps_per_second = RUNNERS * max(1, at_once) / settings.step_seconds
    load = random.choice((0.2, 0.5, 0.9, 1.5, 3.0))
    window = min(SECONDS, 1.2 * SECONDS / load)  # what is left at the end must have ended before the last check
    mean = max(4.0, min(120.0, load * window * steps_per_second / count))
    largest_of_all = min(settings.pages * PAGE_TOKENS, CONTEXT_TOKENS)
    asks = []
    unreadable = random.choice((0.0, 0.0, 0.03))
    for number in range(count):
        huge = random.random() < 0.02
        adapter = random.choice(adapters) if adapters and random.random() < 0.6 else ""
        beside = settings.adapter_pages if adapter else 0
        largest = min(largest_of_all, (settings.pages - beside) * PAGE_TOKENS)
        prompt = random.randint(largest // 2, largest - 2) if huge else min(int(random.expovariate(1 / 60)) + 1, 400)
        prompt = min(prompt, largest - 2)
        tokens = max(1, min(int(random.expovariate(1 / mean)) + 1, 300, largest - prompt))
        asks.append(
            Ask(
                name=f"r{number}",
                at=random.random() ** random.choice((0.5, 1.0, 2.0)) * window,
                gateway=random.randrange(GATEWAYS),
                prompt=(number, *(random.randrange(1000) for _ in range(prompt - 1))),
                max_tokens=tokens,
                tenant=random.choice(("acme", "acme", "umbrella", "initech")),
                request_class=random.choice(tuple(RequestClass)),
                seed=random.getrandbits(32),
                adapter=adapter,
                cancel_after=random.random() * 3 if random.random() < 0.1 else None,
                deadline=random.uniform(2, 10) if random.random() < 0.1 else 300.0,
                unreadable=random.random() < unreadable,
            )
        )
    return asks


def _for_adapters_only(
    random: Random, asks: list[Ask], settings: TrialSettings, adapters: tuple[str, ...]
) -> list[Ask]:
    """All that fit beside one. So an engine may have nothing to do until the files of an adapter have come."""
    largest = (settings.pages - settings.adapter_pages) * PAGE_TOKENS

    def fits(ask: Ask) -> bool:
        return ask.adapter != "" or len(ask.prompt) + ask.max_tokens <= largest

    return [replace(ask, adapter=random.choice(adapters)) if fits(ask) else ask for ask in asks] if adapters else asks


def _make_some_too_large(random: Random, asks: list[Ask], settings: TrialSettings) -> list[Ask]:
    share = random.choice((0.0, 0.0, 0.04))
    least = min(settings.pages * PAGE_TOKENS, CONTEXT_TOKENS)

    def made_larger(ask: Ask) -> Ask:
        more = least - len(ask.prompt) + random.randint(0, 50)
        return replace(ask, too_large=True, prompt=(*ask.prompt, *(random.randrange(1000) for _ in range(more))))

    return [made_larger(ask) if random.random() < share else ask for ask in asks]
