"""The status document: what an operator leaves for the one that follows."""

from motet_operator.local.status import status_document, wanted_from
from motet_operator.reconcile import ScalingAdvice, reconcile
from tests.operator.builders import name, pool, view


def test_a_new_operator_keeps_the_last_wanted_replicas() -> None:
    scaling = {"mode": "Builtin", "minReplicas": 0, "maxReplicas": 5}
    plan = reconcile(view(pools=[pool(autoscaling=scaling)], scaling_advice={name("demo"): ScalingAdvice(replicas=4)}))
    document = status_document(plan, [], [], url="http://127.0.0.1:1", operator_pid=1)
    assert wanted_from(document) == {("default", "demo"): 4}


def test_an_invalid_status_document_gives_no_wanted_replicas() -> None:
    assert wanted_from({"pools": [{"name": "demo"}]}) == {}
    assert wanted_from({}) == {}
