"""Tenants share the prompt tokens of iterations."""

from collections import Counter, defaultdict
from fractions import Fraction

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from motet.domain import PAGE_TOKENS, ParkMethod, RequestId
from motet_runner.interface import State
from motet_runner.plan import PRESETS, Sequence, compose, prompt_shares
from motet_runner.plan.prompt_shares import MAX_OWED, MAX_REMEMBERED, PromptShares
from tests.runner.plan.fake_device import FakeDevice, make_planner, new

CHUNK = 64
WEIGHTS = {"a": 1, "b": 2, "c": 4, "d": 1}
"""Powers of two: shares of a token are exact."""


class Prompts:
    """Prompts that wait in an engine, by arrival."""

    def __init__(self) -> None:
        self.shares = PromptShares()
        self.waiting: list[Sequence] = []
        self.had: Counter[str] = Counter()
        """Tokens, by tenant."""
        self._arrived = 0

    def ask(self, tenant: str, tokens: int, *, weight: int = 1) -> Sequence:
        self._arrived += 1
        added = new(f"{tenant}{self._arrived}", prompt=tokens, tenant=tenant, weight=weight)
        self.waiting.append(
            Sequence(
                added,
                self._arrived,
                promise=1000,
                tokens=list(added.prompt),
                state=State.WAITING,
                page_tokens=PAGE_TOKENS,
            )
        )
        return self.waiting[-1]

    def iterate(self, tokens: int = CHUNK) -> list[tuple[str, int]]:
        """→ whose prompt had how many tokens, in their order."""
        iteration = compose(self.waiting, PRESETS["paged-chunk"], chunk_tokens=tokens, places=1000, shares=self.shares)
        iteration.begin()
        for work in iteration.prefills:
            sequence = work.sequence
            self.shares.charge(sequence, work.count)
            self.had[sequence.tenant] += work.count
            sequence.scheduled += work.count
            if sequence.to_schedule <= 1:  # it decodes
                self.waiting.remove(sequence)
        return [(work.sequence.tenant, work.count) for work in iteration.prefills]


def test_a_short_prompt_does_not_wait_for_the_many_of_another_tenant() -> None:
    planner = make_planner(pages=400, places=40, chunk_tokens=CHUNK)
    device = FakeDevice(planner, checks_each=10)
    for number in range(20):
        planner.commands.add(new(f"flood {number}", prompt=200, tenant="flood"))
    device.step()
    planner.commands.add(new("short", prompt=30, tenant="other"))
    plan = device.step()
    assert device.requests(plan.prefills) == ["short", "flood 0"]
    assert [step.count for step in plan.prefills] == [30, CHUNK - 30]


def test_a_tenants_own_prompts_go_by_arrival() -> None:
    prompts = Prompts()
    prompts.ask("a", 100)
    prompts.ask("b", 100)
    prompts.ask("a", 10)
    seen = []
    while prompts.waiting:
        seen += prompts.iterate()
    assert seen == [("a", 64), ("b", 64), ("a", 36), ("b", 28), ("b", 8), ("a", 10)]


def test_shares_follow_the_weights() -> None:
    prompts = Prompts()
    for _ in range(30):
        prompts.ask("a", 1000)
        prompts.ask("b", 1000, weight=3)
    while prompts.had["a"] + prompts.had["b"] < 2 * MAX_OWED:
        prompts.iterate()
    before = prompts.had.copy()
    for _ in range(80):
        prompts.iterate()
        had = prompts.had - before
        assert abs(had["b"] - 3 * had["a"]) <= 3 * CHUNK + CHUNK


def test_what_a_tenant_leaves_goes_to_the_others_and_is_not_owed_for_ever() -> None:
    prompts = Prompts()
    for _ in range(50):
        prompts.ask("a", 1000)
    for _ in range(500):
        prompts.iterate()
    assert prompts.had["a"] == 500 * CHUNK
    for _ in range(50):
        prompts.ask("b", 1000)
    for _ in range(MAX_OWED // CHUNK):
        prompts.iterate()
    assert prompts.had["b"] == MAX_OWED
    before = prompts.had["a"]
    for _ in range(100):
        prompts.iterate()
    assert abs(prompts.had["a"] - before - 50 * CHUNK) <= CHUNK


def test_a_tenant_that_uses_little_is_owed_no_more_than_one_that_was_away() -> None:
    prompts = Prompts()
    for _ in range(50):
        prompts.ask("a", 1000)
    prompts.iterate()
    for _ in range(400):
        prompts.ask("b", 1)
        assert prompts.iterate()[0] == ("b", 1)
    for _ in range(50):
        prompts.ask("b", 1000)
    before = prompts.had["a"]
    for _ in range(MAX_OWED // CHUNK + 3):
        prompts.iterate()
    assert prompts.had["a"] > before, "it is its turn again"


def test_places_are_taken_by_arrival_whatever_prompts_their_tenants_had() -> None:
    """A place is occupied by the answer. If short prompts went first, long ones of others might never start."""
    planner = make_planner(pages=400, places=2, chunk_tokens=CHUNK)
    device = FakeDevice(planner)
    for name in ("long 0", "long 1"):
        planner.commands.add(new(name, prompt=30, tenant="long"))
    planner.commands.add(new("short", prompt=1, tenant="short"))
    assert device.requests(device.step().prefills) == ["long 0", "long 1"]


def test_a_simulator_knows_when_another_tenant_may_be_next() -> None:
    """It leaps over the chunks of one prompt, and `prompts` says whether the next iteration has the same one."""
    prompts = Prompts()
    for _ in range(2):
        prompts.ask("a", 1000)
    busy = prompts.ask("b", 1000)
    prompts.shares.charge(busy, MAX_OWED)
    decode = prompts.ask("a", 10)
    decode.started, decode.scheduled = True, 9
    of_one = [one for one in prompts.waiting if one is not busy]
    for waiting, expected in ((prompts.waiting, (1, 2, 0)), (of_one, (1, 2, 2))):
        for places, wait in zip((2, 3, 4), expected, strict=True):
            iteration = compose(
                waiting,
                PRESETS["paged-chunk"],
                chunk_tokens=CHUNK,
                places=places,
                beside=lambda *_: CHUNK,
                shares=prompts.shares,
            )
            assert [work.sequence for work in iteration.prefills] == prompts.waiting[:1]
            assert iteration.prompts == wait


def test_an_answer_that_another_runner_began_costs_its_tenant_nothing() -> None:
    planner = make_planner(pages=400, chunk_tokens=CHUNK)
    device = FakeDevice(planner)
    planner.commands.add(new("moved", prompt=40, delivered=(1, 2, 3), tenant="a"))
    device.step()
    assert not planner.next_iteration.shares.had


@pytest.mark.parametrize("method", [ParkMethod.RECOMPUTE, ParkMethod.SWAP])
@pytest.mark.parametrize("steps", [3, 14])
def test_a_prompt_costs_its_tenant_as_much_if_it_was_parked(method: ParkMethod, steps: int) -> None:
    """In the middle of its prompt, or while it decodes. Nobody supervises, so it comes back by itself."""
    planner = make_planner(pages=400, places=40, chunk_tokens=CHUNK)
    device = FakeDevice(planner, checks_each=10)
    for tenant in "ab":
        planner.commands.add(new(tenant, prompt=300, tenant=tenant, max_tokens=100))
    for _ in range(steps):
        device.step()
    parked = planner.sequences.get(RequestId("a"))
    assert parked is not None
    assert planner.commands.park(parked.request, 1, parked.promise, parked.promise, method)
    for _ in range(3):
        device.step()
    for _ in range(30):
        device.step()
    had = planner.next_iteration.shares.had
    assert parked.output_tokens
    assert had["a"] == had["b"]


def test_of_very_many_tenants_those_are_forgotten_that_had_tokens_longest_ago() -> None:
    prompts = Prompts()
    for number in range(MAX_REMEMBERED):
        prompts.ask(f"t{number}", 8)
        prompts.iterate()
    prompts.ask("t0", 8)
    prompts.iterate()
    prompts.ask("new", 8)
    prompts.iterate()
    assert len(prompts.shares.had) == MAX_REMEMBERED
    assert "t0" in prompts.shares.had
    assert "t1" not in prompts.shares.had


class NaiveShares:
    """The same, in fractions of tokens: each turn, look at all who wait."""

    def __init__(self) -> None:
        self.had: dict[str, Fraction] = {}
        self.now = Fraction(0)

    def of(self, tenant: str) -> Fraction:
        owed = self.now - Fraction(MAX_OWED, WEIGHTS[tenant])
        return max(owed, self.had.get(tenant, owed))

    def iterate(self, waiting: list[Sequence], tokens: int) -> list[tuple[str, int]]:
        left = {one: one.to_schedule for one in waiting}
        pieces = []
        while tokens and left:
            heads: dict[str, Sequence] = {}
            for one in left:
                heads.setdefault(one.tenant, one)
            turn = min(heads.values(), key=lambda one: (self.of(one.tenant), one.arrival))
            count = min(tokens, left.pop(turn))
            had = self.of(turn.tenant)
            self.now = max(self.now, had)
            self.had[turn.tenant] = had + Fraction(count, WEIGHTS[turn.tenant])
            tokens -= count
            pieces.append((turn.tenant, count))
        return pieces


class Sharing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.prompts = Prompts()
        self.naive = NaiveShares()
        self.since: dict[tuple[str, str], tuple[int, int]] = {}
        """Two tenants, and what they had had when they began to wait both."""
        self.asked: defaultdict[str, int] = defaultdict(int)

    @rule(tenant=st.sampled_from(sorted(WEIGHTS)), tokens=st.integers(1, 3 * MAX_OWED), times=st.integers(1, 4))
    def ask(self, tenant: str, tokens: int, times: int) -> None:
        for _ in range(times):
            self.prompts.ask(tenant, tokens, weight=WEIGHTS[tenant])

    @rule(times=st.integers(1, 60), tokens=st.sampled_from([8, CHUNK]))
    def iterate(self, times: int, tokens: int) -> None:
        for _ in range(times):
            wanted = self.naive.iterate(self.prompts.waiting, tokens)
            assert self.prompts.iterate(tokens) == wanted
            assert sum(count for _, count in wanted) == tokens or not self.prompts.waiting
            self.note_pairs()

    @rule(index=st.integers(0, 100))
    def cancel(self, index: int) -> None:
        if self.prompts.waiting:
            del self.prompts.waiting[index % len(self.prompts.waiting)]
            self.note_pairs()

    def note_pairs(self) -> None:
        waiting = {one.tenant for one in self.prompts.waiting}
        pairs = {(one, other) for one in waiting for other in waiting if one != other}
        had = self.prompts.had
        self.since = {pair: self.since.get(pair, (had[pair[0]], had[pair[1]])) for pair in pairs}

    @invariant()
    def nobody_has_more_than_its_share_and_what_it_was_owed(self) -> None:
        for (one, other), (had_before, others_before) in self.since.items():
            had = Fraction(self.prompts.had[one] - had_before, WEIGHTS[one])
            others = Fraction(self.prompts.had[other] - others_before, WEIGHTS[other])
            most = Fraction(MAX_OWED + CHUNK, WEIGHTS[one]) + Fraction(CHUNK, WEIGHTS[other])
            assert had - others <= most, (one, other)


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_a_piece_is_as_large_as_the_iteration_allows() -> None:
    """Many tenants with long prompts take turns, and do not each get a few tokens of every iteration."""
    prompts = Prompts()
    for tenant in "abcdefgh":
        prompts.ask(tenant, 1000)
    assert all(prompts.iterate() == [(tenant, CHUNK)] for tenant in "abcdefgh")
    assert prompt_shares.MAX_OWED > 8 * CHUNK
