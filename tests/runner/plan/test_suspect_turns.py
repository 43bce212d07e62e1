"""Who had an engine die on them is computed alone, and everybody outside knows it before the iteration begins."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.domain import ParkMethod, RequestId
from motet.errors import MotetError
from motet_runner.interface import StateChanged
from motet_runner.plan import Planner, StepPlan
from tests.runner.plan.fake_device import FakeDevice, make_planner, new


class WatchedDevice:
    """A device that checks each iteration against the announced request that is computed alone."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.device = FakeDevice(planner)
        self.alone = ""
        self.history: list[list[str]] = []

    def step(self) -> list[str]:
        """The requests that were computed."""
        known = self.alone
        suspects = {sequence.request for sequence in self.planner.sequences if sequence.suspect}
        computed = self.device.requests(self.device.step().rows)
        if computed:
            self.history.append(computed)
            if suspects & set(computed):
                assert computed == [known], "a suspect is computed alone, and was announced before"
            else:
                assert known in ("", *computed) or self.planner.sequences.get(RequestId(known)) is None, (
                    "the announced request is out of date"
                )
        for event in self.device.events:
            if isinstance(event, StateChanged) and (event.alone or event.request == self.alone):
                self.alone = event.request if event.alone else ""
        self.device.events.clear()
        return computed

    def run(self) -> None:
        for _ in range(10_000):
            if not self.planner.has_work():
                return
            self.step()
        raise AssertionError("there is still work")


def test_a_suspect_is_computed_alone_until_it_has_two_new_tokens() -> None:
    planner = make_planner(chunk_tokens=24)
    watched = WatchedDevice(planner)
    planner.commands.add(new("neighbour", prompt=4, max_tokens=30))
    watched.step()
    planner.commands.add(new("suspect", prompt=40, max_tokens=10, engines_lost=1))
    watched.run()
    alone = [computed for computed in watched.history if computed == ["suspect"]]
    together = [computed for computed in watched.history if len(computed) == 2]
    assert len(alone) == 3, "two chunks, the second of which samples, and one decode"
    assert len(together) == 8
    assert watched.device.finished["suspect"][0] == _alone("suspect", prompt=40, max_tokens=10)


def test_other_sequences_get_every_second_iteration() -> None:
    planner = make_planner(pages=200, places=20, chunk_tokens=24)
    watched = WatchedDevice(planner)
    planner.commands.add(new("neighbour", prompt=4, max_tokens=60))
    for n in range(8):
        planner.commands.add(new(f"suspect{n}", prompt=30, max_tokens=3, engines_lost=1))
    while planner.sequences.get(RequestId("neighbour")):
        watched.step()
    for one, two in zip(watched.history, watched.history[1:], strict=False):
        assert "neighbour" in one + two


def test_delivered_tokens_do_not_count_for_a_suspect() -> None:
    planner = make_planner()
    watched = WatchedDevice(planner)
    planner.commands.add(new("moved", prompt=4, max_tokens=20, delivered=(1, 2, 3, 4, 5), engines_lost=2))
    planner.commands.add(new("neighbour", prompt=4, max_tokens=20))
    watched.run()
    assert sum(computed == ["moved"] for computed in watched.history) >= 2


def test_a_suspect_cancelled_before_its_iteration_delays_no_other() -> None:
    planner = make_planner()
    watched = WatchedDevice(planner)
    planner.commands.add(new("suspect", engines_lost=1))
    planner.commands.add(new("other", engines_lost=1))
    watched.step()
    assert watched.alone == "suspect"
    planner.commands.cancel(RequestId("suspect"))
    assert not watched.step()
    assert watched.alone == "other"
    assert watched.step() == ["other"]


def _alone(request: str, **how: int) -> list[int]:
    planner = make_planner()
    device = FakeDevice(planner)
    planner.commands.add(new(request, **how))
    device.run()
    return device.finished[request][0]


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=8
    ),
    orders=st.lists(st.tuples(st.sampled_from(["park", "cancel", "step"]), st.integers(0, 7)), max_size=20),
    pages=st.integers(6, 30),
)
def test_a_suspect_is_always_alone_and_all_sequences_end(
    arrivals: list[tuple[int, int, int, int]], orders: list[tuple[str, int]], pages: int
) -> None:
    planner = make_planner(pages=pages, places=4)
    watched = WatchedDevice(planner)
    cancelled, added = set(), set()
    for index, (engines_lost, prompt, max_tokens, gap) in enumerate(arrivals):
        for _ in range(gap):
            watched.step()
        request = f"r{index}"
        one = new(request, prompt=prompt, max_tokens=max_tokens, promise=1 + prompt // 16, engines_lost=engines_lost)
        with suppress(MotetError):  # no room, or never any
            planner.commands.add(one)
            added.add(request)
    for what, number in orders:
        request = RequestId(f"r{number}")
        sequence = planner.sequences.get(request)
        if what == "step" or sequence is None:
            watched.step()
        elif what == "cancel":
            planner.commands.cancel(request)
            cancelled.add(request)
        else:
            planner.commands.park(request, 1, sequence.promise, sequence.most_pages, ParkMethod.RECOMPUTE)
    watched.run()
    assert added == {*watched.device.finished, *watched.device.given_up, *cancelled}


class WatchedLaunches(FakeDevice):
    """Which requests are under way after each launch"""

    def __init__(self, planner: Planner, ahead: int) -> None:
        super().__init__(planner, ahead=ahead)
        self.under_way: list[list[list[str]]] = []

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        self.under_way.append([self.requests(one.rows) for one, _ in self.launched if one.count])


@pytest.mark.parametrize("ahead", [1, 2])
def test_no_other_iteration_is_under_way_beside_a_suspects(ahead: int) -> None:
    planner = make_planner(chunk_tokens=24)
    device = WatchedLaunches(planner, ahead)
    planner.commands.add(new("neighbour", prompt=4, max_tokens=30))
    device.step()
    planner.commands.add(new("suspect", prompt=40, max_tokens=10, engines_lost=1))
    device.run()
    with_suspect = [under_way for under_way in device.under_way if ["suspect"] in under_way]
    assert with_suspect[:3] == [[["suspect"]]] * 3, "two chunks, the second of which samples, and one decode"
    assert [["neighbour", "suspect"]] * (ahead + 1) in device.under_way, "later both are planned ahead"
    assert {"neighbour", "suspect"} <= device.finished.keys()
