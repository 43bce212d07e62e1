"""A real API server enforces each rule of our CRDs, with the same messages as offline validation."""

import json
import re
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from motet.resources.crd import ADAPTER, CUSTOM_RESOURCES, POOL
from motet.resources.status import Artifact, Condition, LoRAAdapterStatus, ServingPoolStatus
from testbed.cluster.control_plane import Cluster, CommandRefused
from testbed.cluster.operators import apply_definitions
from tests.resources.invalid_objects import BROKEN, GOOD, REMOVED, InvalidObject, with_value

pytestmark = pytest.mark.kube


@pytest.fixture(scope="module")
def tenant(cluster: Cluster) -> Iterator[str]:
    """A namespace in a cluster with our CRDs."""
    apply_definitions(cluster)
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def named(good: dict[str, Any], tenant: str, name: str = "") -> dict[str, Any]:
    return with_value(good, "metadata", {"name": name or f"one-{uuid.uuid4().hex[:8]}", "namespace": tenant})


def complaints(refused: CommandRefused) -> list[str]:
    """The complaints, one for each field, as `field: kind of error: …: message`."""
    return [line.removeprefix("* ") for line in re.split(r"\n|is invalid: ", str(refused)) if line]


# Control characters do not reach the API server: kubectl refuses them.
@pytest.mark.parametrize("broken", [one for one in BROKEN if str(one.value).isprintable()], ids=str)
def test_a_broken_rule_is_refused_with_its_message(cluster: Cluster, tenant: str, broken: InvalidObject) -> None:
    good = named(GOOD[broken.kind], tenant)
    if broken.change:
        cluster.apply(good)
    with pytest.raises(CommandRefused) as refused:
        cluster.apply(with_value(good, broken.at or broken.field, broken.value))
    field = re.escape(re.sub(r"(matchLabels|limits)\.(\w+)", r"\1[\2]", broken.field))
    wanted = re.compile(rf"{field}: (Invalid value(: .*)?|Forbidden|Required value): {re.escape(broken.message)}")
    assert [said for said in complaints(refused.value) if wanted.fullmatch(said)], str(refused.value)


@pytest.mark.parametrize("good", GOOD.values(), ids=GOOD)
def test_a_good_object_may_be_applied_again_and_changed_where_it_may(
    cluster: Cluster, tenant: str, good: dict[str, Any]
) -> None:
    first = named(good, tenant)
    cluster.apply(first)
    cluster.apply(first)
    if good["kind"] == "LoRAAdapter":
        cluster.apply(with_value(first, "spec.source.uri", "file:///adapters/newer"))
        cluster.apply(with_value(first, "spec.source.digest", f"sha256:{'1' * 64}"))
    else:
        cluster.apply(with_value(first, "spec.replicas", 3))


def test_an_unset_field_may_be_set_once(cluster: Cluster, tenant: str) -> None:
    adapter = named(GOOD["LoRAAdapter"], tenant)
    cluster.apply(with_value(with_value(adapter, "spec.modelName", REMOVED), "spec.baseModel", REMOVED))
    cluster.apply(adapter)
    with pytest.raises(CommandRefused, match="modelName may be set once"):
        cluster.apply(with_value(adapter, "spec.modelName", REMOVED))


def test_a_small_object_is_stored_with_its_defaults(cluster: Cluster, tenant: str) -> None:
    pool = named(GOOD["ServingPool"] | {"spec": {"model": {"uri": "file:///models/base"}}}, tenant)
    cluster.apply(pool)
    stored = cluster.get("spool", pool["metadata"]["name"], f"--namespace={tenant}")["spec"]
    assert stored == {
        "model": {"uri": "file:///models/base"},
        "role": "Mixed",
        "engine": {},
        "replicas": 1,
        "allowedNamespaces": {"from": "Same"},
        "autoscaling": {"mode": "Disabled", "scaleDownStabilizationSeconds": 300},
        "admission": {"requireDigest": False},
        "drainTimeoutSeconds": 30,
        "updateStrategy": {"maxSurge": 1, "maxUnavailable": 0},
        "template": {"resources": {}},
    }
    spec = {"poolRef": {"name": "demo"}, "source": {"uri": "file:///adapters/legal"}}
    adapter = named(GOOD["LoRAAdapter"] | {"spec": spec}, tenant)
    cluster.apply(adapter)
    stored = cluster.get("lora", adapter["metadata"]["name"], f"--namespace={tenant}")["spec"]
    assert stored["placement"] == {"minReplicas": 0, "maxReplicas": 1000}
    assert (stored["priority"], stored["suspend"]) == ("Standard", False)


def test_null_is_absent(cluster: Cluster, tenant: str) -> None:
    adapter = named(GOOD["LoRAAdapter"], tenant)
    empty = with_value(with_value(adapter, "spec.modelName", None), "spec.placement", None)
    cluster.apply(empty)
    cluster.apply(adapter)
    with pytest.raises(CommandRefused, match=r"spec\.modelName: Forbidden: modelName may be set once"):
        cluster.apply(empty)
    pool = named(GOOD["ServingPool"], tenant)
    pool = with_value(pool, "spec.engine", {"maxResidentAdapters": 9, "maxCachedAdapters": None})
    cluster.apply(with_value(pool, "spec.group", None))


@pytest.mark.parametrize(
    ("kind", "field", "value", "complaint"),
    [
        ("ServingPool", "spec.replica", 2, r"field not declared in schema|unknown field"),
        ("ServingPool", "spec.replicas", "2", r'spec.replicas: Invalid value: "string"|expected numeric'),
        ("ServingPool", "spec.replicas", 1001, "should be less than or equal to 1000"),
        ("ServingPool", "spec.role", "Token", 'supported values: "Mixed"'),
        ("LoRAAdapter", "spec.priority", "High", 'supported values: "Interactive", "Standard", "Batch"'),
        ("ServingPool", "spec.template", {"hostNetwork": True}, r"field not declared in schema|unknown field"),
        ("ServingPool", "spec.template", {"env": [{"name": "TZ"}, {"name": "TZ"}]}, r"duplicate entries"),
        ("ServingPool", "spec.autoscaling", {"mode": False}, r"expected string"),
        ("LoRAAdapter", "spec.slo", {}, r"field not declared in schema|unknown field"),
    ],
)
def test_the_server_refuses_what_offline_validation_refuses(  # noqa: PLR0917
    cluster: Cluster, tenant: str, kind: str, field: str, value: Any, complaint: str
) -> None:
    with pytest.raises(CommandRefused, match=complaint):
        cluster.apply(with_value(named(GOOD[kind], tenant), field, value))


@pytest.mark.parametrize("resources", [{"limits": {"cpu": 2, "memory": "4Gi", "nvidia.com/gpu": "1"}}])
def test_a_quantity_may_be_a_number_or_text(cluster: Cluster, tenant: str, resources: dict[str, Any]) -> None:
    pool = named(with_value(GOOD["ServingPool"], "spec.template", {"resources": resources}), tenant)
    cluster.apply(pool)
    stored = cluster.get("spool", pool["metadata"]["name"], f"--namespace={tenant}")
    assert stored["spec"]["template"]["resources"] == resources


def test_a_pool_answers_scale(cluster: Cluster, tenant: str) -> None:
    pool = named(GOOD["ServingPool"], tenant)
    cluster.apply(pool)
    where = ("spool", pool["metadata"]["name"], f"--namespace={tenant}")
    cluster.kubectl("scale", *where, "--replicas=3")
    assert cluster.get(*where)["spec"]["replicas"] == 3
    assert cluster.get(*where, "--subresource=scale")["spec"]["replicas"] == 3


def test_kubectl_get_shows_both_kinds_and_what_was_reported(cluster: Cluster, tenant: str) -> None:
    condition = Condition(
        type="Ready",
        status="False",
        reason="PoolNotFound",
        message="there is no pool",
        last_transition_time=datetime(2026, 11, 20, tzinfo=UTC),
        observed_generation=1,
    )
    adapter, pool = named(GOOD["LoRAAdapter"], tenant), named(GOOD["ServingPool"], tenant)
    reports = {
        ADAPTER.short: (
            adapter,
            LoRAAdapterStatus(
                conditions=(condition,),
                model_name=f"{tenant}/legal",
                base_model="motet-demo",
                artifact=Artifact(short_digest="0123456789ab", rank=8, alpha="16", size_bytes=4096),
                placement_summary="1/2",
            ),
        ),
        POOL.short: (pool, ServingPoolStatus(conditions=(condition,), served_name="motet-demo", replica_summary="0/1")),
    }
    for short, (resource, status) in reports.items():
        cluster.apply(resource)
        written = {"status": json.loads(status.model_dump_json(by_alias=True, exclude_none=True))}
        cluster.kubectl(
            *("patch", short, resource["metadata"]["name"], f"--namespace={tenant}"),
            *("--subresource=status", "--type=merge", f"--patch={json.dumps(written)}"),
        )
    shown = cluster.kubectl("get", "motet", f"--namespace={tenant}", "--output=wide")
    (adapter_row,) = [line for line in shown.splitlines() if adapter["metadata"]["name"] in line]
    (pool_row,) = [line for line in shown.splitlines() if pool["metadata"]["name"] in line]
    for word in ("False", "PoolNotFound", "demo", "motet-demo", "8", "1/2", f"{tenant}/legal", "0123456789ab", "4096"):
        assert word in adapter_row.split()
    for word in ("False", "0/1", "motet-demo", "PoolNotFound"):
        assert word in pool_row.split()
    headings = {heading for line in shown.splitlines() if line.startswith("NAME") for heading in line.split("  ")}
    assert {column.name.upper() for kind in CUSTOM_RESOURCES for column in kind.columns} <= {
        each.strip() for each in headings
    }


def test_a_field_is_explained(cluster: Cluster, tenant: str) -> None:
    assert tenant
    said = cluster.kubectl("explain", "lora.spec.placement.minReplicas")
    assert "resident, also without requests" in " ".join(said.split())
