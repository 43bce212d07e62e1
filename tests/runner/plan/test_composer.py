"""Who computes what in an iteration."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.domain import PAGE_TOKENS, RequestId
from motet.errors import SetupError
from motet_runner.interface import Finish, State
from motet_runner.plan import NOT_YET, PRESETS, Sequence, compose, preset_named
from motet_runner.plan.joining import PASSED_OVER_AT_MOST
from tests.runner.plan.fake_device import FakeDevice, make_planner, new


def waiting(request: str, *, arrival: int, promise: int = 1) -> Sequence:
    added = new(request, promise=promise)
    return Sequence(
        new=added,
        arrival=arrival,
        promise=promise,
        tokens=list(added.prompt),
        state=State.WAITING,
        page_tokens=PAGE_TOKENS,
    )


def test_a_long_prompt_is_cut_while_others_go_on_decoding() -> None:
    planner = make_planner(chunk_tokens=24)
    device = FakeDevice(planner)
    planner.commands.add(new("short", prompt=4, max_tokens=20))
    device.step()
    planner.commands.add(new("long", prompt=100, max_tokens=5))
    for start in (0, 24, 48, 72, 96):
        plan = device.step()
        assert device.requests(plan.decodes) == ["short"]
        assert [(step.start, step.samples) for step in plan.prefills] == [(start, start == 96)]


def test_chunks_of_several_prompts_share_the_iteration_by_arrival() -> None:
    planner = make_planner(chunk_tokens=24)
    device = FakeDevice(planner)
    for name in "abc":
        planner.commands.add(new(name, prompt=10))
    plan = device.step()
    assert device.requests(plan.prefills) == ["a", "b", "c"]
    assert [step.count for step in plan.prefills] == [10, 10, 4]


def test_orca_takes_every_prompt_whole() -> None:
    planner = make_planner(preset="orca")
    for name in "ab":
        planner.commands.add(new(name, prompt=60))
    plan = FakeDevice(planner).step()
    assert [step.count for step in plan.prefills] == [60, 60]


def test_punica_takes_one_whole_prompt_beside_all_decodes() -> None:
    planner = make_planner(preset="punica")
    device = FakeDevice(planner)
    for name in "abc":
        planner.commands.add(new(name, prompt=40))
    shapes = [(len(i.prefills), len(i.decodes)) for i in (device.step() for _ in range(3))]
    assert shapes == [(1, 0), (1, 1), (1, 2)]


def test_ft_max_adds_a_sequence_as_soon_as_there_is_a_place() -> None:
    planner = make_planner(preset="ft-max", places=2)
    device = FakeDevice(planner)
    planner.commands.add(new("a", max_tokens=3))
    planner.commands.add(new("b", max_tokens=6))
    device.step()
    planner.commands.add(new("c", max_tokens=3))
    while planner.sequences.get(RequestId("a")):
        device.step()
    assert device.requests(device.step().rows) == ["b", "c"]


def test_request_level_adds_no_sequence_to_a_running_batch() -> None:
    planner = make_planner(preset="request-level", places=2)
    device = FakeDevice(planner)
    planner.commands.add(new("a", max_tokens=3))
    planner.commands.add(new("b", max_tokens=6))
    device.step()
    planner.commands.add(new("c", max_tokens=3))
    while planner.sequences.get(RequestId("b")):
        assert "c" not in device.requests(device.step().rows)
    assert "c" in device.requests(device.step().rows)


def test_s3_starts_the_largest_promise_first() -> None:
    planner = make_planner(preset="s3", places=1)
    planner.commands.add(new("small", promise=1))
    planner.commands.add(new("large", promise=4))
    device = FakeDevice(planner)
    assert device.requests(device.step().rows) == ["large"]


def test_a_small_promise_starts_although_larger_ones_keep_arriving() -> None:
    sequences = [waiting("small", arrival=1, promise=1)]
    for arrival in range(2, PASSED_OVER_AT_MOST + 3):
        sequences.append(waiting(f"large {arrival}", arrival=arrival, promise=9))
        iteration = compose(sequences, preset_named("s3"), chunk_tokens=1, places=1)
        iteration.begin()
        started = iteration.work[0].sequence
        assert (started.request == "small") == (arrival == PASSED_OVER_AT_MOST + 2)
        sequences.remove(started)


def test_with_fewer_places_than_before_the_earliest_go_on() -> None:
    sequences = [waiting("a", arrival=1), waiting("b", arrival=2)]
    for sequence in sequences:
        sequence.started = True
    iteration = compose(sequences, preset_named("orca"), chunk_tokens=1, places=1)
    assert [work.sequence.request for work in iteration.work] == ["a"]


def test_max_sequences_limits_the_started_sequences() -> None:
    planner = make_planner(places=2)
    device = FakeDevice(planner)
    for name in "abc":
        planner.commands.add(new(name, max_tokens=4))
    assert len(device.step().rows) == 2
    while len(device.finished) < 2:
        assert len(device.step().rows) <= 2
    device.run()
    assert len(device.finished) == 3


@pytest.mark.parametrize("name", NOT_YET)
def test_a_planned_preset_is_refused_as_planned(name: str) -> None:
    with pytest.raises(SetupError, match="not yet"):
        preset_named(name)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SetupError, match="paged-chunk"):
        preset_named("pagedchunk")


@settings(max_examples=40)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 80), st.integers(1, 40)), min_size=2, max_size=8),
    preset=st.sampled_from([name for name, preset in PRESETS.items() if preset.order == "arrival"]),
    gaps=st.lists(st.integers(0, 4), min_size=8, max_size=8),
)
def test_an_earlier_sequence_never_has_fewer_iterations_than_a_later_one(
    sizes: list[tuple[int, int]], preset: str, gaps: list[int]
) -> None:
    """OR-07, for sequences that were never parked and whose adapters are here; chunks count as iterations."""
    planner = make_planner(pages=100, preset=preset, places=4)
    device = FakeDevice(planner)
    names = [f"r{i:02}" for i in range(len(sizes))]
    for name, (prompt, max_tokens), gap in zip(names, sizes, gaps, strict=False):
        for _ in range(gap):
            device.step()
        planner.commands.add(new(name, prompt=prompt, max_tokens=max_tokens))
    while planner.has_work():
        running = set(device.requests(device.step().rows))
        latest = max(running, default="")
        left_out = [s.request for s in planner.sequences if s.request < latest and s.request not in running]
        assert not left_out, "an earlier sequence stood still while a later one ran"
    assert all(finish is Finish.LENGTH for _, finish in device.finished.values())


@settings(max_examples=40)
@given(
    waiting=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 5)), max_size=12),
    chunk_tokens=st.integers(1, 64),
    places=st.integers(1, 8),
)
def test_an_iteration_keeps_to_its_bounds(waiting: list[tuple[int, int]], chunk_tokens: int, places: int) -> None:
    planner = make_planner(pages=400, places=places, chunk_tokens=chunk_tokens)
    device = FakeDevice(planner)
    for index, (prompt, max_tokens) in enumerate(waiting):
        planner.commands.add(new(f"r{index}", prompt=prompt, max_tokens=max_tokens))
    while planner.has_work():
        plan = device.step()
        assert plan.prefill_tokens <= chunk_tokens
        assert len(plan.rows) <= places
        assert all(step.count == 1 for step in plan.decodes)
    assert len(device.finished) == len(waiting)
