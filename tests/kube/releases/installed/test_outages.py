"""Parts are killed, hang or are stopped: requests are still served."""

import asyncio

import pytest

from testbed.cluster.nodes import ClusterNode
from testbed.cluster.operators import definition_gone
from testbed.cluster.product import ADAPTERS, FIXED, MANIFESTS, POOLS, RELEASE, SYSTEM, ClientLoad, Product, stream
from tests.kube.releases.installed.steps import (
    QUESTION,
    bring_storyteller,
    wait_for_runners,
    wait_for_silence,
    wait_for_streams,
)

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]

TOKENS = 1500
"""With these, streams still run when the test has found out where: iterations of the bundled model are short."""


async def test_row_20_a_runner_that_is_killed_costs_its_clients_a_pause(
    product: Product, node: ClusterNode, two_runners: list[str]
) -> None:
    undisturbed = await asyncio.gather(*(stream(product, model, tokens=TOKENS) for model in ADAPTERS))
    assert [answer.problem for answer in undisturbed if not answer.complete] == []
    await asyncio.to_thread(wait_for_silence, product)
    running = [asyncio.create_task(stream(product, model, tokens=TOKENS)) for model in (*ADAPTERS, *ADAPTERS)]
    sequences = await asyncio.to_thread(wait_for_streams, product)
    victim = max(two_runners, key=lambda name: sequences[name])
    assert sequences[victim] > 0
    await asyncio.to_thread(node.kill, f"{POOLS}/{victim}")
    answers = await asyncio.gather(*running)
    assert [answer.problem for answer in answers if not answer.complete] == []
    assert {answer.tokens for answer in answers} == {TOKENS}
    for whole, answer in zip((*undisturbed, *undisturbed), answers, strict=True):
        assert answer.text == whole.text, "after the pause it went on with something else"


async def test_row_22_a_scheduler_that_is_killed_is_followed_by_the_other(product: Product, node: ClusterNode) -> None:
    def leader() -> str:
        holder: str = product.cluster.get("lease", f"{RELEASE}-scheduler", f"--namespace={SYSTEM}")["spec"][
            "holderIdentity"
        ]
        return holder.rpartition("-")[0]

    def ready_since() -> dict[str, str]:
        found = {}
        for name in ADAPTERS:
            namespace, _, adapter = name.partition("/")
            conditions = product.cluster.get("lora", adapter, f"--namespace={namespace}")["status"]["conditions"]
            (ready,) = [one for one in conditions if one["type"] == "Ready"]
            found[name] = f"{ready['status']} since {ready['lastTransitionTime']}"
        return found

    for name in ADAPTERS:
        namespace, _, adapter = name.partition("/")
        await asyncio.to_thread(product.wait_ready, "lora", namespace, adapter)
    before = await asyncio.to_thread(ready_since)
    first = await asyncio.to_thread(leader)
    await asyncio.to_thread(wait_for_silence, product)
    running = [asyncio.create_task(stream(product, model, tokens=TOKENS)) for model in ADAPTERS]
    await asyncio.to_thread(wait_for_streams, product)
    await asyncio.to_thread(node.kill, f"{SYSTEM}/{first}")
    # New requests wait for the next leader; running ones continue meanwhile.
    running += [asyncio.create_task(stream(product, model, tokens=20)) for model in ADAPTERS]
    answers = await asyncio.gather(*running)
    assert [answer.problem for answer in answers if not answer.complete] == []
    assert [answer.tokens for answer in answers] == [TOKENS] * len(ADAPTERS) + [20] * len(ADAPTERS)
    # The new leader knows no certificate of an adapter until a runner has reported it again.
    assert await asyncio.to_thread(ready_since) == before


# That it is replaced: also in test_rights.py. That its streams go on: also in tests/stack/test_hung_runner.py.
@pytest.mark.soak
async def test_row_21_a_runner_that_hangs_in_a_cluster_is_replaced_and_its_streams_go_on(
    product: Product, node: ClusterNode, two_runners: list[str]
) -> None:
    def starts() -> dict[str, int]:
        return {
            pod["metadata"]["uid"]: pod["status"]["containerStatuses"][0]["restartCount"] for pod in product.runners()
        }

    before = starts()
    undisturbed = await asyncio.gather(*(stream(product, model, tokens=TOKENS) for model in ADAPTERS))
    await asyncio.to_thread(wait_for_silence, product)
    running = [asyncio.create_task(stream(product, model, tokens=TOKENS)) for model in ADAPTERS]
    sequences = await asyncio.to_thread(wait_for_streams, product)
    await asyncio.to_thread(node.pause, f"{POOLS}/{max(two_runners, key=lambda name: sequences[name])}")
    answers = await asyncio.gather(*running)
    assert [answer.problem for answer in answers if not answer.complete] == []
    assert [answer.text for answer in answers] == [answer.text for answer in undisturbed]

    def replaced() -> bool:
        now = starts()
        return product.pool()["status"]["readyReplicas"] == 2 and len(now) == 2 and now != before

    await asyncio.to_thread(product.cluster.wait_for, replaced, "a replacement", within_s=180)


async def test_row_23_without_predictor_and_supervisor_requests_are_served_and_the_pool_scales(
    product: Product,
) -> None:
    cluster = product.cluster

    def scale(replicas: int) -> None:
        for name in ("predictor", "supervisor"):
            cluster.kubectl("scale", f"deployment/{RELEASE}-{name}", f"--replicas={replicas}", f"--namespace={SYSTEM}")

    def there() -> set[str]:
        pods = cluster.items("pods", f"--namespace={SYSTEM}")
        return {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods}

    def sized() -> str:
        found = {one["type"]: one for one in product.pool()["status"]["conditions"]}["ScalingActive"]
        assert found["status"] == "True", found
        return str(found["reason"])

    # Writing another number takes the field from the person who scaled by hand. In this mode it starts no runner.
    another = product.pool()["spec"]["replicas"] + 1
    product.patch_pool(replicas=another, autoscaling={"mode": "Builtin", "minReplicas": 1, "maxReplicas": 2})
    try:
        await asyncio.to_thread(cluster.wait_for, sized, "the scheduler's figure", within_s=60)
        scale(0)
        await asyncio.to_thread(cluster.wait_for, lambda: not there() & {"predictor", "supervisor"}, "both to be gone")
        async with ClientLoad(product, 4, tokens=60) as load:
            await asyncio.to_thread(cluster.wait_for, lambda: len(load.answers) >= 20, "answers", within_s=120)
            assert sized() != "HoldingStaleAdvice"
            assert product.pool()["status"]["readyReplicas"] >= 1
        load.assert_nobody_noticed()
    finally:
        scale(1)
        product.patch_pool(replicas=another - 1, autoscaling=FIXED)
    for name in ("predictor", "supervisor"):
        cluster.kubectl(
            "wait",
            "--for=condition=Available",
            f"deployment/{RELEASE}-{name}",
            f"--namespace={SYSTEM}",
            "--timeout=60s",
        )
    await asyncio.to_thread(wait_for_runners, product, product.pool()["spec"]["replicas"])


def test_row_13_adapters_are_served_while_their_definition_is_gone_and_made_again(product: Product) -> None:
    cluster = product.cluster
    before = {name: product.answer(name, QUESTION) for name in ADAPTERS}
    try:
        with definition_gone(cluster):
            assert {name: product.answer(name, QUESTION) for name in ADAPTERS} == before
    finally:
        cluster.wait_for(
            lambda: cluster.kubectl("apply", "--server-side", f"--filename={MANIFESTS / '30-adapters.yaml'}"),
            "their manifests to be taken again",
        )
    assert {name: product.answer(name, QUESTION) for name in ADAPTERS} == before
    for name in ADAPTERS:
        namespace, _, adapter = name.partition("/")
        product.wait_ready("lora", namespace, adapter)
    assert {name: product.answer(name, QUESTION) for name in ADAPTERS} == before


def test_row_14_adapters_deleted_without_an_operator_are_dropped_once_one_is_back(product: Product) -> None:
    cluster, operator = product.cluster, f"deployment/{RELEASE}-operator"
    before = len(ADAPTERS)

    def nothing_else() -> bool:
        for name in ADAPTERS:
            product.answer(name, QUESTION, max_tokens=1)  # a new runner may have fewer adapters
        return product.on_devices() == before

    cluster.wait_for(nothing_else, "only these adapters on devices", within_s=60)
    bring_storyteller(product, "quietly")
    cluster.kubectl("scale", operator, "--replicas=0", f"--namespace={SYSTEM}")
    cluster.kubectl(
        *("wait", "--for=delete", "pod", "--selector=app.kubernetes.io/component=operator", f"--namespace={SYSTEM}"),
        "--timeout=60s",
    )
    try:
        cluster.kubectl("delete", "namespace", "quietly", "--timeout=60s", timeout_s=70)
        assert "storyteller" in product.models("quietly"), "the scheduler keeps its catalog"
        assert product.on_devices() == before + 1
    finally:
        cluster.kubectl("scale", operator, "--replicas=2", f"--namespace={SYSTEM}")
    cluster.wait_for(lambda: product.on_devices() == before, "the adapter to leave the device", within_s=60)
    assert "storyteller" not in product.models("quietly")
