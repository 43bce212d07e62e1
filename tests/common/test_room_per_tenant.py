"""What waits for the database or for a service: bounded, with equal room for each tenant."""

from collections import Counter
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from motet.room_per_tenant import RoomPerTenant


class Item(NamedTuple):
    tenant: str
    request: str


def item(tenant: str, number: int) -> Item:
    return Item(tenant, f"{number}")


def taken(waiting: RoomPerTenant[Item], count: int) -> list[Item]:
    return [*waiting.take(count)]


def test_a_tenant_with_many_items_takes_no_room_from_the_others() -> None:
    waiting = RoomPerTenant[Item](10)
    few = [waiting.add(item("few", number)) for number in range(3)]
    many = [waiting.add(item("many", number)) for number in range(1000)]
    assert few == [True] * 3
    assert many == [True] * 7 + [False] * 993
    late = [waiting.add(item("late", number)) for number in range(3)]
    assert late == [False] * 3
    kept = taken(waiting, 100)
    assert len(kept) == 10
    assert [one for one in kept if one[0] == "few"] == [("few", f"{number}") for number in range(3)]
    assert [one for one in kept if one[0] == "late"] == [("late", f"{number}") for number in range(3)]
    assert [one for one in kept if one[0] == "many"] == [("many", f"{number}") for number in (996, 997, 998, 999)]


def test_tenants_take_turns_and_what_is_put_back_comes_first() -> None:
    waiting = RoomPerTenant[Item](10)
    for number in range(3):
        waiting.add(item("one", number))
    waiting.add(item("two", 0))
    first = waiting.take(2)
    assert [one.tenant for one in first] == ["one", "two"]
    waiting.add(item("one", 3))
    assert waiting.put_back(first) == 0
    assert [one for one in taken(waiting, 10) if one[0] == "one"] == [("one", f"{number}") for number in range(4)]
    assert len(waiting) == 0
    assert waiting.take(1) == []


class Read(NamedTuple):
    """An item that counts how often it is asked for its tenant."""

    of: str
    times: list[str]

    @property
    def tenant(self) -> str:
        self.times.append(self.of)
        return self.of


def test_what_is_put_back_takes_no_time_for_what_waits() -> None:
    waiting, times = RoomPerTenant[Read](2000), list[str]()
    for number in range(2000):
        waiting.add(Read(f"t{number % 7}", times))
    first = waiting.take(10)
    times.clear()
    assert waiting.put_back([]) == 0
    assert not times
    assert waiting.put_back(first) == 0
    assert len(times) <= 4 * len(first)


def test_what_is_put_back_gets_no_more_room_than_its_part() -> None:
    waiting = RoomPerTenant[Item](6)
    for number in range(6):
        waiting.add(item("many", number))
    back = waiting.take(4)
    for number in range(3):
        waiting.add(item("few", number))
    assert waiting.put_back(back) == 3
    assert [one for one in taken(waiting, 6) if one.tenant == "many"] == [("many", f"{number}") for number in (3, 4, 5)]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), max_size=200), st.integers(1, 12))
@settings(max_examples=60)
def test_who_loses_an_item_has_the_most_or_more_than_its_part(steps: list[tuple[int, int]], most: int) -> None:
    waiting, held = RoomPerTenant[Item](most), Counter[str]()
    for number, (kind, tenant) in enumerate(steps):
        if kind == 0:
            held -= Counter(one.tenant for one in waiting.take(tenant))
            continue
        name = f"t{tenant}"
        held[name] += 1
        if not waiting.add(item(name, number)):
            largest = max(held.values())
            others = waiting.take(most)
            (loser,) = held - Counter(one.tenant for one in others)
            assert held[loser] == largest or (loser == name and held[name] * len(held) > most)
            held[loser] -= 1
            held = +held
            assert waiting.put_back(others) == 0
        assert len(waiting) == held.total() <= most
