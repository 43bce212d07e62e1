"""The product on a cluster: what tenants and platform teams see, with every part real but the machines."""

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from tests.kube.api import Api
from tests.kube.cluster import Cluster
from tests.kube.nodes import Node
from tests.kube.nodes import node as one_node
from tests.kube.product import (
    ADAPTERS,
    MANIFESTS,
    POOLS,
    RELEASE,
    SYSTEM,
    Load,
    Product,
    bring_demo,
    installed,
    served_after,
    stream,
)
from tests.repo.tree import ROOT
from tests.stack.harness import running_stack

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]

QUESTION = "Who keeps the lighthouse of Brindle?"


@pytest.fixture(scope="module")
def product(cluster: Cluster, node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    folder = tmp_path_factory.mktemp("product")
    folder.chmod(0o755)
    with cluster.inside(), installed(cluster, folder) as running:
        bring_demo(running, folder, drainTimeoutSeconds=2)
        adapters = folder / "volume" / "adapters"
        widen(adapters / "storyteller", adapters / "wide", rank=128)
        yield running


def widen(source: Path, target: Path, *, rank: int) -> None:
    """The same adapter of a higher rank: what comes to it does nothing."""
    target.mkdir()
    config = json.loads((source / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(config | {"r": rank}))
    more = rank - config["r"]
    wide = {
        name: pad(tensor, (0, 0, 0, more) if "lora_A" in name else (0, more))
        for name, tensor in load_file(source / "adapter_model.safetensors").items()
    }
    save_file(wide, target / "adapter_model.safetensors")
    for path in (target, *target.iterdir()):
        path.chmod(0o755)  # for the runners' own user


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
    volume = Path(product.cluster.get("pv", "motet-demo")["spec"]["hostPath"]["path"])
    (folder / "volumes").mkdir()
    (folder / "volumes" / "motet-demo").symlink_to(volume)
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
    product.wait_ready("spool", POOLS, "demo")
    deployments = ("deployments", f"--namespace={POOLS}")
    product.cluster.wait_for(lambda: len(product.cluster.items(*deployments)) == 1, "the old revision to go")
    time.sleep(3)
    before = len(product.cluster.audit())
    time.sleep(10)
    ours = f"system:serviceaccount:{SYSTEM}:"
    writes = [
        (entry["user"].get("username", ""), entry["verb"], entry["requestURI"])
        for entry in product.cluster.audit()[before:]
        if entry["user"].get("username", "").startswith(ours)
        and entry["verb"] not in ("get", "list", "watch")
        and "/leases/" not in entry["requestURI"]
    ]
    assert writes == []


def test_an_adapter_is_served_soon_after_it_is_applied(product: Product) -> None:
    took = [served_after(product, f"tales-{index}") for index in range(3)]
    print(f"applied to first token: {', '.join(f'{seconds:.2f} s' for seconds in took)}")
    assert statistics.median(took) <= 3


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
        ({"source": {"uri": "file:///etc"}}, "Accepted", "PolicyDenied", "persistentVolumeClaim"),
        (
            {"source": {"persistentVolumeClaim": {"claimName": "motet-demo", "path": "nothing"}}},
            "ArtifactReady",
            "FetchFailed",
            "nothing",
        ),
        (
            {"source": {"persistentVolumeClaim": {"claimName": "motet-demo", "path": "wide"}}},
            "ArtifactReady",
            "RankTooLarge",
            "Its rank is 128 and this pool serves up to 64 (engine.maxLoraRank)",
        ),
        (
            {
                "source": {
                    "persistentVolumeClaim": {"claimName": "motet-demo", "path": "storyteller"},
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
        "source": {"persistentVolumeClaim": {"claimName": "motet-demo", "path": "storyteller"}},
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
            "wait", "--for=condition=Accepted=false", "lora/json", "--namespace=zeta", "--timeout=20s"
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


@dataclass(frozen=True)
class Steadfast(Product):
    """Goes on with the gateway it knew, as kube-proxy does while the API server is away."""

    known: str = ""

    def gateway(self) -> str:
        return self.known


async def test_row_2_while_the_api_server_is_away_everybody_is_served(product: Product) -> None:
    cluster, apiserver = product.cluster, product.cluster.apiserver
    if apiserver is None:
        pytest.skip("the API server of an existing cluster is not ours to stop")

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
    cluster.kubectl("delete", "namespace", "afterwards", "--timeout=30s")
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


async def test_row_44_a_node_with_the_only_runner_is_drained_under_load_without_a_failed_request(
    product: Product, cluster: Cluster
) -> None:
    with one_node(cluster, "node-2", 2) as second:
        cluster.kubectl("cordon", "node-1")  # the runner moves for that alone; the rest of the system stays
        try:
            await asyncio.to_thread(_wait_for_the_only_runner_on, product, second.name)
        finally:
            cluster.kubectl("uncordon", "node-1")
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


async def test_row_44_a_node_that_is_lost_costs_its_clients_a_pause(
    product: Product, cluster: Cluster, two_runners: list[str]
) -> None:
    def placed() -> dict[str, str]:
        assert product.pool()["status"]["readyReplicas"] == 2
        return {pod["spec"].get("nodeName", ""): pod["metadata"]["name"] for pod in product.runners()}

    with one_node(cluster, "node-2", 2) as second:
        # Pods go where there are fewest.
        cluster.kubectl("delete", "pod", two_runners[1], f"--namespace={POOLS}", "--wait=false")
        await asyncio.to_thread(
            cluster.wait_for, lambda: placed().keys() == {"node-1", second.name}, "a runner on each", within_s=180
        )
        lost = placed()[second.name]
        async with Load(product, 4, tokens=200) as load:
            await asyncio.sleep(3)  # for streams on both of them
            second.lose()
            await asyncio.to_thread(
                cluster.wait_for, lambda: product.pool()["status"]["readyReplicas"] == 1, "its loss", within_s=60
            )
            # Kubernetes waits five minutes for a lost node; a person need not.
            cluster.kubectl("delete", "pod", lost, f"--namespace={POOLS}", "--force", "--grace-period=0")
            await asyncio.to_thread(
                cluster.wait_for, lambda: placed().keys() == {"node-1"}, "both on the other", within_s=180
            )
        load.assert_nobody_noticed()


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
    product.cluster.kubectl("delete", "namespace", "gone", "--timeout=30s")
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
        cluster.kubectl("delete", "namespace", "quietly", "--timeout=30s")
        assert "quietly/storyteller" in product.models(), "serving goes on by what the scheduler was last told"
        assert product.on_devices() == before + 1
    finally:
        cluster.kubectl("scale", operator, "--replicas=2", f"--namespace={SYSTEM}")
    cluster.wait_for(lambda: product.on_devices() == before, "the runner to let go of it", within_s=60)
    assert "quietly/storyteller" not in product.models()


def _bring_storyteller(product: Product, namespace: str) -> None:
    """A new tenant's adapter, of which nobody else has the bytes, on a device."""
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
                "source": {"persistentVolumeClaim": {"claimName": "motet-demo", "path": "storyteller"}},
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
