"""The product on a cluster: what tenants and platform teams see, with every part real but the machines."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kube.api import Api
from tests.kube.changes import quiet, told, writes_of
from tests.kube.cluster import Cluster, Refused
from tests.kube.metrics import metric
from tests.kube.nodes import Node
from tests.kube.nodes import node as one_node
from tests.kube.product import (
    ADAPTERS,
    FIXED,
    MANIFESTS,
    POOLS,
    RELEASE,
    SYSTEM,
    Load,
    Product,
    served_after,
    stream,
)
from tests.repo.tree import ROOT
from tests.stack.harness import running_stack

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]

QUESTION = "Who keeps the lighthouse of Brindle?"


def volume_of(product: Product) -> Path:
    return Path(product.cluster.get("pv", "motet-demo")["spec"]["hostPath"]["path"])


@pytest.fixture
def two_runners(product: Product) -> Iterator[list[str]]:
    """The names of two runner pods; one again afterwards."""
    product.patch_pool(replicas=2)
    product.cluster.wait_for(lambda: product.pool()["status"]["readyReplicas"] == 2, "two runners", within_s=120)
    yield [pod["metadata"]["name"] for pod in product.runners()]
    product.patch_pool(replicas=1)
    product.cluster.wait_for(lambda: len(product.runners()) == 1, "one runner", within_s=120)
    product.wait_ready("spool", POOLS, "demo")


def test_every_adapter_answers_in_its_own_voice(product: Product) -> None:
    answers = {name: product.answer(name, QUESTION) for name in ("motet-demo", *ADAPTERS)}
    assert len(set(answers.values())) == len(answers), answers


def test_one_folder_is_served_alike_on_a_laptop_and_on_a_cluster(product: Product, tmp_path: Path) -> None:
    def told(models: dict[str, Any]) -> dict[str, Any]:
        facts = ("parent", "max_model_len", "owned_by", "digest", "rank")
        return {model["id"]: [model.get(fact) for fact in facts] for model in models["data"]}

    folder = tmp_path / "manifests"
    folder.mkdir()
    for file in MANIFESTS.glob("*.yaml"):
        (folder / file.name).write_text(file.read_text())
    (folder / "volumes").mkdir()
    (folder / "volumes" / "motet-demo").symlink_to(volume_of(product))
    (tmp_path / "stack").mkdir()
    with running_stack(tmp_path / "stack", manifests=folder) as stack:
        local = stack.openai()
        assert told(local.models.list().to_dict()) == told(product.ask("/v1/models"))  # type: ignore[arg-type]
        for model in ("motet-demo", *ADAPTERS):
            answer = local.chat.completions.create(
                model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=32
            )
            assert answer.choices[0].message.content == product.answer(model, QUESTION)


def test_kubectl_get_tells_the_story(product: Product) -> None:
    table = product.cluster.kubectl("get", "motet", "--all-namespaces")
    rows = {line.split()[1].partition("/")[2]: line.split() for line in table.splitlines() if "motet.dev/" in line}
    assert rows["demo"][2:4] == ["True", "1/1"]
    for name in ADAPTERS:
        row = rows[name.partition("/")[2]]
        assert row[2:4] == ["True", "Serving"]
        assert name in row


def test_helm_finds_everything_in_place(product: Product) -> None:
    assert "Phase:          Succeeded" in product.cluster.helm("test", RELEASE, f"--namespace={SYSTEM}")


def test_nothing_is_written_when_nothing_changes(product: Product) -> None:
    def nothing_leaves() -> bool:
        """Tests come in any order. What the one before has ended may take a while to go, and going is a change."""
        pods = [pod for where in (SYSTEM, POOLS) for pod in product.cluster.items("pods", f"--namespace={where}")]
        alone = len(product.cluster.items("deployments", f"--namespace={POOLS}")) == 1
        return alone and not any("deletionTimestamp" in pod["metadata"] for pod in pods)

    product.wait_ready("spool", POOLS, "demo")
    product.cluster.wait_for(nothing_leaves, "what is on its way out to be gone", within_s=120)
    ours = f"system:serviceaccount:{SYSTEM}:"
    quiet(product.cluster, ours)
    before = len(product.cluster.audit())
    time.sleep(10)
    entries = product.cluster.audit()
    writes = list(writes_of(entries[before:], ours))
    assert not writes, told(writes, entries[:before])


def test_an_adapter_is_served_once_it_is_applied(product: Product) -> None:
    """How soon is for `benchmarks/operator.py`."""
    took = [served_after(product, f"tales-{index}") for index in range(3)]
    print(f"applied to first token: {', '.join(f'{seconds:.2f} s' for seconds in took)}")


@pytest.mark.parametrize(
    ("change", "condition", "reason", "words"),
    [
        (
            {"poolRef": {"name": "dmeo", "namespace": POOLS}},
            "Accepted",
            "PoolNotFound",
            "did you mean motet-pools/demo?",
        ),
        ({"baseModel": "other"}, "Accepted", "BaseModelMismatch", "serves motet-demo"),
        (
            {"source": {"persistentVolumeClaim": {"claimName": "secrets", "path": "a"}}},
            "Accepted",
            "PolicyDenied",
            "its spec.adapterVolumes decides",
        ),
        (
            {"source": {"persistentVolumeClaim": {"claimName": "motet-demo", "path": "zeta/json"}}},
            "Accepted",
            "PolicyDenied",
            "reads adapters of namespace acme from the folder acme of volume motet-demo only",
        ),
        (
            {"source": {"persistentVolumeClaim": {"claimName": "motet-demo", "path": "acme/borrowed"}}},
            "ArtifactReady",
            "FetchFailed",
            "a link that leads out of the folder acme of its volume",
        ),
        ({"source": {"uri": "file:///etc"}}, "Accepted", "PolicyDenied", "persistentVolumeClaim"),
        (
            {"source": {"persistentVolumeClaim": {"claimName": "motet-demo", "path": "acme/nothing"}}},
            "ArtifactReady",
            "FetchFailed",
            "nothing",
        ),
        (
            {"source": {"persistentVolumeClaim": {"claimName": "motet-demo", "path": "acme/wide"}}},
            "ArtifactReady",
            "RankTooLarge",
            "Its rank is 128 and this pool serves up to 64 (engine.maxLoraRank)",
        ),
        (
            {
                "source": {
                    "persistentVolumeClaim": {"claimName": "motet-demo", "path": "acme/storyteller"},
                    "digest": f"sha256:{'0' * 64}",
                }
            },
            "ArtifactReady",
            "DigestMismatch",
            "sha256:0000",
        ),
        ({"modelName": "pirate"}, "Accepted", "NameConflict", "acme/pirate"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_wrong_with_an_adapter_is_said_where_its_owner_looks(
    product: Product, change: dict[str, Any], condition: str, reason: str, words: str
) -> None:
    spec = {
        "poolRef": {"name": "demo", "namespace": POOLS},
        "source": {"persistentVolumeClaim": {"claimName": "motet-demo", "path": "acme/storyteller"}},
        **change,
    }
    product.cluster.apply(
        {
            "apiVersion": "motet.dev/v1alpha1",
            "kind": "LoRAAdapter",
            "metadata": {"name": "wrong", "namespace": "acme"},
            "spec": spec,
        }
    )
    try:

        def said() -> bool:
            conditions = product.cluster.get("lora", "wrong", "--namespace=acme")["status"]["conditions"]
            found = {one["type"]: one for one in conditions}
            assert (found[condition]["status"], found[condition]["reason"]) == ("False", reason), found
            assert found["Ready"]["reason"] == reason
            return words in found[condition]["message"]

        product.cluster.wait_for(said, f"{condition}/{reason}")
    finally:
        product.cluster.kubectl("delete", "lora", "wrong", "--namespace=acme")


def test_admission_is_taken_back_with_the_namespaces_label(product: Product) -> None:
    product.cluster.kubectl("label", "namespace", "zeta", "motet.dev/tenant-")
    try:
        product.cluster.kubectl(
            "wait", "--for=condition=Accepted=false", "lora/json", "--namespace=zeta", "--timeout=60s"
        )
        product.cluster.wait_for(lambda: "zeta/json" not in product.models(), "the model to be gone")
    finally:
        product.cluster.kubectl("label", "namespace", "zeta", "motet.dev/tenant=true")
    product.wait_ready("lora", "zeta", "json")
    product.cluster.wait_for(lambda: product.answer("zeta/json", QUESTION), "the model to be back")


async def test_a_pool_grows_and_shrinks_under_load_without_a_failed_request(product: Product) -> None:
    async with Load(product, 6, tokens=120) as load:
        for replicas in (3, 1):
            await asyncio.to_thread(
                product.cluster.kubectl, "scale", "spool/demo", f"--namespace={POOLS}", f"--replicas={replicas}"
            )
            await asyncio.to_thread(_wait_for_runners, product, replicas)
    load.assert_nobody_noticed()
    print(f"{len(load.answers)} answers while the pool went from 1 to 3 to 1")


async def test_a_rollout_under_load_fails_no_request(product: Product) -> None:
    before = product.pool()["status"]["currentRevision"]
    sequences = 32 if product.pool()["spec"]["engine"].get("maxConcurrentSequences") != 32 else 33
    async with Load(product, 4, tokens=120) as load:
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
            """When a pod was found to have no place."""
            for pod in product.runners():
                for one in pod["status"].get("conditions", ()):
                    if one["type"] == "PodScheduled" and "Insufficient nvidia.com/gpu" in one.get("message", ""):
                        return time.monotonic()
            raise LookupError("every runner has a place")

        def said() -> bool:
            conditions = {one["type"]: one for one in product.pool()["status"]["conditions"]}
            reasons = [(conditions[each]["status"], conditions[each]["reason"]) for each in ("Progressing", "Ready")]
            assert reasons == [("True", "RollingOut"), ("False", "RunnersStarting")]
            messages = [conditions[each]["message"] for each in ("Progressing", "Ready")]
            return all("Unschedulable" in each and "Insufficient nvidia.com/gpu" in each for each in messages)

        began = product.cluster.wait_for(pending, "a runner without a place", within_s=60)
        product.cluster.wait_for(said, "the reason in the pool's status")
        print(f"said {time.monotonic() - began:.1f} s after it was so")
        assert product.answer("acme/pirate", QUESTION)
    finally:
        product.patch_pool(template={"resources": {"limits": {"nvidia.com/gpu": None}}})

    def back() -> bool:
        status = product.pool()["status"]
        left = product.cluster.items("deployments", f"--namespace={POOLS}")
        return status["currentRevision"] == status["updateRevision"] == before and len(left) == 1

    product.cluster.wait_for(back, "the revision of before alone", within_s=120)
    product.wait_ready("spool", POOLS, "demo")


async def test_an_upgrade_of_every_part_and_its_rollback_fail_no_request(product: Product) -> None:
    """Operator, schedulers, gateway, predictor and supervisor are replaced, and with them the runners' template."""
    before = {name: product.answer(name, QUESTION) for name in ("motet-demo", *ADAPTERS)}
    upgrade = ("upgrade", RELEASE, str(ROOT / "charts/motet"), "--reset-then-reuse-values", "--set=logLevel=debug")
    async with Load(product, 4, tokens=120) as load:
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
    """Our pods by uid, with whether each is ready. A pod that is going is one of them."""
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
    """The runners' template is another in it, and its operator never starts: the one of before goes on, and comes back
    when its pods are made anew."""
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
        with pytest.raises(Refused):
            cluster.helm(*upgrade, system, "--wait", "--timeout=10s")
        assert [image.partition(":")[0] for image in waiting_for_an_image()] == ["motet/nothing"]
        cluster.kubectl("delete", *operators, "--timeout=60s", timeout_s=70)
        served_after(product, "meanwhile")  # by an operator that has begun since
        assert runners() == before
    finally:
        cluster.helm("rollback", RELEASE, system, "--wait", "--timeout=2m")
    cluster.wait_for(lambda: len(cluster.items(*operators)) == 2, "the operator's pods of before alone", within_s=60)
    served_after(product, "afterwards")
    assert runners() == before


@dataclass(frozen=True)
class Steadfast(Product):
    """Goes on with the gateway it knew, as kube-proxy does while the API server is away."""

    known: str = ""

    def gateway(self) -> str:
        return self.known


@pytest.mark.own_cluster
async def test_row_2_while_the_api_server_is_away_everybody_is_served(product: Product) -> None:
    cluster, apiserver = product.cluster, product.cluster.apiserver
    assert apiserver is not None

    def leaders() -> list[str]:
        leases = cluster.items("leases", f"--namespace={SYSTEM}")
        return sorted(one["spec"]["holderIdentity"] for one in leases)

    def starts() -> dict[str, int]:
        """Of those that stay: others may be on their way out from the test before."""
        pods = [*cluster.items("pods", f"--namespace={SYSTEM}"), *product.runners()]
        return {
            pod["metadata"]["name"]: pod["status"]["containerStatuses"][0]["restartCount"]
            for pod in pods
            if "deletionTimestamp" not in pod["metadata"]
        }

    before = leaders(), starts()
    known = Steadfast(cluster, product.gateway())
    apiserver.kill()
    try:
        async with Load(known, 4, tokens=60) as load:
            await asyncio.sleep(13)  # who leads is sure of it for ten
    finally:
        apiserver.start()  # from this thread: it ends with the one that began it
    load.assert_nobody_noticed()
    print(f"{len(load.answers)} answers while the API server was away")
    _bring_storyteller(product, "afterwards")
    cluster.kubectl("delete", "namespace", "afterwards", "--timeout=60s", timeout_s=70)
    assert (leaders(), starts()) == before, "nobody ended for it"


async def test_row_20_a_runner_that_is_killed_costs_its_clients_a_pause(
    product: Product, node: Node, two_runners: list[str]
) -> None:
    undisturbed = await asyncio.gather(*(stream(product, model, tokens=600) for model in ADAPTERS))
    await asyncio.to_thread(product.cluster.wait_for, lambda: not any(product.sequences().values()), "silence")
    running = [asyncio.create_task(stream(product, model, tokens=600)) for model in (*ADAPTERS, *ADAPTERS)]
    await asyncio.to_thread(product.cluster.wait_for, lambda: any(product.sequences().values()), "the streams")
    sequences = await asyncio.to_thread(product.sequences)
    victim = max(two_runners, key=lambda name: sequences[name])
    assert sequences[victim] > 0
    await asyncio.to_thread(node.kill, f"{POOLS}/{victim}")
    answers = await asyncio.gather(*running)
    assert [answer.problem for answer in answers if not answer.complete] == []
    assert {answer.tokens for answer in answers} == {600}
    for whole, answer in zip((*undisturbed, *undisturbed), answers, strict=True):
        assert answer.text == whole.text, "after the pause it went on with something else"


async def test_row_22_a_scheduler_that_is_killed_is_followed_by_the_other(product: Product, node: Node) -> None:
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
    await asyncio.to_thread(product.cluster.wait_for, lambda: not any(product.sequences().values()), "silence")
    running = [asyncio.create_task(stream(product, model, tokens=600)) for model in ADAPTERS]
    await asyncio.to_thread(product.cluster.wait_for, lambda: any(product.sequences().values()), "the streams")
    await asyncio.to_thread(node.kill, f"{SYSTEM}/{first}")
    # New requests wait for whoever leads next; those that ran go on meanwhile.
    running += [asyncio.create_task(stream(product, model, tokens=20)) for model in ADAPTERS]
    answers = await asyncio.gather(*running)
    assert [answer.problem for answer in answers if not answer.complete] == []
    assert [answer.tokens for answer in answers] == [600] * len(ADAPTERS) + [20] * len(ADAPTERS)
    # The other knew of no adapter what it is served with before a runner had said so again.
    assert await asyncio.to_thread(ready_since) == before


async def test_row_44_a_node_with_the_only_runner_is_drained_under_load_without_a_failed_request(
    product: Product, cluster: Cluster
) -> None:
    with one_node(cluster, "node-2", 2) as second:
        # As Karpenter begins. The runner moves for that alone; the rest of the system stays.
        cluster.kubectl("taint", "nodes", "node-1", "karpenter.sh/disrupted=:NoSchedule")
        try:
            await asyncio.to_thread(_wait_for_the_only_runner_on, product, second.name)
        finally:
            cluster.kubectl("taint", "nodes", "node-1", "karpenter.sh/disrupted-")
        before = len(cluster.audit())
        async with serving_runners(cluster) as serving, Load(product, 4, tokens=120) as load:
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
        assert evictions[0] == 429, "the budget holds while nobody else serves"
        assert evictions[-1] in (201, 404), "and then no longer; or it was gone by then"


@pytest.mark.parametrize(
    "by", ["a person", pytest.param("Kubernetes", marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
async def test_row_44_a_node_that_is_lost_costs_its_clients_a_pause(
    product: Product, cluster: Cluster, two_runners: list[str], by: str
) -> None:
    """Its pods are deleted by somebody who knows that it is gone, or after the minutes that Kubernetes waits."""

    def placed() -> dict[str, str]:
        assert product.pool()["status"]["readyReplicas"] == 2
        return {pod["spec"].get("nodeName", ""): pod["metadata"]["name"] for pod in product.runners()}

    with _small_batches(product), one_node(cluster, "node-2", 2) as second:
        # Pods go where there are fewest.
        cluster.kubectl(
            "delete", "pod", product.runners()[1]["metadata"]["name"], f"--namespace={POOLS}", "--wait=false"
        )
        await asyncio.to_thread(
            cluster.wait_for, lambda: placed().keys() == {"node-1", second.name}, "a runner on each", within_s=180
        )
        lost = placed()[second.name]
        async with Load(product, 4, tokens=200) as load:
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
            await asyncio.to_thread(
                cluster.wait_for, lambda: placed().keys() == {"node-1"}, "both on the other", within_s=480
            )
        load.assert_nobody_noticed()


@contextmanager
def _small_batches(product: Product) -> Iterator[None]:
    """Runners that take two sequences each: the fullest one takes all that it can."""

    def rolled() -> bool:
        status = product.pool()["status"]
        told = status["observedGeneration"] == product.pool()["metadata"]["generation"]
        return told and status["currentRevision"] == status["updateRevision"] and len(product.runners()) == 2

    before = product.pool()["spec"]["engine"].get("maxConcurrentSequences")
    product.patch_pool(engine={"maxConcurrentSequences": 2})
    product.cluster.wait_for(rolled, "runners that take two", within_s=180)
    try:
        yield
    finally:
        product.patch_pool(engine={"maxConcurrentSequences": before})


def _on_all(sequences: dict[str, float]) -> dict[str, float] | None:
    """The same, once each runner has some."""
    return sequences if len(sequences) > 1 and all(sequences.values()) else None


CUTS = [("gateway", "runner", True), ("runner", "gateway", False), ("scheduler", "runner", True)]
"""Who is cut off from whom, and whether both ways. The runner is the one with more streams."""


@pytest.mark.own_cluster
async def test_row_48_whoever_is_cut_off_from_whom_a_client_sees_a_pause_and_no_token_twice(
    product: Product, two_runners: list[str]
) -> None:
    cluster = product.cluster
    assert cluster.network is not None
    undisturbed = await asyncio.gather(*(stream(product, model, tokens=600) for model in ADAPTERS))
    for one, other, both in CUTS:
        await asyncio.to_thread(cluster.wait_for, lambda: not any(product.sequences().values()), "silence", within_s=60)
        running = [asyncio.create_task(stream(product, model, tokens=600)) for model in (*ADAPTERS, *ADAPTERS)]
        sequences = await asyncio.to_thread(cluster.wait_for, lambda: _some(product.sequences()), "the streams")
        addresses = _addresses(product, max(two_runners, key=lambda name: sequences[name]))
        with cluster.network.cut(addresses[one], addresses[other], both=both):
            running += [asyncio.create_task(stream(product, model, tokens=20)) for model in ADAPTERS]
            answers, _ = await asyncio.gather(
                asyncio.gather(*running), asyncio.to_thread(_wait_for_a_trace, product, addresses["scheduler"], one)
            )
        print(f"{one} and {other}: all {len(answers)} streams have ended while they were apart")
        assert [(one, other, answer.problem) for answer in answers if not answer.complete] == []
        assert [answer.tokens for answer in answers] == [600] * 2 * len(ADAPTERS) + [20] * len(ADAPTERS)
        for whole, answer in zip((*undisturbed, *undisturbed), answers, strict=False):
            assert answer.text == whole.text, f"{one} and {other}: after the pause it went on with something else"
        await asyncio.to_thread(_wait_for_runners, product, 2)
    await asyncio.to_thread(
        cluster.wait_for, lambda: not any(product.sequences().values()), "everybody lets go of what nobody reads"
    )


@pytest.mark.own_cluster
async def test_row_48_a_gateway_that_is_cut_off_from_the_scheduler_goes_on_with_what_it_has(product: Product) -> None:
    cluster = product.cluster
    assert cluster.network is not None
    undisturbed = await asyncio.gather(*(stream(product, model, tokens=600) for model in ADAPTERS))
    running = [asyncio.create_task(stream(product, model, tokens=600)) for model in ADAPTERS]
    await asyncio.to_thread(cluster.wait_for, lambda: _some(product.sequences()), "the streams")
    addresses = _addresses(product, product.runners()[0]["metadata"]["name"])
    with cluster.network.cut(addresses["gateway"], addresses["scheduler"]):
        waiting = [asyncio.create_task(stream(product, model, tokens=20)) for model in ADAPTERS]
        answers = await asyncio.gather(*running)
        assert not any(one.done() for one in waiting), "nobody could place them"
    late = await asyncio.gather(*waiting)
    assert [one.problem for one in (*answers, *late) if not one.complete] == []
    assert [one.text for one in answers] == [one.text for one in undisturbed]
    assert [one.tokens for one in late] == [20] * len(ADAPTERS)


def _wait_for_a_trace(product: Product, scheduler: str, cut_off: str) -> None:
    """Somebody has noticed that a runner is cut off from the scheduler, or from a gateway."""
    name = "motet_attached_runners" if cut_off == "scheduler" else "motet_lost_placements_total"
    before = metric(f"{scheduler}:9090", name)
    product.cluster.wait_for(lambda: metric(f"{scheduler}:9090", name) != before, f"a change of {name}", within_s=60)


def _some(sequences: dict[str, float]) -> dict[str, float] | None:
    return sequences if any(sequences.values()) else None


def _addresses(product: Product, runner: str) -> dict[str, str]:
    """Of a runner, the gateway, and the scheduler that leads."""
    lease = product.cluster.get("lease", f"{RELEASE}-scheduler", f"--namespace={SYSTEM}")
    leader = lease["spec"]["holderIdentity"].rpartition("-")[0]
    pods = {pod["metadata"]["name"]: pod for pod in product.cluster.items("pods", f"--namespace={SYSTEM}")}
    return {
        "runner": next(pod["status"]["podIP"] for pod in product.runners() if pod["metadata"]["name"] == runner),
        "gateway": product.gateway().partition(":")[0],
        "scheduler": pods[leader]["status"]["podIP"],
    }


async def test_row_21_a_runner_that_hangs_in_a_cluster_is_replaced_and_its_streams_go_on(
    product: Product, node: Node, two_runners: list[str]
) -> None:
    def starts() -> dict[str, int]:
        return {
            pod["metadata"]["uid"]: pod["status"]["containerStatuses"][0]["restartCount"] for pod in product.runners()
        }

    before = starts()
    undisturbed = await asyncio.gather(*(stream(product, model, tokens=600) for model in ADAPTERS))
    running = [asyncio.create_task(stream(product, model, tokens=600)) for model in ADAPTERS]
    sequences = await asyncio.to_thread(product.cluster.wait_for, lambda: _some(product.sequences()), "the streams")
    await asyncio.to_thread(node.pause, f"{POOLS}/{max(two_runners, key=lambda name: sequences[name])}")
    answers = await asyncio.gather(*running)
    assert [answer.problem for answer in answers if not answer.complete] == []
    assert [answer.text for answer in answers] == [answer.text for answer in undisturbed]

    def replaced() -> bool:
        now = starts()
        return product.pool()["status"]["readyReplicas"] == 2 and len(now) == 2 and now != before

    await asyncio.to_thread(product.cluster.wait_for, replaced, "another in its place", within_s=180)


async def test_row_23_without_predictor_and_supervisor_serving_goes_on_and_the_pool_is_sized(product: Product) -> None:
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

    # Another figure takes the field back from whoever has scaled by hand before; in this mode it starts no runner.
    another = product.pool()["spec"]["replicas"] + 1
    product.patch_pool(replicas=another, autoscaling={"mode": "Builtin", "minReplicas": 1, "maxReplicas": 2})
    try:
        await asyncio.to_thread(cluster.wait_for, sized, "the scheduler's figure", within_s=60)
        scale(0)
        await asyncio.to_thread(cluster.wait_for, lambda: not there() & {"predictor", "supervisor"}, "both to be gone")
        async with Load(product, 4, tokens=60) as load:
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
    await asyncio.to_thread(_wait_for_runners, product, product.pool()["spec"]["replicas"])


def test_row_13_adapters_are_served_while_their_definition_is_gone_and_made_again(product: Product) -> None:
    cluster = product.cluster
    before = {name: product.answer(name, QUESTION) for name in ADAPTERS}
    definition = cluster.get("crd", "loraadapters.motet.dev")
    cluster.kubectl("delete", "crd", "loraadapters.motet.dev", "--timeout=30s")
    try:
        assert {name: product.answer(name, QUESTION) for name in ADAPTERS} == before
    finally:
        for field in ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields"):
            definition["metadata"].pop(field, None)
        definition.pop("status")
        cluster.apply(definition)
        cluster.kubectl("wait", "--for=condition=Established", "crd/loraadapters.motet.dev", "--timeout=20s")
        cluster.wait_for(
            lambda: cluster.kubectl("apply", "--server-side", f"--filename={MANIFESTS / '30-adapters.yaml'}"),
            "their manifests to be taken again",
        )
    assert {name: product.answer(name, QUESTION) for name in ADAPTERS} == before
    for name in ADAPTERS:
        namespace, _, adapter = name.partition("/")
        product.wait_ready("lora", namespace, adapter)
    assert {name: product.answer(name, QUESTION) for name in ADAPTERS} == before


@asynccontextmanager
async def serving_runners(cluster: Cluster) -> AsyncIterator[list[frozenset[str]]]:
    """Which runners were ready and not leaving, after each change of any of them."""
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


def test_a_tenants_namespace_goes_at_once(product: Product) -> None:
    _bring_storyteller(product, "gone")
    product.cluster.kubectl("delete", "namespace", "gone", "--timeout=60s", timeout_s=70)
    product.cluster.wait_for(lambda: "gone/storyteller" not in product.models(), "the model to be gone")


def test_row_14_what_went_while_no_operator_ran_leaves_the_runners_once_one_is_back(product: Product) -> None:
    cluster, operator = product.cluster, f"deployment/{RELEASE}-operator"
    before = len(ADAPTERS)

    def nothing_else() -> bool:
        for name in ADAPTERS:
            product.answer(name, QUESTION, max_tokens=1)  # a runner that has just come may hold fewer
        return product.on_devices() == before

    cluster.wait_for(nothing_else, "nothing that other tests have left", within_s=60)
    _bring_storyteller(product, "quietly")
    cluster.kubectl("scale", operator, "--replicas=0", f"--namespace={SYSTEM}")
    cluster.kubectl(
        *("wait", "--for=delete", "pod", "--selector=app.kubernetes.io/component=operator", f"--namespace={SYSTEM}"),
        "--timeout=60s",
    )
    try:
        cluster.kubectl("delete", "namespace", "quietly", "--timeout=60s", timeout_s=70)
        assert "quietly/storyteller" in product.models(), "serving goes on by what the scheduler was last told"
        assert product.on_devices() == before + 1
    finally:
        cluster.kubectl("scale", operator, "--replicas=2", f"--namespace={SYSTEM}")
    cluster.wait_for(lambda: product.on_devices() == before, "the runner to let go of it", within_s=60)
    assert "quietly/storyteller" not in product.models()


def _bring_storyteller(product: Product, namespace: str) -> None:
    """A new tenant's adapter, of which nobody else has the bytes, on a device."""
    adapters = volume_of(product) / "adapters"
    shutil.copytree(adapters / "acme" / "storyteller", adapters / namespace / "storyteller", dirs_exist_ok=True)
    product.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": namespace, "labels": {"motet.dev/tenant": "true"}},
        },
        {
            "apiVersion": "motet.dev/v1alpha1",
            "kind": "LoRAAdapter",
            "metadata": {"name": "storyteller", "namespace": namespace},
            "spec": {
                "poolRef": {"name": "demo", "namespace": POOLS},
                "source": {"persistentVolumeClaim": {"claimName": "motet-demo", "path": f"{namespace}/storyteller"}},
            },
        },
    )
    product.wait_ready("lora", namespace, "storyteller")
    product.answer(f"{namespace}/storyteller", QUESTION, max_tokens=1)


def _wait_for_runners(product: Product, count: int) -> None:
    def so_many() -> bool:
        status = product.pool()["status"]
        return status["readyReplicas"] == count and len(product.runners()) == count

    product.cluster.wait_for(so_many, f"{count} runners", within_s=180)
