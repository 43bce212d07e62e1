from datetime import UTC, datetime

import pytest

from motet.resources import LoRAAdapter
from motet_operator.cluster.kinds import ADAPTERS, PODS, Object
from motet_operator.cluster.object_parser import (
    ObjectParser,
    Unreadable,
    conditions_of,
    is_live,
    model_claim,
    model_uri,
    read_adapter,
    read_instance,
    read_pool,
    scale_writers,
)
from motet_operator.reconcile import AdapterObject
from tests.operator.cluster.objects import adapter, made, pod, pool


def test_each_version_is_read_once() -> None:
    reads = []

    def read(it: object) -> object:
        reads.append(it)
        return object()

    reader = ObjectParser(ADAPTERS, read)
    it = adapter(version=1)
    first = reader({("tenant", "legal"): it})
    assert reader({("tenant", "legal"): it}) == first
    assert reader({("tenant", "legal"): adapter(version=2)}) != first
    assert len(reads) == 2


def test_a_version_used_again_after_a_restore_is_read_again() -> None:
    reader = ObjectParser(ADAPTERS, read_adapter)
    for suspend in (False, True):
        found = reader({("tenant", "legal"): adapter(version=7, suspend=suspend)})["tenant", "legal"]
        assert isinstance(found, AdapterObject)
        assert found.resource.spec.suspend is suspend


def test_a_parsed_object_is_reused_until_its_content_changes() -> None:
    key = ("tenant", "legal")
    reader = ObjectParser(ADAPTERS, read_adapter)

    def read(it: Object) -> AdapterObject:
        found = reader({key: it})[key]
        assert isinstance(found, AdapterObject)
        return found

    first = read(adapter(version=1))
    annotated = adapter(version=2)
    annotated["metadata"]["annotations"] = {"team": "legal"}
    assert read(annotated) is first
    with_status = read(adapter(version=3) | {"status": {"loadedReplicas": 1}})
    assert with_status.loaded == 1
    assert with_status.resource is first.resource
    assert read(adapter(version=4, suspend=True)).resource.spec.suspend


def test_an_unreadable_object_has_a_reason_and_affects_no_other() -> None:
    reader = ObjectParser(ADAPTERS, read_adapter)
    found = reader(
        {("tenant", "odd"): adapter("odd", fromTheFuture=True), ("tenant", "legal"): adapter(), ("t", "x"): {}}
        | {("t", "x"): made(ADAPTERS, "x", "t")}
    )
    odd = found["tenant", "odd"]
    assert isinstance(odd, Unreadable)
    assert "spec.fromTheFuture" in odd.message
    assert isinstance(found["t", "x"], Unreadable)
    assert not isinstance(found["tenant", "legal"], Unreadable)


def test_a_volume_is_a_path_that_its_runners_have() -> None:
    claim = {"claimName": "adapters", "path": "legal/v2"}
    it = read_adapter(adapter(source={"persistentVolumeClaim": claim}))
    assert it.source == "file:///var/lib/motet/volumes/adapters/legal/v2"
    model = read_pool(pool(model={"uri": "pvc://weights/llama"}), prepared=lambda _: True)
    assert model.model_uri == "file:///var/lib/motet/model/llama"
    assert model_claim(model.resource) == "weights"
    assert model_claim(read_pool(pool(), prepared=lambda _: True).resource) == ""
    assert model_uri(read_pool(pool(), prepared=lambda _: True).resource) == "hf://acme/base"


def test_an_image_is_a_uri_that_runners_read() -> None:
    image = "ghcr.io/acme/legal:v1"
    it = read_adapter(adapter(source={"image": image}))
    assert it.source == read_adapter(adapter(source={"uri": f"oci://{image}"})).source == f"oci://{image}"


def test_labels_that_offline_validation_would_refuse_do_no_harm() -> None:
    it = adapter()
    it["metadata"]["labels"] = {f"many-{number}": "" for number in range(100)}
    assert isinstance(read_adapter(it).resource, LoRAAdapter)


def test_a_pool_says_what_was_decided_last_and_who_scaled_it() -> None:
    it = pool() | {"status": {"desiredReplicas": 3, "currentRevision": "abc"}}
    it["metadata"]["managedFields"] = [
        {"manager": "kubectl", "subresource": "scale", "fieldsV1": {"f:spec": {"f:replicas": {}}}},
        {"manager": "somebody", "subresource": "status", "fieldsV1": {"f:status": {}}},
    ]
    read = read_pool(it, prepared=lambda name: name == "pools")
    assert (read.wanted, read.current_revision, read.namespace_prepared) == (3, "abc", True)
    assert scale_writers(it) == read.scale_writers == ("kubectl",)
    assert not read_pool(it, prepared=lambda _: False).namespace_prepared


def test_an_adapter_says_how_many_held_it_and_since_when() -> None:
    written = {"loadedReplicas": 2, "lastLoadTime": "2026-01-01T00:00:00Z"}
    read = read_adapter(adapter() | {"status": written})
    assert (read.loaded, read.last_load) == (2, datetime(2026, 1, 1, tzinfo=UTC))
    assert (read_adapter(adapter()).loaded, read_adapter(adapter()).last_load) == (0, None)


def test_an_adapter_says_which_revisions_it_had() -> None:
    revision = {"source": "file:///a", "verdict": "Refused", "reason": "RankTooLarge", "time": "2026-01-01T00:00:00Z"}
    written = {"revisions": [revision, {"verdict": "Sings"}]}
    (read,) = read_adapter(adapter() | {"status": written}).revisions
    assert (read.source, read.verdict, read.reason, read.time) == (
        "file:///a",
        "Refused",
        "RankTooLarge",
        datetime(2026, 1, 1, tzinfo=UTC),
    )


def test_conditions_are_read_back_as_they_were_written_and_nonsense_is_left_out() -> None:
    written = {
        "type": "Ready",
        "status": "False",
        "reason": "PoolNotFound",
        "message": "there is none",
        "lastTransitionTime": "2026-01-02T03:04:05Z",
        "observedGeneration": 7,
    }
    it = adapter() | {"status": {"conditions": [written, {"type": "Odd", "status": "Perhaps"}, {"status": "True"}]}}
    (read,) = conditions_of(it)
    assert (read.type, read.status, read.reason, read.observed_generation) == ("Ready", "False", "PoolNotFound", 7)
    assert read.last_transition_time == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_a_pod_that_is_deleted_or_finished_is_no_runner() -> None:
    assert is_live(pod("one", "1"))
    assert not is_live(pod("one", "1", deletionTimestamp="2026-01-01T00:00:00Z"))
    assert not is_live(pod("one", "1") | {"status": {"phase": "Failed"}})


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}, ""),
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}]},
            "ErrImagePull: no such image",
        ),
        (
            {"containerStatuses": [{"lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}]},
            "OOMKilled, exit code 137",
        ),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "full"}]},
            "Unschedulable: full",
        ),
    ],
)
def test_a_pods_trouble_is_described_in_kubernetes_words(status: dict[str, object], reason: str) -> None:
    assert read_instance(made(PODS, "one", "pools", status=status)).reason == reason


def test_a_ready_pod_has_no_failures_and_a_draining_one_says_until_when() -> None:
    it = pod("one", "1", annotations={"motet.dev/draining-until": "2026-01-01T00:00:30+00:00"})
    it["status"]["containerStatuses"] = [{"restartCount": 4}]
    read = read_instance(it)
    assert (read.ready, read.failures) == (True, 0)
    assert read.draining_until == datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
    it["status"]["conditions"][0]["status"] = "False"
    assert read_instance(it).failures == 4


def test_a_time_without_a_zone_is_in_utc() -> None:
    read = read_instance(pod("one", "1", annotations={"motet.dev/draining-until": "2026-01-01T00:00:30"}))
    assert read.draining_until == datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)


def test_any_error_while_parsing_affects_one_object_only() -> None:
    def read(it: dict[str, object]) -> str:
        if "odd" in str(it["metadata"]):
            raise RecursionError("too deep")
        return "read"

    found = ObjectParser(PODS, read)({("pools", "odd"): pod("odd", "1"), ("pools", "one"): pod("one", "1")})
    assert isinstance(found["pools", "odd"], Unreadable)
    assert found["pools", "one"] == "read"
