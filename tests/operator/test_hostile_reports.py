"""A scheduler, or a runner behind it, that reports what no honest one does: a round still decides for all objects."""

from datetime import timedelta
from typing import Any

import pytest

from motet.api.v1 import common_pb2, scheduler_pb2
from motet_operator.cluster.cluster_operator import reports_of
from motet_operator.cluster.decision import Decider
from motet_operator.cluster.kinds import ADAPTERS, DEPLOYMENTS, POOLS
from motet_operator.reconcile import AdapterReport, ScalingAdvice, reconcile
from motet_operator.sync import SchedulerSync
from tests.operator import builders
from tests.operator.builders import DIGEST, NOW, condition, name, view
from tests.operator.cluster.objects import PLATFORM, adapter, deployment, pod, pool, snapshot
from tests.operator.cluster.test_decide import children, decided, reason_of, revision
from tests.support.hostile_messages import hostile, receive
from tests.support.surroundings import REAL

RUNNER: Any = {"instance": "one", "incarnation": "i", "pool": "pools/demo"}
SCALED = {"mode": "Builtin", "minReplicas": 1, "maxReplicas": 3}
HONEST: dict[str, Any] = {
    "welcome": {},
    "adapter": {
        "ref": {"namespace": "tenant", "name": "legal", "generation": 1},
        "certificate": {"digest": DIGEST, "size_bytes": 1, "rank": 8, "alpha": 16.0, "checker": 1},
        "failure": {"code": "adapter_incompatible", "reason": "ShapeMismatch", "message": "it does not fit"},
        "replicas": [{"instance": "one", "tier": common_pb2.MEMORY_TIER_DEVICE, "digest": DIGEST}],
    },
    "desired": {"pool": "pools/demo", "replicas": 1, "reason": "busy", "reason_code": "Demand"},
    "drained": {"runner": RUNNER},
    "runner": {"runner": RUNNER, "attached": True, "unhealthy": "hangs", "capacity": {"adapter_slots": 4}},
    "not_leader": {},
    "outranked": {"term": 1},
    "reported_all": {"groups": ["pools/demo"]},
}


def test_every_report_is_made_hostile() -> None:
    (oneof,) = scheduler_pb2.SyncDown.DESCRIPTOR.oneofs
    assert HONEST.keys() == {field.name for field in oneof.fields}


@pytest.mark.parametrize("kind", HONEST)
def test_a_round_after_any_report_decides_for_all_objects(kind: str) -> None:
    made = revision()
    objects = [
        *(pool(autoscaling=SCALED), pool("new"), adapter(), adapter("other")),
        *(deployment(made, 1), pod("one", made)),
    ]
    before = decided(*objects)
    for message in hostile(scheduler_pb2.SyncDown, like=scheduler_pb2.SyncDown(**{kind: HONEST[kind]})):
        sync = SchedulerSync("unix:/nowhere", lambda: None, surroundings=REAL)
        sync.send_state(before.plan.catalog, before.drains, ["one"])
        receive(sync.link, message)
        decision = Decider(["pools"], timedelta(seconds=5)).decide(snapshot(*objects), reports_of(sync), PLATFORM, NOW)
        written = [write.document["metadata"]["labels"]["motet.dev/pool"] for write in children(decision, DEPLOYMENTS)]
        assert "new" in written
        for each in ((ADAPTERS, "legal"), (ADAPTERS, "other"), (POOLS, "demo")):
            assert reason_of(decision, *each) not in ("EvaluationFailed", "Unreadable"), message


def test_an_adapter_at_which_the_operator_fails_says_so_and_is_served() -> None:
    wrong = AdapterReport(failure_code="adapter_incompatible", failure_reason="shape mismatch")
    adapters = [builders.adapter("legal"), builders.adapter("other")]
    plan = reconcile(view(pools=[builders.pool()], adapters=adapters, adapter_reports={name("legal"): wrong}))
    legal, other = plan.adapters
    ready = condition(legal.conditions, "Ready")
    assert (ready.status, ready.reason) == ("False", "EvaluationFailed")
    assert "ValidationError: 1 validation error for Condition reason" in ready.message
    assert condition(other.conditions, "Ready").reason == "WaitingForRunner"
    assert [entry.name for entry in plan.catalog.adapters] == [legal.name, other.name]
    said = [(event.name, event.type) for event in plan.events if event.reason == "EvaluationFailed"]
    assert said == [(legal.name, "Warning")]


def test_a_pool_at_which_the_operator_fails_says_so_and_gets_its_runners() -> None:
    wrong: Any = ScalingAdvice(replicas=2, reason=None)  # type: ignore[arg-type]
    pools = [builders.pool("demo", autoscaling=SCALED), builders.pool("next")]
    plan = reconcile(view(pools=pools, scaling_advice={name("demo"): wrong}))
    demo, following = plan.pools
    assert condition(demo.conditions, "Ready").reason == "EvaluationFailed"
    assert condition(following.conditions, "Ready").reason == "RunnersStarting"
    assert [each.replicas for each in plan.runner_sets] == [2, 1]
