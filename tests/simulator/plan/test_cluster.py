"""What a simulated cluster does: the real policies place, and times come from the profile."""

import gc
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from motet_runner.interface import NewSequence
from motet_scheduler.policy import events
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.policy.values import SchedulerConfig
from motet_simulator.plan.cluster import Cluster
from motet_simulator.plan.setup import Setup
from motet_simulator.profiles.profile import StepLaw, Work
from motet_simulator.quantiles import quantile
from motet_simulator.workloads.request import WorkloadRequest
from motet_supervisor.policy import events as supervisor_events
from tests.simulator.setups import LAW, profile, workload

QUIET = profile(noise=0.0)


def simulated(setup: Setup, requests: list[WorkloadRequest], **how: Any) -> Cluster:
    adapters = dict.fromkeys(one.adapter for one in requests if one.adapter)
    cluster = Cluster(setup, adapters, **how)
    cluster.run(iter(requests))
    return cluster


def alone(**how: Any) -> WorkloadRequest:
    return WorkloadRequest(**({"at": 1.0, "prompt_tokens": 40, "output_tokens": 11} | how))


def test_one_request_takes_what_the_law_and_the_overheads_say() -> None:
    outcome = simulated(Setup(profile=QUIET, runners=2), [alone()]).outcome
    over = QUIET.overheads
    first = LAW.seconds(Work(prefill=40, attended=40 * 41 // 2))
    assert outcome.first_tokens == [pytest.approx(over.arrival + over.submit + first + over.delivery)]
    decodes = [LAW.seconds(Work(decodes=1, context=41 + number)) for number in range(10)]
    assert outcome.per_token == [pytest.approx(sum(decodes) / 10)]
    assert len(outcome.gaps) == 10
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.requests) == (40, 11, 1)


def test_no_tokens_are_made_of_a_prompt_that_no_runner_could_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace may have many, each of sixteen million tokens."""
    made: list[int] = []
    prompt = WorkloadRequest.prompt

    def noted(self: WorkloadRequest, number: int) -> tuple[int, ...]:
        made.append(self.prompt_tokens)
        return prompt(self, number)

    monkeypatch.setattr(WorkloadRequest, "prompt", noted)
    setup = Setup(profile=profile(noise=0.0, pages=256, max_model_length=1 << 20), runners=1)
    asked = [
        alone(prompt_tokens=tokens, output_tokens=1, max_tokens=1) for tokens in (1 << 24, 256 * 16 + 1, 256 * 16 - 1)
    ]
    outcome = simulated(setup, asked).outcome
    assert (len(outcome.first_tokens), outcome.refusals.total()) == (1, 2)
    assert made == [256 * 16 - 1]


def test_sequences_and_context_cost_what_the_law_says() -> None:
    """As many at once as there are, each with its own context."""
    steep = profile(noise=0.0, law=StepLaw(fixed=0.001, decodes=((1, 0.0),), context=1e-5))
    short = simulated(Setup(profile=steep, runners=1), [alone(prompt_tokens=100, output_tokens=2)]).outcome
    long = simulated(Setup(profile=steep, runners=1), [alone(prompt_tokens=200, output_tokens=2)]).outcome
    both = simulated(Setup(profile=steep, runners=1), [alone(prompt_tokens=100, output_tokens=2)] * 2).outcome
    assert short.per_token == [pytest.approx(0.001 + 101e-5)]
    assert long.per_token == [pytest.approx(0.001 + 201e-5)]
    assert both.per_token[0] == pytest.approx(0.001 + 202e-5)


def test_more_load_means_longer_waits_and_more_runners_shorter_ones() -> None:
    def waits(rate: float, runners: int) -> float:
        setup = Setup(profile=profile(max_sequences=4), runners=runners, lengths="exact")
        return quantile(simulated(setup, list(workload(3, 300, rate=rate))).outcome.first_tokens, 0.95)

    assert max(waits(2, 1), waits(30, 8)) < 0.5
    assert waits(30, 1) > 2


def test_every_answer_has_its_length_also_when_promises_are_too_short() -> None:
    requests = list(workload(5, 120, rate=20, output=120))
    small = SchedulerConfig(force_promise_pages=4)
    tight = Setup(profile=profile(pages=80, max_sequences=16), runners=1, max_tokens=300, scheduler=small)
    seen: Counter[str] = Counter()
    cluster = simulated(tight, requests, record=lambda _, event: seen.update([type(event).__name__]))
    assert seen["OverflowAnnounced"] > 10
    assert seen["RequestParked"] > 0
    assert cluster.outcome.output_tokens == sum(one.output_tokens for one in requests)
    assert len(cluster.outcome.gaps) == sum(one.output_tokens - 1 for one in requests)
    for runner in cluster.runners.values():
        runner.engine.check()


def test_more_requests_run_at_once_by_forecast() -> None:
    took = {}
    for preset in ("paged-chunk", "paged-promises"):
        size = profile(noise=0.0, pages=160, max_sequences=64, preset=preset)
        setup = Setup(profile=size, runners=1, max_tokens=400, lengths="exact")
        took[preset] = simulated(setup, list(workload(7, 150, rate=100, output=120))).outcome.seconds
    assert took["paged-chunk"] < 0.8 * took["paged-promises"]


def test_a_gateway_that_has_its_tokens_late_keeps_no_memory_free() -> None:
    """The runner tells the scheduler itself which sequences have ended: others take their pages at once."""
    took = {}
    for late in (0.001, 0.5):
        small = profile(noise=0.0, pages=80, max_sequences=64, preset="oracle")
        small = replace(small, overheads=replace(small.overheads, delivery=late))
        setup = Setup(profile=small, runners=1, max_tokens=400, lengths="exact")
        took[late] = simulated(setup, list(workload(7, 150, rate=100, output=60))).outcome.seconds - late
    assert took[0.5] < 1.1 * took[0.001]


def test_the_engine_gets_the_whole_estimate() -> None:
    """Its forecast needs all four quantiles."""
    cluster = Cluster(Setup(profile=QUIET, runners=1, lengths="answers"), [])
    engine = next(iter(cluster.runners.values())).engine
    add, quantiles = engine.planner.commands.add, []

    def added(sequence: NewSequence) -> Any:
        quantiles.append(sequence.quantiles)
        return add(sequence)

    engine.planner.commands.add = added  # type: ignore[method-assign]
    cluster.run(iter(list(workload(7, 100, rate=2, output=120))))
    q50, q80, q90, q95 = quantiles[-1]
    assert q50 < q80 < q90 <= q95


def test_a_request_that_fits_nowhere_is_refused_and_counted() -> None:
    setup = Setup(profile=QUIET, runners=1)
    outcome = simulated(setup, [alone(), alone(prompt_tokens=5000)]).outcome
    assert (len(outcome.first_tokens), outcome.refusals) == (1, Counter({"context_length_exceeded": 1}))


def test_a_cold_adapter_loads_before_its_first_token_and_a_warm_one_does_not() -> None:
    slow = replace(QUIET, overheads=replace(QUIET.overheads, adapter_load=0.5))
    requests = [alone(at=float(5 * number), adapter="a") for number in range(3)]
    first, *others = simulated(Setup(profile=slow, runners=1), requests).outcome.first_tokens
    assert first > 0.5
    assert max(others) < 0.2


def test_few_things_make_a_runner_report_all_that_it_has() -> None:
    """A whole report of each overflow and each load took more than half of a simulation's time."""
    requests = list(workload(3, 500, rate=20, adapters=30, output=150))
    seen: Counter[type] = Counter()
    tight = profile(pages=1500, max_sequences=32, adapter_slots=4, cached_adapters=64)
    setup = Setup(profile=tight, runners=3, lengths="exact")
    cluster = simulated(setup, requests, record=lambda _, one: seen.update([type(one)]))
    overflows, moves = seen[supervisor_events.OverflowAnnounced], seen[events.AdapterStateChanged]
    assert overflows > 200
    assert moves > 200
    assert not seen[supervisor_events.RequestParked]
    each_second = 3 * (int(cluster.outcome.seconds) + 1)
    assert seen[events.RunnerReported] <= each_second + 10, "a few, as pages grew scarce"


def test_prompts_that_begin_alike_are_computed_once() -> None:
    requests = [alone(at=float(number), prompt_tokens=200, blocks=(1, 2, 3), block_tokens=64) for number in range(3)]
    first, *others = simulated(Setup(profile=QUIET, runners=2), requests).outcome.first_tokens
    saved = LAW.seconds(Work(prefill=200, attended=200 * 201 // 2)) - LAW.seconds(
        Work(prefill=8, attended=8 * 192 + 8 * 9 // 2)
    )
    assert others == [pytest.approx(first - saved)] * 2
    strangers = [replace(one, blocks=(number,)) for number, one in enumerate(requests)]
    assert simulated(Setup(profile=QUIET, runners=2), strangers).outcome.first_tokens == [pytest.approx(first)] * 3


def test_time_without_requests_passes_at_once_and_changes_nothing() -> None:
    """Also in years without any. Nobody is taken for silent afterwards."""

    def simulate(gap: float) -> tuple[list[float], Counter[type]]:
        times = [0.0, 0.1, gap, gap + 0.1, 2 * gap]
        requests = [alone(at=at, adapter=f"a{number % 2}", output_tokens=200) for number, at in enumerate(times)]
        seen: Counter[type] = Counter()
        cluster = simulated(Setup(profile=QUIET, runners=3), requests, record=lambda _, one: seen.update([type(one)]))
        return cluster.outcome.first_tokens, seen

    expected, seen = simulate(20.0)
    assert seen[events.Tick] > 60
    for gap in (100.0, 1000.1, 1e8):
        found, seen = simulate(gap)
        assert found == pytest.approx(expected, abs=1e-6)
        assert not seen[events.RunnerUnhealthy]
        assert seen[events.Tick] < 300


def test_the_same_seed_gives_the_same_and_another_one_something_else() -> None:
    def outcome(seed: int) -> list[float]:
        requests = list(workload(1, 80, rate=10, adapters=5))
        return simulated(Setup(profile=profile(), runners=2, seed=seed), requests).outcome.first_tokens

    assert outcome(1) == outcome(1) != outcome(2)


def test_a_simulation_makes_no_garbage_in_cycles() -> None:
    """Nothing is collected while it runs."""
    requests = list(workload(1, 80, rate=20, adapters=5))
    cluster = Cluster(Setup(profile=profile(pages=120), runners=2), dict.fromkeys(one.adapter for one in requests))
    gc.collect()
    cluster.run(iter(requests))
    assert gc.isenabled()
    assert gc.collect() == 0


def test_what_is_recorded_can_be_replayed() -> None:
    """The events of a simulation, given to a scheduler of its own, lead to the same decisions."""
    recorded: list[tuple[float, Any]] = []
    requests = list(workload(2, 100, rate=20, adapters=6))
    setup = Setup(profile=profile(max_sequences=4, adapter_slots=2), runners=2)
    cluster = Cluster(setup, dict.fromkeys(one.adapter for one in requests if one.adapter), record=None)
    decided: list[Any] = []
    handle = cluster.scheduler.handle

    def handling(event: events.Event, now: float) -> Any:
        recorded.append((now, event))
        decided.append(handle(event, now))
        return decided[-1]

    cluster.scheduler.handle = handling  # type: ignore[method-assign]
    cluster.run(iter(requests))
    again = Scheduler(setup.scheduler, now=0.0, saved=Cluster(setup, cluster.adapters).saved)
    assert [again.handle(event, now) for now, event in recorded] == decided


def left_on_both() -> list[WorkloadRequest]:
    """Each of two runners gets four requests; one of each four goes on for long."""
    return [alone(output_tokens=300 if number % 4 == 0 else 20) for number in range(8)]


def test_what_is_left_of_two_runners_moves_together_and_no_token_is_lost() -> None:
    """The moved one goes on from what its first runner had computed, and ends once."""
    setup = Setup(profile=profile(noise=0.0, max_sequences=4), runners=2, lengths="exact")
    spread, together = (simulated(replace(setup, shrinks=shrinks), left_on_both()).outcome for shrinks in (False, True))
    assert (len(spread.gaps.of_moves), len(together.gaps.of_moves)) == (0, 1)
    assert spread.output_tokens == together.output_tokens == 2 * 300 + 6 * 20
    assert len(together.gaps) == 2 * 299 + 6 * 19
    assert 0 < together.gaps.of_moves[0] < 0.1
    assert min(together.busy_seconds) < 0.6 * min(spread.busy_seconds)


def test_an_answer_that_ends_while_it_moves_ends_once() -> None:
    """Its last token is under way when the scheduler decides: its next runner has nothing to do for it."""
    setup = Setup(profile=profile(noise=0.0, max_sequences=4), runners=2, lengths="exact", shrinks=True)
    for tokens in range(60, 130):
        requests = [alone(output_tokens=tokens if number % 4 == 0 else 20) for number in range(8)]
        assert simulated(setup, requests).outcome.output_tokens == 2 * tokens + 6 * 20, tokens
