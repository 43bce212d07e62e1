"""What an adapter's conditions say, and when it reaches the catalog."""

from dataclasses import replace
from typing import Any

import pytest

from motet.resources.status import MAX_MESSAGE, Artifact, Condition
from motet_operator.reconcile import (
    AdapterObject,
    AdapterReplica,
    AdapterReport,
    AdapterStatus,
    Plan,
    ResultCache,
    View,
    reconcile,
)
from motet_operator.reconcile.revisions import revision_of, template_of
from tests.operator.builders import DIGEST, NOW, adapter, condition, instance, later, name, pool, view


def world(*adapters: AdapterObject, known: dict[str, AdapterReport] | None = None, runners: int = 1) -> View:
    one = pool("demo", model={"servedName": "base"}, tenants={"default": {"pinnedReplicas": 3}})
    revision = revision_of(one.resource.object_name, template_of(one))
    return view(
        pools=[one],
        adapters=list(adapters),
        instances=[instance(letter, revision) for letter in "rst"[:runners]],
        adapter_reports={name(key): value for key, value in (known or {}).items()},
    )


def made_ready(place: View, count: int) -> View:
    """The first `count` of its runners, and no others."""
    instances = (replace(one, ready=index < count) for index, one in enumerate(place.instances))
    return replace(place, instances=tuple(instances))


def only(plan: Plan) -> AdapterStatus:
    (status,) = plan.adapters
    return status


def says(status: AdapterStatus, type_: str) -> tuple[str, str]:
    found = condition(status.conditions, type_)
    return found.status, found.reason


SERVING = AdapterReport(serving_digest=DIGEST)
FETCH_FAILED = "adapter_fetch_failed"


def test_a_checked_adapter_is_ready_and_loads_on_demand() -> None:
    plan = reconcile(world(adapter(), known={"legal": SERVING}))
    status = only(plan)
    assert [says(status, each) for each in ("Accepted", "ArtifactReady", "Loaded", "Ready")] == [
        ("True", "Valid"),
        ("True", "Verified"),
        ("True", "OnDemand"),
        ("True", "Serving"),
    ]
    assert status.serves
    assert status.model == "default/legal"
    (entry,) = plan.catalog.adapters
    assert (entry.model_name, entry.source, entry.content_stamp) == ("legal", "file:///adapters/legal", "stamp")


@pytest.mark.parametrize(
    ("one", "hint"),
    [
        (adapter(poolRef={"name": "dmeo"}), "did you mean default/demo?"),
        (adapter(poolRef={"name": "nowhere"}), "check spec.poolRef"),
        # That pool takes only its own namespace: its name is not for others to learn.
        (adapter("acme/legal", poolRef={"name": "dmeo", "namespace": "default"}), "check spec.poolRef"),
    ],
)
def test_a_misspelt_pool_gets_the_nearest_name_that_its_owner_may_use(one: AdapterObject, hint: str) -> None:
    message = next(c.message for c in only(reconcile(world(one))).conditions if c.type == "Accepted")
    assert message.endswith(hint)


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (adapter(poolRef={"name": "nowhere"}), "PoolNotFound"),
        (adapter("acme/legal", poolRef={"name": "demo", "namespace": "default"}), "NamespaceNotAllowed"),
        (adapter(baseModel="other"), "BaseModelMismatch"),
    ],
)
def test_an_adapter_that_is_not_accepted_has_a_reason_and_is_not_in_the_catalog(
    one: AdapterObject, reason: str
) -> None:
    plan = reconcile(world(one))
    assert says(only(plan), "Accepted") == ("False", reason)
    assert says(only(plan), "Ready") == ("False", reason)
    assert says(only(plan), "Loaded") == ("False", reason)
    assert plan.catalog.adapters == ()


def test_the_older_of_two_adapters_keeps_the_model_name() -> None:
    plan = reconcile(world(adapter("b", age=1, modelName="law"), adapter("a", age=2, modelName="law")))
    first, second = plan.adapters
    assert says(first, "Accepted") == ("True", "Valid")
    assert says(second, "Accepted") == ("False", "NameConflict")
    assert "default/b already has the model name law" in condition(second.conditions, "Accepted").message
    assert [entry.name for entry in plan.catalog.adapters] == [name("b")]


def test_two_tenants_may_use_one_name() -> None:
    one = pool("demo", allowedNamespaces={"from": "All"})
    reference = {"name": "demo", "namespace": "default"}
    two = [adapter("acme/legal", poolRef=reference), adapter("zeta/legal", poolRef=reference)]
    assert len(reconcile(view(pools=[one], adapters=two)).catalog.adapters) == 2


def test_without_a_runner_the_state_of_an_adapter_is_unknown() -> None:
    status = only(reconcile(world(adapter(), runners=0)))
    assert [says(status, each) for each in ("ArtifactReady", "Loaded", "Ready")] == [
        ("Unknown", "WaitingForRunner")
    ] * 3
    status = only(reconcile(world(adapter(), known={"legal": SERVING}, runners=0)))
    assert says(status, "ArtifactReady") == ("True", "Verified")
    assert says(status, "Ready") == ("Unknown", "WaitingForRunner")


def test_an_adapter_that_is_being_checked_is_progressing() -> None:
    assert says(only(reconcile(world(adapter()))), "Ready") == ("Unknown", "Checking")


@pytest.mark.parametrize(
    ("code", "given", "reason"),
    [
        ("adapter_fetch_failed", "", "FetchFailed"),
        ("adapter_incompatible", "", "FormatRejected"),
        ("adapter_incompatible", "RankTooLarge", "RankTooLarge"),
        ("adapter_incompatible", "ShapeMismatch", "ShapeMismatch"),
        ("adapter_unproved", "ProofFailed", "ProofFailed"),
        ("adapter_unproved", "NoEffect", "NoEffect"),
        ("adapter_unproved", "NotNumbers", "NotNumbers"),
        ("adapter_incompatible", "ReferenceMismatch", "ReferenceMismatch"),
        ("adapter_incompatible", "RecordMissing", "RecordMissing"),
        ("adapter_incompatible", "TokenizerDiffers", "TokenizerDiffers"),
        ("adapter_incompatible", "ReadingsDiffer", "ReadingsDiffer"),
    ],
)
def test_a_failed_check_is_in_the_adapters_conditions(code: str, given: str, reason: str) -> None:
    failed = AdapterReport(failure_code=code, failure_reason=given, failure_message="rank 64 is above 16")
    plan = reconcile(world(adapter(), known={"legal": failed}))
    certifying = reason not in ("FetchFailed", "FormatRejected", "RankTooLarge")
    for each in ("Certified" if certifying else "ArtifactReady", "Ready"):
        found = condition(only(plan).conditions, each)
        assert (found.status, found.reason, found.message) == ("False", reason, "rank 64 is above 16")
    assert plan.catalog.adapters, "it stays known, so that corrected bytes are looked at"
    assert [(event.type, event.reason) for event in plan.events if event.kind == "LoRAAdapter"] == [("Warning", reason)]


def test_a_failed_new_revision_leaves_the_old_one_serving() -> None:
    both = AdapterReport(serving_digest=DIGEST, failure_code=FETCH_FAILED, failure_message="no such folder")
    status = only(reconcile(world(adapter(), known={"legal": both})))
    assert status.serves
    found = condition(status.conditions, "ArtifactReady")
    assert (found.status, found.message) == ("False", "no such folder. The previous version keeps serving.")


def test_what_may_not_be_meant_is_in_the_status_of_an_adapter_that_serves() -> None:
    artifact = Artifact(digest=DIGEST, warnings=("task_type is SEQ_CLS", "1 of target_modules have no tensors"))
    status = only(reconcile(world(adapter(), known={"legal": AdapterReport(serving_digest=DIGEST, artifact=artifact)})))
    found = condition(status.conditions, "Certified")
    assert (found.status, found.reason) == ("True", "FitsBaseModel")
    assert found.message == "task_type is SEQ_CLS; 1 of target_modules have no tensors"


def test_loaded_counts_the_runners_that_hold_it() -> None:
    wanted = adapter(placement={"minReplicas": 2})
    held = AdapterReport(serving_digest=DIGEST, replicas=(AdapterReplica(runner="r", tier="device", digest=DIGEST),))
    loading = condition(only(reconcile(world(wanted, known={"legal": held}, runners=2))).conditions, "Loaded")
    assert (loading.status, loading.reason) == ("False", "Loading")
    assert loading.message == "the adapter is in device memory on 1 of 2 runners"
    resident = condition(only(reconcile(world(adapter(), known={"legal": held}))).conditions, "Loaded")
    assert (resident.status, resident.reason) == ("True", "Resident")
    assert resident.message == "the adapter is in device memory on 1 runner"


def test_a_revision_that_was_replaced_is_not_where_the_adapter_is_held() -> None:
    places = tuple(AdapterReplica(runner="r", tier="device", digest=one) for one in (DIGEST, "sha256:" + "f" * 64))
    status = only(reconcile(world(adapter(), known={"legal": AdapterReport(serving_digest=DIGEST, replicas=places)})))
    assert (status.loaded, status.replicas) == (1, places[:1])


def test_with_fewer_runners_than_min_replicas_an_adapter_still_serves() -> None:
    wanted = adapter(placement={"minReplicas": 3})
    held = {"legal": AdapterReport(serving_digest=DIGEST, replicas=(AdapterReplica(runner="r", tier="device"),))}
    cache = ResultCache()
    status = only(reconcile(world(wanted, known=held, runners=2), cache))
    assert status.serves
    found = condition(status.conditions, "Loaded")
    assert (found.status, found.reason) == ("False", "NoCapacity")
    assert found.message == (
        "spec.placement.minReplicas asks for 3 runners, but pool default/demo has only 2 ready; raise the pool's "
        "replicas, or lower spec.placement.minReplicas"
    )
    assert says(only(reconcile(world(wanted, known=held, runners=3), cache)), "Loaded") == ("False", "Loading")


def granting(place: View, **tenants: Any) -> View:
    """The same, with a pool that grants so much."""
    return replace(place, pools=(pool("demo", model={"servedName": "base"}, tenants=tenants),))


def test_more_resident_runners_than_the_pool_grants_are_refused() -> None:
    wanted = adapter(placement={"minReplicas": 2})
    held = AdapterReport(serving_digest=DIGEST, replicas=(AdapterReplica(runner="r", tier="device", digest=DIGEST),))
    place = world(wanted, known={"legal": held}, runners=2)
    cache = ResultCache()
    plan = reconcile(granting(place), cache)
    status = only(plan)
    assert (says(status, "Ready"), status.desired) == (("True", "Serving"), 1)
    assert [entry.min_replicas for entry in plan.catalog.adapters] == [1]
    assert condition(status.conditions, "Loaded").message == (
        "spec.placement.minReplicas asks for 2 runners, but pool default/demo grants namespace default 1 for each "
        "adapter; lower spec.placement.minReplicas, or ask the platform team to raise pinnedReplicas in the pool's "
        "spec.tenants"
    )
    assert says(status, "Loaded") == ("False", "NotGranted")
    assert says(status, "Stalled") == ("True", "NotGranted")
    granted = reconcile(granting(place, overrides=[{"namespace": "default", "pinnedReplicas": 2}]), cache)
    assert says(only(granted), "Loaded") == ("False", "Loading")
    assert [entry.min_replicas for entry in granted.catalog.adapters] == [2]


def test_an_adapter_whose_priority_the_pool_does_not_grant_says_so() -> None:
    place = world(adapter(priority="Interactive"))
    found = condition(only(reconcile(granting(place))).conditions, "Accepted")
    assert found.status == "True"
    assert found.message == (
        "spec.priority is Interactive, but pool default/demo grants namespace default at most Standard (maxPriority in "
        "its spec.tenants)"
    )
    granted = granting(place, default={"maxPriority": "Interactive"})
    assert not condition(only(reconcile(granted)).conditions, "Accepted").message


def test_enough_replicas_count_as_loaded_even_if_a_runner_is_not_ready() -> None:
    wanted = adapter(placement={"minReplicas": 2})
    places = tuple(AdapterReplica(runner=letter, tier="device") for letter in "rs")
    known = {"legal": AdapterReport(serving_digest=DIGEST, replicas=places)}
    for ready in (2, 1):
        place = made_ready(world(wanted, known=known, runners=2), ready)
        assert says(only(reconcile(place)), "Loaded") == ("True", "Resident")


def test_a_missing_runner_holds_no_adapter_even_if_the_scheduler_lists_it() -> None:
    """The scheduler waits for it to come back: it may only be out of reach."""
    places = tuple(AdapterReplica(runner=letter, tier="device") for letter in "rs")
    place = world(adapter(), known={"legal": AdapterReport(serving_digest=DIGEST, replicas=places)}, runners=2)
    cache = ResultCache()
    both, first = (only(reconcile(replace(place, instances=place.instances[:count]), cache)) for count in (2, 1))
    assert (both.loaded, len(both.replicas)) == (2, 2)
    assert (first.loaded, [each.runner for each in first.replicas]) == (1, ["r"])


def test_the_number_of_runners_matters_only_to_adapters_that_ask_for_more() -> None:
    cache, known = ResultCache(), {"a": SERVING, "b": SERVING}
    place = world(adapter("a"), adapter("b", placement={"minReplicas": 3}), known=known)
    first = reconcile(place, cache).adapters
    more = reconcile(replace(place, instances=world(runners=2).instances), cache).adapters
    assert more[0] is first[0]
    assert more[1] != first[1]


def test_a_suspended_adapter_is_unloaded_and_kept() -> None:
    plan = reconcile(world(adapter(suspend=True), known={"legal": SERVING}))
    assert says(only(plan), "Ready") == ("True", "Suspended")
    assert not only(plan).serves
    assert says(only(plan), "Loaded") == ("False", "Suspended")
    assert plan.catalog.adapters == ()


def test_a_condition_keeps_its_transition_time_until_its_status_changes() -> None:
    first = only(reconcile(world(adapter())))
    same = world(adapter(conditions=first.conditions))
    same = replace(same, now=later(60))
    assert condition(only(reconcile(same)).conditions, "Ready").last_transition_time == NOW
    after = replace(same, adapter_reports={name("legal"): SERVING})
    assert condition(only(reconcile(after)).conditions, "Ready").last_transition_time == later(60)
    assert condition(only(reconcile(after)).conditions, "Accepted").last_transition_time == NOW


def test_nothing_new_makes_no_event() -> None:
    first = only(reconcile(world(adapter(), known={"legal": SERVING})))
    plan = reconcile(world(adapter(conditions=first.conditions), known={"legal": SERVING}))
    assert [event for event in plan.events if event.kind == "LoRAAdapter"] == []


NO_VOLUME = (
    "pool default/demo mounts no volume adapters for namespace default; ask the platform team to add the volume to "
    "the pool's spec.adapterVolumes"
)
POLICY = {
    "file": ({}, {}, "the pool's runners cannot read file:// sources; use a volume"),
    "scheme": (
        {"source": {"uri": "https://files.example.com/legal/"}},
        {"admission": {"allowedSchemes": ["hf"]}},
        "pool default/demo takes no adapters from https://; use hf://",
    ),
    "image": (
        {"source": {"image": "ghcr.io/acme/legal:v1"}},
        {"admission": {"allowedSchemes": ["hf"]}},
        "pool default/demo takes no adapters from oci://; use hf://",
    ),
    "digest": (
        {"source": {"uri": "hf://acme/legal"}},
        {"admission": {"requireDigest": True}},
        "pool default/demo takes only adapters with a digest; set spec.source.digest",
    ),
    "no volume": (
        {"source": {"persistentVolumeClaim": {"claimName": "adapters", "path": "legal"}}},
        {},
        NO_VOLUME,
    ),
    "another's volume": (
        {"source": {"persistentVolumeClaim": {"claimName": "adapters", "path": "legal"}}},
        {
            "adapterVolumes": [
                {
                    "claimName": "adapters",
                    "allowedNamespaces": {"from": "Selector", "selector": {"matchLabels": {"team": "law"}}},
                }
            ]
        },
        NO_VOLUME,
    ),
}


@pytest.mark.parametrize(("asked", "granted", "sentence"), POLICY.values(), ids=POLICY)
def test_an_adapter_that_the_pool_does_not_admit_is_denied_with_a_reason(
    asked: dict[str, Any], granted: dict[str, Any], sentence: str
) -> None:
    place = view(pools=[pool(**granted)], adapters=[adapter(**asked)], refused_schemes={"file": "use a volume"})
    status = only(reconcile(place))
    found = condition(status.conditions, "Accepted")
    assert (found.status, found.reason, found.message) == ("False", "PolicyDenied", sentence)
    assert condition(status.conditions, "Stalled").message == sentence


def test_a_volume_admits_the_namespaces_that_it_names() -> None:
    one = adapter(source={"persistentVolumeClaim": {"claimName": "adapters", "path": "legal"}})
    place = view(pools=[pool(adapterVolumes=[{"claimName": "adapters"}])], adapters=[one])
    assert says(only(reconcile(place)), "Accepted") == ("True", "Valid")


TENANTS = {"from": "Selector", "selector": {"matchLabels": {"motet.dev/tenant": "true"}}}
ONE_TENANT = {"from": "Selector", "selector": {"matchLabels": {"kubernetes.io/metadata.name": "acme"}}}
IN_A_LIST = {"key": "kubernetes.io/metadata.name", "operator": "In"}


def on_a_volume(path: str, volume: dict[str, Any], *, namespace: str = "acme") -> View:
    """An adapter that names a folder of the claim `shared`, which its pool mounts."""
    one = adapter(
        f"{namespace}/legal",
        poolRef={"name": "demo", "namespace": "default"},
        source={"persistentVolumeClaim": {"claimName": "shared", "path": path}},
    )
    return view(
        pools=[pool(allowedNamespaces={"from": "All"}, adapterVolumes=[{"claimName": "shared", **volume}])],
        adapters=[one],
        namespaces={"acme": {"motet.dev/tenant": "true"}},
    )


@pytest.mark.parametrize("volume", [{"allowedNamespaces": {"from": "All"}}, {"allowedNamespaces": TENANTS}], ids=str)
@pytest.mark.parametrize("path", ["zeta/json", "zeta", "json", "acme-2/json", "shared/acme/json", "ACME/json"])
def test_on_a_shared_volume_a_tenant_may_only_use_its_own_folder(volume: dict[str, Any], path: str) -> None:
    plan = reconcile(on_a_volume(path, volume))
    found = condition(only(plan).conditions, "Accepted")
    assert (found.status, found.reason) == ("False", "PolicyDenied")
    assert found.message == (
        "pool default/demo reads adapters of namespace acme only from the folder acme of volume shared; move the "
        "adapter there, or ask the platform team to change the pool's spec.adapterVolumes"
    )
    assert plan.catalog.adapters == ()


@pytest.mark.parametrize(
    ("volume", "namespace", "path", "folder"),
    [
        ({"allowedNamespaces": {"from": "All"}}, "acme", "acme/json", "acme"),
        ({"allowedNamespaces": {"from": "All"}}, "acme", "acme", "acme"),
        ({}, "default", "zeta/json", ""),
        ({"allowedNamespaces": ONE_TENANT}, "acme", "zeta/json", ""),
        (
            {
                "allowedNamespaces": {
                    "from": "Selector",
                    "selector": {"matchExpressions": [IN_A_LIST | {"values": ["acme"]}]},
                }
            },
            *("acme", "zeta/json", ""),
        ),
        ({"allowedNamespaces": TENANTS, "pathPrefix": ""}, "acme", "zeta/json", ""),
        ({"allowedNamespaces": TENANTS, "pathPrefix": "library"}, "acme", "library/json", "library"),
        (
            {"allowedNamespaces": TENANTS, "pathPrefix": "teams/{namespace}/out"},
            *("acme", "teams/acme/out/json", "teams/acme/out"),
        ),
        ({"allowedNamespaces": TENANTS, "pathPrefix": "team-{namespace}"}, "acme", "team-acme/json", "team-acme"),
    ],
)
def test_the_catalog_names_the_folder_in_which_an_adapter_must_be(
    volume: dict[str, Any], namespace: str, path: str, folder: str
) -> None:
    plan = reconcile(on_a_volume(path, volume, namespace=namespace))
    assert says(only(plan), "Accepted") == ("True", "Valid")
    (entry,) = plan.catalog.adapters
    assert entry.folder == folder


@pytest.mark.parametrize(
    ("volume", "namespace", "path"),
    [
        ({"pathPrefix": "{namespace}"}, "default", "zeta/json"),
        ({"allowedNamespaces": ONE_TENANT, "pathPrefix": "{namespace}"}, "acme", "json"),
        ({"allowedNamespaces": TENANTS, "pathPrefix": "teams/{namespace}/out"}, "acme", "teams/acme/json"),
        ({"allowedNamespaces": TENANTS, "pathPrefix": "library"}, "acme", "acme/json"),
        (
            {
                "allowedNamespaces": {
                    "from": "Selector",
                    "selector": {"matchExpressions": [IN_A_LIST | {"values": ["acme", "zeta"]}]},
                }
            },
            *("acme", "json"),
        ),
    ],
)
def test_a_pool_may_assign_folders_to_tenants(volume: dict[str, Any], namespace: str, path: str) -> None:
    assert says(only(reconcile(on_a_volume(path, volume, namespace=namespace))), "Accepted") == (
        *("False", "PolicyDenied"),
    )


def test_a_full_pool_serves_its_oldest_adapters() -> None:
    young, old = adapter("a", age=2), adapter("b", age=1)
    denied = adapter("c", age=0, baseModel="other")  # takes no place
    place = view(pools=[pool(admission={"maxAdapters": 1})], adapters=[young, old, denied])
    statuses = {status.name.name: says(status, "Accepted")[1] for status in reconcile(place).adapters}
    assert statuses == {"a": "QuotaExceeded", "b": "Valid", "c": "BaseModelMismatch"}


@pytest.mark.parametrize(
    ("bound", "full"), [(1, "1 adapter, and 1 other adapter fills it"), (2, "2 adapters, and 2 other adapters fill it")]
)
def test_a_full_pool_says_how_many_others_fill_it(bound: int, full: str) -> None:
    adapters = [adapter(letter, age=age) for age, letter in enumerate("abc"[: bound + 1])]
    newest = reconcile(view(pools=[pool(admission={"maxAdapters": bound})], adapters=adapters)).adapters[-1]
    assert condition(newest.conditions, "Accepted").message.startswith(f"pool default/demo takes at most {full}; ")


def test_a_namespace_has_as_many_adapters_as_it_is_granted() -> None:
    tenants = {"default": {"maxAdapters": 1}, "overrides": [{"namespace": "acme", "maxAdapters": 2}]}
    own = [adapter("a", age=0), adapter("b", age=1)]
    demo = {"name": "demo", "namespace": "default"}
    others = [adapter(f"acme/{letter}", age=age, poolRef=demo) for age, letter in enumerate("abc", 2)]
    place = pool(tenants=tenants, allowedNamespaces={"from": "All"}, admission={"maxAdapters": 2})
    plan = reconcile(view(pools=[place], adapters=[*own, *others]))
    said = {str(one.name): condition(one.conditions, "Accepted") for one in plan.adapters}
    assert {name: one.reason for name, one in said.items()} == {
        "default/a": "Valid",
        "default/b": "QuotaExceeded",  # and takes no place of the pool
        "acme/a": "Valid",
        "acme/b": "QuotaExceeded",
        "acme/c": "QuotaExceeded",
    }
    assert "takes at most 1 adapter of namespace default, and 1 other" in said["default/b"].message
    assert said["default/b"].message.endswith("raise maxAdapters in the pool's spec.tenants")
    assert said["acme/b"].message.endswith("raise the pool's spec.admission.maxAdapters")


def test_the_catalog_has_the_limits_of_an_adapter() -> None:
    limits = {"requestsPerMinute": 6}
    (entry,) = reconcile(view(pools=[pool()], adapters=[adapter("a", limits=limits)])).catalog.adapters
    assert entry.limits is not None
    assert (entry.limits.requests_per_minute, entry.limits.tokens_per_minute) == (6, None)


def test_the_catalog_has_all_fields_for_the_runner() -> None:
    one = adapter(
        source={"uri": "hf://acme/legal", "revision": "v2", "credentialsSecretRef": {"name": "hub"}, "digest": DIGEST}
    )
    (entry,) = reconcile(view(pools=[pool(admission={"maxAdapterSizeBytes": 10})], adapters=[one])).catalog.adapters
    assert (entry.source_revision, entry.credentials, entry.expected_digest, entry.max_bytes) == (
        *("v2", "default/hub", DIGEST),
        10,
    )


def test_the_catalog_has_the_tenants_of_a_shared_adapter() -> None:
    adapters = [adapter("a"), adapter("b", share=["zeta", "acme", "zeta"]), adapter("c", share=["*"])]
    entries = reconcile(view(pools=[pool()], adapters=adapters)).catalog.adapters
    assert {entry.name.name: entry.share for entry in entries} == {"a": (), "b": ("acme", "zeta"), "c": ("*",)}


@pytest.mark.parametrize(
    ("place", "working", "stalled"),
    [
        (world(adapter(), known={"legal": SERVING}), None, None),
        (world(adapter()), "Checking", None),
        (world(adapter(poolRef={"name": "nowhere"})), "PoolNotFound", None),
        (world(adapter(baseModel="other")), None, "BaseModelMismatch"),
        (world(adapter(suspend=True)), None, None),
        (
            world(adapter(), known={"legal": AdapterReport(failure_code=FETCH_FAILED, failure_passes=True)}),
            "FetchFailed",
            None,
        ),
        # A forbidden address, say: asking again changes nothing.
        (world(adapter(), known={"legal": AdapterReport(failure_code=FETCH_FAILED)}), None, "FetchFailed"),
        (
            world(
                adapter(),
                known={
                    "legal": AdapterReport(
                        failure_code=FETCH_FAILED, failure_reason="CredentialsInvalid", failure_passes=True
                    )
                },
            ),
            None,
            "CredentialsInvalid",
        ),
        (
            world(adapter(), known={"legal": AdapterReport(failure_code="adapter_incompatible")}),
            None,
            "FormatRejected",
        ),
    ],
)
def test_the_conditions_reconciling_and_stalled_are_set(place: View, working: str | None, stalled: str | None) -> None:
    found = {one.type: one.reason for one in only(reconcile(place)).conditions if one.holds}
    assert (found.get("Reconciling"), found.get("Stalled")) == (working, stalled)


def test_the_load_time_is_set_when_a_runner_holds_the_adapter() -> None:
    held = AdapterReport(serving_digest=DIGEST, replicas=(AdapterReplica(runner="r", tier="device", digest=DIGEST),))
    first = only(reconcile(world(adapter(), known={"legal": held})))
    assert (first.loaded, first.last_load) == (1, NOW)
    one = replace(adapter(conditions=first.conditions), last_load=first.last_load, loaded=first.loaded)
    assert only(reconcile(replace(world(one, known={"legal": held}), now=later(60)))).last_load == NOW


@pytest.mark.parametrize(
    ("spec", "runners"),
    [({"placement": {"minReplicas": 2}}, 1), ({"suspend": True}, 1), ({}, 0)],
    ids=["held by fewer than it should", "suspended", "no runner is ready"],
)
def test_the_load_time_changes_only_when_more_runners_hold_the_adapter(spec: dict[str, Any], runners: int) -> None:
    held = AdapterReport(serving_digest=DIGEST, replicas=(AdapterReplica(runner="r", tier="device", digest=DIGEST),))
    place = made_ready(world(adapter(**spec), known={"legal": held}, runners=2), runners)
    first = only(reconcile(place))
    assert first.last_load == NOW
    one = replace(
        place.adapters[0],
        conditions=first.conditions,
        last_load=first.last_load,
        loaded=first.loaded,
        revisions=first.revisions,
    )
    looked_again = replace(place, adapters=(one,), now=later(60))
    assert only(reconcile(looked_again)) == first
    on_another = replace(held, replicas=(*held.replicas, AdapterReplica(runner="s", tier="device", digest=DIGEST)))
    assert only(reconcile(replace(looked_again, adapter_reports={name("legal"): on_another}))).last_load == later(60)


def test_an_unchanged_adapter_is_not_evaluated_again() -> None:
    cache, place = ResultCache(), world(adapter("a"), adapter("b"), known={"a": SERVING})
    first = reconcile(place, cache)
    assert all(one is two for one, two in zip(first.adapters, reconcile(place, cache).adapters, strict=True))
    changed = replace(place, adapter_reports={**place.adapter_reports, name("b"): SERVING})
    again = reconcile(changed, cache)
    assert again.adapters[0] is first.adapters[0]
    assert again.adapters[1].serves


def test_a_pools_status_does_not_make_its_adapters_be_evaluated_again() -> None:
    cache, place = ResultCache(), world(adapter("a"), known={"a": SERVING})
    first = only(reconcile(place, cache))
    (one,) = place.pools
    written = replace(place, pools=(replace(one, wanted=1, conditions=first.conditions),))
    assert only(reconcile(written, cache)) is first
    changed = pool("demo", model={"servedName": "another"}, allowedNamespaces={"from": "Same"})
    assert only(reconcile(replace(place, pools=(changed,)), cache)).base_model == "another"


def test_an_adapter_without_a_pool_is_evaluated_again_when_pools_change() -> None:
    cache, place = ResultCache(), world(adapter("a", poolRef={"name": "demu"}))
    first = only(reconcile(place, cache))
    assert "did you mean default/demo?" in condition(first.conditions, "Accepted").message
    (one,) = place.pools
    assert only(reconcile(replace(place, pools=(replace(one, wanted=1),)), cache)) is first
    nearer = replace(place, pools=(one, replace(pool("dem"), age=1)))
    assert "default/dem" in condition(only(reconcile(nearer, cache)).conditions, "Accepted").message
    assert only(reconcile(replace(place, pools=()), cache)) is not first


def test_a_condition_message_has_a_maximum_length() -> None:
    failed = AdapterReport(failure_code=FETCH_FAILED, failure_message="x" * 5000)
    conditions: tuple[Condition, ...] = only(reconcile(world(adapter(), known={"legal": failed}))).conditions
    assert all(len(each.message) <= MAX_MESSAGE for each in conditions)
