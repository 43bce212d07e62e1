from hypothesis import given
from hypothesis import strategies as st

from motet.clock import FakeClock
from motet_operator.cluster.cache import TOMBSTONE_SECONDS, Cache, CacheRepairs
from motet_operator.cluster.kinds import ADAPTERS, PODS, Object
from tests.operator.cluster.objects import adapter, made, pod

KEY = ("tenant", "legal")


def test_the_cache_keeps_the_newer_of_two_versions_in_any_order() -> None:
    cache = Cache()
    assert cache.put(ADAPTERS, adapter(version=5))
    assert not cache.put(ADAPTERS, adapter(version=4))
    assert not cache.put(ADAPTERS, adapter(version=5))
    assert cache.get(ADAPTERS, KEY) == adapter(version=5)


def test_versions_are_numbers() -> None:
    cache = Cache()
    cache.put(ADAPTERS, adapter(version=9))
    assert cache.put(ADAPTERS, adapter(version=10))


def test_an_older_list_does_not_bring_back_a_deleted_object() -> None:
    clock = FakeClock()
    cache = Cache(clock=clock)
    cache.put(ADAPTERS, adapter(version=5))
    cache.remove(ADAPTERS, adapter(version=6))
    cache.replace(ADAPTERS, [adapter(version=5)], version=5)
    assert cache.count(ADAPTERS) == 0
    clock.advance(TOMBSTONE_SECONDS + 1)
    cache.replace(ADAPTERS, [], version=7)
    assert cache.put(ADAPTERS, adapter(version=5))  # graves are not kept for ever


def test_an_object_with_the_same_name_and_another_uid_is_a_new_object() -> None:
    cache = Cache()
    cache.put(ADAPTERS, adapter(version=5))
    again = made(ADAPTERS, "legal", "tenant", version=8, uid="another", spec={})
    cache.put(ADAPTERS, again)
    assert not cache.remove(ADAPTERS, adapter(version=9))  # a late word about the first
    assert cache.get(ADAPTERS, KEY) == again


def test_an_object_that_left_the_selector_may_come_back_with_its_uid() -> None:
    cache = Cache()
    cache.put(ADAPTERS, adapter(version=5))
    cache.remove(ADAPTERS, adapter(version=6))  # its label is gone; to a watch that is a deletion
    assert cache.put(ADAPTERS, adapter(version=7))
    assert not cache.remove(ADAPTERS, adapter(version=6))  # a late word about the time before
    cache.replace(ADAPTERS, [], version=9)
    assert not cache.put(ADAPTERS, adapter(version=8))  # older than the list that did not have it
    assert cache.put(ADAPTERS, adapter(version=10))


def test_a_list_repairs_each_kind_of_lost_event() -> None:
    cache = Cache()
    cache.put(ADAPTERS, adapter("changed", version=1))
    cache.put(ADAPTERS, adapter("gone", version=2))
    cache.put(ADAPTERS, adapter("newer", version=9))
    listed = [adapter("changed", version=5), adapter("added", version=4)]
    assert cache.replace(ADAPTERS, listed, version=6) == CacheRepairs(added=1, changed=1, removed=1)
    assert sorted(name for _, name in cache.snapshot()[ADAPTERS]) == ["added", "changed", "newer"]
    assert not cache.replace(ADAPTERS, listed, version=6).any


def test_a_list_of_one_namespace_does_not_change_others() -> None:
    cache = Cache()
    cache.put(PODS, pod("here", "1"))
    cache.replace(PODS, [], version=10, namespace="elsewhere")
    assert cache.count(PODS) == 1


def test_the_callback_is_called_only_for_changes() -> None:
    changed = []
    cache = Cache(changed.append)
    cache.put(ADAPTERS, adapter(version=1))
    cache.put(ADAPTERS, adapter(version=1))
    cache.remove(ADAPTERS, adapter(version=2))
    cache.remove(ADAPTERS, adapter(version=2))
    assert changed == [ADAPTERS, ADAPTERS]


def test_the_cache_drops_unused_fields() -> None:
    cache = Cache()
    read = {"name": "runner", "startupProbe": {"periodSeconds": 5}}
    it = pod("one", "1") | {"spec": {"nodeName": "node-1", "containers": [read | {"env": ["much"] * 100}]}}
    it["metadata"]["managedFields"] = [{"manager": "somebody"}]
    cache.put(PODS, it)
    kept = cache.get(PODS, ("pools", "one"))
    assert kept is not None
    assert kept["spec"] == {"nodeName": "node-1", "containers": [read]}
    assert "managedFields" not in kept["metadata"]


@given(st.permutations(range(6)), st.integers(0, 5))
def test_the_order_in_which_news_arrives_does_not_matter(order: list[int], lists: int) -> None:
    """Five versions and a deletion after them, with a list somewhere between: in the end it is gone."""
    cache = Cache()
    for step, number in enumerate(order):
        if step == lists:
            cache.replace(ADAPTERS, [adapter(version=3)], version=3)
        it: Object = adapter(version=number + 1)
        if number == 5:
            cache.remove(ADAPTERS, it)
        else:
            cache.put(ADAPTERS, it)
    assert cache.get(ADAPTERS, KEY) is None
