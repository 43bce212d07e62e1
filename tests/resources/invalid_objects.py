"""One object, or one change of an object, for every rule of the CRDs. The API server is asked the same ones."""

from dataclasses import dataclass
from typing import Any

from motet.resources.template import TUNING

ADAPTER: dict[str, Any] = {
    "apiVersion": "motet.dev/v1alpha1",
    "kind": "LoRAAdapter",
    "metadata": {"name": "legal", "namespace": "default"},
    "spec": {
        "poolRef": {"name": "demo"},
        "source": {"uri": "file:///adapters/legal", "digest": f"sha256:{'0' * 64}"},
        "modelName": "legal",
        "baseModel": "base",
        "placement": {"minReplicas": 1, "maxReplicas": 2},
    },
}
POOL: dict[str, Any] = {
    "apiVersion": "motet.dev/v1alpha1",
    "kind": "ServingPool",
    "metadata": {"name": "demo", "namespace": "default"},
    "spec": {
        "model": {"uri": "file:///models/base"},
        "group": "demo",
        "template": {
            "tolerations": [
                {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30},
                {"key": "gpu", "value": "a100"},
            ],
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {"matchExpressions": [{"key": "gpus", "operator": "Gt", "values": ["3"]}]}
                        ]
                    }
                }
            },
        },
    },
}
GOOD = {"LoRAAdapter": ADAPTER, "ServingPool": POOL}

NAME_LENGTH = "name must be 63 characters or fewer (it becomes a label value)"
UNSAFE = "must not contain '..', '@', '?' or '%' (no traversal, no inline credentials, no signed URLs)"
SCHEMES = {
    "LoRAAdapter": "file:// or hf:// or https:// or oci:// or s3://",
    "ServingPool": "file:// or pvc:// or hf:// or https:// or oci:// or s3://",
}
GPUS = (
    "the GPUs in template.resources.limits must be engine.parallel.tensor × engine.parallel.stages; without "
    "engine.parallel, one"
)
A_URI = (
    "must be a URI such as hf://organisation/name or https://files.example.com/legal/, without spaces and control "
    "characters"
)
A_REPOSITORY = "must name a repository of the hub, as hf://organisation/name"
A_BUCKET = "must name a bucket and a folder in it, as s3://bucket/folder"
AN_IMAGE = "must name a registry, a repository in it, and a tag or a digest, as ghcr.io/acme/pirate:v1"
A_REGISTRY = AN_IMAGE.replace("ghcr", "oci://ghcr")
A_CLAIM = "must name a claim and a folder in it, as pvc://models/llama"
A_PATH = "must be a path inside the volume, such as team/legal: no '/' at either end, no part that begins with '.'"
A_PREFIX = (
    "must be a path inside the volume, such as {namespace} or teams/{namespace}: no '/' at either end, no part that "
    "begins with '.'"
)
AN_OBJECT = (
    "must be an object's name: lower-case letters, digits, '-' and '.', beginning and ending with a letter or digit"
)
A_REVISION = "must be a branch, tag or commit: letters, digits, '-', '_', '.' and '/'"
ONE_SOURCE = "exactly one of uri, image and persistentVolumeClaim must be set"
HUB_ONLY = "revision may only be set for an hf:// source"
NO_SECRET = "credentialsSecretRef may only be set for an hf:// or https:// or oci:// or s3:// source"
A_LABEL = "must be a DNS label: lower-case letters, digits and '-', beginning and ending with a letter or digit"
A_TENANT = "must be a namespace, or '*' for all that the pool admits"
ALONE = "'*' must be the only entry"
A_MODEL_NAME = (
    "must be letters, digits, '-', '_' and '.', beginning and ending with a letter or digit; "
    "in requests '/' and ':' separate it from a tenant or a pool"
)
A_SERVED_NAME = "must be letters, digits, '-', '_' and '.', with at most one '/' inside"
A_DIGEST = "must be 'sha256:' and 64 lower-case hex digits"
A_LABEL_KEY = "must be a label key: letters, digits, '-', '_' and '.', optionally after a DNS prefix and '/'"
A_LABEL_VALUE = "must be a label value: letters, digits, '-', '_' and '.', or empty"
ABSOLUTE = "must be absolute in a cluster (file:///models/base); only motet up knows the manifest's folder"
REMOVED = object()


@dataclass(frozen=True)
class InvalidObject:
    kind: str
    field: str
    """Where the complaint is."""

    value: Any
    """What is put at `at`, and breaks the rule."""

    message: str
    at: str = ""
    """Where the value goes, if not at `field`."""

    change: bool = False
    """Only wrong where there was something else before."""

    only_in_a_cluster: bool = False

    @property
    def before(self) -> dict[str, Any]:
        return GOOD[self.kind]

    @property
    def object(self) -> dict[str, Any]:
        return with_value(self.before, self.at or self.field, self.value)

    def __str__(self) -> str:
        return f"{self.kind} {self.field}: {self.message}"


def with_value(good: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    name, _, rest = dotted.partition(".")
    if rest:
        return good | {name: with_value(good.get(name, {}), rest, value)}
    return {key: inner for key, inner in good.items() if key != name} | ({} if value is REMOVED else {name: value})


def of_a_uri(kind: str, field: str) -> list[InvalidObject]:
    return [
        InvalidObject(kind, field, "file:///a b", A_URI),
        InvalidObject(kind, field, "file:///a\x7fb", A_URI),
        InvalidObject(kind, field, "file:///a/../b", UNSAFE),
        InvalidObject(kind, field, "file:///a?token=x", UNSAFE),
        InvalidObject(kind, field, "ftp://host/a", "must begin with " + SCHEMES[kind]),
        InvalidObject(kind, field, "hf://organisation", A_REPOSITORY),
        InvalidObject(kind, field, "s3://-bucket/legal", A_BUCKET),
        InvalidObject(kind, field, "oci://ghcr.io/acme/pirate", A_REGISTRY),
        InvalidObject(kind, field, "oci://me:geheim@ghcr.io/acme/pirate:v1", A_REGISTRY),
        InvalidObject(kind, field, "file://adapters/legal", ABSOLUTE, only_in_a_cluster=True),
    ]


def selecting(**requirement: Any) -> dict[str, Any]:
    return {"from": "Selector", "selector": {"matchExpressions": [{"key": "team", "operator": "In"} | requirement]}}


CLAIM = {"claimName": "adapters", "path": "team/legal"}
_EXPRESSION = "spec.allowedNamespaces.selector.matchExpressions[0]"
_LABELS = "spec.allowedNamespaces.selector.matchLabels"

BROKEN = [
    InvalidObject("LoRAAdapter", "metadata.name", "x" * 64, NAME_LENGTH),
    InvalidObject("LoRAAdapter", "metadata.name", "a.b", A_LABEL),
    InvalidObject("LoRAAdapter", "spec.poolRef", {"name": "other"}, "poolRef is immutable", change=True),
    InvalidObject("LoRAAdapter", "spec.poolRef.name", "a/b", A_LABEL),
    InvalidObject("LoRAAdapter", "spec.poolRef.namespace", "A", A_LABEL),
    InvalidObject("LoRAAdapter", "spec.modelName", "a/b", A_MODEL_NAME),
    InvalidObject("LoRAAdapter", "spec.modelName", "other", "modelName may be set once", change=True),
    InvalidObject("LoRAAdapter", "spec.modelName", REMOVED, "modelName may be set once", change=True),
    InvalidObject("LoRAAdapter", "spec.baseModel", "a/b/c", A_SERVED_NAME),
    InvalidObject(
        "LoRAAdapter", "spec.baseModel", "other", "baseModel is immutable; create a new LoRAAdapter", change=True
    ),
    *of_a_uri("LoRAAdapter", "spec.source.uri"),
    InvalidObject("LoRAAdapter", "spec.source", {"uri": "file:///a", "persistentVolumeClaim": CLAIM}, ONE_SOURCE),
    InvalidObject("LoRAAdapter", "spec.source", {}, ONE_SOURCE),
    InvalidObject("LoRAAdapter", "spec.source", {"image": "ghcr.io/a:1", "persistentVolumeClaim": CLAIM}, ONE_SOURCE),
    InvalidObject("LoRAAdapter", "spec.source", {"uri": "hf://a/b", "image": "ghcr.io/a:1"}, ONE_SOURCE),
    InvalidObject(
        "LoRAAdapter",
        "spec.source",
        {"uri": "hf://a/b", "image": "ghcr.io/a:1", "persistentVolumeClaim": CLAIM},
        ONE_SOURCE,
    ),
    InvalidObject("LoRAAdapter", "spec.source.image", {"image": "acme/pirate:v1"}, AN_IMAGE, at="spec.source"),
    *(
        InvalidObject(
            "LoRAAdapter",
            f"spec.source.persistentVolumeClaim.{name}",
            {"persistentVolumeClaim": CLAIM | {name: value}},
            message,
            at="spec.source",
        )
        for name, value, message in (
            ("claimName", "A", AN_OBJECT),
            ("path", "/a", A_PATH),
            ("path", "a/../b", A_PATH),
            ("path", "a/", A_PATH),
        )
    ),
    InvalidObject(
        "LoRAAdapter",
        "spec.source.revision",
        {"uri": "https://host/a/", "revision": "main"},
        HUB_ONLY,
        at="spec.source",
    ),
    InvalidObject(
        "LoRAAdapter", "spec.source.revision", {"uri": "hf://a/b", "revision": "a b"}, A_REVISION, at="spec.source"
    ),
    InvalidObject(
        "LoRAAdapter",
        "spec.source.credentialsSecretRef",
        {"uri": "file:///a", "credentialsSecretRef": {"name": "hub"}},
        NO_SECRET,
        at="spec.source",
    ),
    InvalidObject(
        "LoRAAdapter",
        "spec.source.credentialsSecretRef.name",
        {"uri": "hf://a/b", "credentialsSecretRef": {"name": "A B"}},
        AN_OBJECT,
        at="spec.source",
    ),
    InvalidObject("LoRAAdapter", "spec.source.digest", "md5", A_DIGEST),
    InvalidObject("LoRAAdapter", "spec.source.digest", REMOVED, "digest may be changed but not removed", change=True),
    InvalidObject(
        "LoRAAdapter",
        "spec.placement.minReplicas",
        {"minReplicas": 3, "maxReplicas": 2},
        "minReplicas must be less than or equal to maxReplicas",
        at="spec.placement",
    ),
    InvalidObject("LoRAAdapter", "spec.share[0]", ["Acme"], A_TENANT, at="spec.share"),
    InvalidObject("LoRAAdapter", "spec.share[1]", ["acme", "zeta-*"], A_TENANT, at="spec.share"),
    InvalidObject("LoRAAdapter", "spec.share", ["*", "acme"], ALONE),
    InvalidObject("LoRAAdapter", "spec.share", ["acme", "*"], ALONE),
    InvalidObject("ServingPool", "metadata.name", "x" * 64, NAME_LENGTH),
    InvalidObject("ServingPool", "metadata.name", "a.b", A_LABEL),
    *of_a_uri("ServingPool", "spec.model.uri"),
    InvalidObject(
        "ServingPool",
        "spec.model.uri",
        "file:///models/other",
        "create a new ServingPool to change the base model",
        change=True,
    ),
    InvalidObject("ServingPool", "spec.model.uri", "pvc://claim", A_CLAIM),
    InvalidObject("ServingPool", "spec.model.revision", "main", HUB_ONLY),
    InvalidObject("ServingPool", "spec.model.revision", "a b", A_REVISION),
    InvalidObject("ServingPool", "spec.model.credentialsSecretRef", {"name": "hub"}, NO_SECRET),
    InvalidObject(
        "ServingPool",
        "spec.autoscaling",
        {"mode": "Builtin", "minReplicas": 1},
        "minReplicas and maxReplicas must be set unless mode is Disabled",
    ),
    InvalidObject(
        "ServingPool",
        "spec.autoscaling.minReplicas",
        {"minReplicas": 3, "maxReplicas": 2},
        "minReplicas must be less than or equal to maxReplicas",
        at="spec.autoscaling",
    ),
    InvalidObject(
        "ServingPool", "spec.tenants.overrides[0].namespace", [{"namespace": "A"}], A_LABEL, at="spec.tenants.overrides"
    ),
    InvalidObject(
        "ServingPool", "spec.adapterVolumes[0].claimName", [{"claimName": "A"}], AN_OBJECT, at="spec.adapterVolumes"
    ),
    InvalidObject(
        "ServingPool",
        "spec.adapterVolumes[0].subPath",
        [{"claimName": "a", "subPath": "../b"}],
        A_PATH,
        at="spec.adapterVolumes",
    ),
    *(
        InvalidObject(
            "ServingPool",
            "spec.adapterVolumes[0].pathPrefix",
            [{"claimName": "a", "pathPrefix": prefix}],
            A_PREFIX,
            at="spec.adapterVolumes",
        )
        for prefix in ("../b", "/b", "b/", "{name}", "{namespace", "a//b", "a/.b", ".", "{namespace}/..")
    ),
    InvalidObject(
        "ServingPool",
        "spec.updateStrategy.maxUnavailable",
        {"maxSurge": 0},
        "maxUnavailable must be greater than 0 when maxSurge is 0",
        at="spec.updateStrategy",
    ),
    InvalidObject(
        "ServingPool",
        "spec.template.env[0].name",
        {"env": [{"name": "MOTET_LOG_LEVEL", "value": "debug"}]},
        "must not begin with MOTET_: those are set from the pool's other fields and by the chart",
        at="spec.template",
    ),
    InvalidObject(
        "ServingPool",
        "spec.template.env[0].name",
        {"env": [{"name": "LD_PRELOAD", "value": "/var/lib/motet/model/own.so"}]},
        "must be one that tunes libraries and loads no code: " + ", ".join(TUNING),
        at="spec.template",
    ),
    InvalidObject(
        "ServingPool",
        "spec.template.env[0].name",
        {"env": [{"name": "1A"}]},
        "must be a variable's name: letters, digits and '_', not beginning with a digit",
        at="spec.template",
    ),
    InvalidObject(
        "ServingPool",
        "spec.template.labels",
        {"labels": {"app.kubernetes.io/component": "gateway"}},
        "must not begin with motet.dev/ or app.kubernetes.io/ or pod-template-hash: Motet and Kubernetes use these "
        "keys themselves",
        at="spec.template",
    ),
    InvalidObject(
        "ServingPool",
        "spec.template.annotations",
        {"annotations": {"container.apparmor.security.beta.kubernetes.io/runner": "unconfined"}},
        "must not begin with motet.dev/ or controller.kubernetes.io/ or "
        "container.apparmor.security.beta.kubernetes.io/: Motet and Kubernetes use these keys themselves",
        at="spec.template",
    ),
    InvalidObject(
        "ServingPool",
        "spec.template.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
        ".nodeSelectorTerms[0].matchExpressions[0].values",
        {
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "In"}]}]
                    }
                }
            }
        },
        "values must be set unless operator is Exists or DoesNotExist",
        at="spec.template",
    ),
    *(
        InvalidObject(
            "ServingPool",
            "spec.template.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
            ".nodeSelectorTerms[0].matchExpressions[0].values",
            {
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {
                            "nodeSelectorTerms": [
                                {"matchExpressions": [{"key": "gpu", "operator": operator, "values": values}]}
                            ]
                        }
                    }
                }
            },
            "values must be one whole number when operator is Gt or Lt",
            at="spec.template",
        )
        for operator, values in (("Gt", ["1", "2"]), ("Lt", ["many"]))
    ),
    *(
        InvalidObject(
            "ServingPool",
            f"spec.template.tolerations[0].{field}",
            {"tolerations": [toleration]},
            message,
            at="spec.template",
        )
        for field, toleration, message in (
            ("operator", {"effect": "NoSchedule"}, "operator must be Exists when key is not set"),
            ("operator", {"key": None}, "operator must be Exists when key is not set"),
            (
                "value",
                {"key": "gpu", "operator": "Exists", "value": "a100"},
                "value must not be set when operator is Exists",
            ),
            (
                "tolerationSeconds",
                {"key": "gpu", "effect": "NoSchedule", "tolerationSeconds": 5},
                "tolerationSeconds may only be set when effect is NoExecute",
            ),
            (
                "tolerationSeconds",
                {"key": "gpu", "tolerationSeconds": 5},
                "tolerationSeconds may only be set when effect is NoExecute",
            ),
        )
    ),
    InvalidObject(
        "ServingPool",
        "spec.model.cache",
        {"uri": "file:///models/base", "cache": {"claimName": "models"}},
        "cache may only be set for a source that is reached over the network",
        at="spec.model",
    ),
    InvalidObject(
        "ServingPool",
        "spec.template.resources.limits.cpu",
        {"resources": {"limits": {"cpu": "many"}}},
        "must be a quantity such as 2, 500m or 16Gi",
        at="spec.template",
    ),
    InvalidObject("ServingPool", "spec.model.servedName", "a/b/c", A_SERVED_NAME),
    InvalidObject("ServingPool", "spec.model.digest", "md5", A_DIGEST),
    InvalidObject(
        "ServingPool",
        "spec.engine.contiguous",
        {"contiguous": True},
        "contiguous needs a preset that admits by promises, not paged-chunk, the default",
        at="spec.engine",
    ),
    InvalidObject(
        "ServingPool",
        "spec.engine.parallel",
        {"parallel": {"tensor": 2}},
        "parallel may only be set when backend is vllm",
        at="spec.engine",
    ),
    InvalidObject(
        "ServingPool",
        "spec.engine.vllm",
        {"vllm": {"enforceEager": True}, "backend": "motet"},
        "vllm may only be set when backend is vllm",
        at="spec.engine",
    ),
    InvalidObject(
        "ServingPool",
        "spec.engine.hostAdaptersMiB",
        {"hostAdaptersMiB": 1, "backend": "vllm"},
        "hostAdaptersMiB may not be set when backend is vllm",
        at="spec.engine",
    ),
    InvalidObject(
        "ServingPool",
        "spec.template.resources",
        {
            "model": {"uri": "file:///models/base"},
            "engine": {"backend": "vllm", "parallel": {"tensor": 2, "stages": 2}},
            "template": {"resources": {"limits": {"nvidia.com/gpu": 2}}},
        },
        GPUS,
        at="spec",
    ),
    InvalidObject(
        "ServingPool",
        "spec.template.resources",
        {
            "model": {"uri": "file:///models/base"},
            "engine": {"backend": "vllm"},
            "template": {"resources": {"limits": {"amd.com/gpu": "2"}}},
        },
        GPUS,
        at="spec",
    ),
    InvalidObject("ServingPool", "spec.group", "a/b", A_LABEL),
    InvalidObject("ServingPool", "spec.group", "other", "group is immutable", change=True),
    InvalidObject("ServingPool", "spec.group", REMOVED, "group is immutable", change=True),
    InvalidObject(
        "ServingPool",
        "spec.engine.maxResidentAdapters",
        {"maxResidentAdapters": 9, "maxCachedAdapters": 8},
        "maxResidentAdapters must be less than or equal to maxCachedAdapters",
        at="spec.engine",
    ),
    InvalidObject(
        "ServingPool",
        "spec.allowedNamespaces.selector",
        {"from": "Selector"},
        "selector must be set when from is Selector",
        at="spec.allowedNamespaces",
    ),
    InvalidObject(
        "ServingPool",
        "spec.allowedNamespaces.selector",
        {"from": "All", "selector": {}},
        "selector must not be set unless from is Selector",
        at="spec.allowedNamespaces",
    ),
    InvalidObject(
        "ServingPool",
        f"{_EXPRESSION}.values",
        selecting(operator="In"),
        "values must be set when operator is In or NotIn",
        at="spec.allowedNamespaces",
    ),
    InvalidObject(
        "ServingPool",
        f"{_EXPRESSION}.values",
        selecting(operator="Exists", values=["a"]),
        "values must not be set when operator is Exists or DoesNotExist",
        at="spec.allowedNamespaces",
    ),
    InvalidObject(
        "ServingPool",
        f"{_EXPRESSION}.key",
        selecting(key="a b", values=["a"]),
        A_LABEL_KEY,
        at="spec.allowedNamespaces",
    ),
    InvalidObject(
        "ServingPool",
        f"{_EXPRESSION}.values[0]",
        selecting(values=["a b"]),
        A_LABEL_VALUE,
        at="spec.allowedNamespaces",
    ),
    InvalidObject(
        "ServingPool",
        f"{_LABELS}.team",
        {"from": "Selector", "selector": {"matchLabels": {"team": "a b"}}},
        A_LABEL_VALUE,
        at="spec.allowedNamespaces",
    ),
    InvalidObject(
        "ServingPool",
        _LABELS,
        {"from": "Selector", "selector": {"matchLabels": {"x" * 318: "a"}}},
        "keys must be 317 characters or fewer",
        at="spec.allowedNamespaces",
        only_in_a_cluster=True,  # offline says the same of the key itself, with its length
    ),
]
