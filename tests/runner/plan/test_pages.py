"""Pages: each is free or has exactly its holders."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_runner.plan import PageAllocator


@given(st.data())
def test_pages_have_exactly_their_holders_whatever_is_taken_shared_and_given_back(data: st.DataObject) -> None:
    allocator = PageAllocator(data.draw(st.integers(1, 40)))
    held: list[list[int]] = []
    cached: set[int] = set()
    allocator.on_cache_page_taken = cached.remove
    for _ in range(data.draw(st.integers(0, 30))):
        action = data.draw(st.sampled_from(["take", "share", "give", "cache", "uncache"]))
        if held and action == "give":
            allocator.give(held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif held and action == "share":
            pages = data.draw(st.sampled_from(held))
            shared = pages[: data.draw(st.integers(0, len(pages)))]
            allocator.share(shared)
            held.append(shared)
        elif action == "cache" and (pages := {page for pages in held for page in pages} - cached):
            cached.add(page := data.draw(st.sampled_from(sorted(pages))))
            allocator.cache(page)
        elif cached and action == "uncache":
            cached.remove(page := data.draw(st.sampled_from(sorted(cached))))
            allocator.uncache(page)
        else:
            wanted = data.draw(st.integers(0, 50))
            free = allocator.free
            taken = allocator.take(wanted)
            assert (taken is None) == (wanted > free)
            if taken is None:
                assert allocator.free == free
            else:
                assert len(taken) == wanted
                held.append(taken)
        allocator.check(held, cached)


def test_a_shared_page_is_free_after_its_last_holder() -> None:
    allocator = PageAllocator(2)
    (page,) = allocator.take(1) or []
    allocator.share([page])
    assert allocator.is_shared(page)
    allocator.give([page])
    assert (allocator.free, allocator.is_shared(page)) == (1, False)
    allocator.give([page])
    assert allocator.free == 2


def test_a_free_page_cannot_be_shared() -> None:
    with pytest.raises(AssertionError, match="page 0 is free"):
        PageAllocator(1).share([0])


def test_pages_that_only_the_cache_holds_go_when_no_other_is_left_the_oldest_first() -> None:
    allocator = PageAllocator(4)
    taken: list[int] = []
    allocator.on_cache_page_taken = taken.append
    first, second = allocator.take(1) or [], allocator.take(2) or []
    for page in first + second:
        allocator.cache(page)
        assert allocator.is_shared(page)
    allocator.give(second)
    allocator.give(first)
    assert allocator.free == 4
    allocator.take(2)
    assert taken == second[1:]
    allocator.take(2)
    assert taken == [*reversed(second), *first]


@given(st.data())
def test_particular_pages_come_and_go_and_the_others_keep_their_order(data: st.DataObject) -> None:
    """The reference is a list. Its last page is handed out first."""
    capacity = data.draw(st.integers(1, 20))
    allocator, free, held = PageAllocator(capacity), list(range(capacity))[::-1], list[int]()
    for _ in range(data.draw(st.integers(0, 20))):
        if data.draw(st.booleans()):
            given_back = [page for page in held if data.draw(st.booleans())]
            first = data.draw(st.booleans())
            (allocator.give if first else allocator.give_last)(given_back)
            free = free + given_back[::-1] if first else given_back + free
            held = [page for page in held if page not in given_back]
        elif data.draw(st.booleans()):
            these = [page for page in free if data.draw(st.booleans())]
            allocator.take_these(these)
            free = [page for page in free if page not in these]
            held += these
        else:
            taken = allocator.take(data.draw(st.integers(0, len(free)))) or []
            assert taken == free[::-1][: len(taken)]
            del free[len(free) - len(taken) :]
            held += taken
        assert list(allocator.empty_pages) == free


@pytest.mark.parametrize("first", [0, 5000, 9990])
def test_particular_pages_are_taken_without_a_look_at_the_other_free_ones(first: int) -> None:
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    allocator = PageAllocator(10_000)
    sys.setprofile(count)
    try:
        allocator.take_these(range(first, first + 10))
        allocator.give_last(range(first, first + 10))
    finally:
        sys.setprofile(None)
    assert calls < 200
