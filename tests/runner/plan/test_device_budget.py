"""KV pages and adapters in one pool, with the bytes of every page: nothing is lost, overwritten or left behind."""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from random import Random
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from motet.domain import Digest
from motet_runner.adapters.policy import frequency
from motet_runner.adapters.policy.frequency import Frequency
from motet_runner.plan import Copy, DeviceBudget, PageAllocator, Tier
from motet_runner.plan.device_budget import PageRun

A, B, C, D = map(Digest, "ABCD")


class Device:
    """Pages with bytes, sequences that hold some, and adapters: what an engine does with a budget."""

    def __init__(self, pages: int, max_adapters: int = 100) -> None:
        self.allocator = PageAllocator(pages)
        self.awaited: set[Digest] = set()
        self.pinned: set[Digest] = set()
        self.costs: dict[Digest, float] = {}
        self.frequency = Frequency(max_adapters)
        """A second count, by which the same ones must leave"""
        self.budget = DeviceBudget(
            self.allocator,
            max_adapters=max_adapters,
            is_awaited=self.awaited.__contains__,
            load_cost=lambda one: self.costs.get(one, 1.0),
        )
        self.allocator.on_cache_page_taken = self._on_cache_page_taken
        self.bytes: list[object] = ["nothing"] * pages
        self.sequences: list[dict[int, object]] = []
        """Page → its bytes, in order"""
        self.cached: dict[int, object] = {}
        """Page → its bytes, in the prefix cache"""
        self.live: set[Digest] = set()
        self._next = count()

    def _on_cache_page_taken(self, page: int) -> None:
        del self.cached[page]

    def is_live(self, adapter: Digest) -> bool:
        return adapter in self.live

    def take(self, pages: int) -> dict[int, object] | None:
        taken = self.allocator.take(pages)
        if taken is None:
            return None
        sequence = {page: f"kv {next(self._next)}" for page in taken}
        for page, value in sequence.items():
            self.bytes[page] = value
        self.sequences.append(sequence)
        return sequence

    def hold(self, *pages: int) -> None:
        """A sequence has these pages."""
        self.allocator.take_these(pages)
        self.sequences.append({page: f"kv {next(self._next)}" for page in pages})
        for page, value in self.sequences[-1].items():
            self.bytes[page] = value

    def used(self, adapter: Digest) -> None:
        self.budget.used(adapter)
        self.frequency.used(adapter)

    def idle(self) -> list[Digest]:
        """The least recently used first"""
        return [one for one in self.budget.adapters if one not in self.live]

    def worth(self, adapter: Digest, pages: int) -> tuple[bool, bool, float]:
        """The least leave first."""
        uses = self.frequency.of(adapter)
        return adapter in self.pinned, adapter in self.awaited, uses * self.costs.get(adapter, 1.0) / pages

    def check_left(self, evicted: Sequence[Digest], idle: dict[Digest, tuple[bool, bool, float]]) -> None:
        """`idle`: what those that might leave were worth, the least recently used first."""
        assert set(evicted) <= idle.keys(), "a live sequence uses it"
        stays = [one for one in idle if one not in evicted]
        for one in evicted:
            assert all(idle[one] <= idle[other] for other in stays), "it left, and another one would do"
        alike = [one for one in idle if idle[one] == max((idle[gone] for gone in evicted), default=None)]
        left = [one for one in alike if one in evicted]
        assert left == alike[: len(left)], "of those that are worth the same, the least recently used one goes first"

    def load(self, adapter: Digest, pages: int, *, evict: bool = True):
        before = {one: self.budget.run_of(one) for one in self.budget.adapters}
        grant = self.budget.grant(adapter, pages, self.is_live, evict=evict)
        if grant is None:
            assert {one: self.budget.run_of(one) for one in self.budget.adapters} == before
            return None
        self.carry_out(grant.copies)
        self.sequences = [
            {grant.moved.get(page, page): value for page, value in sequence.items()} for sequence in self.sequences
        ]
        self.cached = {grant.moved.get(page, page): value for page, value in self.cached.items()}
        for index, page in enumerate(grant.run.pages):
            self.bytes[page] = (adapter, index)
        return grant

    def carry_out(self, copies: tuple[Copy, ...]) -> None:
        for copy in copies:
            assert copy.source is copy.target is Tier.DEVICE
            pages, to = copy.pages, copy.to
            assert len(set(pages)) == len(pages) == len(set(to)) == len(to)
            assert not set(pages) & set(to), "one copy reads what it writes"
            for page, value in zip(to, [self.bytes[page] for page in pages], strict=True):
                self.bytes[page] = value

    def check(self) -> None:
        self.budget.check(list(map(list, self.sequences)), self.cached)
        for sequence in (*self.sequences, self.cached):
            assert {page: self.bytes[page] for page in sequence} == sequence
        for adapter in self.budget.adapters:
            run = self.budget.run_of(adapter)
            assert [self.bytes[page] for page in run.pages] == [(adapter, index) for index in range(run.length)]


class AnyLife(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.largest = ExitStack()

    def teardown(self) -> None:
        self.largest.close()

    @initialize(pages=st.integers(1, 24), max_adapters=st.integers(1, 6), anew=st.booleans())
    def begin(self, pages: int, max_adapters: int, anew: bool) -> None:
        """`anew`: with each use, all counts begin anew."""
        if anew:
            self.largest.enter_context(patch.object(frequency, "_LARGEST", 1.0))
        self.device = Device(pages, max_adapters)
        self.max_adapters = max_adapters
        self.names = count()

    @rule(pages=st.integers(1, 8))
    def take(self, pages: int) -> None:
        free = self.device.allocator.free
        assert (self.device.take(pages) is None) == (pages > free)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.device.sequences:
            sequence = data.draw(st.sampled_from(self.device.sequences))
            shared = dict(list(sequence.items())[: data.draw(st.integers(0, len(sequence)))])
            self.device.allocator.share(list(shared))
            self.device.sequences.append(shared)

    @rule(data=st.data(), cached=st.booleans())
    def end(self, data: st.DataObject, cached: bool) -> None:
        if self.device.sequences:
            sequence = self.device.sequences.pop(data.draw(st.integers(0, len(self.device.sequences) - 1)))
            for page, value in sequence.items():
                if cached and page not in self.device.cached:
                    self.device.allocator.cache(page)
                    self.device.cached[page] = value
            self.device.allocator.give(list(sequence))

    @rule(pages=st.integers(1, 10), evict=st.booleans(), live=st.booleans())
    def load(self, pages: int, evict: bool, live: bool) -> None:
        device, budget = self.device, self.device.budget
        adapter = Digest(f"adapter {next(self.names)}")
        worth = {one: device.worth(one, budget.run_of(one).length) for one in device.idle()}
        idle = sorted(worth, key=worth.__getitem__)
        sizes = [budget.run_of(one).length for one in idle]
        free, empty, resident = device.allocator.free, len(device.allocator.empty_pages), len(budget.adapters)
        must = max(0, resident + 1 - self.max_adapters)
        needed = next((n for n in range(must, len(idle) + 1) if free + sum(sizes[:n]) >= pages), None)
        could = budget.could_grant(pages, device.is_live)
        assert could == (needed is not None)
        grant = device.load(adapter, pages, evict=evict)
        if not evict:
            assert grant is None or not (grant.evicted or grant.copies)
            assert grant is None or empty >= pages
        elif grant is None:
            assert needed is None, "there is room"
        else:
            device.check_left(grant.evicted, worth)
            assert len(grant.evicted) == needed, "no more than must"
        if grant is not None and live:
            device.live.add(adapter)
            self.device.used(adapter)

    @rule(data=st.data())
    def use_or_leave(self, data: st.DataObject) -> None:
        if self.device.budget.adapters:
            adapter = data.draw(st.sampled_from(self.device.budget.adapters))
            self.device.budget.use(adapter)
            self.device.live ^= {adapter}
            if adapter in self.device.live:
                self.device.used(adapter)

    @rule(data=st.data(), pinned=st.booleans(), awaited=st.booleans(), cost=st.sampled_from([0.5, 1.0, 4.0]))
    def want(self, data: st.DataObject, pinned: bool, awaited: bool, cost: float) -> None:
        device = self.device
        if device.budget.adapters:
            adapter = data.draw(st.sampled_from(device.budget.adapters))
            device.costs[adapter] = cost
            device.budget.load_cost_changed(adapter)
            device.budget.pin(adapter, pinned=pinned)
            (device.pinned.add if pinned else device.pinned.discard)(adapter)
            (device.awaited.add if awaited else device.awaited.discard)(adapter)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if idle := self.device.idle():
            self.device.budget.release(data.draw(st.sampled_from(idle)))

    @rule(pages=st.integers(0, 24))
    def reclaim(self, pages: int) -> None:
        device = self.device
        sizes = {one: device.budget.run_of(one).length for one in device.idle()}
        worth = {one: device.worth(one, size) for one, size in sizes.items()}
        possible = device.allocator.free + sum(sizes.values())
        evicted = device.budget.reclaim(pages, device.is_live)
        assert (evicted is None) == (possible < pages)
        if evicted is not None:
            device.check_left(evicted, worth)
            assert device.allocator.free >= pages

    @invariant()
    def nothing_is_lost(self) -> None:
        self.device.check()


AnyLife.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyLife = AnyLife.TestCase


def test_an_adapter_whose_uses_are_forgotten_is_worth_nothing() -> None:
    device = Device(10, max_adapters=2)
    for adapter in (A, B):
        device.load(adapter, 2)
        device.used(adapter)
    assert device.budget.reclaim(0, device.is_live) == [], "it was looked what each is worth"
    for number in range(1100):
        device.used(Digest(f"other {number}"))
    device.used(A)
    device.check()
    assert device.load(C, 2).evicted == (B,)


def test_adapters_lie_at_one_end_and_kv_at_the_other() -> None:
    device = Device(10)
    assert device.load(A, 3).run == PageRun(7, 3)
    assert device.load(B, 2).run == PageRun(5, 2)
    assert list(device.take(4) or ()) == [0, 1, 2, 3]


def test_kv_in_the_way_is_moved_where_the_fewest_pages_are() -> None:
    device = Device(6)
    device.hold(1, 3, 5)
    grant = device.load(A, 3)
    assert grant.run == PageRun(2, 3), "one page in the way; the high end would have two"
    assert grant.copies == (Copy(Tier.DEVICE, (3,), Tier.DEVICE, (0,)),)
    assert grant.moved == {3: 0}
    device.check()


def test_adapters_are_moved_together_before_another_one_is_evicted() -> None:
    device = Device(10)
    for adapter in (A, B, C, D):
        device.load(adapter, 2)
    device.budget.release(B)
    device.budget.release(D)
    device.take(1)
    grant = device.load(B, 5)
    assert grant.evicted == ()
    assert device.budget.run_of(C) == PageRun(6, 2), "it was moved beside A"
    assert grant.run == PageRun(1, 5)
    device.check()


def lay_out(pages: int, runs: dict[int, int], kv: tuple[int, ...]) -> Device:
    """Live adapters with runs at these places (start → length), and a sequence with these pages."""
    device = Device(pages)
    gaps, end = [], pages
    for start in sorted(runs, reverse=True):
        if gap := end - start - runs[start]:
            gaps.append(Digest(f"gap before {end}"))
            device.load(gaps[-1], gap)
        device.load(Digest(str(start)), runs[start])
        end = start
    for each in gaps:
        device.budget.release(each)
    device.hold(*kv)
    device.live = set(device.budget.adapters)
    assert {int(one): device.budget.run_of(one).length for one in device.live} == runs
    return device


def test_an_adapter_and_kv_that_change_places_use_a_free_page_between() -> None:
    device = lay_out(8, {2: 1, 5: 1}, kv=(0, 1, 6))
    grant = device.load(A, 3)
    assert grant.run == PageRun(3, 3)
    assert grant.moved == {6: 2}
    assert device.budget.run_of(Digest("2")) == PageRun(6, 1)
    assert sum(len(copy.pages) for copy in grant.copies) == 4, "three moves and a copy to the page between"
    device.check()


def test_they_use_a_page_that_has_been_left_if_none_is_free_before() -> None:
    device = lay_out(12, {0: 3, 4: 1, 5: 1, 6: 1, 8: 3}, kv=(3,))
    assert device.load(A, 2) is not None
    device.check()


def test_a_place_that_is_empty_is_the_one_that_a_look_at_all_runs_finds(monkeypatch) -> None:
    """`_empty_place` only saves time."""
    grants = []
    for shortcut in (True, False):
        if not shortcut:
            monkeypatch.setattr(DeviceBudget, "_empty_place", lambda *_: None)
        drawn, budget = Random(0), DeviceBudget(pages := PageAllocator(60), max_adapters=6)
        held = [pages.take(2) for _ in range(8)]
        found = []
        for number in range(300):
            live = {*budget.adapters[-3:]}
            found.append(
                budget.grant(Digest(str(number)), drawn.randint(1, 8), live.__contains__, evict=number % 5 > 0)
            )
            place = drawn.randrange(len(held))
            pages.give(held[place])
            held[place] = pages.take(2)
        grants.append(found)
    assert grants[0] == grants[1]
    assert any(one is not None and one.moved for one in grants[0])
    assert sum(one is not None and not one.moved for one in grants[0]) > 100


def test_a_large_adapter_looks_for_a_place_once_however_many_small_ones_leave_for_it(monkeypatch) -> None:
    """With a look for each that leaves, 4,000 small ones held up an iteration for half a second."""
    looks: list[int] = []
    arrange = DeviceBudget._arrange  # noqa: SLF001

    def counted(budget: DeviceBudget, count: int, evicted: Sequence[Digest], **more) -> object:
        looks.append(len(evicted))
        return arrange(budget, count, evicted, **more)

    monkeypatch.setattr(DeviceBudget, "_arrange", counted)
    device = Device(30)
    for number in range(20):
        device.load(Digest(f"small {number}"), 1)
    device.take(5)
    looks.clear()
    grant = device.load(A, 22)
    assert len(grant.evicted) == 17
    assert looks == [17]
    device.check()


def test_a_device_with_room_orders_no_adapters_for_one_more(monkeypatch) -> None:
    """With thousands on it, that takes milliseconds of an iteration."""
    device = Device(20)
    for number in range(5):
        device.load(Digest(f"small {number}"), 2)
    device.hold(0, 3, 6)
    with monkeypatch.context() as full:
        full.setattr(DeviceBudget, "_idle", None)
        assert device.load(A, 7).evicted == ()
    device.check()
    assert len(device.load(B, 1).evicted) == 1
