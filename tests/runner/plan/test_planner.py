"""Promises, parking and self-protection: the runner's half of the ledger."""

import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from motet.domain import PAGE_TOKENS, Digest, ParkMethod, RequestId
from motet.errors import ContextLengthExceeded, Declined, InvalidRequest, MotetError
from motet_runner.adapters.proof import ProofOrder
from motet_runner.interface import Finish, OverflowAhead, ParkedNow, ProofEnded, ResumedNow, State, StateChanged
from motet_runner.plan import HostAdapters, preset_named
from motet_runner.plan.host_adapters import BLOCK_BYTES
from motet_runner.plan.sequence_memory import MAX_PARKED
from motet_runner.plan.sequence_table import SequenceTable
from tests.runner.plan.fake_device import VOCABULARY, FakeDevice, adapter_layout, make_planner, new

R = RequestId
PAGES = 12
RANKS = {"x": 2, "y": 3, "z": 6, "too large": PAGES + 1}
"""An adapter takes as many pages as its rank is."""


def happened(device, kind):
    return [event for event in device.events + device.planner.sequences.events if isinstance(event, kind)]


def test_a_promise_that_does_not_fit_is_declined_and_leaves_no_trace() -> None:
    planner = make_planner(pages=8)
    planner.commands.add(new("a", prompt=86))
    with pytest.raises(Declined):
        planner.commands.add(new("b", prompt=38))
    assert planner.sequences.get(R("b")) is None
    planner.commands.cancel(R("a"))
    planner.commands.add(new("b", prompt=38))
    planner.check()


@pytest.mark.parametrize(
    ("sequence", "error"),
    [
        (new("a", prompt=50, max_tokens=51), ContextLengthExceeded),
        (new("a", promise=9), InvalidRequest),
        (new("a", prompt=0, promise=1), InvalidRequest),
        (new("a", max_tokens=0, promise=1), InvalidRequest),
        (new("a", max_tokens=2, delivered=(1, 2)), InvalidRequest),
        (new("a", max_tokens=9, delivered=(1, VOCABULARY)), InvalidRequest),
    ],
)
def test_an_impossible_request_is_refused_for_good(sequence, error) -> None:
    with pytest.raises(error):
        make_planner(pages=8, max_length=100).commands.add(sequence)


def test_options_in_other_types_are_those_that_an_engine_computes() -> None:
    planner = make_planner()
    planner.commands.add(new("a", stop_token_ids=[3], logit_bias={"5": 1}, top_k=-1))  # type: ignore[arg-type]
    sampling = planner.sequences.get(R("a")).new.sampling
    assert (sampling.stop_token_ids, dict(sampling.logit_bias), sampling.top_k) == (frozenset({3}), {5: 1}, 0)


def test_the_context_is_never_longer_than_the_memory() -> None:
    with pytest.raises(ContextLengthExceeded):
        make_planner(pages=2).commands.add(new("a", prompt=20, max_tokens=13, promise=1))


def test_a_higher_epoch_takes_the_place_of_a_lower_one() -> None:
    planner = make_planner()
    planner.commands.add(new("a", epoch=1))
    planner.commands.add(new("a", epoch=2))
    assert [sequence.new.epoch for sequence in planner.sequences] == [2]
    with pytest.raises(Declined):
        planner.commands.add(new("a", epoch=2))
    planner.check()


def test_delivered_tokens_count_as_generated() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    sequence = planner.commands.add(new("a", prompt=5, max_tokens=10, delivered=(1, 2, 3)))
    plan = device.step()
    assert plan.prefills[0].count == 8
    device.run()
    tokens, finish = device.finished["a"]
    assert (device.first_index["a"], len(tokens), finish) == (3, 7, Finish.LENGTH)
    assert sequence.output_tokens == 10


def test_a_stop_token_ends_a_sequence_unless_ends_are_ignored() -> None:
    planner = make_planner(eos_token_ids=frozenset(range(VOCABULARY)))
    device = FakeDevice(planner)
    planner.commands.add(new("stops"))
    planner.commands.add(new("goes on", ignore_eos=True))
    planner.commands.add(new("its own", ignore_eos=True, stop_token_ids=frozenset(range(VOCABULARY))))
    device.run()
    assert {name: (len(tokens), finish) for name, (tokens, finish) in device.finished.items()} == {
        "stops": (1, Finish.STOP),
        "goes on": (10, Finish.LENGTH),
        "its own": (1, Finish.STOP),
    }


def test_a_promise_is_announced_one_page_before_its_end_and_once() -> None:
    planner = make_planner()
    planner.commands.supervised = True
    device = FakeDevice(planner)
    planner.commands.add(new("a", prompt=5, max_tokens=100, promise=2))
    announced_at = None
    while planner.sequences.get(R("a")).room > 0:
        device.step()
        if happened(device, OverflowAhead) and announced_at is None:
            announced_at = len(planner.sequences.get(R("a")).tokens)
    assert announced_at == 17  # the first token of the last promised page
    (event,) = happened(device, OverflowAhead)
    assert (event.request, event.epoch, event.promise, event.number) == ("a", 1, 2, 1)
    assert (event.entry.pages_used, event.entry.output_tokens, event.entry.state) == (1, 12, State.DECODE)


def test_a_promise_for_the_whole_answer_is_never_announced() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    planner.commands.add(new("a", prompt=5, max_tokens=28, promise=2))  # 33 tokens, the last of which is never fed back
    device.run()
    assert not happened(device, OverflowAhead)


def test_only_the_sequence_at_its_promise_waits() -> None:
    planner = make_planner(protect_after_steps=1000)
    planner.commands.supervised = True
    device = FakeDevice(planner)
    planner.commands.add(new("a", prompt=5, max_tokens=100, promise=1))
    planner.commands.add(new("b", prompt=5, max_tokens=60))
    for _ in range(40):
        device.step()
    assert (len(planner.sequences.get(R("a")).tokens), len(planner.sequences.get(R("b")).tokens)) == (17, 45)
    assert planner.commands.extend(R("a"), 1, promise=1, extended=2)
    device.step()
    assert len(planner.sequences.get(R("a")).tokens) == 18


def test_promises_double_until_the_longest_answer() -> None:
    planner = make_planner(pages=64)
    device = FakeDevice(planner)
    planner.commands.add(new("a", prompt=5, max_tokens=200, promise=1))
    promises = []
    while planner.has_work():
        device.step()
        sequence = planner.sequences.get(R("a"))
        if sequence and sequence.promise not in promises:
            promises.append(sequence.promise)
    assert promises == [1, 2, 4, 8, 13]


def test_orders_about_changed_sequences_are_ignored() -> None:
    planner = make_planner()
    planner.commands.supervised = True
    planner.commands.add(new("a", prompt=5, max_tokens=100, promise=2))
    assert not planner.commands.extend(R("a"), epoch=2, promise=2, extended=4)
    assert not planner.commands.extend(R("a"), epoch=1, promise=1, extended=4)
    assert not planner.commands.extend(R("b"), epoch=1, promise=2, extended=4)
    assert not planner.commands.park(R("a"), 1, promise=1, wanted=2, method=ParkMethod.SWAP)
    assert not planner.commands.resume(R("a"), 1, promise=2)
    assert planner.commands.cancel(R("a"), epoch=2) is None
    assert planner.commands.cancel(R("a"), epoch=1) is not None
    assert planner.commands.cancel(R("a"), epoch=1) is None


@pytest.mark.parametrize("method", ParkMethod)
def test_a_parked_sequence_comes_back_with_its_tokens(method: ParkMethod) -> None:
    planner = make_planner(host_pages=8)
    planner.commands.supervised = True
    device = FakeDevice(planner)
    planner.commands.add(new("a", prompt=30, max_tokens=40))
    alone = FakeDevice(make_planner())
    alone.planner.commands.add(new("a", prompt=30, max_tokens=40))
    alone.run()
    for _ in range(10):
        device.step()
    promise = planner.sequences.get(R("a")).promise
    assert planner.commands.park(R("a"), 1, promise, wanted=5, method=method)
    assert (planner.memory.pages.free, planner.memory.ledger.promised) == (32, 0)
    device.step()  # the copy, if there is one
    assert not planner.has_work()
    planner.commands.add(new("b", prompt=30, max_tokens=40))  # writes over the pages that were a's
    for _ in range(5):
        device.step()
    assert planner.commands.resume(R("a"), 1, promise=5)
    device.run()
    assert device.finished["a"] == alone.finished["a"]
    assert [event.method for event in happened(device, ParkedNow)] == [method]
    assert happened(device, ResumedNow) == [ResumedNow(R("a"), 1, 5, method, 3)]
    assert planner.memory.host.free == 8


def test_a_resume_of_the_present_number_gives_what_the_sequence_asks_for() -> None:
    """Who orders it may still know the pages of an earlier parking. With them its KV on the host would have no room,
    and it would never come back."""
    planner = make_planner(host_pages=8)
    planner.commands.supervised = True
    device = FakeDevice(planner)
    sequence = planner.commands.add(new("a", prompt=30, max_tokens=40))
    for _ in range(10):
        device.step()
    assert planner.commands.park(R("a"), 1, sequence.promise, wanted=5, method=ParkMethod.SWAP)
    assert not planner.commands.resume(R("a"), 1, promise=1)
    assert planner.commands.resume(R("a"), 1, promise=1, number=sequence.promise_number)
    assert sequence.promise == 5
    device.run()


def test_swap_without_room_on_the_host_becomes_recompute() -> None:
    planner = make_planner(host_pages=1)
    planner.commands.supervised = True
    device = FakeDevice(planner)
    planner.commands.add(new("a", prompt=30, max_tokens=40))
    for _ in range(5):
        device.step()
    assert planner.commands.park(R("a"), 1, planner.sequences.get(R("a")).promise, wanted=5, method=ParkMethod.SWAP)
    assert happened(device, ParkedNow)[0].method is ParkMethod.RECOMPUTE


def test_cancelling_a_parked_sequence_frees_host_memory() -> None:
    planner = make_planner(host_pages=8)
    planner.commands.supervised = True
    device = FakeDevice(planner)
    planner.commands.add(new("a", prompt=30, max_tokens=40))
    for _ in range(5):
        device.step()
    planner.commands.park(R("a"), 1, planner.sequences.get(R("a")).promise, wanted=5, method=ParkMethod.SWAP)
    planner.commands.cancel(R("a"))
    device.step()
    assert planner.memory.host.free == 8


def test_without_a_supervisor_the_newest_of_the_lowest_class_is_parked() -> None:
    planner = make_planner(pages=8)
    device = FakeDevice(planner)
    planner.commands.add(new("first", prompt=5, max_tokens=100, promise=2))
    planner.commands.add(new("urgent", prompt=5, max_tokens=100, promise=2, priority=0))
    planner.commands.add(new("second", prompt=5, max_tokens=100, promise=2))
    planner.commands.add(new("last", prompt=5, max_tokens=100, promise=2, priority=0))
    while not (parked := happened(device, ParkedNow)):
        device.step()
    assert (parked[0].request, parked[0].by_itself, parked[0].wanted) == ("second", True, 3)
    device.run()
    assert {len(tokens) for tokens, _ in device.finished.values()} == {100}


def test_new_sequences_leave_pages_for_parked_ones() -> None:
    planner = make_planner(pages=8)
    device = FakeDevice(planner)
    for name in "ab":
        planner.commands.add(new(name, prompt=5, max_tokens=100, promise=4))
    while not happened(device, ParkedNow):
        device.step()
    with pytest.raises(Declined):
        planner.commands.add(new("c", promise=1))
    device.run()
    assert set(device.finished) == {"a", "b"}


def test_users_of_an_adapter_are_counted_without_a_search(monkeypatch) -> None:
    planner = make_planner()
    for name, adapter in (("a", "x"), ("b", "x"), ("c", "y")):
        planner.commands.add(new(name, adapter=adapter))
    planner.commands.park(R("b"), 1, 1, 1, ParkMethod.RECOMPUTE)
    monkeypatch.setattr(SequenceTable, "__iter__", lambda _: pytest.fail("every sequence was looked at"))
    assert [planner.sequences.live_on(Digest(adapter)) for adapter in "xyz"] == [1, 1, 0]
    planner.commands.park(R("c"), 1, 1, 1, ParkMethod.RECOMPUTE)
    assert [planner.sequences.live_on(Digest(adapter)) for adapter in "xyz"] == [1, 0, 0]
    assert [planner.sequences.has_users(Digest(adapter)) for adapter in "xyz"] == [True, True, False]


def test_changes_of_states_are_reported() -> None:
    planner = make_planner(chunk_tokens=20)
    device = FakeDevice(planner)
    planner.commands.add(new("a", prompt=50, max_tokens=3))
    device.run()
    told = [(event.state, event.percent) for event in happened(device, StateChanged)]
    assert told == [(State.PREFILL, 0), (State.PREFILL, 40), (State.PREFILL, 80), (State.DECODE, 0)]


def test_pages_that_a_window_has_left_are_free() -> None:
    planner = make_planner(window=20)
    device = FakeDevice(planner)
    planner.commands.add(new("a", prompt=40, max_tokens=200))
    used = []
    while planner.has_work():
        device.step()
        used.append(planner.memory.pages.capacity - planner.memory.pages.free)
    assert max(used) == 3, "while the prompt is computed"
    assert set(used[30:-1]) == {2, 3}, "twenty tokens lie in two or three pages"


def test_an_overcommitted_store_parks_when_pages_run_out_and_loses_nothing() -> None:
    planner = make_planner(pages=8, host_pages=4, cheaper=lambda _: ParkMethod.SWAP)
    planner.commands.set_overcommit(3.0)
    device = FakeDevice(planner)
    for index in range(4):
        planner.commands.add(new(f"r{index}", prompt=20, max_tokens=60))
    device.run()
    assert sorted(device.finished) == ["r0", "r1", "r2", "r3"]
    assert {len(tokens) for tokens, _ in device.finished.values()} == {60}


class Runner(RuleBasedStateMachine):
    """Any order of commands and iterations, with adapters in the same pages: the books stay right and, left alone,
    everybody finishes."""

    ahead = 0
    window: int | None = None
    preset = "paged-chunk"
    contiguous = False
    page_tokens = PAGE_TOKENS
    max_adapters, max_loads = 2, 2
    max_pages_beside = math.inf
    host_blocks = 7

    def __init__(self) -> None:
        super().__init__()
        self.planner = make_planner(
            preset=preset_named(self.preset, contiguous=self.contiguous), pages=PAGES, places=3, host_pages=5,
            protect_after_steps=2, window=self.window, page_tokens=self.page_tokens,
            max_adapters=self.max_adapters, max_loads=self.max_loads,
            cheaper=lambda sequence: ParkMethod.SWAP if sequence.arrival % 2 else ParkMethod.RECOMPUTE,
            max_plans_waited=2, max_pages_beside=self.max_pages_beside,
            host_adapters=HostAdapters(self.host_blocks * BLOCK_BYTES),
            bytes_of_rank=lambda rank: rank * BLOCK_BYTES,
        )  # fmt: skip
        self.device = FakeDevice(self.planner, ahead=self.ahead)
        self.admitted: set[str] = set()
        self.cancelled: set[str] = set()
        self.count = 0
        self.needed = 0
        self.ordered: list[int] = []
        """The orders for proofs"""
        self.in_turn: Digest | None = None
        """The adapter that has pages because it is the turn of its proof"""

    def _one(self, data: st.DataObject):
        return data.draw(st.sampled_from(sorted(self.planner.sequences, key=lambda sequence: sequence.arrival)))

    @rule(
        prompt=st.integers(1, 60), max_tokens=st.integers(1, 120), promise=st.integers(1, 13),
        priority=st.integers(0, 2), adapter=st.sampled_from(["", "", *RANKS]), parent=st.integers(0, 3),
        like=st.sampled_from("ab"), salt=st.sampled_from([b"", b"one", b"one", b"two"]),
        quantiles=st.none() | st.integers(1, 120).map(lambda length: (length,) * 4),
    )  # fmt: skip
    def add(self, prompt: int, max_tokens: int, promise: int, parent: int, **more) -> None:
        self.count += 1
        name = f"r{self.count}"
        try:
            self.planner.commands.add(
                new(
                    name,
                    prompt=prompt,
                    max_tokens=max_tokens,
                    promise=promise,
                    parent=f"r{self.count - parent}",
                    **more,
                )
            )
        except MotetError:
            return
        self.admitted.add(name)

    @rule(
        prompts=st.lists(st.integers(17, 60), min_size=2, max_size=4), between=st.integers(0, 6),
        salts=st.sampled_from([[b"one"], [b"one", b"two"]]), parent=st.booleans(),
        adapter=st.sampled_from(["", "", "x"]),
    )  # fmt: skip
    def add_alike(self, prompts: list[int], salts: list[bytes], between: int, parent: bool, adapter: str) -> None:
        """Sequences that can share pages, some iterations apart. Under another salt they must not."""
        first = self.count + 1
        for number, prompt in enumerate(prompts):
            self.add(
                prompt=prompt, max_tokens=20, promise=5, like="a", salt=salts[number % len(salts)], adapter=adapter,
                parent=self.count + 1 - first if parent else 0,
            )  # fmt: skip
            self.step(between)

    @precondition(lambda self: len(self.planner.sequences))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = self._one(data)
        self.planner.commands.cancel(sequence.request)
        self.cancelled.add(sequence.request)

    @precondition(lambda self: len(self.planner.sequences))
    @rule(data=st.data(), extended=st.integers(1, 13))
    def extend(self, data: st.DataObject, extended: int) -> None:
        sequence = self._one(data)
        self.planner.commands.extend(sequence.request, 1, sequence.promise, extended)

    @precondition(lambda self: len(self.planner.sequences))
    @rule(data=st.data(), wanted=st.integers(1, 13), method=st.sampled_from(ParkMethod))
    def park(self, data: st.DataObject, wanted: int, method: ParkMethod) -> None:
        sequence = self._one(data)
        self.planner.commands.park(sequence.request, 1, sequence.promise, wanted, method)

    @precondition(lambda self: len(self.planner.sequences))
    @rule(data=st.data(), promise=st.integers(1, 13))
    def resume(self, data: st.DataObject, promise: int) -> None:
        self.planner.commands.resume(self._one(data).request, 1, promise)

    @rule(adapter=st.sampled_from([*RANKS]), pinned=st.booleans())
    def load_adapter(self, adapter: str, pinned: bool) -> None:
        self.planner.commands.load_adapter(Digest(adapter), adapter_layout(RANKS[adapter]), pinned=pinned)

    @rule(adapter=st.sampled_from([*RANKS]), meanwhile=st.booleans())
    def prove_adapter(self, adapter: str, meanwhile: bool) -> None:
        order = ProofOrder(len(self.ordered) + 1, meanwhile)
        self.ordered.append(order.number)
        self.planner.commands.load_adapter(Digest(adapter), adapter_layout(RANKS[adapter], slab="slab"), proof=order)

    @precondition(lambda self: not len(self.planner.sequences) and not self.device.launched)
    @rule(kernels=st.sampled_from(["", "others"]))
    def change_kernels(self, kernels: str) -> None:
        self.device.kernels = kernels
        self.planner.kernels_changed()

    @rule(adapter=st.sampled_from(["", "", *RANKS]))
    def prove_nothing_of(self, adapter: str) -> None:
        self.device.unproved = {adapter}

    @rule(adapter=st.sampled_from(["", "", *RANKS]))
    def damage_slab_of(self, adapter: str) -> None:
        self.device.damaged_slabs = {adapter}

    @rule(adapter=st.sampled_from(["", "", *RANKS]))
    def give_up_proofs_of(self, adapter: str) -> None:
        self.device.given_up_proofs = {adapter}

    @rule(adapter=st.sampled_from([*RANKS]))
    def drop_adapter(self, adapter: str) -> None:
        self.planner.commands.drop_adapter(Digest(adapter))

    @rule(answers=st.booleans())
    def disk(self, answers: bool) -> None:
        self.device.disk_answers = answers

    @rule(adapter=st.sampled_from(["", "", *RANKS]))
    def hang(self, adapter: str) -> None:
        self.device.hung = {adapter}

    @rule(adapter=st.sampled_from(["", "", *RANKS]))
    def damage(self, adapter: str) -> None:
        self.device.loads_fail = {adapter}

    @rule(supervised=st.booleans())
    def supervise(self, supervised: bool) -> None:
        self.planner.commands.supervised = supervised

    @rule(factor=st.sampled_from([1.0, 1.0, 1.3, 2.0]))
    def overcommit(self, factor: float) -> None:
        self.planner.commands.set_overcommit(factor)

    @rule(times=st.integers(1, 30))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.device.step()
            self.pages_suffice_for_all_promises()

    @invariant()
    def records_agree(self) -> None:
        self.planner.check()
        assert all(sequence.parked_times <= MAX_PARKED for sequence in self.planner.sequences)
        assert len(self.device.loads) <= self.max_loads

    @invariant()
    def kv_may_have_what_adapters_in_use_leave(self) -> None:
        live = {s.adapter for s in self.planner.sequences if s.state is not State.PARKED}
        live |= {self.planner.adapters.proofs.turn or ""}
        pages = sorted((self.planner.adapters.pages_of(adapter) for adapter in live), reverse=True)
        assert self.planner.memory.ledger.kv_pages == max(0, PAGES - sum(pages[: self.max_adapters]))

    @invariant()
    def pages_suffice_for_all_promises(self) -> None:
        """If everybody used the whole promise, beside the adapters in use. What a lower factor, or an adapter that
        becomes known, leaves above the limit may only become less."""
        if self.preset != "paged-promises":
            return
        memory, adapters, sequences = self.planner.memory, self.planner.adapters, self.planner.sequences
        of_live = sum(
            adapters.pages_of(adapter)
            for adapter in sequences.live_adapters() | {adapters.proofs.turn or ""}
            if not adapters.pages_to_take(adapter)
        )
        needed = sum(s.promise - len(s.pages) for s in sequences if s.state is not State.PARKED)
        needed += memory.pages.capacity - memory.free - of_live
        limit, above = memory.ledger.limit, self.needed
        turn = adapters.proofs.turn
        if turn is not None and adapters.pages_to_take(turn):  # until it has pages, they are others'
            sizes = sorted(map(adapters.pages_of, sequences.live_adapters()), reverse=True)
            limit, turn = memory.ledger.limit_beside(sum(sizes[: self.max_adapters])), None
        if turn not in (None, self.in_turn):  # it has taken pages: only because all promises fit beside it
            above = 0
        assert needed <= max(limit, above)
        self.in_turn = turn
        self.needed = needed

    def teardown(self) -> None:
        self.planner.commands.supervised = False
        self.device.disk_answers, self.device.loads_fail, self.device.unproved = True, set(), set()
        self.device.hung = set()
        self.device.given_up_proofs = self.device.damaged_slabs = set()
        for adapter, rank in RANKS.items():
            self.planner.commands.load_adapter(Digest(adapter), adapter_layout(rank))
        self.device.run()
        answered = [one for one in self.device.events if isinstance(one, ProofEnded)]
        assert sorted(one.number for one in answered) == self.ordered, "each order is answered once"
        assert not len(self.planner.sequences), [
            (s.request, s.state, s.promise, s.parked_times) for s in self.planner.sequences
        ]
        assert self.planner.memory.free == PAGES
        assert self.planner.memory.host.free == 5
        assert self.admitted == set(self.device.finished) | self.cancelled | set(self.device.given_up)


class RunnerAhead(Runner):
    """The same while the next iteration is planned before one is collected."""

    ahead = 1


class RunnerWithWindow(Runner):
    """The same with attention that leaves pages behind."""

    ahead = 1
    window = 20


class RunnerOfPromises(Runner):
    """The same where the sum of all promises must fit."""

    preset = "paged-promises"


class RunnerOfPromisesWithWindow(RunnerOfPromises):
    ahead = 1
    window = 20


class RunnerOfRuns(RunnerOfPromises):
    """The same where the pages of each sequence are contiguous."""

    contiguous = True


class RunnerOfRunsWithWindow(RunnerOfRuns):
    ahead = 1
    window = 20


class RunnerOfOneLoad(Runner):
    """The same where one adapter loads at a time, as vLLM takes them."""

    ahead = 1
    max_loads = 1


class RunnerOfThreeLoads(Runner):
    """The same where all adapters may be on the device, and load at a time."""

    ahead = 1
    max_adapters, max_loads = 4, 3


class RunnerOfThreeLoadsAndPromises(RunnerOfPromises):
    max_adapters, max_loads = 4, 3
    max_pages_beside = 4


class RunnerOfPagesOf32(Runner):
    """The same with larger pages."""

    ahead = 1
    page_tokens = 32


class RunnerOfPagesOf128(RunnerOfPromises):
    page_tokens = 128


class RunnerOfPagesOf32WithWindow(RunnerWithWindow):
    page_tokens = 32


def case_of(machine: type[Runner]):
    machine.TestCase.settings = settings(
        max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    return machine.TestCase


TestRunner, TestRunnerAhead, TestRunnerWithWindow = map(case_of, (Runner, RunnerAhead, RunnerWithWindow))
TestRunnerOfPromises, TestRunnerOfPromisesWithWindow = map(case_of, (RunnerOfPromises, RunnerOfPromisesWithWindow))
TestRunnerOfRuns, TestRunnerOfRunsWithWindow = map(case_of, (RunnerOfRuns, RunnerOfRunsWithWindow))
TestRunnerOfPagesOf32, TestRunnerOfPagesOf128 = map(case_of, (RunnerOfPagesOf32, RunnerOfPagesOf128))
TestRunnerOfPagesOf32WithWindow = case_of(RunnerOfPagesOf32WithWindow)
TestRunnerOfOneLoad, TestRunnerOfThreeLoads = map(case_of, (RunnerOfOneLoad, RunnerOfThreeLoads))
TestRunnerOfThreeLoadsAndPromises = case_of(RunnerOfThreeLoadsAndPromises)
