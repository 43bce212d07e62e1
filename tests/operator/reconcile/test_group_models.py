"""A group changes its base model in one rollout, and never serves more than two."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_operator.reconcile import ExistingSet, Plan, PoolObject, RunnerDrain, RunnerSet, reconcile
from motet_operator.reconcile.revisions import revision_of, template_of
from motet_operator.reconcile.rollout_order import WAITING_FOR_GROUP
from tests.operator.builders import condition, instance, name, pool, view
from tests.operator.reconcile.test_rollout_order import Cluster, status_of


def member(of: str, model: str, replicas: int = 2, **spec: object) -> PoolObject:
    return replace(
        pool(of, group="g", uri="hf://acme/base", model={"revision": model}, replicas=replicas, **spec),
        decided=of == "leads",
    )


def revision(of: PoolObject) -> str:
    return revision_of(of.resource.object_name, template_of(of))


def running(*pools: PoolObject, rolling_pools: int | None = None) -> Cluster:
    cluster = Cluster(rolling_pools, list(pools))
    cluster.settle()
    return cluster


def drains_of(plan: Plan, of: str) -> list[RunnerDrain]:
    return [drain for drain in plan.drains if drain.pool == name(of)]


def sets_of(plan: Plan, of: str) -> list[RunnerSet]:
    return [each for each in plan.runner_sets if each.pool == name(of)]


def test_a_pool_of_another_model_keeps_its_runners_and_starts_none() -> None:
    cluster = running(member("follows", "v1"), member("leads", "v1"))
    before = member("follows", "v1")
    cluster.pools = [replace(before, wanted=2), member("leads", "v2")]
    plan = cluster.look()
    assert drains_of(plan, "follows") == []
    assert [(each.revision, each.replicas) for each in sets_of(plan, "follows")] == [(revision(before), 2)]
    status = status_of(plan, "follows")
    assert condition(status.conditions, "Accepted").reason == "ModelMismatch"
    assert condition(status.conditions, "Stalled").reason == "ModelMismatch"
    assert condition(status.conditions, "Progressing").reason == "ModelMismatch"
    assert condition(status.conditions, "Available").holds
    assert (status.replicas, status.ready) == (2, 2)
    assert [entry.pool.name for entry in plan.catalog.pools] == ["leads", "follows"], "its runners serve on"

    cluster.pools = [member("follows", "v1", replicas=5), member("leads", "v2")]
    assert [each.replicas for each in sets_of(cluster.look(), "follows")] == [2]
    cluster.pools = [member("follows", "v1", replicas=1), member("leads", "v2")]
    assert len(drains_of(cluster.look(), "follows")) == 1


def test_the_pool_that_changes_first_waits_with_its_runners_for_the_one_that_decides() -> None:
    cluster = running(member("follows", "v1"), member("leads", "v1"))
    cluster.pools = [member("follows", "v2"), member("leads", "v1")]
    for _ in range(5):
        plan = cluster.look()
        assert [each.revision for each in sets_of(plan, "follows")] == [revision(member("follows", "v1"))]
        assert status_of(plan, "follows").target_revision == revision(member("follows", "v1"))
        assert plan.drains == ()
    cluster.pools = [member("follows", "v2"), member("leads", "v2")]
    cluster.settle()
    assert {one.revision for one in cluster.runners.values()} == {revision(one) for one in cluster.pools}


def test_all_pools_of_a_group_begin_together_although_only_one_pool_may_roll() -> None:
    cluster = running(member("a", "v1"), member("leads", "v1"), pool("z"), rolling_pools=1)
    cluster.pools = [member("a", "v2"), member("leads", "v2"), pool("z", engine={"maxLoraRank": 8})]
    cluster.look()
    assert cluster.on_their_way() == {"a", "leads"}
    cluster.settle()
    assert not cluster.on_their_way()
    # Another change of the pod is none of the group's.
    cluster.pools = [*(member(each, "v2", engine={"maxLoraRank": 8}) for each in ("a", "leads")), cluster.pools[2]]
    cluster.look()
    assert cluster.on_their_way() == {"a"}


@pytest.mark.parametrize("strategy", [{"maxSurge": 1}, {"maxSurge": 0, "maxUnavailable": 1}], ids=str)
@given(
    changes=st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=8),
    rolling_pools=st.sampled_from([None, 1]),
)
def test_two_models_at_most_and_enough_runners_however_often_the_model_changes(
    strategy: dict[str, int], changes: list[tuple[int, bool]], rolling_pools: int | None
) -> None:
    """`changes`: after how many rounds the next model is declared, and whether new runners get ready at once."""
    names, replicas = ("a", "leads"), 3
    models = {f"v{number}" for number in range(len(changes) + 1)}
    model_of = {revision(member(each, model)): model for each in names for model in models}
    cluster = running(
        *(member(each, "v0", replicas, updateStrategy=strategy) for each in names), rolling_pools=rolling_pools
    )

    def look() -> None:
        cluster.look()
        serving = [one for one in cluster.runners.values() if one.ready]
        assert len({model_of[one.revision] for one in serving}) <= 2
        for each in names:
            assert sum(one.pool == name(each) for one in serving) >= replicas - strategy.get("maxUnavailable", 0)

    for number, (rounds, at_once) in enumerate(changes):
        cluster.starts = at_once
        cluster.pools = [member(each, f"v{number + 1}", replicas, updateStrategy=strategy) for each in names]
        for _ in range(rounds):
            look()
        cluster.runners = {one.name: replace(one, ready=True) for one in cluster.runners.values()}
    cluster.starts = True
    for _ in range(60):
        look()
    assert {model_of[one.revision] for one in cluster.runners.values()} == {f"v{len(changes)}"}


def partly(*, failures: int, declared: str = "v3") -> Plan:
    """A group in the middle of a change to v2, in which the next model is declared."""
    v1, v2 = member("leads", "v1"), member("leads", "v2")
    members = [
        instance("one", revision(v1), pool="leads", ordinal=1),
        instance("two", revision(v2), pool="leads", ordinal=2),
        instance("three", revision(v2), pool="leads", ordinal=3, ready=not failures, failures=failures),
    ]
    sets = [
        ExistingSet(
            pool=name("leads"),
            revision=revision(each),
            base=template_of(each).base,
            replicas=1,
        )
        for each in (v1, v2)
    ]
    return reconcile(view(pools=[member("leads", declared)], instances=members, runner_sets=sets))


def test_the_next_model_waits_for_the_last_change_unless_that_fails() -> None:
    (status,) = partly(failures=0).pools
    assert condition(status.conditions, "Progressing").message == WAITING_FOR_GROUP
    assert status.target_revision == revision(member("leads", "v2"))
    (mends,) = partly(failures=2).pools
    assert mends.target_revision == revision(member("leads", "v3"))
    (back,) = partly(failures=0, declared="v1").pools
    assert back.target_revision == revision(member("leads", "v1")), "it adds no model"


def test_the_deciding_pool_waits_while_another_one_serves_the_model_before_the_last() -> None:
    cluster = running(member("follows", "v1"), member("leads", "v1"))
    cluster.pools = [member("follows", "v1"), member("leads", "v2")]
    cluster.settle()
    cluster.pools = [member("follows", "v1"), member("leads", "v3")]
    plan = cluster.look()
    assert condition(status_of(plan, "leads").conditions, "Progressing").message == WAITING_FOR_GROUP
    cluster.pools = [member("follows", "v3"), member("leads", "v3")]
    cluster.settle()
    assert {one.revision for one in cluster.runners.values()} == {revision(one) for one in cluster.pools}
