"""Whoever was parked comes back, however many others want to join, and whatever adapter it needs."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from motet.domain import Digest, ParkMethod
from motet.errors import Declined
from motet_runner.interface import State
from tests.runner.plan.fake_device import FakeDevice, adapter_layout, make_planner, new

PRESETS = st.sampled_from(["paged-chunk", "paged-promises", "s3"])
RANKS = {"": 0, "x": 3, "y": 6}


def has_joined(device: FakeDevice, request: str, **more) -> bool:
    try:
        device.planner.commands.add(new(request, **more))
    except Declined:
        return False
    return True


@pytest.mark.parametrize("overcommit", [1.0, 2.0])
@pytest.mark.parametrize("preset", ["paged-chunk", "paged-promises"])
def test_nobody_joins_while_somebody_is_parked(preset: str, overcommit: float) -> None:
    """Small ones would always take the pages that a large one and its adapter lack."""
    planner = make_planner(pages=12, preset=preset)
    planner.commands.set_overcommit(overcommit)
    planner.commands.load_adapter(Digest("x"), adapter_layout(4))
    device = FakeDevice(planner)
    large = planner.commands.add(new("large", adapter="x", prompt=80, max_tokens=8))
    assert planner.commands.park(large.request, 1, 6, 6, ParkMethod.RECOMPUTE)
    planner.commands.supervised = True  # nothing resumes now, and others may join
    assert has_joined(device, "first", prompt=40, max_tokens=24)
    planner.commands.supervised = False
    for number in range(60):
        device.step()
        if large.state is State.PARKED:
            assert not has_joined(device, f"small {number}", prompt=40, max_tokens=24)
    device.run()
    assert {"first", "large"} <= device.finished.keys()


def test_by_a_forecast_the_pages_of_its_tokens_bring_a_parked_sequence_back() -> None:
    """A promise of all that it may need must not be free at once: others end before it has grown."""
    planner = make_planner(pages=12)
    device = FakeDevice(planner)
    planner.commands.add(new("short", prompt=64, max_tokens=32, quantiles=(8,) * 4))
    for _ in range(4):
        device.step()
    long = planner.commands.add(new("long", prompt=16, max_tokens=120, quantiles=(20, 30, 40, 60)))
    planner.memory.park(long, long.most_pages, ParkMethod.RECOMPUTE, by_itself=True)
    device.step()
    assert long.state is not State.PARKED
    device.run()
    assert device.finished.keys() == {"short", "long"}


request = st.fixed_dictionaries(
    {
        "prompt": st.integers(1, 90),
        "max_tokens": st.integers(1, 60),
        "adapter": st.sampled_from(sorted(RANKS)),
        "priority": st.integers(0, 1),
        "quantiles": st.none() | st.integers(1, 60).map(lambda length: (length,) * 4),
    }
)


@settings(max_examples=30)
@given(
    asked=st.lists(request, min_size=2, max_size=6),
    stranger=request,
    preset=PRESETS,
    overcommit=st.sampled_from([1.0, 1.5, 3.0]),
    ahead=st.integers(0, 1),
)
@example(  # more is promised than there is, so the pages that are free are always too few for the large one
    asked=[
        {"prompt": 1, "max_tokens": 1, "adapter": "", "priority": 0, "quantiles": None},
        {"prompt": 79, "max_tokens": 1, "adapter": "y", "priority": 1, "quantiles": None},
    ],
    stranger={"prompt": 26, "max_tokens": 6, "adapter": "", "priority": 0, "quantiles": None},
    preset="s3",
    overcommit=1.5,
    ahead=1,
)
@example(  # the large one comes back from a park, and small ones of a higher class take each page that comes free
    asked=[
        {"prompt": 1, "max_tokens": 1, "adapter": "", "priority": 0, "quantiles": None},
        {"prompt": 67, "max_tokens": 30, "adapter": "x", "priority": 1, "quantiles": None},
    ],
    stranger={"prompt": 9, "max_tokens": 26, "adapter": "y", "priority": 0, "quantiles": None},
    preset="s3",
    overcommit=3.0,
    ahead=0,
)
def test_all_end_though_others_never_stop_asking(
    asked: list[dict], stranger: dict, preset: str, overcommit: float, ahead: int
) -> None:
    planner = make_planner(pages=20, places=6, max_adapters=2, preset=preset, host_pages=6)
    planner.commands.set_overcommit(overcommit)
    for name, rank in RANKS.items():
        if rank:
            planner.commands.load_adapter(Digest(name), adapter_layout(rank))
    device = FakeDevice(planner, ahead=ahead, checks_each=10)
    joined = {f"r{number}" for number, one in enumerate(asked) if has_joined(device, f"r{number}", **one)}
    steps = 0
    while joined - device.finished.keys() - set(device.given_up):
        assert steps < 4000, {one.request: one.state for one in planner.sequences}
        has_joined(device, f"stranger {steps}", **stranger)
        device.step()
        steps += 1
    assert not set(device.given_up) & joined
