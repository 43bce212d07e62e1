"""Adapters on a cluster: what tenants and platform teams see. Every part is real, except the machines."""

import time
from pathlib import Path
from typing import Any

import pytest

from testbed.cluster.nodes import ClusterNode
from testbed.cluster.product import (
    ADAPTERS,
    MANIFESTS,
    POOLS,
    RELEASE,
    SYSTEM,
    TENANTS,
    Product,
    lines_of,
    served_after,
    tenant_of,
)
from testbed.compiled_kernels import needs_a_compiler
from testbed.local_stack import running_stack
from tests.kube.audit_writes import quiet, told, writes_of
from tests.kube.releases.installed.steps import QUESTION, bring_storyteller, volume_of

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]


def test_every_adapter_answers_in_its_own_style(product: Product) -> None:
    answers = {name: product.answer(name, QUESTION) for name in ("motet-demo", *ADAPTERS)}
    assert len(set(answers.values())) == len(answers), answers


def test_a_runner_computes_with_the_compiled_kernels_of_its_image(product: Product, node: ClusterNode) -> None:
    needs_a_compiler()
    name = product.runners()[0]["metadata"]["name"]
    product.cluster.wait_for(lambda: '"cpp (' in product.cluster.logs(name, POOLS), "the compiled kernels")
    _, said = node.execute(f"{POOLS}/{name}", "find", "/tmp/.cache", "-name", "*.so")
    assert ".so" not in said, "it has compiled none itself"


def test_a_folder_is_served_the_same_on_a_laptop_and_in_a_cluster(product: Product, tmp_path: Path) -> None:
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
    lines = tmp_path / "keys"
    lines.write_text("\n".join(lines_of(product.keys).values()))
    env = {"MOTET_GATEWAY_KEYS_FILE": str(lines)}
    with running_stack(tmp_path / "stack", manifests=folder, env=env) as stack:
        stack.until(lambda: all(adapter["ready"] for adapter in stack.status()["adapters"]))
        local = {tenant: stack.openai(api_key=str(product.keys[tenant])) for tenant in TENANTS}
        for tenant, client in local.items():
            there = product.ask("/v1/models", tenant=tenant)
            assert told(client.models.list().to_dict()) == told(there)
        for model in ("motet-demo", *ADAPTERS):
            answer = local[tenant_of(model)].chat.completions.create(
                model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=32
            )
            assert answer.choices[0].message.content == product.answer(model, QUESTION)


def test_kubectl_get_shows_the_state(product: Product) -> None:
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
        """Whether no pod is ending: pods of an earlier test may take a while, and each end is a change."""
        pods = [pod for where in (SYSTEM, POOLS) for pod in product.cluster.items("pods", f"--namespace={where}")]
        alone = len(product.cluster.items("deployments", f"--namespace={POOLS}")) == 1
        return alone and not any("deletionTimestamp" in pod["metadata"] for pod in pods)

    def all_are_loaded() -> bool:
        """Whether statuses say so: they follow once a minute which adapters are in memory."""
        where = [name.partition("/") for name in ADAPTERS]
        every = [product.cluster.get("loraadapter", name, f"--namespace={tenant}") for tenant, _, name in where]
        return all(one["status"]["loadedReplicas"] for one in every)

    product.wait_ready("spool", POOLS, "demo")
    product.cluster.wait_for(nothing_leaves, "ending pods to be gone", within_s=120)
    product.cluster.wait_for(all_are_loaded, "statuses to say that adapters are loaded", within_s=120)
    ours = f"system:serviceaccount:{SYSTEM}:"
    quiet(product.cluster, ours)
    before = len(product.cluster.audit())
    time.sleep(10)
    entries = product.cluster.audit()
    writes = list(writes_of(entries[before:], ours))
    assert not writes, told(writes, entries[:before])


def test_an_adapter_is_served_once_it_is_applied(product: Product) -> None:
    """`benchmarks/operator.py` measures how long it takes."""
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
            "mounts no volume secrets for namespace acme",
        ),
        (
            {"source": {"persistentVolumeClaim": {"claimName": "motet-demo", "path": "zeta/json"}}},
            "Accepted",
            "PolicyDenied",
            "reads adapters of namespace acme only from the folder acme of volume motet-demo",
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
            "The adapter's rank is 128, but this pool serves ranks up to 64",
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
def test_the_adapters_condition_tells_its_owner_what_is_wrong(
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
        product.cluster.wait_for(lambda: "json" not in product.models("zeta"), "the model to be gone")
    finally:
        product.cluster.kubectl("label", "namespace", "zeta", "motet.dev/tenant=true")
    product.wait_ready("lora", "zeta", "json")
    product.cluster.wait_for(lambda: product.answer("zeta/json", QUESTION), "the model to be back")


def test_a_tenants_namespace_goes_at_once(product: Product) -> None:
    bring_storyteller(product, "gone")
    product.cluster.kubectl("delete", "namespace", "gone", "--timeout=60s", timeout_s=70)
    product.cluster.wait_for(lambda: "storyteller" not in product.models("gone"), "the model to be gone")
