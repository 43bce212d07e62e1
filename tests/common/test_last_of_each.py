"""Whoever has most loses the oldest, so that nobody's flood pushes out what belongs to others."""

from hypothesis import given
from hypothesis import strategies as st

from motet.last_of_each import LastOfEach


def test_a_flood_pushes_out_only_its_own() -> None:
    kept: LastOfEach[int, str] = LastOfEach(4)
    for key in (1, 2):
        assert kept.add("acme", key, f"acme {key}") is None
    gone = [kept.add("zeta", key, f"zeta {key}") for key in range(10, 20)]
    assert gone == [None, None, *(f"zeta {key}" for key in range(10, 18))]
    assert kept.get(1) == "acme 1"
    assert kept.get(19) == "zeta 19"
    assert kept.get(10) is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12), st.booleans())), st.integers(1, 6))
def test_it_is_as_if_it_looked_for_the_owner_of_most(steps: list[tuple[str, int, bool]], most: int) -> None:
    kept: LastOfEach[int, tuple[str, int]] = LastOfEach(most)
    model: list[tuple[str, int]] = []
    for owner, key, pops in steps:
        known = next((one for one in model if one[1] == key), None)
        if pops or known:
            assert kept.pop(key) == known
            if known:
                model.remove(known)
        else:
            model.append((owner, key))
            gone = kept.add(owner, key, (owner, key))
            if len(model) > most:
                assert gone is not None
                counts = [sum(one[0] == name for one in model) for name in "abc"]
                assert counts["abc".index(gone[0])] == max(counts)
                assert gone == next(one for one in model if one[0] == gone[0])
                model.remove(gone)
            else:
                assert gone is None
        assert len(kept) == len(model)
        assert all(kept.get(one[1]) == one for one in model)
