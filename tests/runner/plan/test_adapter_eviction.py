"""Which adapters leave the device: those whose return would cost the least, and not what requests wait for."""

import pytest

from motet.domain import Digest, ParkMethod, RequestId
from motet_runner.interface import AdapterEvicted
from motet_runner.plan import HostAdapters, Planner
from testbed.adapter_uses import best_hits, hits_on_device, uses_of
from tests.runner.plan.fake_device import FakeDevice, adapter_layout, make_planner, new

MIB = 1 << 20


class Requests:
    """One request after the other"""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.device = FakeDevice(planner)
        self._count = 0

    def know(self, **pages: int) -> None:
        for adapter, count in pages.items():
            self.planner.commands.load_adapter(Digest(adapter), adapter_layout(count))
        self.device.run()

    def ask(self, adapters: str) -> None:
        for adapter in adapters:
            self.ask_together(adapter)

    def ask_together(self, adapters: str) -> None:
        for adapter in adapters:
            self._count += 1
            self.planner.commands.add(new(f"request {self._count}", adapter=adapter, max_tokens=2))
        self.device.run()

    @property
    def left(self) -> list[Digest]:
        """In this order"""
        return [event.digest for event in self.device.events if isinstance(event, AdapterEvicted)]


@pytest.mark.parametrize(("skew", "least"), [(1.5, 0.965), (1.0, 0.78)])
def test_the_hits_come_near_those_of_an_eviction_that_knows_the_future(skew: float, least: float) -> None:
    uses = uses_of(skew)
    assert hits_on_device(uses) / best_hits(uses) >= least


def test_what_few_requests_use_leaves_before_what_was_used_longer_ago() -> None:
    requests = Requests(make_planner(max_adapters=3))
    requests.know(u=1, v=1, w=1, x=1, y=1, z=1)
    requests.ask("uuuvvxyz")
    assert requests.left == ["w", "x", "y"]


def test_old_requests_count_less() -> None:
    requests = Requests(make_planner(max_adapters=2))
    requests.know(x=1, y=1, z=1)
    requests.ask("x" * 20 + "y" * 400 + "z" * 15 + "y")
    assert requests.left == ["x"]


def test_many_pages_leave_before_few() -> None:
    """They make room for more."""
    requests = Requests(make_planner(pages=16, max_adapters=3))
    requests.know(x=1, y=10, z=2)
    requests.ask("xyxyzzz")
    requests.know(w=4)
    requests.ask("w")
    assert requests.left == ["y"]


def test_what_the_hosts_memory_keeps_leaves_before_what_must_be_read() -> None:
    host = HostAdapters(MIB, adapters=1)
    planner = make_planner(max_adapters=2, host_adapters=host, bytes_of_rank=lambda rank: rank * MIB)
    requests = Requests(planner)
    requests.know(x=1)
    requests.know(y=1)
    assert [host.holds(Digest(one)) for one in "xy"] == [False, True]
    requests.ask("xy")
    requests.know(z=1)
    requests.ask("z")
    assert requests.left == ["y"], "it was used last"


def test_what_the_hosts_memory_keeps_no_more_leaves_later() -> None:
    host = HostAdapters(MIB, adapters=1)
    requests = Requests(make_planner(max_adapters=3, host_adapters=host, bytes_of_rank=lambda rank: rank * MIB))
    for one in "xyz":
        requests.know(**{one: 1})
    requests.ask("xyyyzzzz")
    requests.know(w=1)
    assert host.holds(Digest("z"))
    requests.ask_together("wwwww")
    assert host.holds(Digest("w"))
    requests.know(v=1)
    requests.ask("v")
    assert requests.left == ["x", "w"]


def test_what_the_hosts_memory_keeps_is_worth_less_once_it_has_arrived() -> None:
    """It was looked what it is worth while it loaded from the disk. `check` computes that anew."""
    planner = make_planner(host_adapters=HostAdapters(MIB, adapters=1), bytes_of_rank=lambda rank: rank * MIB)
    requests = Requests(planner)
    planner.commands.load_adapter(Digest("x"), adapter_layout(1))
    plan = planner.plan()
    planner.adapters.used(Digest("x"))
    assert planner.adapters.reclaim(0)
    requests.device.launch(plan)
    requests.device.run()
    planner.check()


def test_what_a_parked_request_will_need_leaves_after_what_nobody_waits_for() -> None:
    planner = make_planner(max_adapters=3, places=2)
    planner.commands.supervised = True
    requests = Requests(planner)
    requests.know(x=1, y=1, z=1)
    planner.commands.add(new("parked", adapter="x", max_tokens=20))
    requests.device.step()
    assert planner.commands.park(RequestId("parked"), 1, 2, 2, ParkMethod.RECOMPUTE)
    requests.ask("yyyzzz")
    requests.know(v=1, w=1)
    requests.ask("vw")
    assert requests.left == ["y", "v"]
    assert planner.commands.resume(RequestId("parked"), 1, 2)
    requests.device.run()
    assert "parked" in requests.device.finished
    assert requests.left == ["y", "v"]


def test_what_requests_in_the_queue_need_stays() -> None:
    """They wait for a place in the batch. The others are used more."""
    planner = make_planner(max_adapters=3, places=1)
    requests = Requests(planner)
    requests.know(x=1, y=1, z=1)
    requests.ask("yyyzz")
    planner.commands.add(new("long", max_tokens=100))
    requests.device.step()
    planner.commands.add(new("queued", adapter="x"))
    requests.device.step()
    requests.planner.commands.add(new("another", adapter="w"))
    requests.planner.commands.load_adapter(Digest("w"), adapter_layout(1))
    requests.device.run()
    assert {"long", "queued", "another"} <= set(requests.device.finished)
    assert requests.left == ["z"]
