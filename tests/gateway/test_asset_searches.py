"""Who is asked for assets of which many may have the same: each owner's own runners, in turns of their namespaces."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from motet.adapter_template import AdapterTemplate, digest_of_template
from motet.api.v1 import runner_pb2
from motet.held_templates import MAX_HELD_TEMPLATES, MAX_OF_NAMESPACE
from motet.transport import CallFailed, StatusCode
from motet_gateway import asset_searches
from motet_gateway.asset_searches import Owner, Searches
from motet_gateway.assets import TEMPLATES, AssetStore
from motet_gateway.tokens.own_template import OwnTemplate
from testbed.fake_services import FakeServices
from tests.common.waiting import until
from tests.gateway.conftest import Served, eventually, serve
from tests.gateway.test_adapter_templates import SAYS, bring, kind
from tests.support.surroundings import REAL

CONTENT = AdapterTemplate(text="x").encode()
DIGEST = digest_of_template(CONTENT)


def nth(number: int) -> str:
    return f"sha256:{number:064x}"


class Runners(AssetStore[OwnTemplate]):
    """A store whose runners are these. It keeps whom it has asked."""

    def __init__(self, folder: Path, groups: Mapping[str, list[str]], **more: Any) -> None:
        of_kind = more.pop("kind", TEMPLATES)
        self.told: Mapping[str, list[str]] = {}
        super().__init__(
            folder,
            self.end,
            network=REAL.network,
            kind=of_kind,
            addresses=lambda group: groups.get(group, []),
            missing=self._tell,
        )
        self.asked: list[tuple[str, str]] = []
        self.have: set[tuple[str, str]] = set()
        self.waits: Owner | None = None
        """Asked for again whenever something changes"""

    def _tell(self, missing: Mapping[str, list[str]]) -> None:
        self.told = missing

    def end(self) -> None:
        if self.waits is not None:
            self.fetch(DIGEST, self.waits)

    async def _fetch(self, asked: runner_pb2.AssetsRequest, address: str, folder: Path) -> None:
        self.asked.append((address, asked.adapter))
        await asyncio.sleep(0)
        if (address, asked.adapter) not in self.have:
            raise CallFailed(StatusCode.NOT_FOUND, "no")
        folder.mkdir(parents=True)
        (folder / "template.json").write_bytes(CONTENT)


async def test_each_owners_own_runners_are_asked(tmp_path: Path) -> None:
    store = Runners(tmp_path, {"one": ["a0", "a1"], "two": ["b0", "b1"]})
    store.have = {("b1", "B")}
    store.fetch(DIGEST, Owner("one", "A", "a"))
    await until(lambda: store.told)
    store.fetch(DIGEST, Owner("two", "B", "b"))
    await until(lambda: store.get(DIGEST))
    assert set(store.asked) == {("a0", "A"), ("a1", "A"), ("b0", "B"), ("b1", "B")}
    assert store.told == {}, "A has it, too"
    await store.close()


async def test_owners_without_it_do_not_block_another_one(tmp_path: Path) -> None:
    store = Runners(tmp_path, {"one": ["a0"]})
    store.have = {("a0", "alive")}
    for number in range(100):
        store.fetch(DIGEST, Owner("one", f"dead{number}", "a"))
    await until(lambda: store.told)
    store.fetch(DIGEST, Owner("one", "alive", "a"))
    await until(lambda: store.get(DIGEST))
    await store.close()


async def test_one_adapter_in_two_groups_is_told_for_both(tmp_path: Path) -> None:
    store = Runners(tmp_path, {"one": ["a0"], "two": ["b0"]})
    for group in ("one", "two"):
        store.fetch(DIGEST, Owner(group, "A", "a"))
    await until(lambda: store.told == {"one": ["A"], "two": ["A"]})
    store.have = {("b0", "A")}
    await until(lambda: store.get(DIGEST))
    assert store.told == {}
    await store.close()


async def test_what_a_namespace_misses_does_not_delay_others(tmp_path: Path) -> None:
    runners = [f"r{number}" for number in range(20)]
    store = Runners(tmp_path, {"one": runners})
    store.have = {(runners[-1], "B")}
    for number in range(300):
        store.fetch(nth(number), Owner("one", f"A{number}", "a"))
    await until(lambda: store.asked)
    before = len(store.asked)
    store.fetch(DIGEST, Owner("one", "B", "b"))
    await until(lambda: store.get(DIGEST))
    own = store.asked.index(("r0", "B"))
    others = len(store.asked[own : store.asked.index((runners[-1], "B"))]) - len(runners) + 1
    assert before < own + 1
    assert others <= 2 * TEMPLATES.bounds.at_once_of_namespace * len(runners)
    await store.close()


async def test_what_is_missing_is_asked_for_less_often_the_more_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asset_searches, "SECONDS_PER_ASK", 1000.0)
    store = Runners(tmp_path, {"one": ["a0", "a1"]})
    for number in range(30):
        store.fetch(nth(number), Owner("one", f"A{number}", "a"))
    await until(lambda: len(store.asked) == 60)
    await asyncio.sleep(1.5)
    assert len(store.asked) == 60
    await store.close()


async def test_what_a_runner_has_by_now_is_asked_for_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much else is missing"""
    monkeypatch.setattr(asset_searches, "SECONDS_PER_ASK", 1e6)
    store, owner = Runners(tmp_path, {"one": ["a0"]}), Owner("one", "A", "a")
    store.fetch(DIGEST, owner)
    await until(lambda: store.told)
    store.have = {("a0", "A")}
    for _ in range(3):
        store.fetch(DIGEST, owner)
        await asyncio.sleep(0.1)
        assert len(store.asked) == 1
    store.fetch(DIGEST, owner, at_hand=True)
    await until(lambda: store.get(DIGEST))
    await store.close()


async def test_a_search_that_rests_ends_when_nobody_waits_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what nobody wants has the places of its namespace for long."""
    monkeypatch.setattr(asset_searches, "SECONDS_PER_ASK", 1e6)
    store = Runners(tmp_path, {"one": ["a0"]}, kind=kind(unwanted_seconds=0.5))
    store.fetch(DIGEST, Owner("one", "A", "a"))
    await until(lambda: store.told)
    await until(lambda: not store.told)
    assert len(store.asked) == 1
    await store.close()


async def test_a_search_ends_when_nobody_waits_any_more(tmp_path: Path) -> None:
    """Those that wait are made to say so."""
    store = Runners(tmp_path, {"one": ["a0"]}, kind=kind(unwanted_seconds=0.5))
    store.waits = Owner("one", "waits", "a")
    store.fetch(DIGEST, store.waits)
    store.fetch(DIGEST, Owner("one", "gone", "a"))
    await until(lambda: store.told == {"one": ["waits", "gone"]})
    await until(lambda: store.told == {"one": ["waits"]})
    for _ in range(10):  # twice as long as one that nobody wants any more
        await asyncio.sleep(0.1)
        assert store.told == {"one": ["waits"]}
    store.waits = None
    await until(lambda: store.told == {})
    await store.close()


# ----------------------------------------------------------------------------------------------------------- the policy


def missing(searches: Searches, namespace: str, count: int) -> None:
    for number in range(count):
        search = searches.want(nth(number), Owner("one", f"{namespace}{number}", namespace), 0.0)
        assert search is not None
        search.missing = True


def told(searches: Searches) -> Iterator[str]:
    return (adapter for adapters in searches.missing().values() for adapter in adapters)


def test_one_namespace_has_a_part_of_what_the_scheduler_is_told() -> None:
    searches = Searches()
    missing(searches, "greedy", MAX_OF_NAMESPACE + 5)
    missing(searches, "modest", 1)
    assert len(list(told(searches))) == MAX_OF_NAMESPACE + 1
    assert "modest0" in told(searches)


def test_all_namespaces_are_told_of_although_there_are_many() -> None:
    searches = Searches()
    for number in range(100):
        missing(searches, f"n{number}-", MAX_OF_NAMESPACE)
    found = list(told(searches))
    assert len(found) == MAX_HELD_TEMPLATES
    assert len({one.partition("-")[0] for one in found}) == 100


def test_each_of_many_has_its_turn_to_be_told() -> None:
    searches = Searches()
    missing(searches, "greedy", 3 * MAX_OF_NAMESPACE)
    seen = set(told(searches))
    for _ in range(2):
        searches.take_turns()
        assert not seen.issuperset(told(searches))
        seen |= set(told(searches))
    assert len(seen) == 3 * MAX_OF_NAMESPACE
    few = Searches()
    missing(few, "modest", MAX_OF_NAMESPACE)
    before = few.missing()
    few.take_turns()
    assert few.missing() == before


def test_a_namespace_has_a_bounded_number_of_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asset_searches, "MAX_SEARCHES", 3)
    searches = Searches()
    begun = [searches.want(nth(number), Owner("one", "A", "a"), 0.0) for number in range(5)]
    assert [one is not None for one in begun] == [True] * 3 + [False] * 2
    assert searches.want(DIGEST, Owner("one", "B", "b"), 0.0) is not None
    assert begun[0] is not None
    assert searches.want(nth(0), Owner("one", "A", "a"), 5.0) is None
    assert begun[0].wanted_at == 5.0
    searches.end(begun[0])
    assert searches.want(nth(4), Owner("one", "A", "a"), 0.0) is not None


# ---------------------------------------------------------------------------------------------------------- the gateway


@pytest.fixture
async def two_groups(cluster: FakeServices) -> AsyncIterator[Served]:
    """Two with the same model, of which the first has no runner"""
    (first,), (second,) = cluster.scheduler.catalog().groups, cluster.scheduler.catalog().groups
    del first.runners[:]
    second.group, second.served_name = "default/other", "other"
    cluster.scheduler.groups = [first, second]
    async with serve(cluster, ready=False) as served:
        await eventually(lambda: served.gateway.catalog.known)
        yield served


async def test_the_tokenizer_of_two_groups_comes_from_the_one_that_has_runners(two_groups: Served) -> None:
    answer = await two_groups.http.post("/tokenize", json={"model": "other", "prompt": "Hi"})
    assert answer.status_code == 200, answer.text


async def test_one_template_of_two_groups_comes_from_the_one_that_has_runners(two_groups: Served) -> None:
    cluster = two_groups.cluster
    waits = bring(cluster, "waits", "{{ messages[0].content }}!", sent=False)
    bring(cluster, "served", "{{ messages[0].content }}!").group = "default/other"
    cluster.scheduler.publish()
    await eventually(lambda: len(two_groups.gateway.catalog.current.adapters) == len(cluster.scheduler.adapters))
    body = {"messages": SAYS, "max_tokens": 2}
    first = asyncio.create_task(two_groups.http.post("/v1/chat/completions", json={"model": "waits", **body}))
    await eventually(lambda: cluster.scheduler.held_templates[-1:] == [{waits.group: [waits.digest]}])
    answer = await two_groups.http.post("/v1/chat/completions", json={"model": "served", **body})
    assert answer.status_code == 200, answer.text
    first.cancel()


async def test_adapters_whose_template_is_nowhere_do_not_block_another_one_with_the_same(cluster: FakeServices) -> None:
    text = "same: {{ messages[0].content }}"
    for number in range(9):
        bring(cluster, f"dead{number}", text, sent=False)
    bring(cluster, "alive", text)
    async with serve(cluster) as served:
        await eventually(lambda: len(served.gateway.catalog.current.adapters) == len(cluster.scheduler.adapters))
        body = {"messages": SAYS, "max_tokens": 2}
        dead = [
            asyncio.create_task(served.http.post("/v1/chat/completions", json={"model": f"dead{number}", **body}))
            for number in range(9)
        ]
        await eventually(lambda: cluster.scheduler.held_templates)
        answer = await served.http.post("/v1/chat/completions", json={"model": "alive", **body})
        assert answer.status_code == 200, answer.text
        for one in await asyncio.gather(*dead):
            assert one.status_code == 200, "they have it, too"
