"""Which nodes are to be emptied, from an API server that answers as it is told."""

import asyncio
from collections.abc import Collection

from motet.kube import ApiError, Unreachable
from motet_operator.cluster.api import ApiRefused
from motet_operator.cluster.kinds import NODES, Kind, Object
from motet_operator.cluster.leaving_nodes import LeavingNodes
from motet_operator.cluster.obstacles import ObstacleLog
from tests.common.waiting import until
from tests.operator.cluster.objects import made


class ScriptedApi:
    def __init__(self) -> None:
        self.cordoned: list[str] | ApiError = []
        self.taints: dict[str, list[str]] = {}
        self.asked: list[str] = []

    async def list(self, kind: Kind, *, fields: str) -> tuple[list[Object], int]:
        assert kind is NODES
        self.asked.append(fields)
        if isinstance(self.cordoned, ApiError):
            raise self.cordoned
        field, _, name = fields.partition("=")
        if field == "metadata.name":
            taints = [{"key": key, "effect": "NoSchedule"} for key in self.taints.get(name, ())]
            return [made(NODES, name, spec={"taints": taints} if taints else {})], 1
        return [made(NODES, name) for name in self.cordoned], 1


class Setup:
    def __init__(self, seconds: float = 10.0, taints: Collection[str] = ()) -> None:
        self.api, self.obstacle_log = ScriptedApi(), ObstacleLog()
        self.hosts, self.changes = {"node-1", "node-2"}, 0
        self.cordons = LeavingNodes(
            self.api,  # type: ignore[arg-type]
            self.obstacle_log,
            seconds=seconds,
            taints=taints,
            hosts=lambda: self.hosts,
            changed=self._changed,
        )

    def _changed(self) -> None:
        self.changes += 1


async def test_only_cordoned_nodes_are_listed_and_a_change_is_reported_once() -> None:
    setup = Setup()
    await setup.cordons.refresh()
    assert (setup.cordons.nodes, setup.changes) == (frozenset(), 0)
    setup.api.cordoned = ["node-2"]
    for _ in range(2):
        await setup.cordons.refresh()
    assert (setup.cordons.nodes, setup.changes) == ({"node-2"}, 1)
    assert set(setup.api.asked) == {"spec.unschedulable=true"}


async def test_nodes_are_polled() -> None:
    setup = Setup(seconds=0.005)
    task = asyncio.create_task(setup.cordons.run())
    setup.api.cordoned = ["node-2"]
    await until(lambda: setup.cordons.nodes)
    setup.api.cordoned = []
    await until(lambda: not setup.cordons.nodes)
    task.cancel()


async def test_the_last_answer_counts_until_the_next_one() -> None:
    setup = Setup()
    setup.api.cordoned = ["node-2"]
    await setup.cordons.refresh()
    setup.api.cordoned = Unreachable("away")
    await setup.cordons.refresh()
    assert setup.cordons.nodes == {"node-2"}


async def test_a_missing_permission_for_nodes_is_an_obstacle_that_affects_no_pool() -> None:
    setup = Setup()
    setup.api.cordoned = ApiRefused("list", NODES, "", status=403, message="no")
    for _ in range(2):
        await setup.cordons.refresh()
    assert len(setup.obstacle_log) == 1
    assert setup.obstacle_log.standing().forbidden_namespaces == {}
    setup.api.cordoned = []
    await setup.cordons.refresh()
    assert len(setup.obstacle_log) == 0


async def test_without_runners_no_node_is_listed_or_remembered() -> None:
    setup = Setup()
    setup.api.cordoned = ["node-2"]
    await setup.cordons.refresh()
    setup.hosts = set()
    await setup.cordons.refresh()
    assert len(setup.api.asked) == 1
    assert setup.cordons.nodes == frozenset()


async def test_a_node_tainted_by_an_autoscaler_counts_as_cordoned() -> None:
    setup = Setup(taints=["karpenter.sh/disrupted", "ToBeDeletedByClusterAutoscaler"])
    setup.api.taints = {
        "node-1": ["nvidia.com/gpu", "karpenter.sh/disrupted"],
        "node-2": ["nvidia.com/gpu"],
        "node-3": ["karpenter.sh/disrupted"],
    }
    await setup.cordons.refresh()
    assert setup.cordons.nodes == {"node-1"}, "where no runner is nobody looks"
    setup.api.cordoned = ["node-2", "node-4"]
    setup.api.asked.clear()
    await setup.cordons.refresh()
    assert setup.cordons.nodes == {"node-1", "node-2", "node-4"}
    assert setup.api.asked == ["spec.unschedulable=true", "metadata.name=node-1"]
    setup.api.taints = {}
    setup.api.cordoned = []
    await setup.cordons.refresh()
    assert (setup.cordons.nodes, setup.changes) == (frozenset(), 3)
