"""Adapters and sequences in one pool of pages: who loads, who waits, who yields."""

from contextlib import suppress
from dataclasses import replace

import pytest

from motet.domain import PAGE_TOKENS, Digest, ParkMethod, RequestId
from motet.errors import AdapterError, AdapterIncompatible, Declined, InvalidRequest
from motet_runner.interface import AdapterEvicted, AdapterFailed, AdapterLoaded, ParkedNow, State
from motet_runner.plan import LoadArrived, Planner, StepResult
from tests.runner.plan.fake_device import FakeDevice, adapter_layout, make_planner, new

R = RequestId
X, Y, Z = map(Digest, "xyz")


def know(planner: Planner, **pages: int) -> None:
    for adapter, count in pages.items():
        planner.commands.load_adapter(Digest(adapter), adapter_layout(count))


def pin(planner: Planner, **pages: int) -> None:
    for adapter, count in pages.items():
        planner.commands.load_adapter(Digest(adapter), adapter_layout(count), pinned=True)


def happened(device: FakeDevice, kind: type) -> list:
    return [event for event in device.events + device.planner.sequences.events if isinstance(event, kind)]


def state(planner: Planner, request: str) -> State:
    sequence = planner.sequences.get(R(request))
    assert sequence is not None
    return sequence.state


def here(planner: Planner) -> set[str]:
    return {digest for digest, known in planner.adapters.on_device_or_in(()) if known.arrived}


def test_a_sequence_that_waits_for_its_adapter_delays_no_other() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    planner.commands.add(new("tuned", adapter="x"))
    planner.commands.add(new("plain"))
    device.run()
    assert set(device.finished) == {"plain"}
    assert state(planner, "tuned") is State.LOADING
    know(planner, x=2)
    device.run()
    assert set(device.finished) == {"plain", "tuned"}


def test_a_failed_load_fails_only_sequences_of_that_adapter() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    device.loads_fail = {"x"}
    know(planner, x=2, y=2)
    for name, adapter in (("a", "x"), ("b", "y"), ("c", "")):
        planner.commands.add(new(name, adapter=adapter))
    device.run()
    assert device.given_up == ["a"]
    assert set(device.finished) == {"b", "c"}
    assert [(event.digest, type(event.error)) for event in happened(device, AdapterFailed)] == [(X, AdapterError)]
    assert planner.memory.pages.free == 30, "its pages are free again"


def test_others_go_on_while_an_adapter_is_read() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    device.disk_answers = False
    know(planner, x=2)
    for name, adapter in (("a", "x"), ("b", "x"), ("plain", "")):
        planner.commands.add(new(name, adapter=adapter))
    for _ in range(40):
        device.step()
    assert set(device.finished) == {"plain"}
    assert planner.has_work(), "the load is under way"
    device.disk_answers = True
    device.run()
    assert len(happened(device, AdapterLoaded)) == 1, "they share it"
    assert set(device.finished) == {"plain", "a", "b"}


def test_adapters_that_sequences_wait_for_load_side_by_side() -> None:
    """A load takes several iterations. One after the other, sequences that all want other adapters would wait for each
    other's."""
    planner = make_planner(pages=40, max_adapters=8)
    device = FakeDevice(planner)
    planner.commands.add(new("plain", max_tokens=100))
    device.step()
    for adapter in "uvwxyz":
        planner.commands.add(new(adapter, adapter=adapter))
    know(planner, u=2, v=2, w=2, x=2, y=2, z=2)
    device.loads_fail = {"w"}
    (begun, copied) = (device.step(), device.step())
    assert [load.digest for load in begun.loads] == [*"uvwx"]
    assert [load.digest for load in copied.loads] == ["y"], "in the place of the one that has failed"
    assert here(planner) == {"u", "v", "x"}
    device.step()
    assert here(planner) == {"u", "v", "x", "y"}
    device.run()
    assert device.given_up == ["w"]
    assert set(device.finished) == {"plain", *"uvxyz"}


@pytest.mark.parametrize("max_adapters", [2, 8])
def test_tenants_take_turns_to_load_however_many_adapters_one_waits_for(max_adapters: int) -> None:
    """Also where they wait for a place among the device's adapters."""
    planner = make_planner(pages=100, max_adapters=max_adapters, places=32, max_loads=1)
    device = FakeDevice(planner)
    many, few, others = "abcdefgh", "rst", "xyz"
    for adapter in many + few + others:
        tenant = "many" if adapter in many else "few" if adapter in few else "other"
        planner.commands.add(new(adapter, adapter=adapter, tenant=tenant, max_tokens=3))
    know(planner, **dict.fromkeys(many + few + others, 2))
    device.run()
    assert [one.digest for one in happened(device, AdapterLoaded)] == [*"arxbsyctzdefgh"]


def test_a_tenant_that_comes_later_loads_next() -> None:
    planner = make_planner(pages=100, max_adapters=16, places=32, max_loads=1)
    device = FakeDevice(planner)
    for adapter in "abcdefgh":
        planner.commands.add(new(adapter, adapter=adapter, tenant="many"))
    know(planner, **dict.fromkeys("abcdefghxy", 2))
    while len(happened(device, AdapterLoaded)) < 3:
        device.step()
    planner.commands.add(new("x", adapter="x", tenant="few"))
    planner.commands.add(new("y", adapter="y", tenant="few"))
    device.run()
    loaded = "".join(one.digest for one in happened(device, AdapterLoaded))
    assert loaded.index("x") < 6, loaded
    assert loaded.index("y") < 8, loaded


def test_an_adapter_of_several_tenants_loads_at_the_first_of_their_turns() -> None:
    planner = make_planner(pages=100, max_adapters=16, places=32, max_loads=1)
    device = FakeDevice(planner)
    for adapter in "abcdef":
        planner.commands.add(new(adapter, adapter=adapter, tenant="many"))
    planner.commands.add(new("of another", adapter="f", tenant="few"))
    know(planner, **dict.fromkeys("abcdef", 2))
    device.run()
    assert [one.digest for one in happened(device, AdapterLoaded)][:3] == ["a", "f", "b"]


def test_what_sequences_wait_for_loads_before_what_nobody_waits_for() -> None:
    planner = make_planner(pages=100, max_adapters=16, max_loads=1)
    device = FakeDevice(planner)
    know(planner, u=2, v=2, x=2)
    planner.commands.add(new("a", adapter="x"))
    device.run()
    assert [one.digest for one in happened(device, AdapterLoaded)] == ["x", "u", "v"]


def test_what_nobody_waits_for_begins_to_load_alone_and_is_copied_last() -> None:
    planner = make_planner(pages=40, max_adapters=8)
    device = FakeDevice(planner)
    planner.commands.add(new("plain", max_tokens=100))
    device.step()
    know(planner, u=3, v=3)
    (idle,) = device.step().loads
    planner.commands.add(new("a", adapter="x"))
    know(planner, x=3, y=3)
    plan = device.step()
    assert idle.digest == "u"
    (awaited,) = plan.loads
    assert [*plan.loading] == [awaited.number, idle.number]
    device.run()
    assert here(planner) == {"u", "v", "x", "y"}


def test_large_adapters_load_one_after_the_other() -> None:
    """They would only wait for each other's copies, in the host's memory. None is passed by smaller ones, or it could
    wait for ever."""
    planner = make_planner(pages=40, max_adapters=8, max_pages_beside=8)
    device = FakeDevice(planner)
    planner.commands.add(new("plain", max_tokens=100))
    device.step()
    for adapter, pages in (("x", 4), ("y", 5), ("z", 4)):
        planner.commands.add(new(adapter, adapter=adapter))
        planner.commands.load_adapter(Digest(adapter), replace(adapter_layout(pages), size=1))
    begun = []
    while "z" not in begun:
        plan = device.step()
        begun += [load.digest for load in plan.loads]
        assert len(plan.loading) <= 1
    assert begun == ["x", "y", "z"]
    device.run()
    assert set(device.finished) == {"plain", *"xyz"}


@pytest.mark.parametrize("pages", [(9, 1, 1, 1), (5, 4, 1, 1), (1, 8, 1, 1)])
def test_a_load_whose_disk_does_not_answer_keeps_no_others_from_theirs(pages: tuple[int, ...]) -> None:
    """However large they are together"""
    planner = make_planner(pages=40, max_adapters=8, max_pages_beside=8)
    device = FakeDevice(planner)
    device.hung = {"u"}
    planner.commands.add(new("plain", max_tokens=200))
    device.step()
    for adapter, count in zip("uvxy", pages, strict=True):
        planner.commands.add(new(adapter, adapter=adapter))
        know(planner, **{adapter: count})
        device.step()
    for _ in range(100):
        device.step()
    assert set(device.finished) == {*"vxy"}
    device.hung.clear()
    device.run()
    assert set(device.finished) == {"plain", *"uvxy"}


def test_loads_whose_disks_do_not_answer_keep_no_others_from_theirs_however_many_they_are() -> None:
    planner = make_planner(pages=40, max_adapters=8, max_loads=2)
    device = FakeDevice(planner)
    device.hung = {"u", "v", "w"}
    planner.commands.add(new("plain", max_tokens=200))
    for adapter in "uvwxy":
        planner.commands.add(new(adapter, adapter=adapter))
        know(planner, **{adapter: 2})
        device.step()
    for _ in range(100):
        device.step()
    assert set(device.finished) == {*"xy"}
    device.hung.clear()
    device.run()
    assert set(device.finished) == {"plain", *"uvwxy"}


def test_the_worker_does_not_hear_of_a_load_that_ends_before_it_is_told() -> None:
    planner = make_planner(pages=8)
    know(planner, x=4)
    planner.commands.add(new("a", adapter="y"))
    know(planner, y=5)
    plan = planner.plan()
    assert plan is not None
    (load,) = plan.loads
    assert load.digest == Y, "it takes the pages that were empty when x began"
    assert plan.loading.keys() == {load.number}
    planner.check()


def test_a_load_is_in_no_hurry_while_somebody_could_run() -> None:
    planner = make_planner()
    device = FakeDevice(planner)
    know(planner, x=20)
    planner.commands.add(new("plain"))
    assert not device.step().hurry
    while "plain" not in device.finished:
        device.step()
    assert device.step().hurry
    assert here(planner) == {"x"}


def test_adapters_are_prefetched_into_empty_pages_only() -> None:
    planner = make_planner(pages=10)
    device = FakeDevice(planner)
    know(planner, x=4, y=4, z=4)
    device.run()
    assert here(planner) == {"x", "y"}
    assert not planner.has_work()
    planner.commands.add(new("a", adapter="z"))
    device.run()
    assert here(planner) == {"y", "z"}, "the least recently used one went"


def test_pinned_adapters_leave_last_for_a_slot_and_leave_all_the_same_if_nothing_else_can() -> None:
    planner = make_planner(pages=20, max_adapters=2)
    device = FakeDevice(planner)
    pin(planner, x=2)
    know(planner, y=2, z=2)
    device.run()
    assert here(planner) == {"x", "y"}
    planner.commands.add(new("a", adapter="z"))
    device.run()
    assert here(planner) == {"x", "z"}, "y was used after x, but x is pinned"
    pin(planner, z=2)
    planner.commands.add(new("b", adapter="y"))
    device.run()
    assert here(planner) == {"z", "y"}, "both were pinned: the least recently used one went"
    assert set(device.finished) == {"a", "b"}


def test_pinned_adapters_leave_last_for_kv() -> None:
    planner = make_planner(pages=8, chunk_tokens=200)
    device = FakeDevice(planner)
    pin(planner, x=2)
    know(planner, y=2)
    device.run()
    planner.commands.add(new("a", prompt=80, max_tokens=6))  # six pages
    device.run()
    assert [event.digest for event in happened(device, AdapterEvicted)] == [Y]
    planner.commands.add(new("b", prompt=120, max_tokens=6))  # all
    device.run()
    assert [event.digest for event in happened(device, AdapterEvicted)] == [Y, X]


def test_an_adapter_is_pinned_until_it_is_said_not_to_be() -> None:
    planner = make_planner(pages=20, max_adapters=2)
    device = FakeDevice(planner)
    pin(planner, x=2)
    know(planner, y=2, x=2, z=2)
    device.run()
    planner.commands.add(new("a", adapter="z"))
    device.run()
    assert here(planner) == {"y", "z"}
    pin(planner, y=2)
    planner.commands.drop_adapter(Y)
    device.run()
    know(planner, y=2, x=2)
    device.run()
    planner.commands.add(new("b", adapter="z"))
    planner.commands.add(new("c", adapter="x"))
    device.run()
    assert here(planner) == {"z", "x"}, "what was dropped is not pinned"


def test_pinned_adapters_as_many_as_slots_are_all_resident_and_one_yields_to_a_request() -> None:
    planner = make_planner(pages=20, max_adapters=2)
    device = FakeDevice(planner)
    pin(planner, x=2, z=2)
    device.run()
    assert here(planner) == {"x", "z"}
    know(planner, y=2)
    device.run()
    assert here(planner) == {"x", "z"}
    planner.commands.add(new("a", adapter="y"))
    device.run()
    assert here(planner) == {"z", "y"}


def test_a_pinned_adapter_comes_back_in_the_place_of_an_idle_one_that_is_not_pinned() -> None:
    planner = make_planner(pages=20, max_adapters=2)
    device = FakeDevice(planner)
    pin(planner, x=2)
    know(planner, y=2)
    device.run()
    planner.commands.add(new("a", adapter="z", max_tokens=20))
    planner.commands.add(new("b", adapter="y", max_tokens=20))
    know(planner, z=2)
    for _ in range(8):
        device.step()
    assert here(planner) == {"y", "z"}
    pin(planner, x=2)
    assert not happened(device, AdapterEvicted)[1:], "both are in use"
    device.run()
    assert here(planner) == {"y", "z"}
    pin(planner, x=2)
    device.run()
    assert "x" in here(planner)
    pin(planner, w=2)
    device.run()
    assert here(planner) == {"x", "w"}
    pin(planner, v=2)
    device.run()
    assert here(planner) == {"x", "w"}, "none goes for another pinned one"
    know(planner, y=2)
    device.run()
    assert here(planner) == {"x", "w"}


def test_a_pinned_adapter_takes_pages_of_the_prefix_cache_and_none_of_sequences() -> None:
    planner = make_planner(pages=10, prefix_cache=True)
    device = FakeDevice(planner)
    planner.commands.add(new("cached", prompt=8 * PAGE_TOKENS, max_tokens=2, salt=b"t"))
    device.run()
    assert len(planner.memory.cache) == 8
    know(planner, y=4)
    device.run()
    assert here(planner) == set()
    pin(planner, x=4)
    device.run()
    assert here(planner) == {"x"}
    assert len(planner.memory.cache) == 6
    planner.commands.add(new("a", prompt=5 * PAGE_TOKENS, max_tokens=12, salt=b"u"))
    for _ in range(2):
        device.step()
    pin(planner, w=4)
    device.run()
    assert here(planner) == {"x"}
    assert set(device.finished) == {"cached", "a"}
    assert not happened(device, ParkedNow)


def test_an_adapter_with_live_sequences_is_never_evicted() -> None:
    planner = make_planner(pages=12, max_adapters=1)
    device = FakeDevice(planner)
    know(planner, x=4, y=4)
    planner.commands.add(new("a", adapter="x", max_tokens=20))
    for _ in range(6):
        device.step()
    planner.commands.add(new("b", adapter="y"))
    while "a" not in device.finished:
        assert state(planner, "b") is State.LOADING
        device.step()
    device.run()
    assert [event.digest for event in happened(device, AdapterEvicted)] == [X]
    assert set(device.finished) == {"a", "b"}


def test_the_prefix_cache_yields_before_idle_adapters_and_they_before_anybody_parks() -> None:
    planner = make_planner(pages=10)
    device = FakeDevice(planner)
    know(planner, x=2, y=2)
    device.run()
    planner.commands.add(new("cached", prompt=2 * PAGE_TOKENS, max_tokens=2, salt=b"t"))
    device.run()
    assert len(planner.memory.cache) == 2
    planner.commands.add(new("a", prompt=90, max_tokens=6))  # six pages
    device.run()
    assert len(planner.memory.cache) == 0
    assert not happened(device, AdapterEvicted)
    planner.commands.add(new("b", prompt=110, max_tokens=6))  # eight
    device.run()
    assert [event.digest for event in happened(device, AdapterEvicted)] == [X], "the least recently used one"
    assert not happened(device, ParkedNow)


def test_a_load_that_nobody_waits_for_is_given_up_and_its_late_arrival_changes_nothing() -> None:
    planner = make_planner(pages=8, chunk_tokens=200)
    know(planner, x=4)
    begun = planner.plan()
    assert begun is not None
    (load,) = begun.loads
    planner.commands.add(new("a", prompt=100, max_tokens=6))
    grown = planner.plan()
    assert grown is not None
    assert (grown.loading, grown.gone) == ({}, (X,))
    planner.collect(StepResult(number=0, arrived=(LoadArrived(load.number, 1.0),)))
    assert here(planner) == set()
    planner.check()


def test_a_load_that_begins_again_is_another_one() -> None:
    planner = make_planner(pages=8)
    know(planner, x=4)
    first = planner.plan()
    assert first is not None
    planner.commands.drop_adapter(X)
    second = planner.plan()
    assert second is not None
    assert second.gone == (X,)
    planner.commands.add(new("a", adapter="x"))
    know(planner, x=4)
    third = planner.plan()
    assert third is not None
    planner.collect(StepResult(number=0, arrived=(LoadArrived(first.loads[0].number, 1.0),)))
    assert state(planner, "a") is State.LOADING, "that was the load before"
    planner.collect(StepResult(number=0))
    planner.collect(StepResult(number=0, arrived=(LoadArrived(third.loads[0].number, 1.0),)))
    assert state(planner, "a") is State.WAITING


def test_a_promise_must_fit_beside_the_adapters_in_use() -> None:
    planner = make_planner(pages=12)
    device = FakeDevice(planner)
    know(planner, x=4, y=3)
    planner.commands.add(new("a", adapter="x", prompt=40, max_tokens=8))
    assert planner.memory.ledger.kv_pages == 8, "also before it is loaded"
    with pytest.raises(Declined):
        planner.commands.add(new("b", adapter="y", prompt=40, max_tokens=8))
    planner.commands.add(new("b", adapter="y", prompt=24, max_tokens=8))
    with pytest.raises(Declined):
        planner.commands.add(new("c", adapter="x", prompt=8, max_tokens=8))
    assert planner.memory.ledger.free == 0
    device.run()
    assert set(device.finished) == {"a", "b"}
    assert planner.memory.ledger.kv_pages == 12


def test_no_more_adapters_count_than_can_be_on_the_device_together() -> None:
    planner = make_planner(pages=20, max_adapters=2)
    know(planner, x=2, y=3, z=4)
    for adapter in "xyz":
        planner.commands.add(new(adapter, adapter=adapter))
    assert planner.memory.ledger.kv_pages == 20 - 3 - 4


def test_overcommit_applies_to_what_adapters_leave() -> None:
    planner = make_planner(pages=12)
    planner.commands.set_overcommit(1.5)
    know(planner, x=4)
    planner.commands.add(new("a", adapter="x", promise=1))
    assert planner.memory.ledger.limit == 12


def test_what_can_never_fit_beside_its_adapter_is_refused_also_when_the_adapter_is_known_later() -> None:
    planner = make_planner(pages=8)
    device = FakeDevice(planner)
    planner.commands.add(new("early", adapter="x", prompt=60, max_tokens=20, promise=1))
    planner.commands.add(new("parked", adapter="y"))
    planner.commands.supervised = True
    assert planner.commands.park(R("parked"), 1, 1, 1, ParkMethod.RECOMPUTE)
    know(planner, x=4, y=9)
    device.run()
    assert device.given_up == ["early", "parked"]
    with pytest.raises(InvalidRequest, match=r"needs 5 pages of device memory, and its adapter 4\. This runner has 8"):
        planner.commands.add(new("late", adapter="x", prompt=60, max_tokens=20, promise=1))
    with pytest.raises(AdapterIncompatible, match="needs 9 pages"):
        planner.commands.add(new("late", adapter="y"))
    planner.commands.add(new("fits", adapter="x", prompt=40, max_tokens=20, promise=1))
    device.run()
    assert set(device.finished) == {"fits"}


def test_sequences_that_wait_make_way_when_what_they_hold_keeps_their_adapters_away() -> None:
    """Their adapters became known only after they had found pages in the prefix cache."""
    planner = make_planner(pages=8)
    device = FakeDevice(planner)
    for name in "xy":
        know(planner, **{name: 1})
        planner.commands.add(
            new(f"first {name}", prompt=3 * PAGE_TOKENS, max_tokens=2, adapter=name, like="p", salt=b"t")
        )
        device.run()
        planner.commands.drop_adapter(Digest(name))
        device.run()
    for name in "xy":
        planner.commands.add(new(name, prompt=3 * PAGE_TOKENS + 1, max_tokens=2, adapter=name, like="p", salt=b"t"))
    know(planner, x=4, y=4)
    device.run()
    assert {"x", "y"} <= set(device.finished)
    assert {event.request for event in happened(device, ParkedNow)} == {"y"}


def test_a_parked_sequence_resumes_only_where_its_adapter_has_room_too() -> None:
    planner = make_planner(pages=10, host_pages=4)
    planner.commands.supervised = True
    device = FakeDevice(planner)
    know(planner, x=6)
    planner.commands.add(new("a", adapter="x", prompt=20, max_tokens=20, promise=3))
    for _ in range(12):
        device.step()
    assert planner.commands.park(R("a"), 1, 3, 3, ParkMethod.SWAP)
    assert planner.memory.ledger.kv_pages == 10
    planner.commands.add(new("b", prompt=20, max_tokens=60, promise=5))
    for _ in range(5):
        device.step()
    assert not planner.commands.resume(R("a"), 1, 3), "3 pages and its adapter's 6, beside 5"
    planner.commands.cancel(R("b"))
    assert planner.commands.resume(R("a"), 1, 3)
    device.run()
    assert set(device.finished) == {"a"}


def test_resuming_evicts_other_adapters_and_not_its_own() -> None:
    planner = make_planner(pages=8, host_pages=4)
    planner.commands.supervised = True
    device = FakeDevice(planner)
    know(planner, x=3, y=3)
    planner.commands.add(new("a", adapter="x", prompt=40, max_tokens=20, promise=4))
    for _ in range(8):
        device.step()
    assert planner.commands.park(R("a"), 1, 4, 4, ParkMethod.SWAP)
    planner.commands.add(new("b", adapter="y", prompt=5, max_tokens=3, promise=1))
    device.run()
    assert here(planner) == {"x", "y"}
    assert planner.commands.resume(R("a"), 1, 4)
    device.run()
    assert set(device.finished) == {"a", "b"}
    assert [event.digest for event in happened(device, AdapterEvicted)] == [Y]


def test_a_dropped_adapter_stays_while_a_sequence_will_need_it() -> None:
    planner = make_planner()
    planner.commands.supervised = True
    device = FakeDevice(planner)
    know(planner, x=2)
    planner.commands.add(new("a", adapter="x", max_tokens=5))
    for _ in range(4):
        device.step()
    planner.commands.park(R("a"), 1, 1, 1, ParkMethod.RECOMPUTE)
    planner.commands.drop_adapter(X)
    device.run()
    assert planner.adapters.is_known(X)
    assert planner.commands.resume(R("a"), 1, 1)
    device.run()
    assert set(device.finished) == {"a"}
    assert not planner.adapters.is_known(X)
    assert planner.memory.pages.free == 32


def test_an_overcommitted_ledger_resumes_nobody_whose_adapter_has_no_room() -> None:
    planner = make_planner(pages=10, host_pages=4, chunk_tokens=200)
    planner.commands.supervised = True
    planner.commands.set_overcommit(3.0)
    device = FakeDevice(planner)
    know(planner, x=6)
    planner.commands.add(new("a", adapter="x", prompt=20, max_tokens=20, promise=3))
    for _ in range(12):
        device.step()
    assert planner.commands.park(R("a"), 1, 3, 3, ParkMethod.SWAP)
    planner.commands.add(new("b", prompt=70, max_tokens=8, promise=5))
    device.step()
    assert here(planner) == set()
    assert not planner.commands.resume(R("a"), 1, 3), "it would hold pages that its adapter needs"
    planner.commands.cancel(R("b"))
    assert planner.commands.resume(R("a"), 1, 3)
    device.run()
    assert set(device.finished) == {"a"}


@pytest.mark.parametrize("ahead", [0, 1])
def test_others_do_not_keep_an_adapter_away_for_ever(ahead: int) -> None:
    """More is promised than there is, and somebody always takes the pages that are given back."""
    planner = make_planner(pages=16, host_pages=16)
    device = FakeDevice(planner, ahead=ahead)
    planner.commands.set_overcommit(2.0)
    know(planner, x=8)

    def keep_full(step: int) -> None:
        with suppress(Declined):
            planner.commands.add(new(f"plain {step}", prompt=40, max_tokens=24))
        device.step()

    for step in range(3):
        keep_full(step)
    planner.commands.add(new("tuned", adapter="x"))
    step = 3
    while "tuned" not in device.finished:
        assert step < 120
        keep_full(step)
        step += 1
    assert happened(device, ParkedNow)
    device.run()
