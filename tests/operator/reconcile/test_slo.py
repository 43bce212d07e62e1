"""The condition `SloKept` of a pool with a target for the time of a token (S3-18)."""

from motet.resources.status import Condition
from motet.runner_info import BatchCap
from motet_operator.environment import runner_environment
from motet_operator.reconcile import reconcile
from motet_operator.reconcile.revisions import revision_of, template_of
from tests.operator.builders import condition, instance, pool, view

SLO = {"tpotMilliseconds": 20}
KEPT = BatchCap(target_seconds=0.02, sequences=7, token_seconds=0.019, alone_seconds=0.004)
LEARNING = BatchCap(target_seconds=0.02)
TOO_SLOW = BatchCap(target_seconds=0.02, sequences=1, token_seconds=0.0312, alone_seconds=0.0312)


def revision(of):
    return revision_of(of.resource.object_name, template_of(of))


def conditions(*caps: BatchCap, before: tuple[Condition, ...] = (), **spec) -> tuple[Condition, ...]:
    one = pool(replicas=len(caps), conditions=before, **({"slo": SLO} | spec))
    names = [f"r{number}" for number in range(len(caps))]
    plan = reconcile(
        view(
            pools=[one],
            instances=[instance(name, revision(one), ordinal=number) for number, name in enumerate(names)],
            batch_caps=dict(zip(names, caps, strict=True)),
        )
    )
    return plan.pools[0].conditions


def test_a_runner_that_keeps_the_target_alone_is_enough():
    found = condition(conditions(KEPT, LEARNING), "SloKept")
    assert (found.status, found.reason) == ("True", "BatchCapped")


def test_before_enough_is_known_the_condition_is_unknown():
    found = condition(conditions(LEARNING), "SloKept")
    assert (found.status, found.reason) == ("Unknown", "SloLearning")


def test_a_runner_that_is_too_slow_alone_says_by_how_much():
    found = condition(conditions(KEPT, TOO_SLOW), "SloKept")
    assert (found.status, found.reason) == ("False", "SloTooShort")
    assert found.message.startswith(
        "spec.slo.tpotMilliseconds is 20, and a token takes 31 ms with one request alone, 1.6 "
    )
    assert condition(conditions(KEPT, TOO_SLOW), "Ready").status == "True"


def test_a_pool_without_a_target_has_no_such_condition():
    for spec in ({"slo": None}, {"slo": {}}):
        assert "SloKept" not in {one.type for one in conditions(KEPT, **spec)}


def test_the_caps_alone_change_no_status():
    """They move with the traffic."""
    before = conditions(KEPT)
    other = BatchCap(target_seconds=0.02, sequences=9, token_seconds=0.0195, alone_seconds=0.0045)
    assert conditions(other, before=before) == before


def test_a_target_is_part_of_the_revision_and_of_the_runners_environment():
    one = pool(slo=SLO)
    assert revision(one) != revision(pool()) == revision(pool(slo={}))
    environment = runner_environment("default/demo", "1", template_of(one))
    assert environment["MOTET_RUNNER_TPOT_MILLISECONDS"] == "20"
    assert "MOTET_RUNNER_TPOT_MILLISECONDS" not in runner_environment("default/demo", "1", template_of(pool()))
