from importlib.metadata import version
from pathlib import Path

import pytest

from motet.domain import ObjectName
from motet.errors import SetupError
from motet_operator.cluster.deployments import PlatformTemplate, budget, deployment, pod_digest, read_template
from motet_operator.cluster.object_parser import read_pool, read_runner_set
from motet_operator.cluster.writes import covers
from motet_operator.reconcile import RunnerSet
from motet_operator.reconcile.revisions import template_of
from tests.operator.cluster.objects import PLATFORM, pool

DEMO = ObjectName("pools", "demo")


def made(drain_seconds: float = 30.0, platform: PlatformTemplate = PLATFORM, **spec: object) -> dict:
    read = read_pool(pool(**spec), prepared=lambda _: True)
    template = template_of(read)
    each = RunnerSet(pool=DEMO, revision="0a1b", template=template, replicas=2, drain_seconds=drain_seconds)
    return deployment(each, template, read.resource, "uid-1", platform)


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


def test_the_variables_of_a_revisions_runners_say_which_base_model_they_load() -> None:
    """No annotation does: those of the release before have none, and their model must be known, too."""
    models = [
        {"uri": "hf://acme/base"},
        {"uri": "hf://acme/base", "revision": "v2"},
        {"uri": "hf://acme/base", "digest": f"sha256:{'0' * 64}"},
        {"uri": "pvc://models/base"},
    ]
    templates = [template_of(read_pool(pool(model=model), prepared=lambda _: True)) for model in models]
    bases = [read_runner_set(made(model=model)).base for model in models]
    assert bases == [template.base for template in templates]
    assert len(set(bases)) == len(models)


@pytest.mark.parametrize(
    ("said", "read"), [("30", 30.0), ("0.5", 0.5), ("9" * 400, 86_400.0), ("\N{SUPERSCRIPT TWO}", 0.0), ("soon", 0.0)]
)
def test_a_drain_that_somebody_has_annotated_is_no_longer_than_a_manifest_may_say(said: str, read: float) -> None:
    document = made()
    document["metadata"]["annotations"]["motet.dev/drain-seconds"] = said
    assert read_runner_set(document).drain_seconds == read


def test_every_child_carries_the_labels_by_which_people_and_tools_find_it() -> None:
    document = made(group="shared")
    for labels in (document["metadata"]["labels"], document["spec"]["template"]["metadata"]["labels"]):
        assert {name.partition("/")[2] for name in labels if name.startswith("app.kubernetes.io/")} == {
            "name",
            "instance",
            "component",
            "part-of",
            "managed-by",
        }
        assert labels["motet.dev/group"] == "shared"


def test_a_runners_own_variables_come_after_the_platforms() -> None:
    env = runner(made(engine={"maxLoraRank": 16}, template={"env": [{"name": "OMP_NUM_THREADS", "value": "4"}]}))["env"]
    names = [one["name"] for one in env]
    assert names[:2] == ["POD_IP", "MOTET_RUNNER_LISTEN"]  # the second names the first
    values = {one["name"]: one.get("value") for one in env}
    assert values["MOTET_RUNNER_POOL"] == "pools/demo"
    assert values["MOTET_RUNNER_REVISION"] == "0a1b"
    assert values["MOTET_RUNNER_MODEL_URI"] == "hf://acme/base"
    assert values["MOTET_RUNNER_MAX_LORA_RANK"] == "16"
    assert values["OMP_NUM_THREADS"] == "4"
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


def test_pod_fields_of_a_pool_override_the_platforms_defaults() -> None:
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


def test_scheduling_fields_of_a_pool_are_on_its_pods() -> None:
    require = "requiredDuringSchedulingIgnoredDuringExecution"
    prefer = "preferredDuringSchedulingIgnoredDuringExecution"
    here = {"labelSelector": {"matchLabels": {"app": "x"}}, "topologyKey": "kubernetes.io/hostname"}
    affinity = {
        "nodeAffinity": {
            require: {"nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]},
            prefer: [
                {
                    "weight": 5,
                    "preference": {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
                }
            ],
        },
        "podAffinity": {prefer: [{"weight": 1, "podAffinityTerm": here}]},
        "podAntiAffinity": {require: [here]},
    }
    labels, annotations = {"kueue.x-k8s.io/queue-name": "team-a"}, {"example.com/cost": "42"}
    choice = {"labels": labels, "annotations": annotations, "affinity": affinity, "schedulerName": "volcano"}
    document = made(template=choice)
    pod = document["spec"]["template"]
    assert pod["spec"]["affinity"] == affinity
    assert pod["spec"]["schedulerName"] == "volcano"
    assert labels.items() <= pod["metadata"]["labels"].items()
    assert labels.items() <= document["metadata"]["labels"].items()
    assert pod["metadata"]["annotations"] == annotations | {"example.com/team": "platform"}
    assert "motet.dev/drain-seconds" in document["metadata"]["annotations"]
    assert labels.keys().isdisjoint(document["spec"]["selector"]["matchLabels"])


def test_a_pool_cannot_override_the_platforms_annotations() -> None:
    values = {"example.com/team": "another"}
    assert made(template={"annotations": values})["spec"]["template"]["metadata"]["annotations"] == {
        "example.com/team": "platform"
    }


def test_a_model_cache_is_a_writable_claim_named_in_the_runners_settings() -> None:
    document = made(model={"uri": "hf://acme/base", "cache": {"claimName": "models"}})
    volume = next(one for one in document["spec"]["template"]["spec"]["volumes"] if one["name"] == "models")
    assert volume["persistentVolumeClaim"] == {"claimName": "models"}
    (mount,) = [one for one in runner(document)["volumeMounts"] if one["name"] == "models"]
    assert "readOnly" not in mount
    assert {"name": "MOTET_RUNNER_MODEL_CACHE", "value": mount["mountPath"]} in runner(document)["env"]
    assert not mount["mountPath"].startswith("/var/lib/motet/cache"), "what lies above a mount is its maker's, root's"


def test_the_platforms_sidecars_are_beside_the_runner_and_get_nothing_of_the_pool() -> None:
    proxy = {"name": "proxy", "image": "proxy:1"}
    beside = PlatformTemplate({"spec": {"containers": [proxy, {"name": "runner", "image": "one"}]}})
    own, other = made(platform=beside)["spec"]["template"]["spec"]["containers"]
    assert own["name"] == "runner"
    assert {"name": "MOTET_RUNNER_POOL", "value": "pools/demo"} in own["env"]
    assert other == proxy


def test_runners_have_the_image_of_their_engine() -> None:
    both = PlatformTemplate({"metadata": PLATFORM.metadata, "spec": PLATFORM.spec, "images": {"vllm": "motet/vllm:1"}})
    assert runner(made(platform=both))["image"] == "motet/runner:1"
    assert runner(made(platform=both, engine={"backend": "vllm"}))["image"] == "motet/vllm:1"
    assert digest() == digest(both), "another engine's image replaces no runners"
    assert digest(both, engine={"backend": "vllm"}) != digest(PLATFORM, engine={"backend": "vllm"})


def test_the_operators_class_is_on_everything_that_it_makes_for_a_pool() -> None:
    label = {"motet.dev/operator-class": "staging"}
    own = PlatformTemplate({"metadata": PLATFORM.metadata, "spec": PLATFORM.spec}, "staging")
    document = made(platform=own)
    read = read_pool(pool(), prepared=lambda _: True)
    pods = document["spec"]["template"]
    for each in (document, pods, budget(read.resource, "uid-1", 2, own)):
        assert label.items() <= each["metadata"]["labels"].items()
    assert "motet.dev/operator-class" not in document["spec"]["selector"]["matchLabels"]
    assert digest() != digest(own), "pods get the label by a rollout"
    assert "motet.dev/operator-class" not in str(made())


def test_the_platforms_template_is_not_changed() -> None:
    before = repr(PLATFORM.spec)
    made(adapterVolumes=[{"claimName": "tuned"}])
    assert repr(PLATFORM.spec) == before


def platform(**container: object) -> PlatformTemplate:
    return PlatformTemplate({"metadata": {}, "spec": {"containers": [{"name": "runner", "image": "one"} | container]}})


def digest(of: PlatformTemplate = PLATFORM, **spec: object) -> str:
    return pod_digest(read_pool(pool(**spec), prepared=lambda _: True), of)


def test_a_change_of_the_pod_changes_the_digest() -> None:
    other_order = PlatformTemplate({"spec": {"containers": [{"image": "one", "name": "runner"}]}, "metadata": {}})
    assert digest(platform()) == digest(other_order)
    changes: list[dict[str, object]] = [
        {},
        {"engine": {"maxLoraRank": 8}},
        {"engine": {"prefixCache": False}},
        {"engine": {"prefixCache": True}},
        {"drainTimeoutSeconds": 7},
        {"adapterVolumes": [{"claimName": "tuned"}]},
        {"template": {"nodeSelector": {"gpu": "large"}}},
    ]
    found = [digest(platform(image=image), **change) for image in ("one", "two") for change in changes]
    assert len(set(found)) == len(found)


def test_the_same_pod_has_the_same_digest() -> None:
    sized = {"template": {"resources": {"limits": {"cpu": "4"}}}}
    smaller, larger = (platform(resources={"requests": {"cpu": cpu}}) for cpu in ("1", "2"))
    assert digest(smaller) != digest(larger)
    assert digest(smaller, **sized) == digest(larger, **sized), "the pool's own size is what counts"
    volumes = ({"claimName": "tuned"}, {"claimName": "tuned", "allowedNamespaces": {"from": "All"}})
    assert len({digest(adapterVolumes=[one]) for one in volumes}) == 1, "who may read it is no matter of the pod"
    assert digest(replicas=1) == digest(replicas=5, updateStrategy={"maxSurge": 2})


def test_a_runners_pod_does_not_depend_on_the_operators_version() -> None:
    """Such as its version: then every operator would make every runner anew."""
    assert version("motet") not in repr(made())


@pytest.mark.parametrize("content", ["", "[1]", "spec: {}", "spec: {containers: [{name: other}]}", "a: b: c"])
def test_an_invalid_pod_template_stops_the_start_and_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "template.yaml"
    path.write_text(content)
    with pytest.raises(SetupError, match=r"MOTET_CLUSTER_RUNNER_TEMPLATE: .*template.yaml is not a template"):
        read_template(path)


def test_fields_filled_in_by_the_server_are_no_difference_but_changes_are() -> None:
    wanted = {"spec": {"containers": [{"name": "runner", "env": [{"name": "A", "value": ""}]}], "volumes": []}}
    found = {"spec": {"containers": [{"name": "runner", "env": [{"name": "A"}], "terminationMessagePath": "/dev"}]}}
    assert covers(found, wanted)
    assert not covers({"spec": {"containers": []}}, wanted)
    assert not covers({"spec": {"containers": [{"name": "other", "env": [{"name": "A"}]}]}}, wanted)
    assert not covers({}, wanted)
