"""Who starts next: by arrival without overtaking, or packed largest first without starving."""

from dataclasses import dataclass, field
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from motet_runner.plan import PRESETS
from motet_runner.plan.joining import PASSED_OVER_AT_MOST, choose, passed_over

ARRIVAL, LARGEST = PRESETS["orca"], PRESETS["s3"]
promises = st.lists(st.integers(1, 30), max_size=12)


@dataclass
class Request:
    promise: int
    passed_over: int = 0
    arrival: int = field(default_factory=count(1).__next__)


def requests(*pages: int) -> list[Request]:
    return [Request(promise) for promise in pages]


def chosen(waiting: list[Request], preset, **room) -> list[int]:
    return [request.promise for request in choose(waiting, preset, **room)]


def best_fill(pages: list[int], room: int) -> int:
    """The most pages that any of their subsets fills, by dynamic programming."""
    fills = {0}
    for one in pages:
        fills |= {fill + one for fill in fills if fill + one <= room}
    return max(fills)


def test_by_arrival_the_first_without_room_ends_the_choice() -> None:
    assert chosen(requests(3, 9, 1), ARRIVAL, places=8, pages=8) == [3]
    assert chosen(requests(3, 4, 1), ARRIVAL, places=2, pages=8) == [3, 4]


def test_largest_first_skips_those_without_room_and_goes_on() -> None:
    assert chosen(requests(3, 9, 1, 4, 4), LARGEST, places=8, pages=8) == [4, 4]
    assert chosen(requests(3, 9, 1, 4), LARGEST, places=8, pages=8) == [4, 3, 1]


def test_of_two_equal_ones_the_older_goes_first() -> None:
    waiting = requests(4, 4)
    assert choose(waiting, LARGEST, places=1) == [waiting[0]]


def test_an_overdue_request_goes_first_and_blocks_when_it_has_no_room() -> None:
    waiting = [Request(2, passed_over=PASSED_OVER_AT_MOST), *requests(5)]
    assert chosen(waiting, LARGEST, places=1, pages=5) == [2]
    assert chosen(waiting, LARGEST, places=2, pages=1) == []


@given(promises, st.integers(0, 60), st.integers(0, 12))
def test_what_is_chosen_fits(pages: list[int], room: int, places: int) -> None:
    for preset in (ARRIVAL, LARGEST):
        picked = chosen(requests(*pages), preset, places=places, pages=room)
        assert sum(picked) <= room
        assert len(picked) <= places


@given(promises, st.integers(0, 60))
def test_largest_first_is_within_one_request_of_the_best_packing(pages: list[int], room: int) -> None:
    """S3-05. What is missing to the best packing is less than the smallest request that was left out."""
    picked = chosen(requests(*pages), LARGEST, places=len(pages), pages=room)
    left_out = list(pages)
    for one in picked:
        left_out.remove(one)
    missing = best_fill(pages, room) - sum(picked)
    assert missing < min(left_out, default=1)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=200), st.integers(1, 3))
def test_nobody_is_passed_over_without_end(arrivals: list[tuple[int, int]], places: int) -> None:
    """A stream of large requests, with more of them arriving at every choice, lets the small one start at last."""
    room, waiting, started = 30, requests(1), list[Request]()
    first = waiting[0]
    for pages, more in [*arrivals, *[(30, 30)] * (PASSED_OVER_AT_MOST + 2)]:
        waiting += requests(pages, more or 1)
        starting = choose(waiting, LARGEST, places=places, pages=room)
        for request in passed_over(waiting, starting):
            request.passed_over += 1
        waiting = [request for request in waiting if request not in starting]
        started += starting
    assert first in started
    assert all(request.passed_over <= PASSED_OVER_AT_MOST for request in waiting + started)
