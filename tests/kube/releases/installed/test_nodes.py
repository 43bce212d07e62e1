"""Nodes that are drained, and nodes that are lost."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from testbed.cluster.api import Api
from testbed.cluster.cluster import Cluster
from testbed.cluster.nodes import node as one_node
from testbed.cluster.product import POOLS, ClientLoad, Product
from tests.kube.releases.installed.steps import wait_for_one_runner

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]


async def test_row_44_a_node_with_the_only_runner_is_drained_under_load_without_a_failed_request(
    product: Product, cluster: Cluster
) -> None:
    with one_node(cluster, "node-2", 2) as second:
        # Karpenter begins with this taint. It alone makes the runner move; the other pods stay.
        cluster.kubectl("taint", "nodes", "node-1", "karpenter.sh/disrupted=:NoSchedule")
        try:
            await asyncio.to_thread(_wait_for_the_only_runner_on, product, second.name)
        finally:
            cluster.kubectl("taint", "nodes", "node-1", "karpenter.sh/disrupted-")
        before = len(cluster.audit())
        async with serving_runners(cluster) as serving, ClientLoad(product, 4, tokens=120) as load:
            began = time.monotonic()
            await asyncio.to_thread(
                cluster.kubectl,
                *("drain", second.name, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=150s"),
                timeout_s=170,
            )
            took = time.monotonic() - began
            await asyncio.to_thread(_wait_for_the_only_runner_on, product, "node-1")
        load.assert_nobody_noticed()
        assert min(len(names) for names in serving) >= 1, serving
        assert cluster.items("pods", "--all-namespaces", f"--field-selector=spec.nodeName={second.name}") == []
        evictions = [
            entry["responseStatus"]["code"]
            for entry in cluster.audit()[before:]
            if entry.get("objectRef", {}).get("subresource") == "eviction"
        ]
        print(f"drained in {took:.1f} s with {len(load.answers)} answers; the evictions were answered {evictions}")
        assert evictions[0] == 429, "the budget refuses while no other runner serves"
        assert evictions[-1] in (201, 404), "and then no longer; or it was gone by then"


@pytest.mark.parametrize(
    "by", ["a person", pytest.param("Kubernetes", marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
async def test_row_44_a_node_that_is_lost_costs_its_clients_a_pause(
    product: Product, cluster: Cluster, by: str
) -> None:
    """An administrator deletes its pods, or Kubernetes does after some minutes."""

    def serving_on(*nodes: str) -> dict[str, str]:
        """The node of each ready runner. The pool's count alone may be from before a runner was deleted."""
        assert product.pool()["status"]["readyReplicas"] == 2
        serving = [pod for pod in product.runners() if _serves(pod)]
        assert len(serving) == 2
        found = {pod["spec"]["nodeName"]: pod["metadata"]["name"] for pod in serving}
        return found if found.keys() == set(nodes) else {}

    with _small_batches(product), one_node(cluster, "node-2", 2) as second:
        # The pod scheduler prefers the node with the fewest pods, which is the new one.
        product.patch_pool(replicas=2)
        runners = await asyncio.to_thread(
            cluster.wait_for, lambda: serving_on("node-1", second.name), "a runner on each", within_s=180
        )
        lost = runners[second.name]
        async with ClientLoad(product, 4, tokens=200) as load:
            sequences = await asyncio.to_thread(
                cluster.wait_for, lambda: _on_all(product.sequences()), "streams on both of them"
            )
            assert sequences[lost] > 0
            second.lose()
            await asyncio.to_thread(
                cluster.wait_for, lambda: product.pool()["status"]["readyReplicas"] == 1, "its loss", within_s=60
            )
            if by == "a person":
                cluster.kubectl("delete", "pod", lost, f"--namespace={POOLS}", "--force", "--grace-period=0")
            await asyncio.to_thread(cluster.wait_for, lambda: serving_on("node-1"), "both on the other", within_s=480)
        load.assert_nobody_noticed()


@contextmanager
def _small_batches(product: Product) -> Iterator[None]:
    """Runners take two sequences each: the scheduler fills one runner before it uses the next. Afterwards there is one
    runner again."""
    before = product.pool()["spec"]["engine"].get("maxConcurrentSequences")
    product.patch_pool(engine={"maxConcurrentSequences": 2})
    wait_for_one_runner(product)
    try:
        yield
    finally:
        product.patch_pool(replicas=1, engine={"maxConcurrentSequences": before})
        wait_for_one_runner(product)


def _on_all(sequences: dict[str, float]) -> dict[str, float] | None:
    """The sequences of each runner, once each has some."""
    return sequences if len(sequences) > 1 and all(sequences.values()) else None


@asynccontextmanager
async def serving_runners(cluster: Cluster) -> AsyncIterator[list[frozenset[str]]]:
    """Collects, after each change of a runner, the set of runners that were ready and not ending."""
    pods: dict[str, dict[str, Any]] = {}
    told: list[frozenset[str]] = []
    synced = asyncio.Event()

    async def follow(api: Api) -> None:
        async for kind, pod in api.follow(f"/api/v1/namespaces/{POOLS}/pods", labelSelector="motet.dev/pool=demo"):
            if kind == "SYNCED":
                synced.set()
            elif kind == "DELETED":
                del pods[pod["metadata"]["name"]]
            else:
                pods[pod["metadata"]["name"]] = pod
            if synced.is_set():
                told.append(frozenset(name for name, pod in pods.items() if _serves(pod)))

    async with Api(cluster.kubeconfig) as api:
        following = asyncio.create_task(follow(api))
        await synced.wait()
        try:
            yield told
        finally:
            following.cancel()


def _serves(pod: dict[str, Any]) -> bool:
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ()))
    leaves = "motet.dev/draining-until" in pod["metadata"].get("annotations", {})
    return ready and not leaves and "deletionTimestamp" not in pod["metadata"]


def _wait_for_the_only_runner_on(product: Product, node: str) -> None:
    def there() -> bool:
        runners = product.runners()
        ready = product.pool()["status"]["readyReplicas"] == 1
        return ready and [pod["spec"].get("nodeName") for pod in runners] == [node]

    product.cluster.wait_for(there, f"the only runner on {node}", within_s=180)
