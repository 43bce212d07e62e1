"""What the host's memory keeps, which adapters leave it, and that no byte is another's."""

from collections.abc import Collection

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from motet.domain import Digest
from motet_runner.adapters.policy import frequency
from motet_runner.interface import AdapterLeftHost, AdapterLoaded
from motet_runner.plan import HostAdapters, LoadedContents, host_adapters
from motet_runner.plan.host_adapters import BLOCK_BYTES
from tests.runner.plan.fake_device import FakeDevice, adapter_layout, make_planner, new

CONTENTS = LoadedContents(frozenset(), scales=False, from_slab=True)


class Loads:
    """Loads that arrive at once"""

    def __init__(self, blocks: int) -> None:
        self.host = HostAdapters(blocks * BLOCK_BYTES, adapters=blocks)
        self.number = 0

    def load(
        self,
        digest: str,
        blocks: int = 1,
        *,
        uses: int = 1,
        awaited: Collection[str] = "",
        pinned: Collection[str] = "",
    ) -> list[str]:
        """→ those that left for it"""
        for _ in range(uses):
            self.host.used(Digest(digest))
        self.number += 1
        place, gone = self.host.begin(
            self.number,
            Digest(digest),
            blocks * BLOCK_BYTES,
            awaited=frozenset(map(Digest, awaited)),
            pinned=lambda one: one in pinned,
        )
        self.host.arrived(Digest(digest), None if place is None else CONTENTS)
        self.host.check({})
        return gone

    @property
    def kept(self) -> set[str]:
        return {one for one in "abcdefgh" if self.host.holds(Digest(one))}


def test_the_adapter_leaves_that_the_fewest_requests_have_used() -> None:
    loads = Loads(3)
    for digest, uses in (("a", 3), ("b", 1), ("c", 2)):
        assert loads.load(digest, uses=uses) == []
    assert loads.load("d") == ["b"]
    assert loads.kept == {"a", "c", "d"}


def test_none_leaves_for_one_that_fewer_requests_use() -> None:
    loads = Loads(2)
    loads.load("a", uses=3)
    loads.load("b", uses=3)
    assert loads.load("c") == []
    assert loads.kept == {"a", "b"}
    assert loads.load("c", uses=2) == ["a"]


def test_of_those_that_are_used_alike_the_one_leaves_whose_load_is_the_longest_ago() -> None:
    loads = Loads(2)
    loads.load("a", uses=0)
    loads.load("b", uses=0)
    loads.load("a", uses=0)
    assert loads.load("c", uses=0) == ["b"]


def test_old_uses_count_less() -> None:
    loads = Loads(2)
    loads.load("a", uses=20)
    loads.load("b", uses=1000)
    assert loads.load("c", uses=15) == ["a"]


def test_the_order_stays_when_all_numbers_of_uses_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frequency, "_LARGEST", 2.0)
    loads = Loads(3)
    for digest, uses in (("a", 30), ("b", 20), ("c", 40)):
        loads.load(digest, uses=uses)
    for _ in range(200):
        for digest in "abc":
            loads.host.used(Digest(digest))
        loads.host.used(Digest("a"))
    assert loads.load("d", uses=150) == ["b"]
    assert loads.load("e", uses=400) == ["c"]


def test_one_that_is_used_no_more_leaves_although_another_ones_use_has_the_numbers_begin_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutation: only the use of a kept one is seen to make the numbers smaller."""
    monkeypatch.setattr(frequency, "_LARGEST", 1e6)
    loads = Loads(1)
    loads.load("a", uses=600)
    weight = 0.0
    while loads.host._frequency._weight > weight:  # noqa: SLF001 - until they begin anew
        weight = loads.host._frequency._weight  # noqa: SLF001
        loads.host.used(Digest("b"))
    assert loads.load("b", uses=64) == ["a"]


def test_a_gap_that_is_not_where_the_last_one_left_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One leaves because there are too many, another gap is large enough, and stays so when its neighbour leaves."""
    loads = Loads(6)
    for digest in "abc":
        loads.load(digest)
    monkeypatch.setattr(host_adapters, "MAX_KEPT", 2)
    assert loads.load("d", 3) == ["a", "b"]
    assert loads.kept == {"c", "d"}
    monkeypatch.setattr(host_adapters, "MAX_KEPT", 1)
    assert loads.load("e", 1, uses=2) == ["c", "d"]


def test_what_sequences_wait_for_stays() -> None:
    loads = Loads(2)
    loads.load("a")
    loads.load("b", uses=2)
    assert loads.load("c", uses=5, awaited="a") == ["b"]
    assert loads.load("d", uses=9, awaited="ac") == []
    assert loads.kept == {"a", "c"}


def test_pinned_adapters_leave_only_for_each_other_and_last() -> None:
    loads = Loads(2)
    loads.load("a", pinned="a")
    loads.load("b", uses=5, pinned="a")
    assert loads.load("c", uses=9, pinned="a") == ["b"]
    assert loads.load("d", uses=1, pinned="ad") == ["c"], "one that is pinned comes first, also if fewer use it"
    assert loads.load("e", uses=9, pinned="ad") == []
    assert loads.load("f", uses=3, pinned="adf") == ["a"]


def test_a_large_adapter_takes_the_room_of_several_or_none_leaves() -> None:
    loads = Loads(4)
    for digest in "abcd":
        loads.load(digest, uses=2)
    loads.host.used(Digest("c"))
    assert loads.load("e", 3, uses=2) == [], "it would need the room of c"
    assert loads.kept == set("abcd")
    assert loads.load("e", 3, uses=2) == ["a", "b", "d", "c"], "there was no gap of three before the last one left"
    assert loads.load("f", 5, uses=99) == [], "it fits nowhere"


def test_there_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_adapters, "MAX_KEPT", 2)
    loads = Loads(10)
    for digest in "abc":
        loads.load(digest)
    assert loads.kept == {"b", "c"}


def test_without_memory_nothing_is_kept_or_counted() -> None:
    loads = Loads(0)
    loads.load("a", uses=9)
    assert loads.kept == set()
    assert loads.host.bytes == loads.host.adapters == 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_adapter_that_comes_back_is_read_once(ahead: int) -> None:
    planner = make_planner(
        max_adapters=1, host_adapters=HostAdapters(5 * BLOCK_BYTES), bytes_of_rank=lambda rank: rank * BLOCK_BYTES
    )
    device = FakeDevice(planner, ahead=ahead)
    for adapter in "xyz":
        planner.commands.load_adapter(Digest(adapter), adapter_layout(2))
    for number, adapter in enumerate("xyxyxx"):
        planner.commands.add(new(f"r{number}", adapter=adapter))
        device.run()
    assert device.read_from_disk == ["x", "y"]
    planner.commands.add(new("z", adapter="z"))
    planner.commands.add(new("z again", adapter="z"))
    device.run()
    loaded = [event for event in device.events if isinstance(event, AdapterLoaded)]
    assert [(one.digest, one.from_host) for one in loaded if one.digest == "x"][1:] == [("x", True)] * 2
    left = [event.digest for event in device.events if isinstance(event, AdapterLeftHost)]
    assert left == ["y"]
    assert [one.in_host for one in loaded if one.digest == "z"] == [True]


@pytest.mark.parametrize("on_device", [True, False])
def test_an_adapter_that_is_dropped_leaves_its_place(on_device: bool) -> None:
    planner = make_planner(
        max_adapters=1, host_adapters=HostAdapters(5 * BLOCK_BYTES), bytes_of_rank=lambda rank: rank * BLOCK_BYTES
    )
    device = FakeDevice(planner)
    for adapter in "xy":
        planner.commands.load_adapter(Digest(adapter), adapter_layout(2))
    for adapter in "yx" if on_device else "xy":
        planner.commands.add(new(adapter, adapter=adapter))
        device.run()
    host = planner.adapters.host
    assert host.bytes == 4 * BLOCK_BYTES
    planner.commands.drop_adapter(Digest("x"))
    device.run()
    assert (host.bytes, host.adapters, host.holds(Digest("x"))) == (2 * BLOCK_BYTES, 1, False)
    assert [event.digest for event in device.events if isinstance(event, AdapterLeftHost)] == ["x"]


def test_an_adapter_that_is_loaded_again_before_it_is_forgotten_is_not_kept_untold() -> None:
    """The service takes what it has dropped for gone from there."""
    planner = make_planner(host_adapters=HostAdapters(4 * BLOCK_BYTES), bytes_of_rank=lambda rank: rank * BLOCK_BYTES)
    device, host = FakeDevice(planner), planner.adapters.host
    planner.commands.load_adapter(Digest("x"), adapter_layout(2))
    device.run()
    assert host.holds(Digest("x"))
    planner.commands.drop_adapter(Digest("x"))
    planner.commands.load_adapter(Digest("x"), adapter_layout(2))
    device.run()
    assert [event.digest for event in device.events if isinstance(event, AdapterLeftHost)] == ["x"]
    assert (host.holds(Digest("x")), host.bytes) == (False, 0)


def test_the_place_of_a_load_that_was_given_up_is_nobodys_until_its_thread_has_ended() -> None:
    planner = make_planner(
        max_adapters=1, host_adapters=HostAdapters(3 * BLOCK_BYTES), bytes_of_rank=lambda rank: rank * BLOCK_BYTES
    )
    device = FakeDevice(planner)
    device.hung = {"x"}
    planner.commands.load_adapter(Digest("x"), adapter_layout(2))
    planner.commands.add(new("x", adapter="x"))
    device.step()
    planner.commands.cancel("x")
    planner.commands.load_adapter(Digest("y"), adapter_layout(2))
    planner.commands.add(new("y", adapter="y"))
    plan = planner.plan()
    assert plan is not None
    assert [load.host for load in plan.loads] == [None]
    assert planner.adapters.host.bytes == 2 * BLOCK_BYTES
    device.launch(plan)
    planner.collect(device.launched.popleft()[1])
    device.run()
    assert planner.adapters.host.bytes == 0


@pytest.mark.parametrize(("often", "left"), [("x", "y"), ("y", "x")])
def test_each_request_is_a_use(often: str, left: str) -> None:
    planner = make_planner(
        max_adapters=1, host_adapters=HostAdapters(4 * BLOCK_BYTES), bytes_of_rank=lambda rank: rank * BLOCK_BYTES
    )
    device = FakeDevice(planner)
    for adapter in "xyz":
        planner.commands.load_adapter(Digest(adapter), adapter_layout(2))
    for number, adapter in enumerate(["x", "y", often, often, often, "z", "z"]):
        planner.commands.add(new(f"r{number}", adapter=adapter))
    device.run()
    assert [event.digest for event in device.events if isinstance(event, AdapterLeftHost)] == [left]


def test_what_arrives_after_it_was_given_up_leaves_its_place() -> None:
    planner = make_planner(host_adapters=HostAdapters(4 * BLOCK_BYTES), bytes_of_rank=lambda rank: rank * BLOCK_BYTES)
    device = FakeDevice(planner)
    planner.commands.load_adapter(Digest("x"), adapter_layout(2))
    plan = planner.plan()
    assert plan is not None
    device.launch(plan)
    _, result = device.launched.popleft()
    assert [one.number for one in result.arrived] == [load.number for load in plan.loads]
    planner.commands.drop_adapter(Digest("x"))
    planner.plan()
    assert planner.adapters.host.bytes == 2 * BLOCK_BYTES
    planner.collect(result)
    assert planner.adapters.host.bytes == 0


class History(RuleBasedStateMachine):
    """Any order of loads, ends, failures and uses. Each thread writes wherever its load has a place, until it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.host = HostAdapters(8 * BLOCK_BYTES, adapters=4)
        self.memory: list[str] = [""] * 8
        self.loading: dict[str, tuple[int, int, int, bool]] = {}
        """Digest → the load's number, where it begins, its blocks, and whether it reads the disk"""
        self.leaving: dict[int, tuple[str, int, int]] = {}
        self.number = 0

    @rule(digest=st.sampled_from("abcdef"), times=st.integers(1, 5))
    def use(self, digest: str, times: int) -> None:
        for _ in range(times):
            self.host.used(Digest(digest))

    @rule(
        digest=st.sampled_from("abcdef"), awaited=st.sets(st.sampled_from("abc")), pinned=st.sets(st.sampled_from("ad"))
    )
    def begin(self, digest: str, awaited: set[str], pinned: set[str]) -> None:
        if digest in self.loading:
            return
        self.number += 1
        blocks = 1 + ord(digest) % 4
        held = self.host.holds(Digest(digest))
        before = {one for one in "abcdef" if self.host.holds(Digest(one))}
        place, gone = self.host.begin(
            self.number,
            Digest(digest),
            blocks * BLOCK_BYTES - 7,
            awaited=frozenset(awaited),
            pinned=pinned.__contains__,
        )
        after = {one for one in "abcdef" if self.host.holds(Digest(one))}
        assert before - after == set(gone)
        assert not set(gone) & {*awaited, *self.loading}
        assert digest in pinned or not set(gone) & pinned
        if place is None:
            assert not gone, "none leaves for nothing"
            return
        first = place.begin // BLOCK_BYTES
        assert (place.contents is not None) is held
        if held:
            assert set(self.memory[first : first + blocks]) == {digest}
        self.loading[digest] = self.number, first, blocks, not held

    @rule()
    def write(self) -> None:
        for digest, (_, first, blocks, reads) in self.loading.items():
            if reads:
                self.memory[first : first + blocks] = [digest] * blocks
        for digest, first, blocks in self.leaving.values():
            self.memory[first : first + blocks] = ["?" + digest] * blocks

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        self.write()
        digest = data.draw(st.sampled_from(sorted(self.loading)))
        del self.loading[digest]
        self.host.arrived(Digest(digest), CONTENTS)
        assert self.host.holds(Digest(digest))

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(self.loading)))
        number, first, blocks, reads = self.loading.pop(digest)
        self.host.given_up(Digest(digest))
        assert self.host.holds(Digest(digest)) is not reads
        if reads:
            self.leaving[number] = digest, first, blocks

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.leaving)))
        del self.leaving[number]
        self.host.ended(number)

    @rule(digest=st.sampled_from("abcdef"))
    def drop(self, digest: str) -> None:
        if digest not in self.loading:
            self.host.drop(Digest(digest))

    @invariant()
    def records_agree(self) -> None:
        self.write()
        self.host.check({Digest(digest): number for digest, (number, *_) in self.loading.items()})
        kept = sum(self.host.holds(Digest(one)) for one in "abcdef")
        assert self.host.adapters == kept
        under_way = [blocks for _, _, blocks, reads in self.loading.values() if reads]
        under_way += [blocks for _, _, blocks in self.leaving.values()]
        held = sum(1 + ord(one) % 4 for one in "abcdef" if self.host.holds(Digest(one)))
        assert self.host.bytes == (sum(under_way) + held) * BLOCK_BYTES <= self.host.size


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
