"""Offline validation: one test a rule, with the exact words and the exact place."""

import itertools
from pathlib import Path

import pytest

import motet_cli
from motet.resources import (
    LoRAAdapter,
    Manifest,
    ManifestPosition,
    ServingPool,
    files_of,
    forbidden_changes,
    read_all,
    read_file,
    read_text,
)
from motet.resources.planned_fields import PLANNED_FIELDS, PLANNED_VALUES
from motet.resources.template import TUNING
from motet.resources.validation import fields_at

ADAPTER = """\
apiVersion: motet.dev/v1alpha1
kind: LoRAAdapter
metadata: {name: legal, namespace: acme}
spec:
  poolRef: {name: demo}
  source: {uri: "file://adapters/legal"}
"""
POOL = """\
apiVersion: motet.dev/v1alpha1
kind: ServingPool
metadata: {name: demo}
spec:
  model: {uri: "file:///models/base"}
"""
DIGESTED = ADAPTER.replace('legal"}', f'legal", digest: "sha256:{"0" * 64}"}}')
LONG = "x" * 64
A_LABEL = "must be a DNS label: lower-case letters, digits and '-', beginning and ending with a letter or digit"
A_MODEL_NAME = (
    "must be letters, digits, '-', '_' and '.', beginning and ending with a letter or digit; "
    "in requests '/' and ':' separate it from a tenant or a pool"
)
UNSAFE = "must not contain '..', '@', '?' or '%' (no traversal, no inline credentials, no signed URLs)"
PRESETS = "paged-chunk, paged-promises, orca, s3, oracle, punica, ft-max, request-level"
KINDS = "LoRAAdapter, ServingPool, Namespace, Secret"


def said(text: str) -> list[str]:
    """All complaints, without the file's name."""
    reading = read_text(text, file="f")
    assert bool(reading.problems) != bool(reading.manifests) or not text.strip()
    return [str(problem).removeprefix("f:") for problem in reading.problems]


def one(text: str) -> Manifest:
    reading = read_text(text, file="f")
    assert reading.problems == ()
    (manifest,) = reading.manifests
    return manifest


def pool(**spec: str) -> str:
    return POOL + "".join(f"  {field}: {value}\n" for field, value in spec.items())


def adapter(**spec: str) -> str:
    return ADAPTER + "".join(f"  {field}: {value}\n" for field, value in spec.items())


def test_a_small_adapter_gets_its_defaults() -> None:
    resource = one(ADAPTER).resource
    assert isinstance(resource, LoRAAdapter)
    assert str(resource.object_name) == "acme/legal"
    assert resource.model_name == "legal"
    assert str(resource.group) == "acme/demo"
    assert resource.spec.priority == "Standard"
    assert (resource.spec.placement.min_replicas, resource.spec.placement.max_replicas) == (0, 1000)
    assert not resource.spec.suspend


def test_a_small_pool_gets_its_defaults() -> None:
    resource = one(POOL).resource
    assert isinstance(resource, ServingPool)
    assert str(resource.object_name) == "default/demo"
    assert str(resource.group) == "default/demo"
    assert resource.served_name == "demo"
    assert resource.spec.replicas == 1
    assert resource.spec.role == "Mixed"
    assert resource.spec.allowed_namespaces.from_ == "Same"
    assert resource.spec.drain_timeout_seconds == 30
    assert resource.spec.engine.model_dump(exclude_none=True) == {}
    grant = resource.spec.granted.grant_to("acme")
    assert (grant.max_priority, grant.pinned_replicas) == ("Standard", 1)


def test_the_bundled_manifests_are_valid() -> None:
    reading = read_all(files_of(Path(motet_cli.__file__).parent / "bundled"))
    assert reading.problems == ()
    assert {manifest.resource.kind for manifest in reading.manifests} == {"ServingPool", "LoRAAdapter"}


@pytest.mark.parametrize(
    ("field", "complaint"),
    [
        ("replicas: -1", "replicas: must be at least 0, not -1"),
        ("replicas: 1001", "replicas: must be at most 1000, not 1001"),
        ('replicas: "2"', "replicas: must be a whole number, not '2'"),
        ("replicas: 1.5", "replicas: must be a whole number, not 1.5"),
        ("replica: 2", "replica: is not a known field; did you mean replicas?"),
        ("role: mixed", "role: must be Mixed, not 'mixed'; did you mean Mixed?"),
        ("role: Token", "role: not yet: Token (pools that only generate tokens) comes later"),
        ("group: a/b", f"group: {A_LABEL}; not 'a/b'"),
        (f"group: {LONG}", "group: must be 63 characters or fewer, not 64"),
        ("drainTimeoutSeconds: 86401", "drainTimeoutSeconds: must be at most 86400, not 86401"),
        ("engine: {maxLoraRank: 0}", "engine.maxLoraRank: must be at least 1, not 0"),
        ("engine: {maxLoraRank: 513}", "engine.maxLoraRank: must be at most 512, not 513"),
        ("engine: {kvCacheMib: 64}", "engine.kvCacheMib: is not a known field; did you mean kvCacheMiB?"),
        (
            "engine: {preset: orka}",
            f"engine.preset: must be one of {PRESETS}, not 'orka'; did you mean orca?",
        ),
        ("engine: {preset: flexgen}", "engine.preset: not yet: flexgen (models larger than their device) comes later"),
        ("engine: {backend: sglang}", "engine.backend: not yet: sglang (SGLang as the engine of a runner) comes later"),
        (
            "engine: {dtype: fp16}",
            "engine.dtype: must be one of auto, float32, bfloat16, float16, not 'fp16'",
        ),
        (
            "engine: {memoryUtilizationPercent: 100}",
            "engine.memoryUtilizationPercent: must be at most 99, not 100",
        ),
        (
            "engine: {maxResidentAdapters: 9, maxCachedAdapters: 8}",
            "engine.maxResidentAdapters: maxResidentAdapters must be less than or equal to maxCachedAdapters",
        ),
        (
            "engine: {contiguous: true}",
            "engine.contiguous: contiguous needs a preset that admits by promises, not paged-chunk, the default",
        ),
        ("engine: {promiseQuantile: 85}", "engine.promiseQuantile: must be one of 50, 80, 90, 95, not 85"),
        (
            "chat: {reasoningFormat: thought}",
            "chat.reasoningFormat: must be one of think, mistral, granite, seed, not 'thought'",
        ),
        (
            "chat: {toolFormat: llama}",
            "chat.toolFormat: must be one of hermes, llama3, mistral, pythonic, not 'llama'; did you mean llama3?",
        ),
        ("slo: {tpotMilliseconds: 0}", "slo.tpotMilliseconds: must be at least 1, not 0"),
        ("slo: {tpotMilliseconds: -5}", "slo.tpotMilliseconds: must be at least 1, not -5"),
        ("slo: {tpotMilliseconds: 60001}", "slo.tpotMilliseconds: must be at most 60000, not 60001"),
        ("tenants: {default: {weight: 0}}", "tenants.default.weight: must be at least 1, not 0"),
        (
            "tenants: {overrides: [{namespace: acme, weight: -2}]}",
            "tenants.overrides[0].weight: must be at least 1, not -2",
        ),
        ("tenants: {default: {weight: 1001}}", "tenants.default.weight: must be at most 1000, not 1001"),
        (
            "slo: {ttftMilliseconds: 500}",
            "slo.ttftMilliseconds: not yet: targets for the first token come later; remove this field for now",
        ),
        ("engine: 7", "engine: must be a mapping, not a number"),
        (
            "allowedNamespaces: {from: Selector}",
            "allowedNamespaces.selector: selector must be set when from is Selector",
        ),
        (
            "allowedNamespaces: {from: All, selector: {matchLabels: {a: b}}}",
            "allowedNamespaces.selector: selector must not be set unless from is Selector",
        ),
        ("allowedNamespaces: {from: Off}", "allowedNamespaces.from: must be one of Same, All, Selector, not Off"),
        (
            "autoscaling: {mode: Builtin}",
            "autoscaling: minReplicas and maxReplicas must be set unless mode is Disabled",
        ),
        (
            "template: {env: [{name: TZ}, {name: TZ}]}",
            "template.env: two entries have the same name: TZ; remove one or rename it",
        ),
        (
            "template: {volumes: []}",
            "template.volumes: not yet: further volumes of pods come later; remove this field for now",
        ),
    ],
)
def test_a_pool_that_breaks_a_rule_is_refused_with_it(field: str, complaint: str) -> None:
    (found,) = said(POOL + f"  {field}\n")
    assert found.partition(": ")[2] == f"ServingPool default/demo: spec.{complaint}"


@pytest.mark.parametrize(
    "variable",
    [
        # Code of the author's own, from a volume, in a process with everybody's bytes and a token.
        *("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"),
        *("CUDA_INJECTION64_PATH", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "TORCHINDUCTOR_CACHE_DIR", "GCONV_PATH"),
        # Somebody else's server, to which the token or what is fetched goes.
        *("KUBERNETES_SERVICE_HOST", "HTTPS_PROXY", "https_proxy", "SSL_CERT_FILE", "HF_ENDPOINT", "HOSTALIASES"),
        # Devices of other pods on the node.
        *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_MIG_CONFIG_DEVICES"),
        *("POD_NAME", "HOME", "GLIBC_TUNABLES", "OMP_TOOL_LIBRARIES", "KMP_AFFINITY_FORMAT"),
    ],
)
def test_variables_that_load_code_or_change_peers_are_refused(variable: str) -> None:
    (found,) = said(POOL + f"  template: {{env: [{{name: {variable}, value: /var/lib/motet/model/own.so}}]}}\n")
    assert "spec.template.env[0].name: must be one that tunes libraries and loads no code" in found


def test_a_pool_may_tune_its_libraries() -> None:
    listed = ", ".join(f"{{name: {each}, value: '1'}}" for each in TUNING)
    assert said(POOL + f"  template: {{env: [{listed}]}}\n") == []


@pytest.mark.parametrize(
    ("field", "complaint"),
    [
        ("suspend: yes please", "suspend: must be true or false, not 'yes please'"),
        ("priority: High", "priority: must be one of Interactive, Standard, Batch, not 'High'"),
        (
            "chat: {toolFormat: xml}",
            "chat.toolFormat: must be one of hermes, llama3, mistral, pythonic, not 'xml'",
        ),
        ("modelName: no", 'modelName: must be text, not no; write "no" in quotes'),
        (
            "modelName: a/b",
            f"modelName: {A_MODEL_NAME}; not 'a/b'",
        ),
        (
            "placement: {minReplicas: 3, maxReplicas: 2}",
            "placement.minReplicas: minReplicas must be less than or equal to maxReplicas",
        ),
        ("slo: {}", "slo: not yet: latency targets come later; remove this field for now"),
        ("limits: {requestsPerMinute: 0}", "limits.requestsPerMinute: must be at least 1, not 0"),
        ("baseMode: x", "baseMode: is not a known field; did you mean baseModel?"),
    ],
)
def test_an_adapter_that_breaks_a_rule_is_refused_with_it(field: str, complaint: str) -> None:
    (found,) = said(ADAPTER + f"  {field}\n")
    assert found.partition(": ")[2] == f"LoRAAdapter acme/legal: spec.{complaint}"


@pytest.mark.parametrize(
    ("field", "place"),
    [
        ("replica: 2", "6:3"),  # a wrong name: the name
        ("replicas: many", "6:13"),  # a wrong value: the value
        ("engine: {maxLoraRank: 0}", "6:25"),
        ("engine: 7", "6:11"),
        ("allowedNamespaces: {from: Selector}", "6:22"),  # something missing: what it is missing from
        ("tenants: {overrides: [{namespace: acme, weight: 0}]}", "6:51"),
        ("autoscaling: {mode: Builtin}", "6:3"),
    ],
)
def test_a_complaint_points_at_line_and_column(field: str, place: str) -> None:
    (found,) = said(POOL + f"  {field}\n")
    assert found.startswith(f"{place}: ")


SOURCE_COMPLAINTS = {
    '{uri: "file://a/../b"}': UNSAFE,
    '{uri: "file://a?token=x"}': UNSAFE,
    '{uri: "/models/a"}': "must be a URI such as hf://organisation/name or "
    "https://files.example.com/legal/, without spaces and control characters; not '/models/a'",
    '{uri: "ftp://host/a"}': "must begin with file:// or hf:// or https:// or oci:// or s3://",
    '{uri: "hf://repo"}': "must name a repository of the hub, as hf://organisation/name",
    '{uri: "s3://a"}': "must name a bucket and a folder in it, as s3://bucket/folder",
    '{uri: "oci://host/a"}': "must name a registry, a repository in it, and a tag or a digest, as oci://ghcr.io/acme/pirate:v1",
}


@pytest.mark.parametrize("source", SOURCE_COMPLAINTS)
def test_a_source_that_cannot_be_read_is_refused(source: str) -> None:
    text = ADAPTER.replace('{uri: "file://adapters/legal"}', source)
    assert said(text) == [f"6:17: LoRAAdapter acme/legal: spec.source.uri: {SOURCE_COMPLAINTS[source]}"]


def test_a_digest_is_sha256_in_hex() -> None:
    text = ADAPTER.replace('legal"}', 'legal", digest: md5}')
    assert said(text) == [
        "6:50: LoRAAdapter acme/legal: spec.source.digest: must be 'sha256:' and 64 lower-case hex digits; not 'md5'"
    ]
    assert one(ADAPTER.replace('legal"}', f'legal", digest: "sha256:{"0" * 64}"}}'))


def test_a_missing_field_is_reported_at_its_place() -> None:
    assert said("apiVersion: motet.dev/v1alpha1\nkind: LoRAAdapter\nmetadata: {name: a}\nspec: {}\n") == [
        "4:7: LoRAAdapter default/a: spec.poolRef: is required",
        "4:7: LoRAAdapter default/a: spec.source: is required",
    ]


def test_all_errors_are_reported_at_once() -> None:
    assert len(said(POOL + "  replicas: x\n  role: y\n  what: z\n")) == 3


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "kind: LoraAdapter",
            f"1:7: kind: must be one of {KINDS}, not LoraAdapter; did you mean LoRAAdapter?",
        ),
        ("kind: Deployment", f"1:7: kind: must be one of {KINDS}, not Deployment"),
        ("apiVersion: v1", f"1:1: kind: must be set to one of {KINDS}"),
        ("kind: ServingPool", "1:1: apiVersion: must be motet.dev/v1alpha1 for a ServingPool"),
        (
            "kind: ServingPool\napiVersion: motet.dev/v1",
            "2:13: apiVersion: must be motet.dev/v1alpha1: this version of Motet does not read motet.dev/v1",
        ),
        ("- a\n- b", "1:1: must be an object with apiVersion, kind and metadata, not a list"),
        ("a: [", "2:1: is not YAML: did not find expected node content"),
        (
            "a:\n\tb: c",
            "2:1: is not YAML: found character that cannot start any token; YAML is indented with spaces, not tabs",
        ),
        ("a: &x [*x]", f"1:1: kind: must be set to one of {KINDS}"),
        ("{? [a] : b}", "1:4: is not YAML: found unhashable key"),
        ("spec: {a: 1, b: 2, a: 3}", "1:20: a: is set twice; first in line 1"),
    ],
)
def test_a_foreign_kind_is_named(text: str, complaint: str) -> None:
    assert said(text) == [complaint]


@pytest.mark.parametrize(
    ("scalar", "kind"),
    [
        *[(each, "timestamp") for each in ("2026-02-30", "2024-13-45", "2024-01-01T99:00:00Z", "!!timestamp x")],
        *[(each, "int") for each in ("0x_", "0b_", "!!int abc", "1" * 5000, "0x" + "f" * 5000)],
        *[("!!bool maybe", "bool"), ("!!float x", "float")],
    ],
)
def test_a_value_that_only_looks_like_a_date_or_a_number_is_a_problem_at_its_place(scalar: str, kind: str) -> None:
    complaint = f"is not YAML: this is no {kind}; write it in quotes if it is text"
    assert said(POOL + f"  template: {{annotations: {{released: {scalar}}}}}\n") == [f"6:38: {complaint}"]
    assert said(POOL + f"  ? {scalar}\n  : x\n") == [f"6:5: {complaint}"]


def test_a_document_of_aliases_in_aliases_is_answered_at_once() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40)]
    assert said("\n".join([*lines, "kind: ServingPool"])) == [
        "1:1: apiVersion: must be motet.dev/v1alpha1 for a ServingPool"
    ]


def test_too_deep_nesting_is_refused() -> None:
    assert "is nested too deeply" in said("a: " + "[" * 500 + "]" * 500)[0]


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 100_000, "- " * 100_000])
def test_a_hundred_thousand_brackets_do_not_crash_the_process(text: str) -> None:
    assert "is nested too deeply" in said(text)[0]


def test_empty_documents_are_ignored() -> None:
    assert said("") == []
    assert len(read_text(f"---\n# nothing\n---\n{ADAPTER}---\n").manifests) == 1


def test_fields_added_by_kubectl_are_ignored() -> None:
    text = ADAPTER.replace("namespace: acme", "namespace: acme, uid: u, resourceVersion: '7', generation: 3")
    assert one(text + "status: {conditions: []}\n")


def test_a_namespace_and_a_secret_are_accepted() -> None:
    text = (
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: acme, labels: {team: law}}\n---\n"
        "apiVersion: v1\nkind: Secret\nmetadata: {name: hub, namespace: acme}\nstringData: {token: hush}\n"
    )
    namespace, secret = read_text(text).manifests
    assert namespace.key == ("Namespace", "/acme")
    assert "hush" not in repr(secret.resource)


SECRET = "apiVersion: v1\nkind: Secret\nmetadata: {name: hub, namespace: acme}\n"
HIDDEN = "write it in quotes"


@pytest.mark.parametrize(
    ("rest", "complaint"),
    [
        ("stringData: {token: 4711}", f"4:21: Secret acme/hub: stringData.token: must be text, not a number; {HIDDEN}"),
        ("data: {token: 47.11}", f"4:15: Secret acme/hub: data.token: must be text, not a number; {HIDDEN}"),
        ("stringData: {4711: x}", "4:13: Secret acme/hub: stringData[4711]: must be text, not a number"),
        ("stringData: {token: [4711]}", "4:14: Secret acme/hub: stringData.token: must be text, not a list"),
        ("stringData: 4711", "4:13: Secret acme/hub: stringData: must be a mapping, not a number"),
        ("type: 4711", f"4:7: Secret acme/hub: type: must be text, not a number; {HIDDEN}"),
        ("immutable: 4711", "4:12: Secret acme/hub: immutable: must be true or false, not a number"),
        ("stringData: {token: 0x_}", f"4:21: is not YAML: this is no int; {HIDDEN} if it is text"),
        (
            "stringData: {token: !4711 }",
            "4:21: is not YAML: this tag is not known; write text that begins with '!' in quotes",
        ),
    ],
)
def test_a_value_of_a_secret_is_never_shown(rest: str, complaint: str) -> None:
    assert said(SECRET + rest) == [complaint]


@pytest.mark.parametrize(
    "text",
    [
        *("kind: $", "kind: ServingPool\napiVersion: motet.dev/$", "a$: 1\na$: 2"),
        POOL.replace("name: demo", "name: $"),
        POOL.replace("name: demo", "name: demo, namespace: $"),
        *(
            POOL + f"  {rest}\n"
            for rest in ("role: $", "group: $", "$: 1", "replicas: 1$", "replicas: 0x$", "role: 0x$")
        ),
        *(
            ADAPTER + f"  {rest}\n"
            for rest in (
                "modelName: 1$",
                "modelName: 0x$",
                "suspend: $",
                "modelName: !$",
                "0x$: 1",
                "1$: 1",
                "? 0x$\n  : 1",
            )
        ),
    ],
)
def test_a_problem_is_short_whatever_stands_there(text: str) -> None:
    for problem in said(text.replace("$", "1" * 4200)):
        assert len(problem) < 500
        assert "1" * 61 not in problem


def test_an_object_declared_twice_is_refused_with_both_places(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(ADAPTER)
    (tmp_path / "b.yaml").write_text(f"{POOL}---\n{ADAPTER}")
    (problem,) = read_all(files_of(tmp_path)).problems
    assert str(problem) == (
        f"{tmp_path}/b.yaml:7:1: LoRAAdapter acme/legal: is declared twice: first at {tmp_path}/a.yaml:1:1; remove one"
    )


def test_a_folder_means_the_manifests_directly_in_it(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yml", "c.json", ".hidden.yaml", "readme.md"):
        (tmp_path / name).write_text("")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.yaml").write_text("")
    assert [path.name for path in files_of(tmp_path)] == ["a.yaml", "b.yml", "c.json"]


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    (problem,) = read_file(tmp_path / "a.yaml").problems
    assert problem.message == "is not UTF-8 text: byte 0 cannot be read"


def test_a_selector_reads_labels_as_kubernetes_does() -> None:
    text = POOL + (
        "  allowedNamespaces:\n    from: Selector\n    selector:\n      matchLabels: {team: law}\n"
        "      matchExpressions: [{key: stage, operator: NotIn, values: [test]}]\n"
    )
    resource = one(text).resource
    assert isinstance(resource, ServingPool)
    allowed = resource.spec.allowed_namespaces
    assert allowed.admits("a", own="default", labels={"team": "law", "stage": "live"})
    assert allowed.admits("a", own="default", labels={"team": "law"})
    assert not allowed.admits("a", own="default", labels={"team": "law", "stage": "test"})
    assert not allowed.admits("default", own="default", labels={})


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (ADAPTER, ADAPTER.replace("name: demo", "name: other"), "poolRef is immutable"),
        (adapter(baseModel="a"), adapter(baseModel="b"), "baseModel is immutable; create a new LoRAAdapter"),
        (adapter(modelName="a"), adapter(modelName="b"), "modelName may be set once"),
        (POOL, POOL.replace("base", "best"), "create a new ServingPool to change the base model"),
        (POOL, pool(group="g"), "group is immutable"),
        (DIGESTED, ADAPTER, "digest may be changed but not removed"),
    ],
)
def test_a_forbidden_change_has_the_message_of_the_crd(before: str, after: str, sentence: str) -> None:
    assert [found for _, found in forbidden_changes(one(before).resource, one(after).resource)] == [sentence]
    assert forbidden_changes(one(before).resource, one(before).resource) == []


def test_a_name_may_be_set_once_and_a_source_may_change() -> None:
    assert forbidden_changes(one(ADAPTER).resource, one(adapter(modelName="a")).resource) == []
    assert forbidden_changes(one(ADAPTER).resource, one(ADAPTER.replace("adapters/legal", "other")).resource) == []


def test_the_share_list_of_an_adapter_may_change() -> None:
    texts = [ADAPTER, *(ADAPTER + f"  share: {said}\n" for said in ("[acme]", '["*"]', "[]"))]
    for before, after in itertools.permutations(texts, 2):
        assert forbidden_changes(one(before).resource, one(after).resource) == []


def test_an_adapter_is_shared_with_64_at_most() -> None:
    names = [f"tenant-{number}" for number in range(65)]
    resource = one(ADAPTER + f"  share: {names[1:]}\n").resource
    assert isinstance(resource, LoRAAdapter)
    assert resource.spec.share == names[1:]
    (problem,) = read_text(ADAPTER + f"  share: {names}\n").problems
    assert "64" in problem.message


def test_what_recorded_answers_decide_has_no_default() -> None:
    resource = one(ADAPTER + "  verify: {require: None, onFailure: Refuse}\n").resource
    assert isinstance(resource, LoRAAdapter)
    assert resource.spec.verify is not None
    assert (resource.spec.verify.require, resource.spec.verify.on_failure) == ("None", "Refuse")
    for given in ("", "  verify: {}\n", "  verify: {require: null}\n"):
        resource = one(ADAPTER + given).resource
        assert isinstance(resource, LoRAAdapter)
        verify = resource.spec.verify
        assert verify is None or (verify.require, verify.on_failure) == (None, None)
    for wrong in (
        "{require: record}",
        "{onFailure: Ignore}",
        "{require: true}",
        "{tolerance: 1}",
        "{onFailure: [Warn]}",
    ):
        (problem,) = read_text(ADAPTER + f"  verify: {wrong}\n").problems
        assert problem.field.startswith("spec.verify")


def test_places_point_at_the_value() -> None:
    assert one(ADAPTER).place_of(("spec", "source", "uri")) == ManifestPosition("f", 6, 17)


@pytest.mark.parametrize("kind", PLANNED_FIELDS)
def test_no_field_is_both_implemented_and_planned(kind: str) -> None:
    model = {"LoRAAdapter": LoRAAdapter, "ServingPool": ServingPool}[kind]
    for dotted in [*PLANNED_FIELDS[kind], *PLANNED_VALUES.get(kind, {})]:
        *parents, last = dotted.split(".")
        known = fields_at(model, tuple(parents))
        assert known, f"{dotted} hangs in the air"
        assert (last in known) == (dotted in PLANNED_VALUES.get(kind, {}))
