"""Changes of a pool and upgrades of the product: clients notice nothing."""

import asyncio
import time
from collections.abc import Set as AbstractSet

import pytest

from testbed.cluster.cluster import CommandRefused
from testbed.cluster.product import ADAPTERS, POOLS, RELEASE, SYSTEM, ClientLoad, Product, served_after
from testbed.tree import ROOT
from tests.kube.releases.installed.steps import QUESTION, wait_for_runners

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]

TOLD_WITHIN_S = 5.0
"""How long after a change of a pod the pool may show it."""


@pytest.mark.parametrize("most", [2, pytest.param(3, marks=pytest.mark.soak)])
async def test_a_pool_grows_and_shrinks_under_load_without_a_failed_request(product: Product, most: int) -> None:
    async with ClientLoad(product, 6, tokens=120) as load:
        for replicas in (most, 1):
            await asyncio.to_thread(
                product.cluster.kubectl, "scale", "spool/demo", f"--namespace={POOLS}", f"--replicas={replicas}"
            )
            await asyncio.to_thread(wait_for_runners, product, replicas)
    load.assert_nobody_noticed()
    print(f"{len(load.answers)} answers while the pool went from 1 to {most} to 1")


async def test_a_rollout_under_load_fails_no_request(product: Product) -> None:
    before = product.pool()["status"]["currentRevision"]
    sequences = 32 if product.pool()["spec"]["engine"].get("maxConcurrentSequences") != 32 else 33
    async with ClientLoad(product, 4, tokens=120) as load:
        product.patch_pool(engine={"maxConcurrentSequences": sequences})

        def rolled() -> bool:
            status = product.pool()["status"]
            return status["currentRevision"] == status["updateRevision"] != before and status["readyReplicas"] == 1

        await asyncio.to_thread(product.cluster.wait_for, rolled, "the new revision", within_s=180)
    load.assert_nobody_noticed()

    def alone() -> bool:
        left = product.cluster.items("deployments", f"--namespace={POOLS}")
        revisions = [one["metadata"]["labels"]["motet.dev/revision"] for one in left]
        return revisions == [product.pool()["status"]["currentRevision"]]

    await asyncio.to_thread(product.cluster.wait_for, alone, "the old Deployment to go")


def test_a_rollout_that_no_node_has_room_for_says_so_while_the_old_runner_serves(product: Product) -> None:
    before = product.pool()["status"]["currentRevision"]
    product.patch_pool(template={"resources": {"limits": {"nvidia.com/gpu": "1"}}})
    try:

        def pending() -> float:
            """The time at which the pod scheduler found no node for a pod."""
            for pod in product.runners():
                for one in pod["status"].get("conditions", ()):
                    if one["type"] == "PodScheduled" and "Insufficient nvidia.com/gpu" in one.get("message", ""):
                        return time.monotonic()
            raise LookupError("every runner has a node")

        def said() -> bool:
            conditions = {one["type"]: one for one in product.pool()["status"]["conditions"]}
            reasons = [(conditions[each]["status"], conditions[each]["reason"]) for each in ("Progressing", "Ready")]
            assert reasons == [("True", "RollingOut"), ("False", "RunnersStarting")]
            messages = [conditions[each]["message"] for each in ("Progressing", "Ready")]
            return all("Unschedulable" in each and "Insufficient nvidia.com/gpu" in each for each in messages)

        began = product.cluster.wait_for(pending, "a runner without a node", within_s=60)
        product.cluster.wait_for(said, "the reason in the pool's status", within_s=TOLD_WITHIN_S)
        print(f"said {time.monotonic() - began:.1f} s after it was so")
        assert product.answer("acme/pirate", QUESTION)
    finally:
        product.patch_pool(template={"resources": {"limits": {"nvidia.com/gpu": None}}})

    def back() -> bool:
        status = product.pool()["status"]
        left = product.cluster.items("deployments", f"--namespace={POOLS}")
        return status["currentRevision"] == status["updateRevision"] == before and len(left) == 1

    product.cluster.wait_for(back, "only the revision before", within_s=120)
    product.wait_ready("spool", POOLS, "demo")


async def test_an_upgrade_of_every_part_and_its_rollback_fail_no_request(product: Product) -> None:
    """Operator, schedulers, gateway, predictor and supervisor are replaced, and with them the runners' template."""
    before = {name: product.answer(name, QUESTION) for name in ("motet-demo", *ADAPTERS)}
    upgrade = ("upgrade", RELEASE, str(ROOT / "charts/motet"), "--reset-then-reuse-values", "--set=logLevel=debug")
    async with ClientLoad(product, 4, tokens=120) as load:
        for command in (upgrade, ("rollback", RELEASE)):
            old, answered = _everything(product).keys(), len(load.answers)
            await asyncio.to_thread(product.cluster.helm, *command, f"--namespace={SYSTEM}", "--wait", "--timeout=3m")

            def replaced(old: AbstractSet[str] = old) -> bool:
                now = _everything(product)
                return not old & now.keys() and all(now.values())

            await asyncio.to_thread(product.cluster.wait_for, replaced, "new pods of every part", within_s=180)
            print(f"{command[0]}: {len(load.answers) - answered} answers")
    load.assert_nobody_noticed()
    told = {(one.model, one.text) for one in load.answers}
    assert len(told) == len({one.model for one in load.answers}), "an answer changed on its way"
    assert {name: product.answer(name, QUESTION) for name in before} == before


def _everything(product: Product) -> dict[str, bool]:
    """Uid of each of our pods → whether it is ready. Ending pods are included."""
    return {
        pod["metadata"]["uid"]: any(
            one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ())
        )
        for namespace in (SYSTEM, POOLS)
        for pod in product.cluster.items(
            "pods", f"--namespace={namespace}", "--selector=app.kubernetes.io/part-of=motet"
        )
    }


def test_an_upgrade_that_fails_rolls_no_pool(product: Product) -> None:
    """The upgrade has another runner template, and its operator never starts. The operator before it continues, and its
    pods can be replaced."""
    cluster, system = product.cluster, f"--namespace={SYSTEM}"
    operators = ("pods", system, "--selector=app.kubernetes.io/component=operator")

    def runners() -> tuple[str, str, dict[str, int]]:
        status = product.pool()["status"]
        starts = {
            pod["metadata"]["uid"]: pod["status"]["containerStatuses"][0]["restartCount"] for pod in product.runners()
        }
        return status["currentRevision"], status["updateRevision"], starts

    def waiting_for_an_image() -> list[str]:
        containers = [each for pod in cluster.items(*operators) for each in pod["status"].get("containerStatuses", ())]
        return [each["image"] for each in containers if "Image" in each["state"].get("waiting", {}).get("reason", "")]

    before = runners()
    changes = ("--set=runner.env.MOTET_LOG_LEVEL=debug", "--set=operator.image.repository=motet/nothing")
    upgrade = ("upgrade", RELEASE, str(ROOT / "charts/motet"), "--reset-then-reuse-values", *changes)
    try:
        with pytest.raises(CommandRefused):
            cluster.helm(*upgrade, system, "--wait", "--timeout=10s")
        assert [image.partition(":")[0] for image in waiting_for_an_image()] == ["motet/nothing"]
        cluster.kubectl("delete", *operators, "--timeout=60s", timeout_s=70)
        served_after(product, "meanwhile")  # by an operator that has started since
        assert runners() == before
    finally:
        cluster.helm("rollback", RELEASE, system, "--wait", "--timeout=2m")
    cluster.wait_for(lambda: len(cluster.items(*operators)) == 2, "only the operator's earlier pods", within_s=60)
    served_after(product, "afterwards")
    assert runners() == before
