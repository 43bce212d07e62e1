from hypothesis import given
from hypothesis import strategies as st

from motet_runner.plan import PageAllocator


@given(st.data())
def test_a_page_has_one_owner_whatever_is_taken_and_given_back(data: st.DataObject) -> None:
    allocator = PageAllocator(data.draw(st.integers(1, 40)))
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 30))):
        if held and data.draw(st.booleans()):
            allocator.give(held.pop(data.draw(st.integers(0, len(held) - 1))))
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
        allocator.check(held)
