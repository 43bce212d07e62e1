"""A simulated engine that leaps over plain iterations does exactly what one does that takes each of them."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from motet_runner.plan import Planner
from motet_simulator.plan.cluster import Cluster
from motet_simulator.plan.setup import Setup
from motet_supervisor.policy.values import SupervisorConfig
from tests.simulator.setups import profile, workload


def all_that_happens(seed: int, *, leaps: bool) -> tuple[list[Any], Any]:
    chance = random.Random(seed)
    adapters = chance.choice([0, 0, 3, 40])
    setup = Setup(
        profile=profile(
            noise=chance.choice([0.1, 0.5]),
            seed=seed,
            pages=chance.choice([96, 160, 512]),
            max_sequences=chance.choice([4, 16, 64]),
            adapter_slots=chance.choice([2, 8]),
            cached_adapters=chance.choice([4, 64]),
            host_pages=chance.choice([0, 64]),
            decode_slowdown=chance.choice([1.1, 1.5, 2.0]),
            tpot_seconds=chance.choice([None, 0.016]),
        ),
        runners=chance.choice([1, 2, 3]),
        seed=seed,
        lengths=chance.choice(["answers", "exact", "max_tokens"]),
        max_tokens=400,
        rank=8,
        supervisor=SupervisorConfig(overcommit=chance.choice([1.0, 1.5])),
        shrinks=seed % 3 == 0,
        leaps=leaps,
    )
    seen: list[Any] = []
    cluster = Cluster(
        setup, [f"a{number}" for number in range(adapters)], record=lambda now, event: seen.append((now, event))
    )
    asked = workload(
        seed,
        40,
        rate=chance.choice([1, 8, 60]),
        adapters=adapters,
        blocks=chance.choice([0, 6]),
        prompt=chance.choice([30, 30, 300]),
        output=chance.choice([20, 90]),
    )
    outcome = cluster.run(asked)
    for runner in cluster.runners.values():
        runner.engine.check()
    cluster.scheduler.check()
    return seen, outcome


@pytest.mark.parametrize(
    "first", [*range(0, 20, 10), *(pytest.param(one, marks=pytest.mark.soak) for one in range(20, 100, 10))]
)
def test_leaping_is_the_same_as_stepping(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All events of scheduler and supervisor, with their times, and all that the gateway has seen."""
    leapt = beside_chunks = 0
    leap = Planner.leap

    def counted(self: Planner, count: int, tokens: Sequence[int], pieces: Sequence[int] = ()) -> None:
        nonlocal leapt, beside_chunks
        leapt += count
        beside_chunks += len(pieces)
        leap(self, count, tokens, pieces)

    monkeypatch.setattr(Planner, "leap", counted)
    for seed in range(first, first + 10):
        events, outcome = all_that_happens(seed, leaps=True)
        stepped_events, stepped_outcome = all_that_happens(seed, leaps=False)
        for ours, theirs in zip(events, stepped_events, strict=False):
            assert ours == theirs, seed
        assert len(events) == len(stepped_events), seed
        assert outcome == stepped_outcome, seed
        assert outcome.busy_seconds == pytest.approx(stepped_outcome.busy_seconds)
        assert outcome.requests == 40
    assert leapt > 100
    assert beside_chunks > 20
