"""How many pools roll at once, and what the others do meanwhile."""

from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from motet_operator.reconcile import (
    ExistingSet,
    Plan,
    PoolObject,
    PoolStatus,
    RolloutLimiter,
    RunnerInstance,
    RunnerTemplate,
    reconcile,
)
from motet_operator.reconcile.revisions import revision_of, template_of
from motet_operator.reconcile.rollout_order import CHANGED_TOO_OFTEN, RolloutTarget
from tests.operator.builders import NOW, condition, existing, instance, later, name, pool, view

NAMES = ("a", "b", "c", "d", "e")


def release(number: int, replicas: int = 2, **spec: object) -> list[PoolObject]:
    """Every pool as a release makes it."""
    return [replace(pool(each, replicas=replicas, **spec), pod_digest=f"{each} of {number}") for each in NAMES]


def revision(of: PoolObject) -> str:
    return revision_of(of.resource.object_name, template_of(of))


@dataclass
class Cluster:
    """Carries plans out as the cluster does."""

    rolling_pools: int | None
    pools: list[PoolObject]
    runners: dict[str, RunnerInstance] = field(default_factory=dict)
    sets: dict[tuple[str, str], ExistingSet] = field(default_factory=dict)
    made: int = 0
    starts: bool = True
    """New runners get ready."""
    limiter: RolloutLimiter = field(default_factory=RolloutLimiter)
    now: float = 0.0

    def look(self) -> Plan:
        plan = reconcile(
            view(
                now=later(self.now),
                pools=self.pools,
                instances=list(self.runners.values()),
                runner_sets=list(self.sets.values()),
                rolling_pools=self.rolling_pools,
            ),
            limiter=self.limiter,
        )
        ends = {drain.instance for drain in plan.drains}
        for one in self.runners.values():
            gone = one.name in ends
            self.runners[one.name] = replace(one, draining_until=NOW if gone else None, drained=gone)
        wanted = {}
        for each in plan.runner_sets:
            key = (each.pool.name, each.revision)
            wanted[key] = existing(each, self.sets.get(key))
            for leaving in each.leaving:
                del self.runners[leaving]
            for _ in range(each.replicas - len(self.of(*key))):
                self.made += 1
                fresh = instance(f"r{self.made}", each.revision, pool=each.pool.name, ordinal=self.made)
                self.runners[fresh.name] = replace(fresh, ready=self.starts or not self.runs_already(each.pool.name))
        self.sets = wanted
        return plan

    def of(self, of: str, revision: str) -> list[RunnerInstance]:
        return [one for one in self.runners.values() if (one.pool.name, one.revision) == (of, revision)]

    def runs_already(self, of: str) -> bool:
        return any(one.pool.name == of for one in self.runners.values())

    def settle(self) -> None:
        for _ in range(60):
            before = dict(self.runners), dict(self.sets)
            self.look()
            if (self.runners, self.sets) == before:
                return
        raise AssertionError("it never comes to an end")

    def on_their_way(self) -> set[str]:
        newest = {one.resource.object_name.name: revision(one) for one in self.pools}
        old = {one.pool.name for one in self.runners.values() if one.revision != newest[one.pool.name]}
        new = {of for of, each in self.sets if each == newest[of]}
        return old & new


def status_of(plan: Plan, of: str) -> PoolStatus:
    return next(one for one in plan.pools if one.name == name(of))


@pytest.mark.parametrize("strategy", [{"maxSurge": 1}, {"maxSurge": 0, "maxUnavailable": 1}], ids=str)
@pytest.mark.parametrize("limit", [1, 2])
def test_a_limited_number_of_pools_roll_at_once_until_all_have(limit: int, strategy: dict[str, int]) -> None:
    cluster = Cluster(limit, release(1, updateStrategy=strategy))
    cluster.settle()
    cluster.pools = release(2, updateStrategy=strategy)
    most = 0
    for _ in range(60):
        cluster.look()
        most = max(most, len(cluster.on_their_way()))
    assert most == limit
    assert {(one.pool.name, one.revision) for one in cluster.runners.values()} == {
        (one.resource.object_name.name, revision(one)) for one in cluster.pools
    }


def test_a_release_whose_runners_never_start_stops_at_the_first_pools() -> None:
    cluster = Cluster(2, release(1))
    cluster.settle()
    cluster.pools, cluster.starts = release(2), False
    cluster.settle()
    assert len(cluster.on_their_way()) == 2
    before = {one.resource.object_name.name: revision(one) for one in release(1)}
    assert all(len(cluster.of(each, before[each])) == 2 for each in NAMES), "every old runner serves on"
    cluster.pools = release(1)
    cluster.settle()
    assert cluster.on_their_way() == set()
    assert {one.revision for one in cluster.runners.values()} == set(before.values())


def test_a_pool_that_waits_says_so_and_scales_and_replaces_what_it_has() -> None:
    cluster = Cluster(1, release(1))
    cluster.settle()
    cluster.pools, cluster.starts = release(2), False
    cluster.settle()
    (rolls,) = cluster.on_their_way()
    waits = next(each for each in NAMES if each != rolls)
    status = status_of(cluster.look(), waits)
    assert condition(status.conditions, "Progressing").reason == "WaitingForTurn"
    assert condition(status.conditions, "Ready").reason == "WaitingForTurn"
    assert condition(status.conditions, "Available").holds
    assert condition(status.conditions, "Reconciling").holds
    old, new = (revision(release(number)[NAMES.index(waits)]) for number in (1, 2))
    assert (status.revision, status.updated, status.ready) == (new, 0, 2)

    cluster.pools, cluster.starts = release(2, replicas=3), True
    gone = cluster.of(waits, old)[0].name
    del cluster.runners[gone]
    cluster.look()
    assert len(cluster.of(waits, old)) == 3
    assert cluster.of(waits, new) == []


def test_a_pool_that_serves_nothing_rolls_at_once() -> None:
    cluster = Cluster(1, release(1))
    cluster.settle()
    for one in cluster.runners.values():
        if one.pool.name == "e":
            cluster.runners[one.name] = replace(one, ready=False)
    cluster.pools = release(2)
    cluster.look()
    assert cluster.on_their_way() == {"a", "e"}


def test_without_a_limit_all_pools_roll_at_once() -> None:
    cluster = Cluster(None, release(1))
    cluster.settle()
    cluster.pools = release(2)
    cluster.look()
    assert cluster.on_their_way() == set(NAMES)


def paced(pools: list[PoolObject], **how: object) -> Cluster:
    return Cluster(None, pools, limiter=RolloutLimiter(timedelta(seconds=30)), **how)  # type: ignore[arg-type]


def one(number: int) -> list[PoolObject]:
    return release(number)[:1]


def test_row_15_runners_that_never_get_ready_are_few_however_often_the_pool_flips() -> None:
    cluster = paced(one(1))
    cluster.settle()
    cluster.starts, before = False, cluster.made
    for flip in range(100):
        cluster.pools = one(2 - flip % 2)
        cluster.look()
        cluster.now += 1
    assert cluster.made - before <= 3 + 100 / 30, "one for each rollout that began"
    cluster.starts, cluster.pools = True, one(3)
    cluster.now += 30
    cluster.settle()
    assert [each.revision for each in cluster.runners.values()] == 2 * [revision(one(3)[0])]
    assert list(cluster.sets) == [("a", revision(one(3)[0]))]


@settings(deadline=None, max_examples=12, phases=[Phase.generate])  # a hundred changes shrink for minutes
@given(
    changes=st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from((0, 1, 5)), st.booleans()), min_size=100, max_size=100
    ),
    last=st.integers(1, 3),
)
def test_row_15_a_pool_that_flips_a_hundred_times_begins_to_roll_three_times_and_once_in_half_a_minute(
    changes: list[tuple[int, int, bool]], last: int
) -> None:
    cluster = paced(one(1))
    cluster.settle()
    began: list[float] = []
    aim = revision(one(1)[0])
    for number, seconds, cluster.starts in (*changes, *[(last, 5, True)] * 20):
        cluster.pools = one(number)
        if cluster.starts:
            cluster.runners = {name: replace(each, ready=True) for name, each in cluster.runners.items()}
        before = [each.revision for each in cluster.runners.values() if each.ready]
        (status,) = cluster.look().pools
        if status.target_revision != aim and before.count(status.target_revision) <= before.count(aim):
            began.append(cluster.now)
        aim = status.target_revision
        cluster.now += seconds
        assert sum(each.ready and each.draining_until is None for each in cluster.runners.values()) >= 2
    for number, since in enumerate(began):
        for more, until in enumerate(began[number:], 1):
            assert more <= 3 + (until - since) / 30
    assert [each.revision for each in cluster.runners.values()] == 2 * [revision(one(last)[0])]


def test_a_pool_that_returns_to_its_runners_revision_does_so_at_once() -> None:
    cluster = paced(one(1))
    cluster.settle()
    cluster.starts = False
    for _ in range(3):
        for number in (2, 1):
            cluster.pools = one(number)
            status = status_of(cluster.look(), "a")
            assert status.target_revision == revision(one(number)[0])
    cluster.pools = one(2)
    plan = cluster.look()
    status = status_of(plan, "a")
    progressing = condition(status.conditions, "Progressing")
    assert (status.target_revision, progressing.reason) == (revision(one(1)[0]), "WaitingForTurn")
    assert "three times in a row" in progressing.message
    assert plan.due == later(30)
    cluster.now = 30
    assert status_of(cluster.look(), "a").target_revision == revision(one(2)[0])


def test_a_clock_that_is_set_back_holds_a_pool_no_longer_than_a_pause() -> None:
    cluster = paced(one(1))
    cluster.settle()
    cluster.starts = False
    for number in (2, 1, 2, 1, 2, 1, 2):
        cluster.pools = one(number)
        assert cluster.look().pools
    cluster.now = -3600
    assert cluster.look().due == later(-3600 + 30)
    cluster.now += 30
    assert status_of(cluster.look(), "a").target_revision == revision(one(2)[0])


@given(
    since=st.timedeltas(timedelta(0), timedelta(days=30000)),
    pause=st.timedeltas(timedelta(microseconds=1), timedelta(hours=1)),
)
def test_a_delayed_pool_may_begin_exactly_at_the_reported_time(since: timedelta, pause: timedelta) -> None:
    def aim(revision: str, newest: str) -> RolloutTarget:
        template = RunnerTemplate(group=name("a"), model_uri="")
        return RolloutTarget(
            newest=newest,
            revision=revision,
            template=template,
            base=template.base,
            waiting_reason=CHANGED_TOO_OFTEN * (revision != newest),
        )

    limiter, now = RolloutLimiter(pause), NOW + since
    for revision in ("first", "second", "third", "fourth"):
        assert limiter.held(name("a"), revision, (), now) is None
        limiter.note({name("a"): aim(revision, revision)}, {}, now)
    assert limiter.held(name("a"), "fifth", (), now) == "fourth"
    held = {name("a"): aim("fourth", "fifth")}
    limiter.note(held, {}, now)
    assert limiter.due(held) == [now + pause]
    assert limiter.held(name("a"), "fifth", (), now + pause - timedelta(microseconds=1)) == "fourth"
    assert limiter.held(name("a"), "fifth", (), now + pause) is None
