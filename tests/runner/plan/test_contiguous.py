"""The pages of a sequence as one run (S3-08): they are appended to in place, and holes between runs close (S3-12)."""

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from motet.domain import PAGE_TOKENS, Digest, ParkMethod, RequestId
from motet.errors import SetupError
from motet_runner.plan import Copy, DeviceBudget, PageAllocator, Planner, Tier, preset_named
from motet_runner.step_costs import StepCosts
from tests.runner.plan.fake_device import FakeDevice, adapter_layout, make_planner, new

R = RequestId
PAGES = 12


def planner_of_runs(**more) -> Planner:
    return make_planner(preset=preset_named("s3", contiguous=True), pages=PAGES, **more)


def pages_of(planner: Planner, request: str) -> list[int]:
    sequence = planner.sequences.get(R(request))
    assert sequence is not None
    return sequence.pages


def begin(device: FakeDevice, request: str, *, promise: int, max_tokens: int = 0) -> None:
    """A sequence of one token, with an answer as long as its promise."""
    device.planner.commands.add(
        new(request, prompt=1, max_tokens=max_tokens or promise * PAGE_TOKENS - 1, promise=promise)
    )
    device.step()


def test_a_sequence_has_the_pages_of_its_whole_promise_from_the_beginning() -> None:
    planner = planner_of_runs()
    device = FakeDevice(planner)
    begin(device, "a", promise=3)
    begin(device, "b", promise=2)
    assert (pages_of(planner, "a"), pages_of(planner, "b")) == ([0, 1, 2], [3, 4])
    for _ in range(2 * PAGE_TOKENS):
        device.step()
    assert pages_of(planner, "a") == [0, 1, 2]
    assert not planner.memory.copies, "nothing is ever moved"


def test_holes_close_when_no_gap_is_large_enough_and_no_token_changes() -> None:
    planner = planner_of_runs()
    device = FakeDevice(planner)
    for request in "abcde":
        begin(device, request, promise=2)
    planner.commands.cancel(R("b"))
    planner.commands.cancel(R("d"))
    begin(device, "small", promise=2)
    assert pages_of(planner, "small") == [2, 3], "the lowest gap"
    assert pages_of(planner, "e") == [8, 9], "nothing was moved for it"
    begin(device, "large", promise=4)
    assert [pages_of(planner, request) for request in ("a", "small", "c", "e", "large")] == [
        [0, 1], [2, 3], [4, 5], [6, 7], [8, 9, 10, 11],
    ]  # fmt: skip
    device.run()  # it notices keys and values that are not where they should be
    assert {"a", "small", "c", "e", "large"} == device.finished.keys()


def test_a_longer_promise_takes_the_pages_after_the_run_or_moves_it() -> None:
    planner = planner_of_runs()
    device = FakeDevice(planner)
    begin(device, "a", promise=2, max_tokens=11 * PAGE_TOKENS)
    begin(device, "b", promise=2, max_tokens=11 * PAGE_TOKENS)
    assert planner.commands.extend(R("b"), 1, 2, 4)
    assert pages_of(planner, "b") == [2, 3, 4, 5]
    assert not planner.memory.copies
    assert planner.commands.extend(R("a"), 1, 2, 5)
    assert pages_of(planner, "a") == [6, 7, 8, 9, 10]
    assert planner.memory.copies == [Copy(Tier.DEVICE, (0, 1), Tier.DEVICE, (6, 7))]
    assert not planner.commands.extend(R("a"), 1, 5, 9), "no more pages are free"
    for _ in range(3 * PAGE_TOKENS):
        device.step()
    planner.check()


def test_an_extension_beyond_the_longest_life_moves_no_run_and_makes_no_other_promise() -> None:
    planner = planner_of_runs()
    device = FakeDevice(planner)
    begin(device, "a", promise=2)
    begin(device, "b", promise=2)
    planner.commands.cancel(R("a"))
    assert not planner.commands.extend(R("b"), 1, 2, 4)
    assert pages_of(planner, "b") == [2, 3]
    assert not planner.memory.copies
    sequence = planner.sequences.get(R("b"))
    assert sequence is not None
    assert sequence.promise_number == 1


def test_an_overcommitted_promise_that_finds_no_run_stays_as_it_was() -> None:
    planner = planner_of_runs()
    planner.commands.supervised = True
    planner.commands.set_overcommit(2.0)
    device = FakeDevice(planner)
    begin(device, "a", promise=6, max_tokens=11 * PAGE_TOKENS)
    begin(device, "b", promise=6, max_tokens=11 * PAGE_TOKENS)
    assert not planner.commands.extend(R("a"), 1, 6, 8)
    assert planner.memory.ledger.promise_of(R("a")) == 6
    planner.check()


@pytest.mark.parametrize("method", ParkMethod)
def test_a_parked_sequence_comes_back_as_a_run(method: ParkMethod) -> None:
    planner = planner_of_runs(host_pages=4)
    planner.commands.supervised = True
    device = FakeDevice(planner)
    for request in "abc":
        begin(device, request, promise=3, max_tokens=5 * PAGE_TOKENS)
    assert planner.commands.park(R("a"), 1, 3, 5, method)
    assert planner.commands.cancel(R("b"))
    assert planner.commands.resume(R("a"), 1, 5)
    device.step()
    assert pages_of(planner, "a") == [0, 1, 2, 3, 4]
    device.run()
    assert len(device.finished["a"][0]) == 5 * PAGE_TOKENS


def test_only_pages_with_tokens_are_copied_to_the_host() -> None:
    planner = planner_of_runs(host_pages=1)
    begin(FakeDevice(planner), "a", promise=PAGES)
    costs = StepCosts(prefill_seconds_per_token=4.0, swap_seconds_per_page=1.0)
    sequence = planner.sequences.get(R("a"))
    assert sequence is not None
    assert (len(sequence.pages), sequence.scheduled) == (PAGES, 1)
    assert costs.cheaper_park(sequence) is ParkMethod.SWAP


def test_an_adapter_moves_runs_and_an_idle_one_yields_to_them() -> None:
    planner = planner_of_runs(max_adapters=2)
    device = FakeDevice(planner)
    for request in "abc":
        begin(device, request, promise=3)
    planner.commands.cancel(R("b"))
    planner.commands.load_adapter(Digest("x"), adapter_layout(5))
    planner.commands.add(new("tuned", prompt=1, max_tokens=10, promise=1, adapter="x"))
    device.run()
    assert device.finished.keys() == {"a", "c", "tuned"}
    begin(device, "whole", promise=PAGES)
    assert pages_of(planner, "whole") == list(range(PAGES))
    device.run()
    assert "whole" in device.finished


def test_a_promise_beyond_the_longest_life_takes_no_pages_from_its_adapter() -> None:
    planner = planner_of_runs()
    device = FakeDevice(planner)
    planner.commands.add(new("tuned", prompt=1, max_tokens=3 * PAGE_TOKENS, promise=PAGES, adapter="x"))
    planner.commands.load_adapter(Digest("x"), adapter_layout(5))
    device.run()
    assert "tuned" in device.finished


def test_a_run_that_an_adapter_in_use_leaves_no_room_for_gives_up_its_place() -> None:
    planner = planner_of_runs(places=1, max_adapters=1)
    planner.commands.set_overcommit(2.0)
    device = FakeDevice(planner)
    planner.commands.load_adapter(Digest("x"), adapter_layout(5))
    begin(device, "short", promise=1)
    planner.commands.add(new("tuned", prompt=1, max_tokens=10, promise=1, adapter="x"))
    device.step()
    planner.commands.add(new("long", prompt=1, max_tokens=11 * PAGE_TOKENS, promise=11))
    device.run()
    assert device.finished.keys() == {"short", "tuned", "long"}, "the largest goes first, and nobody can be parked"


def test_runs_need_a_preset_that_admits_by_promises() -> None:
    with pytest.raises(SetupError, match=r"engine\.contiguous needs .* Choose one of ft-max"):
        preset_named("paged-chunk", contiguous=True)


class AnyRuns(RuleBasedStateMachine):
    """Runs of sequences and adapters that come, grow and go, with the bytes of every page."""

    @initialize(pages=st.integers(1, 24))
    def begin(self, pages: int) -> None:
        self.pages = PageAllocator(pages)
        self.runs: list[list[int]] = []
        self.budget = DeviceBudget(self.pages, max_adapters=3, kv_runs=lambda: self.runs)
        self.live: set[Digest] = set()
        self.bytes: list[object] = [None] * pages
        self.written: list[list[object]] = []
        """Of each run of a sequence, in the same order"""
        self.numbers = count()

    def is_live(self, adapter: Digest) -> bool:
        return adapter in self.live

    def carry_out(self, moved, copies: tuple[Copy, ...]) -> None:
        for copy in copies:
            assert not set(copy.pages) & set(copy.to), "one copy reads what it writes"
            for page, to in zip(copy.pages, copy.to, strict=True):
                self.bytes[to] = self.bytes[page]
        for run in self.runs:
            run[:] = [moved.get(page, page) for page in run]

    def write(self, number: int) -> None:
        run, written = self.runs[number], self.written[number]
        for page in run[len(written) :]:
            written.append(next(self.numbers))
            self.bytes[page] = written[-1]

    def lengthen(self, run: list[int], length: int) -> bool:
        idle = [one for one in self.budget.adapters if one not in self.live]
        free = self.pages.free
        room = free + sum(self.budget.run_of(one).length for one in idle)
        grant = self.budget.lengthen(run, length, self.is_live)
        assert (grant is None) == (length - len(run) > room)
        if grant is None:
            return False
        assert grant.evicted == tuple(idle[: len(grant.evicted)]), "the least recently used go first"
        assert not grant.evicted or length - len(run) > free, "no more than must"
        self.carry_out(grant.moved, grant.copies)
        assert run == list(grant.run.pages)[: len(run)]
        run[:] = grant.run.pages
        return True

    @rule(length=st.integers(1, 10))
    def join(self, length: int) -> None:
        run: list[int] = []
        if self.lengthen(run, length):
            self.runs.append(run)
            self.written.append([])
            self.write(-1)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), more=st.integers(1, 8))
    def grow(self, data: st.DataObject, more: int) -> None:
        number = data.draw(st.integers(0, len(self.runs) - 1))
        run = self.runs[number]
        if self.lengthen(run, len(run) + more):
            self.write(number)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.runs) - 1))
        self.pages.give(self.runs.pop(number))
        del self.written[number]

    @rule(length=st.integers(1, 8), live=st.booleans())
    def load(self, length: int, live: bool) -> None:
        adapter = Digest(f"adapter {next(self.numbers)}")
        could = self.budget.could_grant(length, self.is_live)
        grant = self.budget.grant(adapter, length, self.is_live)
        assert could == (grant is not None), "runs never leave gaps that nobody can have"
        if grant is None:
            return
        self.carry_out(grant.moved, grant.copies)
        for index, page in enumerate(grant.run.pages):
            self.bytes[page] = adapter, index
        if live:
            self.live.add(adapter)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.budget.adapters:
            self.live.discard(data.draw(st.sampled_from(self.budget.adapters)))

    @invariant()
    def nothing_is_lost(self) -> None:
        self.budget.check(self.runs)
        for run, written in zip(self.runs, self.written, strict=True):
            assert run == list(range(run[0], run[0] + len(run)))
            assert [self.bytes[page] for page in run] == written
        for adapter, run in self.budget.runs:
            assert [self.bytes[page] for page in run.pages] == [(adapter, index) for index in range(run.length)]


AnyRuns.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyRuns = AnyRuns.TestCase
