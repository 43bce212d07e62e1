"""When an adapter is proved: at once if nobody is there, beside others in what they leave, and in its turn."""

from contextlib import suppress
from itertools import pairwise

import pytest

from motet.domain import Digest
from motet.errors import AdapterUnproved, Declined
from motet_runner.interface import AdapterEvicted, AdapterFailed, AdapterLoaded, AdapterProved, ParkedNow, State
from motet_runner.plan import Planner
from motet_runner.plan.adapter_proofs import MAX_PLANS_WAITED
from tests.runner.plan.fake_device import FakeDevice, adapter_layout, make_planner, new
from tests.runner.plan.test_resident_adapters import happened, here, know, state

X, Y, Z = map(Digest, "xyz")


def prove(planner: Planner, proved_by: tuple[str, ...] = (), **pages: int) -> None:
    for adapter, count in pages.items():
        planner.commands.load_adapter(Digest(adapter), adapter_layout(count), prove=True, proved_by=proved_by)


def proved(device: FakeDevice) -> list[str]:
    return [event.digest for event in happened(device, AdapterProved)]


def test_a_proof_is_a_part_of_the_first_load_and_comes_once() -> None:
    planner = make_planner(max_adapters=1)
    device = FakeDevice(planner)
    prove(planner, x=2)
    device.run()
    assert proved(device) == [X]
    for name, adapter in (("a", "y"), ("b", "x")):
        know(planner, y=2)
        planner.commands.add(new(name, adapter=adapter))
        device.run()
    assert [event.digest for event in happened(device, AdapterLoaded)] == [X, Y, X]
    assert proved(device) == [X]
    assert device.proved == {"x"}


def test_what_the_present_kernels_have_proved_elsewhere_is_not_proved_again() -> None:
    planner = make_planner()
    planner.kernels_changed("cpp")
    device = FakeDevice(planner)
    prove(planner, ("torch", "cpp"), x=2)
    prove(planner, ("torch",), y=2)
    device.run()
    assert here(planner) == {"x", "y"}
    assert proved(device) == [Y]


def test_whoever_asks_again_is_told_again() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    prove(planner, x=2)
    device.run()
    prove(planner, x=2)
    device.run()
    assert proved(device) == [X, X]
    assert len(happened(device, AdapterLoaded)) == 1
    prove(planner, (planner.adapters.proofs.kernels,), x=2)
    device.run()
    assert proved(device) == [X, X]


def test_without_sequences_all_are_proved_one_after_the_other_also_in_others_places() -> None:
    planner = make_planner(pages=10, max_adapters=2)
    device = FakeDevice(planner)
    know(planner, z=8)
    device.run()
    prove(planner, **{f"a{number}": 4 for number in range(20)})
    assert planner.has_work()
    device.run(at_most=200)
    assert len(proved(device)) == 20
    assert not planner.has_work()
    assert len(here(planner)) == 2


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
    planner.commands.add(new("plain", max_tokens=60))
    device.step()
    prove(planner, x=2, y=2, z=2)
    planner.commands.add(new("tuned", adapter="z"))
    device.run()
    assert proved(device) == [Z, X, Y]


def full(planner: Planner, step: int, adapters: tuple[str, ...] = ("",)) -> None:
    for adapter in adapters:
        with suppress(Declined):
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


def test_a_failed_proof_is_a_failed_load_and_serves_nobody() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    device.unproved = {"x"}
    prove(planner, x=2, y=2)
    planner.commands.add(new("a", adapter="x"))
    planner.commands.add(new("b", adapter="y"))
    device.run()
    assert device.given_up == ["a"]
    assert set(device.finished) == {"b"}
    assert [(event.digest, type(event.error)) for event in happened(device, AdapterFailed)] == [(X, AdapterUnproved)]
    assert here(planner) == {"y"}
    planner.commands.add(new("again", adapter="x"))
    device.run()
    assert device.given_up == ["a", "again"], "it is not served unproved the next time"


def test_who_asks_while_the_adapter_loads_gets_its_proof_with_the_next_load_at_once() -> None:
    planner = make_planner(max_adapters=1)
    device = FakeDevice(planner)
    device.disk_answers = False
    know(planner, x=2)
    device.step()
    prove(planner, x=2)
    device.disk_answers = True
    device.run(at_most=20)
    assert here(planner) == {"x"}
    assert proved(device) == [X]
    assert len(happened(device, AdapterLoaded)) == 2


def test_a_kept_proof_that_is_lost_is_made_again() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    prove(planner, (planner.adapters.proofs.kernels,), x=2)
    device.run()
    assert here(planner) == {"x"}
    assert not proved(device)
    prove(planner, x=2)
    device.run()
    assert proved(device) == [X]
    assert here(planner) == {"x"}


def test_a_proof_that_is_lost_is_made_again_in_its_turn_where_sequences_come_for_ever() -> None:
    planner = make_planner(pages=60, host_pages=60, max_plans_waited=30)
    device = FakeDevice(planner)
    prove(planner, (planner.adapters.proofs.kernels,), x=2)
    for step in range(30 + 20):
        full(planner, step, ("x",))
        device.step()
        if step == 5:
            prove(planner, x=2)
            assert not proved(device)
    assert proved(device) == [X]
    device.run()
    assert not device.given_up
    assert not happened(device, AdapterFailed)


def test_other_kernels_prove_again_what_is_on_the_device() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    prove(planner, x=2)
    know(planner, y=2)
    device.run()
    planner.kernels_changed("cpp")
    device.run()
    assert [event.digest for event in happened(device, AdapterEvicted)] == [X]
    assert [event.proof.kernels for event in happened(device, AdapterProved)] == ["", "cpp"]
    assert here(planner) == {"x", "y"}
    planner.kernels_changed("")
    device.run()
    assert len(proved(device)) == 2, "these have proved it before"


def test_a_dropped_adapter_is_not_proved() -> None:
    planner = make_planner(pages=20, max_adapters=1)
    device = FakeDevice(planner)
    know(planner, x=2)
    planner.commands.add(new("a", adapter="x", max_tokens=60))
    device.step()
    prove(planner, y=2)
    planner.commands.drop_adapter(Y)
    device.run()
    assert not proved(device)
    assert planner.adapters.proofs.first is None


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
