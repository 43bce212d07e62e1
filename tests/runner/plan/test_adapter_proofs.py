"""When an adapter is proved: at once if nobody is there, beside others in what they leave, and in its turn. Each order
is answered, once."""

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import count, pairwise

import pytest

from motet.domain import Digest, ParkMethod, RequestId
from motet.errors import AdapterError, AdapterUnproved, Declined, MotetError
from motet_runner.adapters.proof import Proof, ProofOrder
from motet_runner.interface import AdapterEvicted, AdapterFailed, AdapterLoaded, ParkedNow, ProofEnded, State
from motet_runner.plan import HostAdapters, Planner
from motet_runner.plan.adapter_proofs import MAX_PLANS_WAITED
from motet_runner.plan.host_adapters import BLOCK_BYTES
from tests.runner.plan.fake_device import FakeDevice, adapter_layout, make_planner, new
from tests.runner.plan.test_resident_adapters import happened, here, know, state

X, Y, Z = map(Digest, "xyz")
NUMBERS = count(1)


def prove(planner: Planner, *, meanwhile: bool = False, **pages: int) -> None:
    for adapter, pages_of_it in pages.items():
        order = ProofOrder(next(NUMBERS), serves_meanwhile=meanwhile)
        planner.commands.load_adapter(Digest(adapter), adapter_layout(pages_of_it), proof=order)


def proved(device: FakeDevice) -> list[str]:
    return [event.digest for event in happened(device, ProofEnded) if isinstance(event.found, Proof)]


def not_proved(device: FakeDevice) -> list[tuple[str, type[MotetError]]]:
    answers = happened(device, ProofEnded)
    return [(event.digest, type(event.found)) for event in answers if not isinstance(event.found, Proof)]


def test_an_adapter_is_proved_once_it_has_arrived_and_once_for_each_order() -> None:
    planner = make_planner(max_adapters=1)
    device = FakeDevice(planner)
    prove(planner, x=2)
    device.run()
    assert [type(event) for event in device.events] == [AdapterLoaded, ProofEnded]
    for name, adapter in (("a", "y"), ("b", "x")):
        know(planner, y=2)
        planner.commands.add(new(name, adapter=adapter))
        device.run()
    assert [event.digest for event in happened(device, AdapterLoaded)] == [X, Y, X]
    assert proved(device) == [X]


def test_an_order_that_is_told_again_is_the_same_order() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    device.disk_answers = False
    for _ in range(3):
        planner.commands.load_adapter(X, adapter_layout(2), proof=ProofOrder(7))
        device.step()
    device.disk_answers = True
    device.run()
    assert [(event.number, event.digest) for event in happened(device, ProofEnded)] == [(7, X)]


def test_another_order_takes_the_place_of_the_former_one_which_is_answered_too() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    device.disk_answers = False
    planner.commands.load_adapter(X, adapter_layout(2), proof=ProofOrder(7))
    device.step()
    planner.commands.load_adapter(X, adapter_layout(2), proof=ProofOrder(8))
    device.disk_answers = True
    device.run()
    answers = happened(device, ProofEnded)
    assert [(event.number, type(event.found)) for event in answers] == [(7, AdapterError), (8, Proof)]


def test_an_adapter_on_the_device_is_proved_there_beside_its_sequences() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    device.proof_parts = 5
    know(planner, x=2)
    planner.commands.add(new("a", adapter="x", max_tokens=30))
    device.step()
    device.step()
    prove(planner, x=2)
    while not proved(device):
        before = device.iterations["a"]
        device.step()
        assert device.iterations["a"] == before + 1
    device.run()
    assert len(happened(device, AdapterLoaded)) == 1
    assert len(device.finished["a"][0]) == 30


@pytest.mark.parametrize("meanwhile", [False, True])
def test_only_what_was_proved_before_serves_before_its_proof(meanwhile: bool) -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    device.proof_parts = 12
    planner.commands.add(new("plain", max_tokens=60))
    device.step()
    prove(planner, meanwhile=meanwhile, x=2)
    planner.commands.add(new("tuned", adapter="x", max_tokens=4))
    while "tuned" not in device.finished:
        device.step()
    assert bool(proved(device)) is not meanwhile
    device.run()
    assert proved(device) == [X]


def test_an_adapter_that_may_serve_after_all_serves_at_once() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    device.proof_parts = 1000
    planner.commands.add(new("plain", max_tokens=60))
    device.step()
    prove(planner, x=2)
    planner.commands.add(new("tuned", adapter="x", max_tokens=4))
    for _ in range(10):
        device.step()
    assert state(planner, "tuned") is State.LOADING
    prove(planner, meanwhile=True, x=2)
    for _ in range(10):
        device.step()
    assert "tuned" in device.finished
    assert not proved(device)


def test_without_sequences_all_are_proved_one_after_the_other_also_in_others_places() -> None:
    planner = make_planner(pages=10, max_adapters=2)
    device = FakeDevice(planner)
    device.proof_parts = 3
    know(planner, z=8)
    device.run()
    prove(planner, **{f"a{number}": 4 for number in range(20)})
    assert planner.has_work()
    device.run(at_most=200)
    assert len(proved(device)) == 20
    assert len(happened(device, AdapterLoaded)) == 21, "none has left before it was proved"
    assert not planner.has_work()
    assert len(here(planner)) == 2


def test_the_next_one_loads_while_one_is_proved_and_no_more_of_them() -> None:
    planner = make_planner(pages=20, max_adapters=4)
    device = FakeDevice(planner)
    know(planner, z=19)
    device.run()
    prove(planner, **{f"a{number}": 4 for number in range(12)})
    beside, most = 0, 0
    while planner.has_work():
        plan = device.step()
        beside += plan.proof is not None and bool(plan.loading)
        most = max(most, len(happened(device, AdapterLoaded)) - len(proved(device)))
    assert len(proved(device)) == 12
    assert beside > 8
    assert most <= 3, "z, the one that is proved, and the next one"


def test_a_sequence_that_waits_for_an_order_keeps_no_proof_from_its_place() -> None:
    planner = make_planner(max_adapters=1)
    device = FakeDevice(planner)
    planner.commands.supervised = True
    know(planner, x=2)
    planner.commands.add(new("a", adapter="x", max_tokens=30))
    device.step()
    device.step()
    a = planner.sequences.get(RequestId("a"))
    assert planner.commands.park(RequestId("a"), 1, a.promise, a.promise, ParkMethod.RECOMPUTE)
    planner.commands.add(new("b", adapter="unknown"))
    prove(planner, y=2)
    device.run()
    assert proved(device) == [Y]


def test_beside_sequences_a_proof_takes_only_what_nobody_has_until_its_turn() -> None:
    planner = make_planner(pages=40, max_adapters=1)
    device = FakeDevice(planner)
    know(planner, x=2)
    device.run()
    planner.commands.add(new("plain", max_tokens=MAX_PLANS_WAITED + 40))
    device.step()
    prove(planner, y=2)
    for _ in range(MAX_PLANS_WAITED - 1):
        device.step()
        assert here(planner) == {"x"}
    for _ in range(5):
        device.step()
    assert here(planner) == {"y"}
    assert proved(device) == [Y]
    assert not happened(device, ParkedNow)
    device.run()
    assert len(device.finished["plain"][0]) == MAX_PLANS_WAITED + 40


def test_whoever_is_awaited_is_proved_before_those_that_nobody_waits_for() -> None:
    planner = make_planner(pages=40, max_adapters=4)
    device = FakeDevice(planner)
    device.proof_parts = 10
    planner.commands.add(new("plain", max_tokens=90))
    device.step()
    prove(planner, x=2, y=2, z=2)
    for _ in range(6):
        device.step()
    planner.commands.add(new("tuned", adapter="z"))
    device.run()
    assert proved(device) == [Z, X, Y]


@pytest.mark.parametrize("runs", ["", "x"])
def test_a_proof_that_nobody_waits_for_pauses_while_an_awaited_adapter_loads_but_not_for_ever(runs: str) -> None:
    planner = make_planner(pages=60, max_adapters=4, max_plans_waited=40)
    device = FakeDevice(planner)
    device.proof_parts = 20
    know(planner, x=2)
    planner.commands.add(new("runs", adapter=runs, max_tokens=90))
    device.step()
    prove(planner, meanwhile=True, x=2)
    while device.proving[1] < 3:
        device.step()
    device.disk_answers = False
    know(planner, y=2)
    planner.commands.add(new("cold", adapter="y", max_tokens=4))
    device.step()
    done = device.proving[1]
    for _ in range(10):
        device.step()
    assert device.proving[1] <= done + 1
    for _ in range(60):
        device.step()
    assert proved(device) == [X]
    device.disk_answers = True
    device.run()
    assert "cold" in device.finished


def full(planner: Planner, step: int, adapters: tuple[str, ...] = ("",)) -> None:
    for adapter in adapters:
        with suppress(Declined, AdapterError):
            planner.commands.add(new(f"{adapter} {step}", prompt=20, max_tokens=12, adapter=adapter))


@pytest.mark.parametrize("preset", ["paged-promises", "paged-chunk"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_under_full_load_a_proof_gets_pages_in_its_turn_and_no_promise_is_broken(preset: str, ahead: int) -> None:
    planner = make_planner(pages=12, preset=preset, host_pages=12, max_plans_waited=30)
    device = FakeDevice(planner, ahead=ahead)
    planner.commands.supervised = True
    for step in range(20):
        full(planner, step)
        device.step()
    prove(planner, x=6)
    for step in range(20, 30 + 30 + 40):
        full(planner, step)
        device.step()
        if proved(device):
            break
    assert proved(device) == [X]
    if preset == "paged-promises":
        assert not happened(device, ParkedNow), "others ended, and fewer were let in meanwhile"
    assert planner.adapters.proofs.turn is None
    device.run()


def test_where_sequences_have_all_places_one_adapter_gives_its_place_up_in_turn() -> None:
    planner = make_planner(pages=60, max_adapters=2, host_pages=60, max_plans_waited=30)
    device = FakeDevice(planner)
    know(planner, x=2, y=2)
    for step in range(5):
        full(planner, step, ("x", "y"))
        device.step()
    prove(planner, z=2)
    for step in range(5, 30 + 20):
        full(planner, step, ("x", "y"))
        device.step()
        if proved(device):
            break
    assert proved(device) == [Z]
    assert happened(device, ParkedNow)
    device.run()
    assert not device.given_up


def test_what_serves_meanwhile_takes_nothing_from_sequences_for_its_proof() -> None:
    planner = make_planner(pages=60, max_adapters=2, host_pages=60, max_plans_waited=10)
    device = FakeDevice(planner)
    know(planner, x=2, y=2)
    for step in range(60):
        full(planner, step, ("x", "y"))
        device.step()
        if step == 5:
            prove(planner, meanwhile=True, z=2)
    assert planner.adapters.proofs.turn is None
    assert not happened(device, ParkedNow)
    device.run()
    assert proved(device) == [Z], "once there is room"


def test_turns_are_as_far_apart_as_the_first_has_waited() -> None:
    planner = make_planner(pages=60, max_adapters=2, host_pages=60, max_plans_waited=30)
    device = FakeDevice(planner)
    know(planner, x=2, y=2)
    prove_at: list[int] = []
    for step in range(200):
        full(planner, step, ("x", "y"))
        device.step()
        if step == 5:
            prove(planner, a=2, b=2, c=2)
        prove_at += [step] * (len(proved(device)) - len(prove_at))
    assert len(prove_at) == 3
    assert all(after - before >= 30 for before, after in pairwise(prove_at)), prove_at


def test_what_is_wrong_serves_nobody_until_there_is_another_order() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    device.unproved = {"x"}
    prove(planner, x=2, y=2)
    planner.commands.add(new("a", adapter="x"))
    planner.commands.add(new("b", adapter="y"))
    device.run()
    assert device.given_up == ["a"]
    assert set(device.finished) == {"b"}
    assert not_proved(device) == [(X, AdapterUnproved)]
    assert here(planner) == {"y"}
    with pytest.raises(AdapterUnproved):
        planner.commands.add(new("again", adapter="x"))
    device.unproved = set()
    prove(planner, x=2)
    planner.commands.add(new("again", adapter="x"))
    device.run()
    assert "again" in device.finished


def prove_from_slab(planner: Planner, *, meanwhile: bool = False, number: int = 0) -> int:
    number = number or next(NUMBERS)
    order = ProofOrder(number, serves_meanwhile=meanwhile)
    planner.commands.load_adapter(X, adapter_layout(2, slab="slab"), proof=order)
    return number


@pytest.mark.parametrize("host_blocks", [0, 4])
@pytest.mark.parametrize("ahead", [0, 1])
def test_an_adapter_with_a_damaged_slab_is_loaded_from_its_files_and_proved_again(ahead: int, host_blocks: int) -> None:
    """Also where the host's memory keeps what the slab held"""
    planner = make_planner(
        host_adapters=HostAdapters(host_blocks * BLOCK_BYTES), bytes_of_rank=lambda rank: rank * BLOCK_BYTES
    )
    device = FakeDevice(planner, ahead=ahead)
    device.damaged_slabs = {"x"}
    prove_from_slab(planner)
    planner.commands.add(new("a", adapter="x"))
    device.run()
    assert "a" in device.finished
    assert proved(device) == [X]
    assert not not_proved(device)
    loads = happened(device, AdapterLoaded)
    assert [one.lacks_slab for one in loads] == [False, True], "the slab is to be written again"
    know(planner, y=2)
    planner.commands.add(new("b", adapter="y"))
    device.run()
    assert "b" in device.finished


def test_a_slab_that_was_found_wrong_is_not_read_again_once_its_adapter_is_proved() -> None:
    """It may be on a disk that takes no writes, or not be removed yet."""
    planner = make_planner(max_adapters=1)
    device = FakeDevice(planner)
    device.damaged_slabs = {"x"}
    prove_from_slab(planner)
    device.run()
    assert proved(device) == [X]
    know(planner, y=2)
    for request, adapter in (("y", "y"), ("x", "x")):  # which takes the other one's place
        planner.commands.add(new(request, adapter=adapter))
        device.run()
    assert not device.from_slab["x"]
    planner.commands.load_adapter(X, adapter_layout(2, slab="slab of other files"))
    for request, adapter in (("y again", "y"), ("x again", "x")):
        planner.commands.add(new(request, adapter=adapter))
        device.run()
    assert device.from_slab["x"]


def test_what_is_wrong_from_its_files_too_is_refused_after_one_more_attempt() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    device.damaged_slabs = device.unproved = {"x"}
    prove_from_slab(planner)
    planner.commands.add(new("a", adapter="x"))
    device.run()
    assert device.given_up == ["a"]
    assert not_proved(device) == [(X, AdapterUnproved)]
    device.unproved = set()
    prove_from_slab(planner)
    device.run()
    assert proved(device) == [X], "another order tries the files again"


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_a_damaged_slab_has_served_ends_and_others_get_what_is_right(ahead: int) -> None:
    planner = make_planner()
    device = FakeDevice(planner, ahead=ahead)
    device.proof_parts = 4
    device.damaged_slabs = {"x"}
    number = prove_from_slab(planner, meanwhile=True)
    planner.commands.add(new("before", adapter="x", max_tokens=40))
    planner.commands.add(new("base", max_tokens=40))
    while not device.given_up:
        device.step()
    planner.commands.add(new("after", adapter="x"))
    prove_from_slab(planner, meanwhile=True, number=number)  # told again, as with each request
    while not proved(device):
        assert not device.tokens.get("after"), "it serves nobody before it is proved"
        device.step()
    device.run()
    assert device.given_up == ["before"]
    assert set(device.finished) == {"base", "after"}
    assert proved(device) == [X]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_later_proof_that_fails_ends_the_sequences_of_its_adapter_and_no_others(ahead: int) -> None:
    planner = make_planner(host_pages=20)
    device = FakeDevice(planner, ahead=ahead)
    device.unproved = {"x"}
    know(planner, x=2, y=2)
    for name, adapter in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "")):
        planner.commands.add(new(name, adapter=adapter, max_tokens=30))
    for _ in range(6):
        device.step()
    b = planner.sequences.get(RequestId("b"))
    planner.commands.park(RequestId("b"), 1, b.promise, b.promise, ParkMethod.SWAP)
    planner.commands.supervised = True
    prove(planner, meanwhile=True, x=2)
    device.run()
    assert sorted(device.given_up) == ["a", "b"]
    assert [len(device.finished[name][0]) for name in "cd"] == [30, 30]
    assert [event.digest for event in happened(device, AdapterEvicted)] == [X]


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_proof_that_is_given_up_is_answered_and_nobody_waits_for_it(meanwhile: bool) -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    device.given_up_proofs = {"x"}
    prove(planner, meanwhile=meanwhile, x=2)
    planner.commands.add(new("a", adapter="x"))
    device.run()
    assert not_proved(device) == [(X, AdapterError)]
    assert ("a" in device.finished) is meanwhile
    if not meanwhile:
        assert device.given_up == ["a"]
        with pytest.raises(AdapterError):
            planner.commands.add(new("b", adapter="x"))


def test_a_load_that_fails_answers_the_order() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    device.loads_fail = {"x"}
    prove(planner, x=2)
    planner.commands.add(new("a", adapter="x"))
    device.run()
    assert not_proved(device) == [(X, AdapterError)]
    assert [event.digest for event in happened(device, AdapterFailed)] == [X]
    assert device.given_up == ["a"]
    device.loads_fail = set()
    prove(planner, x=2)
    planner.commands.add(new("b", adapter="x"))
    device.run()
    assert "b" in device.finished


def test_an_adapter_that_never_fits_and_one_that_is_dropped_answer_their_orders() -> None:
    planner = make_planner(pages=8, max_adapters=1)
    device = FakeDevice(planner)
    know(planner, x=2)
    planner.commands.add(new("a", adapter="x", max_tokens=20))
    device.step()
    prove(planner, y=8, z=2)
    planner.commands.drop_adapter(Z)
    device.run()
    assert sorted(digest for digest, _ in not_proved(device)) == [Y, Z]
    assert not planner.adapters.proofs


def test_an_adapter_that_leaves_the_device_before_it_is_proved_is_proved_later() -> None:
    planner = make_planner(pages=12, max_adapters=2)
    device = FakeDevice(planner)
    device.proof_parts = 30
    planner.commands.add(new("plain", prompt=20, max_tokens=60))
    device.step()
    prove(planner, x=4)
    while device.proving[1] < 3:
        device.step()
    know(planner, y=5)
    planner.commands.add(new("tuned", adapter="y", max_tokens=20))
    device.run()
    assert X in [event.digest for event in happened(device, AdapterEvicted)]
    assert proved(device) == [X]


def test_other_kernels_begin_anew_what_others_have_begun() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    device.proof_parts = 5
    prove(planner, x=2)
    while not device.proving[0]:
        plan = planner.plan()
        device.launch(replace(plan, hurry=False))
        planner.collect(device.launched.popleft()[1])
    assert 0 < device.proving[1] < 5
    device.kernels = "cpp"
    planner.kernels_changed()
    device.run()
    assert [event.found.kernels for event in happened(device, ProofEnded)] == ["cpp"]
    assert len(happened(device, AdapterLoaded)) == 1
    assert not happened(device, AdapterEvicted)


def test_a_proof_has_its_turn_also_while_another_adapter_loads() -> None:
    """Under load one always does."""
    planner = make_planner(pages=20, max_adapters=2, host_pages=20, max_plans_waited=5)
    device = FakeDevice(planner)
    know(planner, x=2)
    planner.commands.add(new("a", adapter="x", max_tokens=100))
    for _ in range(5):
        device.step()
    device.disk_answers = False
    know(planner, y=2)
    planner.commands.add(new("b", adapter="y"))
    device.step()
    prove(planner, z=2)
    for _ in range(10):
        device.step()
    assert planner.adapters.proofs.turn == Z
    assert not planner.adapters.pages_to_take(Z), "it has its pages"
    device.disk_answers = True
    device.run()
    assert proved(device) == [Z]
    assert set(device.finished) == {"a", "b"}


def test_no_sequence_makes_way_for_a_proof_that_is_too_large_to_load_beside_another_adapter() -> None:
    planner = make_planner(pages=60, max_adapters=2, host_pages=60, max_plans_waited=5, max_pages_beside=4)
    device = FakeDevice(planner)
    know(planner, x=2)
    planner.commands.add(new("a", adapter="x", max_tokens=200, promise=14))
    for _ in range(3):
        device.step()
    device.disk_answers = False
    know(planner, y=2)
    planner.commands.add(new("b", adapter="y"))
    device.step()
    planner.commands.load_adapter(Z, adapter_layout(3), proof=ProofOrder(99))
    for number in range(5):
        with suppress(Declined):
            planner.commands.add(new(f"c{number}", max_tokens=2))
        for _ in range(4):
            device.step()
    assert planner.adapters.proofs.turn == Z
    assert not happened(device, ParkedNow)
    device.disk_answers = True
    device.run()
    assert proved(device) == [Z]


def test_an_adapter_that_waits_for_its_turn_keeps_no_sequence_from_a_quick_round() -> None:
    planner = make_planner(pages=20, max_adapters=1)
    device = FakeDevice(planner)
    know(planner, x=2)
    planner.commands.add(new("a", adapter="x", max_tokens=60))
    for _ in range(5):
        device.step()
    prove(planner, y=2)
    for _ in range(5):
        device.step()
    assert state(planner, "a") is State.DECODE
    assert planner.adapters.still, "nothing is to be chosen with each plan"


def test_each_order_is_answered_once_whatever_happens() -> None:
    planner = make_planner(pages=14, max_adapters=2, host_pages=14, max_plans_waited=5)
    device = FakeDevice(planner)
    device.proof_parts = 4
    device.unproved, device.given_up_proofs = {"b"}, {"c"}
    asked: list[int] = []
    for step in range(300):
        adapter = "abcde"[step * 7 % 5]
        if step % 3 == 0:
            asked.append(order := next(NUMBERS))
            planner.commands.load_adapter(Digest(adapter), adapter_layout(3), proof=ProofOrder(order, step % 2 == 0))
        if step % 11 == 0:
            planner.commands.drop_adapter(Digest(adapter))
        device.loads_fail = {"d"} if step % 50 < 10 else set()
        full(planner, step, (adapter, ""))
        device.step()
    device.loads_fail = set()
    for adapter in "abcde":
        planner.commands.load_adapter(Digest(adapter), adapter_layout(3))
    device.run()
    assert Counter(event.number for event in happened(device, ProofEnded)) == Counter(asked)
