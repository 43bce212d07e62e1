"""Consolidation (PU-18): the emptiest runner of a pool that may shrink is emptied."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from motet.domain import InstanceName, RequestId
from motet.promises import LENGTH_OF_MAX_TOKENS
from motet.runner_info import BatchCap, RunnerRequest
from motet_scheduler.policy import effects, request_lifecycle
from motet_scheduler.policy.consolidation import (
    MAX_SECONDS_AGAIN,
    SAVED_PER_COST,
    WHY,
    Running,
    expected_left,
    fullness,
    worth_moving,
)
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.scaling_rule import TARGET
from motet_scheduler.policy.values import Estimate, Promise, ScalingMode
from tests.scheduler.builders import SchedulerDriver, entry, pool

STEP, PROMPT_TOKEN = 0.02, 0.0002
"""Seconds: a prompt of 100 tokens takes as long as an iteration."""

LONG = Estimate(q50=500, q80=600, q90=700, q95=800, source="tenant")
FIXED = "default/fixed"
SHRINKS = {"scaling": ScalingMode.BUILTIN, "min_replicas": 1}

Live = dict[str, int]
"""Tokens that each request of a runner has delivered."""


class Driver(SchedulerDriver):
    """Its runners run requests that go on for long, and report once a second."""

    def __init__(self, live: dict[str, Live], spec: dict[str, Any], *, fixed: Sequence[str] = (), **how: Any) -> None:
        """`fixed`: the runners of another pool, which may not shrink."""
        super().__init__()
        self.fixed = fixed
        self.spread(live, **how)
        self.state(pools=(pool(replicas=len(live) - len(fixed), **spec), pool(pool=FIXED)))

    def spread(
        self,
        live: dict[str, Live],
        *,
        epoch: int = 1,
        max_sequences: int = 8,
        pages: int = 1000,
        promised: int = 10,
    ) -> None:
        for instance in live:
            of = FIXED if instance in self.fixed else "default/demo"
            self.attach(instance, max_sequences=max_sequences, pages=pages, pool=of)
        self.gateway(
            "g0",
            *(
                self.live(
                    request,
                    instance=instance,
                    epoch=epoch,
                    pages=10,
                    promise=Promise(10),
                    max_tokens=1000,
                    delivered=delivered,
                    estimate=LONG,
                )
                for instance, requests in live.items()
                for request, delivered in requests.items()
            ),
        )
        for instance, requests in live.items():
            entries = (entry(one, promised, epoch=epoch, output_tokens=got) for one, got in requests.items())
            self.report_on(instance, *entries)

    def report_on(self, instance: str, *live: RunnerRequest, **how: Any) -> list[effects.Effect]:
        return self.report(instance, *live, **({"step_seconds": STEP, "prompt_token_seconds": PROMPT_TOKEN} | how))

    def moves(self) -> list[tuple[str, str]]:
        """In the last effects: what moved, and where to."""
        return [(one.request, str(one.instance)) for one in self.of(effects.SendPlaced) if one.moved_reason == WHY]

    def emptied(self) -> list[str]:
        return [one.instance for one in self.scheduler.runners.values() if one.emptied]


def some(**live: int) -> Live:
    return live


def test_the_emptiest_runner_is_emptied_and_the_longest_answer_moves_first():
    driver = Driver({"r0": some(a=10, b=400), "r1": some(c=5, d=5, e=5)}, SHRINKS)
    driver.wait(1.0)
    assert driver.moves() == [("a", "r1"), ("b", "r1")], "490 tokens are left of one, and 100 of the other"
    cancelled = [(one.instance, one.request, one.epoch) for one in driver.of(effects.CancelAtRunner)]
    assert cancelled == [("r0", "a", 1), ("r0", "b", 1)]
    assert driver.scheduler.runners[InstanceName("r0")].empty
    told = driver.scheduler.timelines.of(RequestId("a"))
    assert told is not None
    assert f"away from runner r0: {WHY}" in [detail for _, _, detail in told]


@pytest.mark.parametrize(
    ("slo", "moves"),
    [
        pytest.param({}, [], id="the knee is the only limit"),
        pytest.param({"target_seconds": 0.2}, [("a", "r1")], id="a token takes 95 ms there then"),
        pytest.param({"target_seconds": 0.09}, [], id="it would take longer than the SLO says"),
    ],
)
def test_beyond_the_knee_requests_move_as_long_as_the_slo_holds(slo, moves):
    live = {"r0": some(a=10), "r1": some(x=5, y=5)}
    driver = Driver(live, SHRINKS)
    law = {"sequences": 8, "fixed_seconds": 0.02, "sequence_seconds": 0.025}
    for name, of in live.items():
        entries = (entry(one, 10, output_tokens=got) for one, got in of.items())
        cap = {"batch_cap": BatchCap(**slo, **law)} if slo else {}
        driver.report_on(name, *entries, fixed_seconds=0.02, sequence_seconds=0.025, **cap)
    driver.wait(1.0)
    assert driver.moves() == moves


def test_the_room_of_the_runner_that_gets_it_is_known():
    """A small request lowers what a request has there on average, so it keeps fewer pages for others."""
    live = {"r0": some(a=10), "r1": some(x=5, y=5, z=5)}
    driver = Driver(live, SHRINKS, max_sequences=64, pages=100_000)
    driver.report_on("r1", *(entry(one, 400, epoch=1, output_tokens=5) for one in live["r1"]))
    driver.wait(1.0)
    assert driver.moves() == [("a", "r1")]
    driver.scheduler.check()


def test_little_is_computed_again_at_once():
    live = {"r0": some(a=450, b=350, c=250), "r1": {f"x{n}": 5 for n in range(4)}}
    driver = Driver(live, SHRINKS, max_sequences=12)
    driver.scheduler.requests[RequestId("c")].prompt_tokens = int(MAX_SECONDS_AGAIN / PROMPT_TOKEN) - 250
    driver.wait(1.0)
    assert driver.moves() == [("c", "r1")]
    driver.wait(0.5)
    assert driver.moves() == []
    driver.wait(0.5)
    assert driver.moves() == [("b", "r1")]
    driver.wait(1.0)
    assert driver.moves() == [("a", "r1")]


def test_what_would_pause_for_too_long_stays_and_so_do_shorter_ones():
    driver = Driver({"r0": some(b=350, c=250), "r1": some(d=5, e=5, f=5)}, SHRINKS)
    driver.scheduler.requests[RequestId("c")].prompt_tokens = int(MAX_SECONDS_AGAIN / PROMPT_TOKEN) - 249
    driver.wait(1.0)
    assert (driver.moves(), driver.emptied()) == ([], ["r0"])


def test_several_runners_are_emptied_if_the_others_have_room_and_each_gets_little_at_once():
    live = {"r0": some(a=300), "r1": some(b=300), "r2": some(c=300, d=300), "r3": some(e=5, f=5, g=5)}
    driver = Driver(live, SHRINKS, max_sequences=12)
    for one in driver.scheduler.requests.values():
        one.prompt_tokens = 400
    driver.wait(1.0)
    assert driver.emptied() == ["r0", "r1", "r2"]
    assert driver.moves() == [("a", "r3")], "two would take longer than an eighth of a second"
    live["r4"] = {f"x{n}": 5 for n in range(4)}
    driver = Driver(live, SHRINKS | {"min_replicas": 3}, max_sequences=12)
    for one in driver.scheduler.requests.values():
        one.prompt_tokens = 900
    driver.wait(1.0)
    assert driver.emptied() == ["r0", "r1"]
    assert driver.moves() == [("a", "r4"), ("b", "r3")]


@pytest.mark.parametrize(
    "spec",
    [{}, {"scaling": ScalingMode.BUILTIN, "min_replicas": 2}, {"scaling": ScalingMode.EXTERNAL, "min_replicas": 3}],
    ids=["replicas decides", "at the minimum", "below it"],
)
def test_nothing_moves_where_no_runner_could_be_removed(spec):
    driver = Driver({"r0": some(a=10), "r1": some(c=5, d=5)}, spec)
    driver.wait(1.0)
    assert (driver.moves(), driver.emptied()) == ([], [])


@pytest.mark.parametrize(
    ("live", "how"),
    [
        ({"r0": some(a=10, b=10, c=10), "r1": some(d=5, e=5, f=5, g=5)}, {}),  # 7 of 8 places
        ({"r0": some(a=10), "r1": some(c=5, d=5)}, {"pages": 120, "promised": 35}),  # 105 of 120, and 50 are free there
        ({"r0": some(a=10), "r1": {}}, {}),
    ],
    ids=["places", "pages", "an empty runner"],
)
def test_nothing_moves_where_the_others_would_be_too_full(live, how):
    driver = Driver(live, SHRINKS, **how)
    driver.wait(1.0)
    assert (driver.moves(), driver.emptied()) == ([], [])


def test_nothing_moves_from_a_pool_of_fixed_size_nor_to_an_emptier_runner():
    live = {"r0": some(a=10), "r1": some(c=10, d=10), "r2": some(e=5, f=5, g=5), "r3": some(h=10, i=10)}
    driver = Driver(live, SHRINKS, fixed=("r0", "r2"))
    driver.wait(1.0)
    assert (driver.moves(), driver.emptied()) == ([("c", "r2"), ("d", "r2")], ["r1"])
    driver = Driver(live, SHRINKS, fixed=("r0", "r2"))
    for name in ("c", "d"):
        driver.scheduler.requests[RequestId(name)].avoid = dict.fromkeys(("r2", "r3"), driver.clock() + 10)
    driver.wait(1.0)
    assert (driver.moves(), driver.emptied()) == ([], [])


def test_nothing_moves_where_the_autoscaler_needs_as_many_runners():
    """Of four places it counts three as full: sixteen requests need six runners. None goes in a rollout."""
    live = {f"r{n}": {f"q{n}-{one}": 10 for one in range(3 if n else 1)} for n in range(6)}
    driver = Driver(live, SHRINKS, max_sequences=4)
    driver.wait(1.0)
    assert (driver.moves(), driver.emptied()) == ([], [])
    driver = Driver({"r0": some(a=10), "r1": some(c=5, d=5)}, SHRINKS)
    new = driver.scheduler.runners[InstanceName("r0")]
    new.identity = replace(new.identity, revision="new")
    driver.wait(1.0)
    assert (driver.moves(), driver.emptied()) == ([], [])


@pytest.mark.parametrize("how", [{"step_seconds": 9 * STEP}, {"prompt_token_seconds": 9 * PROMPT_TOKEN}])
def test_nothing_moves_to_a_runner_that_is_much_slower_or_does_not_say(how):
    for one in (how, dict.fromkeys(how, 0.0)):
        driver = Driver({"r0": some(a=10), "r1": some(c=5, d=5)}, SHRINKS)
        driver.report_on("r1", entry("c", 10, output_tokens=5), entry("d", 10, output_tokens=5), **one)
        driver.wait(1.0)
        assert (driver.moves(), driver.emptied()) == ([], ["r0"])


def test_what_is_computed_again_takes_as_long_as_on_the_other_runner():
    driver = Driver({"r0": some(a=10), "r1": some(c=5, d=5)}, SHRINKS)
    driver.scheduler.requests[RequestId("a")].prompt_tokens = int(MAX_SECONDS_AGAIN / PROMPT_TOKEN / 2)
    driver.report_on("r1", *(entry(one, 10, output_tokens=5) for one in "cd"), prompt_token_seconds=2 * PROMPT_TOKEN)
    driver.wait(1.0)
    assert driver.moves() == []


def test_choices_of_one_call_stay_together():
    driver = Driver({"r0": some(a=10, b=10), "r1": some(c=5, d=5, e=5)}, SHRINKS)
    for one in "ab":
        driver.scheduler.requests[RequestId(one)].choices = 2
    driver.wait(1.0)
    assert (driver.moves(), driver.emptied()) == ([], ["r0"])


def test_nothing_moves_to_a_runner_on_which_a_request_is_parked():
    driver = Driver({"r0": some(a=10), "r1": some(c=5, d=5)}, SHRINKS)
    driver.report_on("r1", entry("c", 10, output_tokens=5), entry("d", 991, output_tokens=5, parked=True))
    driver.wait(1.0)
    assert (driver.moves(), driver.emptied()) == ([], [])


def test_what_moved_twice_stays():
    for epoch, moves in ((2, [("a", "r1")]), (3, [])):
        driver = Driver({"r0": some(a=10), "r1": some(c=5, d=5)}, SHRINKS, epoch=epoch)
        driver.wait(1.0)
        assert driver.moves() == moves


def test_what_has_no_token_yet_or_no_gateway_stays():
    driver = Driver({"r0": some(a=0), "r1": some(c=5, d=5)}, SHRINKS)
    driver.wait(1.0)
    assert (driver.moves(), driver.emptied()) == ([], ["r0"])
    driver.report_on("r0", entry("a", 10, output_tokens=3))
    driver.gateway("g1")
    driver.scheduler.state.gateways.discard("g0")
    driver.wait(1.0)
    assert driver.moves() == []
    driver.scheduler.state.gateways.add("g0")
    driver.wait(1.0)
    assert driver.moves() == [("a", "r1")]


@pytest.mark.parametrize("forgotten", [False, True])
def test_what_its_runner_has_not_listed_yet_stays_and_so_does_what_its_gateway_does_not_know(forgotten, monkeypatch):
    driver = Driver({"r0": some(a=10), "r1": some(c=5, d=5)}, SHRINKS)
    driver.scheduler.lifecycle.placed(RequestId("a"), 1)
    driver.wait(1.0)
    assert (driver.moves(), driver.emptied()) == ([], ["r0"])
    driver.report_on("r0", entry("a", 10, output_tokens=10))
    if forgotten:
        monkeypatch.setattr(request_lifecycle, "ENDED_AT_ONCE", 0)  # it ends later
        driver.scheduler.lifecycle.forget([driver.scheduler.requests[RequestId("a")]])
    driver.wait(1.0)
    assert driver.moves() == ([] if forgotten else [("a", "r1")])


def test_nothing_moves_to_a_runner_that_would_have_to_fetch_its_adapter():
    driver = Driver({"r0": some(a=10), "r1": some(c=5, d=5)}, SHRINKS)
    driver.scheduler.requests[RequestId("a")].digest = "sha256:" + "f" * 64
    driver.scheduler.state.adapter_uses["sha256:" + "f" * 64] += 1
    driver.clock.advance(1.0)
    driver.scheduler.state.now = driver.clock()
    driver.wait(0.0)
    assert driver.moves() == []


def test_what_a_runner_does_not_say_is_not_guessed():
    driver = Driver({"r0": some(a=10), "r1": some(c=5, d=5)}, SHRINKS)
    driver.report_on("r0", entry("a", 10, output_tokens=10), prompt_token_seconds=0.0)
    driver.wait(1.0)
    assert (driver.moves(), driver.emptied()) == ([], ["r0"])


def test_a_runner_that_is_emptied_gets_no_new_requests_while_another_has_room():
    """Else the prompt that it has in its cache would go before fullness."""
    driver = Driver({"r0": some(a=0), "r1": some(c=5, d=5)}, SHRINKS)
    driver.report_on("r0", entry("a", 10, output_tokens=0), cached=(1, 2))
    driver.wait(1.0)
    assert driver.emptied() == ["r0"]
    driver.enqueue("new", prefix_hints=(1, 2))
    assert (driver.where("new"), driver.emptied()) == ("r1", ["r0"])


def test_it_is_emptied_no_more_when_the_load_returns():
    driver = Driver({"r0": some(a=0), "r1": some(c=5, d=5)}, SHRINKS)
    driver.wait(1.0)
    assert driver.emptied() == ["r0"]
    for number in range(6):
        driver.enqueue(f"n{number}")
        assert driver.where(f"n{number}") == "r1"
    driver.enqueue("more")
    assert (driver.where("more"), driver.emptied()) == ("r0", [])
    driver.report_on("r0", entry("a", 10, output_tokens=3), entry("more", 5, output_tokens=3))
    driver.wait(1.0)
    assert (driver.moves(), driver.emptied()) == ([], [])


def test_it_is_emptied_no_more_while_a_request_waits():
    driver = Driver({"r0": some(a=0), "r1": some(c=5, d=5)}, SHRINKS, pages=100)
    driver.wait(1.0)
    assert driver.emptied() == ["r0"]
    driver.enqueue("large", prompt=92 * 16, max_tokens=64)
    assert driver.where("large") == ""
    driver.report_on("r0", entry("a", 10, output_tokens=3))
    driver.wait(1.0)
    assert (driver.moves(), driver.emptied()) == ([], [])


def test_it_is_emptied_no_more_if_its_longest_answer_fits_nowhere_else():
    driver = Driver({"r0": some(a=5), "r1": some(c=5, d=5)}, SHRINKS)
    driver.scheduler.requests[RequestId("a")].avoid["r1"] = driver.clock() + 10
    driver.wait(1.0)
    assert (driver.moves(), driver.emptied()) == ([], [])


def request(delivered: int, estimate: Estimate = LONG, max_tokens: int = 1000) -> Request:
    driver = SchedulerDriver()
    driver.gateway()
    driver.enqueue("a", estimate=estimate, max_tokens=max_tokens)
    found = driver.scheduler.requests[RequestId("a")]
    found.delivered = delivered
    return found


@pytest.mark.parametrize(
    ("delivered", "estimate", "left"),
    [
        (10, LONG, 490),
        (500, LONG, 100),
        (800, LONG, 200),
        (30, Estimate(), 30),
        (30, Estimate(q50=1000, q80=1000, q90=1000, q95=1000, source=LENGTH_OF_MAX_TOKENS), 30),
        (1000, LONG, 0),
    ],
    ids=["median", "next quantile", "longer than all", "no estimate", "only its limit", "all"],
)
def test_how_much_an_answer_is_expected_to_get_still(delivered, estimate, left):
    assert expected_left(request(delivered, estimate)) == left


RUNNING = st.lists(st.tuples(st.integers(0, 500), st.floats(0.001, 0.25), st.booleans()), max_size=8)


@given(RUNNING, st.sampled_from([0.0, 0.0001, 0.001, 0.02]))
@settings(max_examples=150, deadline=None)
def test_as_many_move_as_save_most(drawn, step):
    one = request(1)
    running = [Running(left, again, one if moves else None) for left, again, moves in sorted(drawn, reverse=True)]

    def saved(count: int) -> float:
        after = running[count].left if count < len(running) else 0
        return (running[0].left - after) * step - SAVED_PER_COST * sum(one.again for one in running[:count])

    stays = next((number for number, one in enumerate(running) if one.request is None), len(running))
    count = worth_moving(running, step)
    assert count <= stays
    best = max(map(saved, range(1, stays + 1)), default=0.0)
    assert saved(count) == pytest.approx(best) if count else best <= 1e-9


@pytest.mark.parametrize(("again", "count"), [(0.49, 1), (0.51, 0)])
def test_what_moves_saves_twice_what_it_costs(again, count):
    """A thousand tokens fewer at a millisecond each: a second."""
    assert worth_moving([Running(1500, again, request(1)), Running(500, 0.1, None)], 0.001) == count


class Consolidating(RuleBasedStateMachine):
    """Requests come, go on, and end; runners break and come back. Every move keeps the rules."""

    @initialize(runners=st.integers(2, 4), least=st.integers(0, 2), max_sequences=st.sampled_from([2, 4, 8]))
    def start(self, runners, least, max_sequences):
        self.driver = Driver({}, SHRINKS | {"min_replicas": least})
        self.instances = [f"r{number}" for number in range(runners)]
        self.capacity = {"pages": 60, "max_sequences": max_sequences}
        self.delivered: dict[str, int] = {}
        self.moves: dict[str, int] = {}
        self.down: set[str] = set()
        self.number = 0
        for instance in self.instances:
            self.driver.attach(instance, **self.capacity)

    def placed(self, instance: str) -> list[RunnerRequest]:
        return [
            entry(one.id, 4, epoch=one.placement.epoch, output_tokens=self.delivered[one.id])
            for one in self.driver.scheduler.requests.values()
            if one.placement is not None and one.placement.instance == instance
        ]

    @rule(count=st.integers(1, 4), prompt=st.integers(1, 300), q50=st.integers(0, 300))
    def ask(self, count, prompt, q50):
        for _ in range(count):
            self.number += 1
            estimate = Estimate(q50=q50, q80=2 * q50, q90=3 * q50, q95=4 * q50, source="tenant")
            self.delivered[f"q{self.number}"] = 0
            self.driver.enqueue(f"q{self.number}", prompt=prompt, max_tokens=600, estimate=estimate)

    @rule(data=st.data())
    def end(self, data):
        running = sorted(one.id for one in self.driver.scheduler.requests.values() if one.placement is not None)
        for name in data.draw(st.lists(st.sampled_from(running), unique=True, max_size=6)) if running else []:
            placement = self.driver.scheduler.requests[name].placement
            self.driver.finish(name, placement.epoch)

    @rule(data=st.data())
    def break_or_mend(self, data):
        instance = data.draw(st.sampled_from(self.instances))
        if instance in self.down:
            self.down.discard(instance)
            self.driver.attach(instance, live=tuple(self.placed(instance)), **self.capacity)
        else:
            self.down.add(instance)
            self.driver.detach(instance)

    @rule(tokens=st.integers(0, 200))
    def go_on(self, tokens):
        """A second passes."""
        scheduler = self.driver.scheduler
        for one in scheduler.requests.values():
            if one.placement is not None and one.placement.instance not in self.down:
                self.delivered[one.id] = min(599, self.delivered[one.id] + tokens)
        for instance in self.instances:
            if instance not in self.down:
                self.driver.report_on(instance, *self.placed(instance))
        before = {
            runner.instance: (fullness(runner), runner.max_sequences, runner.ledger.free, runner.takes_work)
            for runner in scheduler.runners.values()
        }
        running = {
            runner.instance: [scheduler.requests[name] for name, _ in runner.entries]
            for runner in scheduler.runners.values()
        }
        waited = any(map(len, scheduler.queues.values()))
        self.driver.wait(1.0)
        moves = [one for one in self.driver.of(effects.SendPlaced) if one.moved_reason == WHY]
        if not moves:
            return
        assert not waited
        cancelled = [one for one in self.driver.of(effects.CancelAtRunner) if one.reason == WHY]
        source_of = {one.request: str(one.instance) for one in cancelled}
        taken: dict[str, list[int]] = {}
        for move in moves:
            self.moves[move.request] = self.moves.get(move.request, 0) + 1
            assert self.moves[move.request] <= 2
            taken.setdefault(str(move.instance), []).append(move.promise.pages)
            full, source = before[str(move.instance)][0], before[source_of[move.request]][0]
            assert full > source, "it goes to a fuller runner, so it never comes back at once"
        for target, pages in taken.items():
            full, most, free, takes_work = before[target]
            assert takes_work
            assert target not in source_of.values(), "one that is emptied gets nothing"
            assert full[0] + len(pages) <= most
            assert sum(pages) <= free
        used = [one for name, one in before.items() if one[0][0] and name not in source_of.values()]
        assert sum(one[0][0] for one in before.values()) <= TARGET * sum(one[1] for one in used)
        for source in set(source_of.values()):
            moved = [expected_left(one) for one in running[source] if one.id in source_of]
            rest = sorted((expected_left(one) for one in running[source] if one.id not in source_of), reverse=True)
            assert min(moved) >= max(rest, default=0), "the longest go first"
            costs = sorted(
                ((expected_left(one), one.prompt_tokens + one.delivered) for one in running[source]), reverse=True
            )
            sums = accumulate(cost for _, cost in costs)
            first, ends = costs[0][0], [*(left for left, _ in costs[1:]), 0]
            assert any(
                (first - end) * STEP >= SAVED_PER_COST * total * PROMPT_TOKEN
                for number, (end, total) in enumerate(zip(ends, sums, strict=True), 1)
                if number >= len(moved)
            ), "it does not pay"


TestConsolidating = Consolidating.TestCase
TestConsolidating.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
