"""Sequences that share cached pages: what they compute, what they are charged, and whom they wait for."""

from dataclasses import replace

import pytest

from motet.domain import PAGE_TOKENS, Digest, ParkMethod, RequestId
from motet.errors import Declined
from motet_runner.interface import ParkedNow, State, StateChanged
from motet_runner.plan import Planner
from tests.runner.plan.fake_device import FakeDevice, adapter_layout, make_planner, new

R = RequestId
SALT = b"a base model, an adapter and a tenant"


def shared(request: str, *, like: str = "all", salt: bytes = SALT, **more):
    return new(request, like=like, salt=salt, **more)


def running(planner: Planner, *sequences, steps: int = 4) -> FakeDevice:
    """A device with sequences that are being decoded."""
    device = FakeDevice(planner)
    for sequence in sequences:
        planner.commands.add(sequence)
    for _ in range(steps):
        device.step()
    assert planner.sequences.count(State.DECODE) == len(sequences)
    return device


def test_a_sequence_computes_only_what_is_not_in_the_cache() -> None:
    planner = make_planner()
    device = running(planner, shared("first", prompt=40))
    planner.commands.add(shared("second", prompt=50))
    device.run()
    assert device.computed == {"first": 49, "second": 59 - 2 * PAGE_TOKENS}
    cache = planner.memory.cache
    assert (cache.queried_tokens, cache.hit_tokens) == (90, 32)


@pytest.mark.parametrize("size", [PAGE_TOKENS, 32])
def test_a_waiting_sequence_that_shares_pages_finds_those_that_come_meanwhile(size: int) -> None:
    planner = make_planner(page_tokens=size, places=1)
    device = running(planner, shared("short", prompt=40))
    for request in ("long", "waits"):
        planner.commands.add(shared(request, prompt=100))
    assert planner.sequences.get(R("waits")).scheduled == 40 // size * size
    device.run()
    assert device.computed["waits"] == 109 - 96


@pytest.mark.parametrize("size", [PAGE_TOKENS, 32])
def test_a_prompt_shares_the_pages_before_the_first_token_that_is_still_to_be_scored(size: int) -> None:
    planner = make_planner(page_tokens=size)
    device = running(planner, shared("first", prompt=80))
    planner.commands.add(replace(shared("second", prompt=80, prompt_logprobs=0), scored=60))
    device.run()
    assert device.computed["second"] == 89 - 59 // size * size
    assert device.scored["second"] == list(range(60, 80))


def test_pages_stay_in_the_cache_after_their_sequence_and_count_as_free() -> None:
    planner = make_planner()
    device = running(planner, shared("first", prompt=40, max_tokens=30))
    device.run()
    assert planner.memory.pages.free == 32
    planner.commands.add(shared("second", prompt=40))
    device.run()
    assert device.computed["second"] == 49 - 2 * PAGE_TOKENS


def test_the_next_turn_of_a_conversation_finds_the_answer_of_the_last_one() -> None:
    planner = make_planner()
    device = running(planner, shared("a", prompt=20, max_tokens=30))
    device.run()
    answer = tuple(device.tokens["a"])
    planner.commands.add(shared("a", prompt=20, max_tokens=40, delivered=answer))
    device.run()
    assert device.computed["a"] == 49 + (59 - 3 * PAGE_TOKENS)


def test_a_long_answer_is_given_from_a_cache_of_prompts_without_a_change() -> None:
    alone = FakeDevice(make_planner(prefix_cache=False))
    alone.planner.commands.add(shared("b", prompt=40, max_tokens=60))
    alone.run()
    planner = make_planner()
    device = running(planner, shared("a", prompt=40))
    planner.commands.add(shared("b", prompt=40, max_tokens=60))
    device.run()
    assert device.finished["b"] == alone.finished["b"]


@pytest.mark.parametrize("other", [{"salt": b"another tenant"}, {"adapter": "x"}, {"salt": b""}, {"like": "other"}])
def test_others_share_nothing(other: dict) -> None:
    planner = make_planner()
    planner.commands.load_adapter(Digest("x"), adapter_layout(1))
    device = running(planner, shared("first", prompt=40))
    planner.commands.add(shared("second", prompt=40, **other))
    device.run()
    assert device.computed["second"] == 49


def test_a_planner_without_a_prefix_cache_shares_nothing() -> None:
    planner = make_planner(prefix_cache=False)
    device = running(planner, shared("first", prompt=40))
    planner.commands.add(shared("second", prompt=40, parent=R("first")))
    device.run()
    assert device.computed["second"] == 49
    assert len(planner.memory.cache) == 0


def test_progress_counts_shared_tokens() -> None:
    planner = make_planner(chunk_tokens=16)
    device = running(planner, shared("first", prompt=64), steps=5)
    planner.commands.add(shared("second", prompt=160))
    device.events.clear()
    for _ in range(2):
        device.step()
    told = [(e.state, e.percent) for e in device.events if isinstance(e, StateChanged) and e.request == "second"]
    assert told == [(State.PREFILL, 0), (State.PREFILL, 50), (State.PREFILL, 60)]


def test_no_page_is_shared_before_a_token_has_shown_that_its_numbers_are_finite() -> None:
    planner = make_planner(chunk_tokens=24)
    device = FakeDevice(planner)
    device.not_finite.add("first")
    planner.commands.add(shared("first", prompt=40))
    for _ in range(2):
        assert len(planner.memory.cache) == 0
        device.step()
    assert device.given_up == ["first"]
    assert len(planner.memory.cache) == 0


@pytest.mark.parametrize(
    ("preset", "refusal", "first", "second"),
    [
        ("paged-promises", "5 pages were promised and 3 can be given", 5, 3),
        ("paged-chunk", "10 pages are expected to be needed with it, and 8 can be given", 3, 5),
    ],
)
def test_a_shared_page_is_charged_once(preset: str, refusal: str, first: int, second: int) -> None:
    planner = make_planner(pages=8, preset=preset)
    device = running(planner, shared("first", prompt=40, max_tokens=30, promise=5))
    with pytest.raises(Declined, match=refusal):
        planner.commands.add(shared("other", like="other", prompt=40, max_tokens=30, promise=5))
    assert planner.sequences.get(R("other")) is None
    planner.commands.add(shared("second", prompt=40, max_tokens=30, promise=5))
    assert planner.memory.ledger.promised == 8
    assert planner.memory.charges() == {"first": first, "second": second}
    device.run()
    assert not [event for event in device.events if isinstance(event, ParkedNow)]
    assert {len(tokens) for tokens in device.tokens.values()} == {30}


def test_a_declined_sequence_gives_shared_pages_back() -> None:
    planner = make_planner(pages=8)
    running(planner, shared("first", prompt=40, max_tokens=30, promise=5))
    with pytest.raises(Declined):
        planner.commands.add(shared("second", prompt=90, max_tokens=30, promise=8))
    planner.check()
    assert planner.memory.pages.repeated == 0


def test_who_is_left_pays_for_what_was_shared() -> None:
    planner = make_planner(pages=8)
    running(planner, shared("first", prompt=40, max_tokens=30, promise=5))
    planner.commands.add(shared("second", prompt=40, max_tokens=30, promise=5))
    planner.commands.cancel(R("first"))
    assert planner.memory.charges() == {"second": 5}
    assert planner.memory.ledger.free == 3


def test_pages_of_a_promise_are_the_most_that_is_shared() -> None:
    planner = make_planner()
    device = running(planner, shared("first", prompt=100, max_tokens=30), steps=6)
    planner.commands.add(shared("second", prompt=100, max_tokens=30, promise=2))
    assert len(planner.sequences.get(R("second")).pages) == 2
    device.run()
    assert len(device.tokens["second"]) == 30


@pytest.mark.parametrize("method", ParkMethod)
def test_parking_changes_nothing_for_other_holders(method: ParkMethod) -> None:
    planner = make_planner(host_pages=8)
    planner.commands.supervised = True
    device = running(planner, shared("first", prompt=40, max_tokens=60))
    planner.commands.add(shared("second", prompt=40, max_tokens=60))
    for _ in range(10):
        device.step()
    assert planner.commands.park(R("first"), 1, planner.sequences.get(R("first")).promise, wanted=7, method=method)
    for _ in range(5):
        device.step()
    assert planner.commands.resume(R("first"), 1, promise=7)
    device.run()
    assert {len(tokens) for tokens in device.tokens.values()} == {60}


def test_a_resumed_sequence_copies_only_what_is_not_in_the_cache() -> None:
    planner = make_planner(host_pages=8)
    planner.commands.supervised = True
    device = running(planner, shared("a", prompt=40, max_tokens=60))
    assert planner.commands.park(R("a"), 1, planner.sequences.get(R("a")).promise, wanted=7, method=ParkMethod.SWAP)
    device.step()
    assert planner.commands.resume(R("a"), 1, promise=7)
    assert [len(copy.pages) for copy in planner.memory.copies] == [1]
    assert planner.memory.host.free == 8
    device.run()
    assert len(device.tokens["a"]) == 60


def test_a_sequence_that_was_dropped_finds_its_own_pages() -> None:
    planner = make_planner()
    planner.commands.supervised = True
    device = running(planner, shared("a", prompt=40, max_tokens=60))
    assert planner.commands.park(
        R("a"), 1, planner.sequences.get(R("a")).promise, wanted=7, method=ParkMethod.RECOMPUTE
    )
    assert planner.commands.resume(R("a"), 1, promise=7)
    device.run()
    assert device.computed["a"] == 99 + 42 - 2 * PAGE_TOKENS


def test_a_sequence_that_was_parked_in_its_prompt_goes_on_after_what_others_have_computed() -> None:
    planner = make_planner(host_pages=8, chunk_tokens=24)
    planner.commands.supervised = True
    device = FakeDevice(planner)
    planner.commands.add(shared("a", prompt=70))
    device.step()
    assert planner.commands.park(R("a"), 1, planner.sequences.get(R("a")).promise, wanted=7, method=ParkMethod.SWAP)
    planner.commands.add(shared("b", prompt=70))
    for _ in range(4):
        device.step()
    assert planner.commands.resume(R("a"), 1, promise=7)
    assert not planner.memory.copies
    device.run()
    assert {len(tokens) for tokens in device.tokens.values()} == {10}
    assert device.computed["a"] == 24 + 79 - 4 * PAGE_TOKENS


def test_the_last_token_of_a_sequence_that_was_parked_meanwhile_adds_no_pages() -> None:
    planner = make_planner(host_pages=8, chunk_tokens=100)
    planner.commands.supervised = True
    device = FakeDevice(planner, ahead=1)
    planner.commands.add(shared("a", prompt=70))
    plan = planner.plan()
    assert plan is not None
    device.launch(plan)
    assert planner.commands.park(R("a"), 1, planner.sequences.get(R("a")).promise, wanted=7, method=ParkMethod.SWAP)
    device.step()
    assert (len(device.tokens["a"]), len(planner.memory.cache)) == (1, 0)
    assert planner.commands.resume(R("a"), 1, promise=7)
    device.run()
    assert len(device.tokens["a"]) == 10


def test_cached_pages_are_evicted_for_sequences() -> None:
    planner = make_planner(pages=8)
    device = running(planner, shared("a", prompt=40, max_tokens=60))
    device.run()
    planner.commands.add(shared("b", like="b", prompt=60, max_tokens=60))
    device.run()
    assert planner.memory.cache.evicted_pages > 0
    assert len(device.tokens["b"]) == 60


# -- choices of one call -----------------------------------------------------------------------------------------------


def test_choices_of_one_call_compute_their_prompt_once() -> None:
    planner = make_planner(chunk_tokens=100)
    device = FakeDevice(planner)
    planner.commands.add(shared("first", prompt=70))
    for name in ("second", "third"):
        planner.commands.add(shared(name, prompt=70, parent=R("first")))
    assert device.requests(device.step().rows) == ["first"]
    assert planner.sequences.get(R("second")).state is State.WAITING
    assert device.requests(device.step().rows) == ["first", "second", "third"]
    device.run()
    assert device.computed == {"first": 79, "second": 79 - 64, "third": 79 - 64}


@pytest.mark.parametrize(
    "why", ["gone", "parked", "failed", "of another prompt", "at its promise", "later", "unknown", "in a fixed batch"]
)
def test_a_choice_does_not_wait_for_a_parent_that_is(why: str) -> None:
    preset = "request-level" if why == "in a fixed batch" else "paged-chunk"
    planner = make_planner(chunk_tokens=20, preset=preset, protect_after_steps=1000)
    planner.commands.supervised = True
    device = FakeDevice(planner)
    if why not in ("later", "unknown"):
        like = "another" if why == "of another prompt" else "all"
        planner.commands.add(shared("parent", like=like, prompt=70, promise=1 if why == "at its promise" else None))
    planner.commands.add(shared("choice", prompt=70, parent=R("parent")))
    if why == "later":
        planner.commands.add(shared("parent", prompt=70, parent=R("choice")))
    if why in ("gone", "parked", "at its promise"):
        device.step()
    if why == "gone":
        planner.commands.cancel(R("parent"))
    if why == "parked":
        planner.commands.park(R("parent"), 1, planner.sequences.get(R("parent")).promise, 5, ParkMethod.RECOMPUTE)
    if why == "failed":
        device.not_finite.add("parent")
        for _ in range(4):
            device.step()
        assert device.given_up == ["parent"]
    for _ in range(4):
        device.step()
    assert device.computed["choice"] > 0


def test_a_choice_waits_only_for_pages_within_its_promise() -> None:
    planner = make_planner(chunk_tokens=16)
    running(planner, shared("seed", prompt=20))
    planner.commands.add(shared("parent", prompt=70))
    planner.commands.add(shared("choice", prompt=70, promise=1, parent=R("parent")))
    assert not planner.next_iteration.waits_for_parent(planner.sequences.get(R("choice")))
