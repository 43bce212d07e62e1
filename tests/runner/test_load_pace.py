"""How much of adapters an iteration takes beside sequences."""

import pytest

from motet_runner.execute.adapters.load_pace import MAX_SLICE_BYTES, SHARE, SLICE_BYTES, LoadPace

MIB = 1 << 20


def pace_of(*iterations: float, mib_seconds: float) -> LoadPace:
    pace = LoadPace()
    for one in iterations:
        pace.iterated(one)
    pace.loaded(4 * MIB, 4 * mib_seconds)
    return pace


def test_it_is_what_is_read_in_a_part_of_an_iteration() -> None:
    pace = pace_of(0.08, mib_seconds=0.001)
    assert pace.seconds == pytest.approx(SHARE * 0.08)
    assert pace.bytes == pytest.approx(8 * MIB, rel=1e-6)


def test_it_is_bounded() -> None:
    assert pace_of(0.01, mib_seconds=0.1).bytes == SLICE_BYTES, "adapters arrive beside short iterations, too"
    assert pace_of(10.0, mib_seconds=0.0001).bytes == MAX_SLICE_BYTES


def test_before_anything_is_known_nothing_is_waited_for() -> None:
    assert (LoadPace().seconds, LoadPace().bytes) == (0, SLICE_BYTES)


def test_one_long_iteration_or_load_changes_little() -> None:
    pace = pace_of(0.08, 100.0, mib_seconds=0.001)
    assert pace.seconds == pytest.approx(1.25 * SHARE * 0.08)
    before = pace.bytes
    pace.loaded(MIB, 100.0)
    assert pace.bytes == pytest.approx(before / 1.25, rel=1e-6)
