from pathlib import Path

import pytest

from motet.errors import SetupError
from motet.model import ObjectName
from motet_operator.cluster.deployments import PlatformTemplate, deployment, read_template
from motet_operator.cluster.view import read_pool
from motet_operator.cluster.writes import covers
from motet_operator.reconcile import RunnerSet
from motet_operator.reconcile.pools import template_of
from tests.operator.cluster.objects import PLATFORM, pool

DEMO = ObjectName("pools", "demo")


def made(drain_seconds: float = 30.0, platform: PlatformTemplate = PLATFORM, **spec: object) -> dict:
    read = read_pool(pool(**spec), prepared=lambda _: True)
    each = RunnerSet(pool=DEMO, revision="0a1b", template=template_of(read), replicas=2, drain_seconds=drain_seconds)
    return deployment(each, read.resource, "uid-1", platform)


def runner(document: dict) -> dict:
    (container,) = document["spec"]["template"]["spec"]["containers"]
    return container


def test_a_revision_is_a_deployment_that_its_pool_owns_without_a_number_of_its_own() -> None:
    document = made()
    assert document["metadata"]["name"] == "demo-0a1b"
    (owner,) = document["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == ("ServingPool", "demo", "uid-1", True)
    assert "replicas" not in document["spec"]
    selector = document["spec"]["selector"]["matchLabels"]
    assert selector == {"motet.dev/pool": "demo", "motet.dev/revision": "0a1b"}
    assert selector.items() <= document["spec"]["template"]["metadata"]["labels"].items()


def test_every_child_carries_the_labels_by_which_people_and_tools_find_it() -> None:
    document = made(group="shared")
    for labels in (document["metadata"]["labels"], document["spec"]["template"]["metadata"]["labels"]):
        assert {name.partition("/")[2] for name in labels if name.startswith("app.kubernetes.io/")} == {
            "name",
            "instance",
            "version",
            "component",
            "part-of",
            "managed-by",
        }
        assert labels["motet.dev/group"] == "shared"


def test_a_runner_is_told_its_pool_and_engine_behind_what_the_platform_tells_it() -> None:
    env = runner(made(engine={"maxLoraRank": 16}, template={"env": [{"name": "OMP_NUM_THREADS", "value": "4"}]}))["env"]
    names = [one["name"] for one in env]
    assert names[:2] == ["POD_IP", "MOTET_RUNNER_LISTEN"]  # the second names the first
    said = {one["name"]: one.get("value") for one in env}
    assert said["MOTET_RUNNER_POOL"] == "pools/demo"
    assert said["MOTET_RUNNER_REVISION"] == "0a1b"
    assert said["MOTET_RUNNER_MODEL_URI"] == "hf://acme/base"
    assert said["MOTET_RUNNER_MAX_LORA_RANK"] == "16"
    assert said["OMP_NUM_THREADS"] == "4"
    assert len(names) == len(set(names))


def test_the_grace_is_long_enough_for_the_drain_that_the_runner_is_told_of() -> None:
    spec = made(drain_seconds=30)["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 5 + 30 + 15
    assert {"name": "MOTET_RUNNER_DRAIN_SECONDS", "value": "30"} in spec["containers"][0]["env"]


def test_claims_of_models_and_adapters_are_mounted_read_only_where_sources_point() -> None:
    volumes = [{"claimName": "tuned", "subPath": "2026"}, {"claimName": "other"}]
    document = made(model={"uri": "pvc://weights/llama"}, adapterVolumes=volumes)
    mounts = {one["mountPath"]: one for one in runner(document)["volumeMounts"]}
    assert mounts["/var/lib/motet"]["name"] == "data"
    assert mounts["/var/lib/motet/model"]["readOnly"]
    assert mounts["/var/lib/motet/volumes/tuned"]["subPath"] == "2026"
    claims = {
        one["persistentVolumeClaim"]["claimName"]: one["persistentVolumeClaim"]["readOnly"]
        for one in document["spec"]["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in one
    }
    assert claims == {"weights": True, "tuned": True, "other": True}


def test_what_a_pool_may_choose_of_its_pods_is_in_them_and_the_platforms_choice_stands_otherwise() -> None:
    choice = {
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
        "nodeSelector": {"gpu": "large"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "topologySpreadConstraints": [{"topologyKey": "topology.kubernetes.io/zone"}],
        "priorityClassName": "serving",
    }
    spec = made(template=choice)["spec"]["template"]["spec"]
    assert spec["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert spec["nodeSelector"] == {"gpu": "large"}
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    (spread,) = spec["topologySpreadConstraints"]
    assert spread["labelSelector"] == {"matchLabels": {"motet.dev/pool": "demo"}}
    assert spec["priorityClassName"] == "serving"
    assert spec["serviceAccountName"] == "motet-runner"
    assert made(template={"serviceAccountName": "own"})["spec"]["template"]["spec"]["serviceAccountName"] == "own"


def test_the_platforms_template_is_left_as_it_was() -> None:
    before = repr(PLATFORM.spec)
    made(adapterVolumes=[{"claimName": "tuned"}])
    assert repr(PLATFORM.spec) == before


def test_another_platform_is_another_digest_and_another_order_is_not() -> None:
    spec = {"containers": [{"name": "runner", "image": "one"}]}
    one = PlatformTemplate({"metadata": {}, "spec": spec})
    same = PlatformTemplate({"spec": {"containers": [{"image": "one", "name": "runner"}]}, "metadata": {}})
    other = PlatformTemplate({"metadata": {}, "spec": {"containers": [{"name": "runner", "image": "two"}]}})
    assert one.digest == same.digest != other.digest


@pytest.mark.parametrize("content", ["", "[1]", "spec: {}", "spec: {containers: [{name: other}]}", "a: b: c"])
def test_a_template_that_makes_no_pod_ends_the_start_with_its_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "template.yaml"
    path.write_text(content)
    with pytest.raises(SetupError, match=r"MOTET_CLUSTER_RUNNER_TEMPLATE: .*template.yaml is no template"):
        read_template(path)


def test_what_the_server_fills_in_is_no_difference_and_what_somebody_changed_is() -> None:
    wanted = {"spec": {"containers": [{"name": "runner", "env": [{"name": "A", "value": ""}]}], "volumes": []}}
    found = {"spec": {"containers": [{"name": "runner", "env": [{"name": "A"}], "terminationMessagePath": "/dev"}]}}
    assert covers(found, wanted)
    assert not covers({"spec": {"containers": []}}, wanted)
    assert not covers({"spec": {"containers": [{"name": "other", "env": [{"name": "A"}]}]}}, wanted)
    assert not covers({}, wanted)
