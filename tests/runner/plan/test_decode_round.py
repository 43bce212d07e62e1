"""A planner that knows that decoding only goes on makes the plans of one that composes every iteration."""

from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from motet.domain import Digest, ParkMethod, RequestId
from motet.errors import MotetError
from motet_runner.plan import StepPlan, StepResult
from motet_runner.plan.decode_round import DecodeRound
from motet_runner.plan.length_rope import LengthRope
from tests.runner.plan.fake_device import VOCABULARY, FakeDevice, adapter_layout, make_planner, new

PAGES = 24
RANKS = {"x": 1, "y": 3, "z": 6}


class Twins:
    """Two devices that get the same commands. The first one's planner composes every iteration."""

    def __init__(self, *, ahead: int = 0, **planner) -> None:
        self.devices = [
            FakeDevice(make_planner(pages=PAGES, places=5, **planner), ahead=ahead, checks_each=each) for each in (1, 7)
        ]
        self.devices[0].planner._plan_as_before = lambda: None  # noqa: SLF001
        self.caches = [device.planner.memory.cache for device in self.devices]
        self.rounds = 0

    def both(self, act) -> None:
        answers = []
        for device in self.devices:
            try:
                answers.append(act(device.planner))
            except MotetError as error:
                answers.append(str(error))
        names = [getattr(answer, "request", answer) for answer in answers]
        assert names[0] == names[1]

    def step(self) -> StepPlan:
        plans = [device.step() for device in self.devices]
        seen = [(plan.rows, plan.adapters, plan.copies, plan.moves, plan.number, plan.hurry) for plan in plans]
        assert seen[0] == seen[1]
        assert (plans[0].loads, plans[0].loading, plans[0].gone) == (plans[1].loads, plans[1].loading, plans[1].gone)
        events = [device.events for device in self.devices]
        assert events[0] == events[1]
        assert self.devices[0].finished == self.devices[1].finished
        assert len(self.caches[0]) == len(self.caches[1])
        assert self.devices[0].pages.free == self.devices[1].pages.free
        self.rounds += self.devices[1].planner._round is not None  # noqa: SLF001
        return plans[1]


class PlansAgree(RuleBasedStateMachine):
    OPTIONS: ClassVar[dict[str, object]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.twins = Twins(**self.OPTIONS)
        self.count = 0

    @rule(
        prompt=st.integers(1, 40),
        tokens=st.integers(1, 60),
        promise=st.none() | st.integers(1, 4),
        kind=st.fixed_dictionaries(
            {
                "adapter": st.sampled_from([Digest(""), Digest(""), Digest("x"), Digest("y"), Digest("z")]),
                "engines_lost": st.sampled_from([0, 0, 0, 1]),
                "salt": st.sampled_from([b"", b"s"]),
            }
        ),
    )
    def add(self, prompt, tokens, promise, kind) -> None:
        self.count += 1
        self.twins.both(
            lambda planner: planner.commands.add(
                new(f"r{self.count}", prompt=prompt, max_tokens=tokens, promise=promise, like="same", **kind)
            )
        )

    @rule(which=st.integers(1, 9))
    def cancel(self, which) -> None:
        self.twins.both(lambda planner: planner.commands.cancel(RequestId(f"r{which}")))

    @rule(which=st.integers(1, 9), method=st.sampled_from(list(ParkMethod)))
    def park(self, which, method) -> None:
        def act(planner) -> bool | None:
            known = planner.sequences.get(RequestId(f"r{which}"))
            return known and planner.commands.park(known.request, 1, known.promise, known.promise, method)

        self.twins.both(act)

    @rule(which=st.integers(1, 9), more=st.integers(1, 3))
    def extend(self, which, more) -> None:
        def act(planner) -> bool | None:
            known = planner.sequences.get(RequestId(f"r{which}"))
            return known and planner.commands.extend(known.request, 1, known.promise, known.promise + more)

        self.twins.both(act)

    @rule(which=st.integers(1, 9))
    def resume(self, which) -> None:
        self.twins.both(lambda planner: planner.commands.resume(RequestId(f"r{which}"), 1, 4))

    @rule(adapter=st.sampled_from(["x", "y", "z"]))
    def load(self, adapter) -> None:
        self.twins.both(lambda planner: planner.commands.load_adapter(Digest(adapter), adapter_layout(RANKS[adapter])))

    @rule(adapter=st.sampled_from(["x", "y", "z"]))
    def drop(self, adapter) -> None:
        self.twins.both(lambda planner: planner.commands.drop_adapter(Digest(adapter)))

    @rule(supervised=st.booleans())
    def supervise(self, supervised) -> None:
        for device in self.twins.devices:
            device.planner.commands.supervised = supervised

    @rule(factor=st.sampled_from([1.0, 2.0]))
    def overcommit(self, factor) -> None:
        self.twins.both(lambda planner: planner.commands.set_overcommit(factor))

    @rule(steps=st.integers(1, 25))
    def go_on(self, steps) -> None:
        for _ in range(steps):
            self.twins.step()


class PlansAgreeAhead(PlansAgree):
    OPTIONS: ClassVar[dict[str, object]] = {"ahead": 1, "host_pages": 8}


class PlansAgreeInWindows(PlansAgree):
    OPTIONS: ClassVar[dict[str, object]] = {"window": 20, "eos_token_ids": frozenset({7})}


class PlansAgreeWhereKeysRestart(PlansAgree):
    OPTIONS: ClassVar[dict[str, object]] = {"ahead": 1, "rope": LengthRope(20, grows=False)}


class PlansAgreeWithOneLoad(PlansAgree):
    OPTIONS: ClassVar[dict[str, object]] = {"ahead": 1, "max_loads": 1}


class PlansAgreeOnPagesOf32(PlansAgree):
    OPTIONS: ClassVar[dict[str, object]] = {"ahead": 1, "page_tokens": 32, "window": 40}


for machine in (
    PlansAgree,
    PlansAgreeAhead,
    PlansAgreeInWindows,
    PlansAgreeWhereKeysRestart,
    PlansAgreeWithOneLoad,
    PlansAgreeOnPagesOf32,
):
    machine.TestCase.settings = settings(
        max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
TestPlansAgree = PlansAgree.TestCase
TestPlansAgreeAhead = PlansAgreeAhead.TestCase
TestPlansAgreeInWindows = PlansAgreeInWindows.TestCase
TestPlansAgreeWhereKeysRestart = PlansAgreeWhereKeysRestart.TestCase
TestPlansAgreeWithOneLoad = PlansAgreeWithOneLoad.TestCase
TestPlansAgreeOnPagesOf32 = PlansAgreeOnPagesOf32.TestCase


@pytest.mark.parametrize("ahead", [0, 1])
def test_sequences_that_decode_are_not_composed_again(ahead: int, monkeypatch) -> None:
    twins = Twins(ahead=ahead)
    for name, prompt in (("a", 5), ("b", 9), ("c", 15)):
        twins.both(
            lambda planner, name=name, prompt=prompt: planner.commands.add(new(name, prompt=prompt, max_tokens=30))
        )
    composed = []
    monkeypatch.setattr(twins.devices[1].planner, "_plan_anew", _noted(twins.devices[1].planner, composed))
    plans = [twins.step() for _ in range(29)]
    assert len(composed) <= 4, "the prompts, and the first iteration that only decodes"
    assert len({id(plan.decodes.rows) for plan in plans[-20:]}) == 1, "what does not change is the same object"


@pytest.mark.parametrize("ahead", [0, 1])
def test_sequences_are_not_composed_again_while_an_adapter_loads(ahead: int, monkeypatch) -> None:
    twins = Twins(ahead=ahead)
    for name in ("a", "b"):
        twins.both(lambda planner, name=name: planner.commands.add(new(name, prompt=5, max_tokens=40)))
    for _ in range(5):
        twins.step()
    twins.both(lambda planner: planner.commands.load_adapter(Digest("z"), adapter_layout(RANKS["z"])))
    composed: list[int] = []
    monkeypatch.setattr(twins.devices[1].planner, "_plan_anew", _noted(twins.devices[1].planner, composed))
    plans = [twins.step() for _ in range(20)]
    loading = sum(bool(plan.loading) for plan in plans)
    assert loading >= 5, "the load takes many iterations"
    assert len(composed) <= 3, "the one that begins the load, the first one beside it, and the one after it"


def test_what_decodes_beside_a_load_may_be_leapt() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    device.disk_answers = False
    for name in ("a", "b", "c"):
        planner.commands.add(new(name, prompt=5, max_tokens=40))
    planner.commands.load_adapter(Digest("z"), adapter_layout(RANKS["z"]))
    for _ in range(5):
        device.step()
    planner.commands.cancel(RequestId("c"))
    assert planner.adapters.loading()
    decoding = planner.plain_round()
    assert decoding is not None
    assert [one.request for one in decoding.sequences] == ["a", "b"]


def _noted(planner, composed):
    anew = planner._plan_anew  # noqa: SLF001

    def plan_anew() -> StepPlan | None:
        composed.append(planner.steps)
        return anew()

    return plan_anew


def test_a_round_ends_when_one_of_its_sequences_may_not_go_on() -> None:
    planner = make_planner()
    device = FakeDevice(planner, ahead=1)
    short, long = planner.commands.add(new("short", max_tokens=6)), planner.commands.add(new("long", max_tokens=20))
    for _ in range(3):
        device.step()
    decoding = DecodeRound([short, long], {})
    left = 0
    while not decoding.ended:
        decodes = decoding.schedule(planner.memory)
        left += 1
    decoding.write_back()
    assert decodes.starts == (short.scheduled - 1, long.scheduled - 1)
    assert short.output_tokens + short.pending == 6
    assert left > 0


def test_results_of_a_round_go_to_the_sequences_that_are_still_there() -> None:
    planner = make_planner()
    for name in "abc":
        planner.commands.add(new(name, prompt=3, max_tokens=20))

    def step(*after) -> dict[str, list[int]]:
        plan = planner.plan()
        for command in after:
            command()
        planner.collect(StepResult(number=plan.number, sampled=tuple(range(len(plan.rows)))))
        planner.check()
        return {output.request: output.tokens for output in planner.take_outputs()[0]}

    for _ in range(4):
        assert step() == {"a": [0], "b": [1], "c": [2]}
    assert step(lambda: planner.commands.cancel(RequestId("b"))) == {"a": [0], "c": [2]}
    assert step() == {"a": [0], "c": [1]}


def test_one_that_is_not_finite_leaves_a_round(monkeypatch) -> None:
    twins = Twins()
    for name in "abc":
        twins.both(lambda planner, name=name: planner.commands.add(new(name, prompt=3, max_tokens=VOCABULARY)))
    for _ in range(4):
        twins.step()
    for device in twins.devices:
        device.not_finite.add("b")
    for _ in range(5):
        twins.step()
    assert [device.given_up for device in twins.devices] == [["b"], ["b"]]


def test_a_round_ends_when_pages_are_short() -> None:
    planner = make_planner(pages=4)
    planner.commands.set_overcommit(2.0)
    device = FakeDevice(planner)
    for name in "ab":
        planner.commands.add(new(name, prompt=3, max_tokens=60))
    device.run()
    assert {name: len(tokens) for name, (tokens, _) in device.finished.items()} == {"a": 60, "b": 60}


def test_a_round_keeps_tokens_as_columns_until_they_mean_more() -> None:
    planner = make_planner(eos_token_ids=frozenset({7}))
    planner.commands.supervised = True
    planner.commands.add(new("a", prompt=3, max_tokens=80, promise=2))
    planner.commands.add(new("b", prompt=3, max_tokens=80))
    kept: list[tuple[str, ...] | None] = []
    for token in [1] * 20 + [7]:
        plan = planner.plan()
        planner.collect(StepResult(number=plan.number, sampled=(token, token)))
        decoded = planner.take_decoded()
        kept.append(decoded and decoded.requests)
        outputs, _ = planner.take_outputs()
        seen = outputs if decoded is None else [*decoded.outputs(), *outputs]
        assert sorted((one.request, one.index, one.tokens) for one in seen) == [
            (name, len(kept) - 1, [token]) for name in "ab"
        ]
    # The prompts; the announcement of a's overflow; the end.
    assert kept == [None, *[("a", "b")] * 12, ("b",), *[("a", "b")] * 6, None]
    assert len(planner.sequences) == 0


def test_those_beside_one_that_ends_stay_columns_and_go_on() -> None:
    """Its last token comes by `max_tokens` or is a stop token, and its pages are free at once."""
    planner = make_planner(eos_token_ids=frozenset({7}))
    for name, tokens in (("a", 30), ("b", 4), ("c", 30)):
        planner.commands.add(new(name, prompt=3, max_tokens=tokens))
    seen: list[tuple[tuple[str, ...], list[tuple[str, str | None]]]] = []
    for tokens in [(1, 1, 1)] * 4 + [(1, 1)] * 3 + [(7, 1)] + [(1,)] * 3:
        plan = planner.plan()
        planner.collect(StepResult(number=plan.number, sampled=tokens))
        planner.check()
        decoded = planner.take_decoded()
        outputs, _ = planner.take_outputs()
        seen.append((decoded.requests if decoded else (), [(one.request, one.finish) for one in outputs]))
    assert seen[2:4] == [(("a", "b", "c"), []), (("a", "c"), [("b", "length")])]
    assert seen[7] == (("c",), [("a", "stop")])
    assert [len(one.tokens) for one in planner.sequences] == [3 + 11]


def test_a_page_is_cached_when_the_one_that_had_it_cached_ends() -> None:
    """Both compute the same first page at once, so only one of them can cache its own."""
    twins = Twins()
    for name, prompt, tokens in (("a", 26, 4), ("b", 37, 7)):
        twins.both(
            lambda planner, name=name, prompt=prompt, tokens=tokens: planner.commands.add(
                new(name, prompt=prompt, max_tokens=tokens, like="same", salt=b"s")
            )
        )
    cached = []
    while not twins.devices[1].finished:
        twins.step()
        cached.append(len(twins.caches[1]))
    assert cached[-2:] == [1, 2]
