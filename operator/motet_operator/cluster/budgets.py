"""A PodDisruptionBudget for each pool: whoever empties a node waits until the pool can spare what is on it. Pure."""

from motet.resources import ServingPool
from motet_operator.cluster.deployments import owned_by, pool_labels
from motet_operator.cluster.kinds import BUDGETS, Object
from motet_operator.cluster.view import POOL_LABEL


def budget(pool: ServingPool, uid: str, wanted: int) -> Object:
    """`wanted` runners, and as many fewer as may be missing."""
    name = pool.object_name
    return {
        "apiVersion": BUDGETS.api_version,
        "kind": BUDGETS.name,
        "metadata": {
            "name": name.name,
            "namespace": name.namespace,
            "labels": pool_labels(name.name, pool.group.name),
            "ownerReferences": owned_by(name.name, uid),
        },
        "spec": {
            # A number, and no percentage of what a controller says: a pool has a Deployment for each revision.
            "minAvailable": max(0, wanted - pool.spec.update_strategy.max_unavailable),
            "selector": {"matchLabels": {POOL_LABEL: name.name}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
