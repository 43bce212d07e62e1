"""The fields of a runner's pod that a pool may set."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from motet.resources.affinity import Affinity
from motet.resources.fields import (
    MAX_REPLICAS,
    Annotations,
    EnvName,
    LabelKey,
    Labels,
    LabelValue,
    ObjectReference,
    Quantities,
    ResourceModel,
    UniqueBy,
)
from motet.resources.validation_rules import Rule, quoted


class Resources(ResourceModel):
    """The resources that a runner's container requests and may use."""

    limits: Quantities = Field(default_factory=dict)
    """The most that it may use, such as `nvidia.com/gpu: 1`."""

    requests: Quantities = Field(default_factory=dict)
    """What it needs at least. A node must have that much free."""


class Toleration(ResourceModel):
    """A taint of nodes that runners tolerate."""

    key: LabelKey | None = None
    """The key of the taint. Absent: all keys, with `operator: Exists`."""

    operator: Literal["Equal", "Exists"] = "Equal"
    """How the taint's value is compared."""

    value: LabelValue | None = None
    """The value of the taint."""

    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The effect of the taint. Absent: all effects."""

    toleration_seconds: Annotated[int, Field(ge=0, le=86_400)] | None = None
    """How long a runner stays on a node that gets a taint with NoExecute."""

    rules: ClassVar = (
        Rule(
            field="operator",
            cel="has(self.key) || self.operator == 'Exists'",
            message="operator must be Exists when key is not set",
            holds=lambda toleration: toleration.key is not None or toleration.operator == "Exists",
        ),
        Rule(
            field="value",
            cel="self.operator != 'Exists' || !has(self.value) || self.value == ''",
            message="value must not be set when operator is Exists",
            reason="FieldValueForbidden",
            holds=lambda toleration: toleration.operator != "Exists" or not toleration.value,
        ),
        Rule(
            field="tolerationSeconds",
            cel="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            message="tolerationSeconds may only be set when effect is NoExecute",
            reason="FieldValueForbidden",
            holds=lambda toleration: toleration.toleration_seconds is None or toleration.effect == "NoExecute",
        ),
    )


class TopologySpread(ResourceModel):
    """How runners are spread over domains of nodes. Only the pool's own runners are counted."""

    max_skew: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1
    """By how many runners two domains may differ."""

    topology_key: LabelKey
    """The node label whose values are the domains, such as topology.kubernetes.io/zone."""

    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = "ScheduleAnyway"
    """What to do with a runner that can only run where it would exceed `maxSkew`."""


TUNING = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "MALLOC_ARENA_MAX",
    "MKL_NUM_THREADS",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "OMP_PLACES",
    "OMP_PROC_BIND",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_LOGS",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TZ",
)
"""Variables that change only the speed or the log output of libraries. None of them names a file to load, a program, a
server, or a device outside the pod. Otherwise the author of a pool could run code in its runners, and read their TLS
certificate, their token and the files of all tenants."""


class EnvironmentVariable(ResourceModel):
    """One variable of the runner's process."""

    name: EnvName
    """The name of the variable: one that tunes libraries and loads no code, such as OMP_NUM_THREADS or NCCL_DEBUG. The
    chart's value `runner.env` can set any variable."""

    value: Annotated[str, Field(max_length=4096)] = ""
    """The value. Never put a secret here: everybody who can read the pool can read it."""

    rules: ClassVar = (
        Rule(
            field="name",
            cel="!self.name.startsWith('MOTET_')",
            message="must not begin with MOTET_: those are set from the pool's other fields and by the chart",
            reason="FieldValueForbidden",
            holds=lambda variable: not variable.name.startswith("MOTET_"),
        ),
        Rule(
            field="name",
            cel=f"self.name.startsWith('MOTET_') || self.name in [{', '.join(map(quoted, TUNING))}]",
            message="must be one that tunes libraries and loads no code: " + ", ".join(TUNING),
            reason="FieldValueForbidden",
            holds=lambda variable: variable.name.startswith("MOTET_") or variable.name in TUNING,
        ),
    )


def _not_reserved(field: str, *prefixes: str) -> Rule:
    """A rule against keys with these prefixes. The operator, NetworkPolicies and Kubernetes use them to find pods."""
    free = " && ".join(f"!key.startsWith({quoted(one)})" for one in prefixes)
    return Rule(
        field=field,
        cel=f"!has(self.{field}) || self.{field}.all(key, {free})",
        message="must not begin with " + " or ".join(prefixes) + ": Motet and Kubernetes use these keys themselves",
        reason="FieldValueForbidden",
        holds=lambda template: not any(key.startswith(prefixes) for key in getattr(template, field)),
    )


class PodTemplate(ResourceModel):
    """The fields of a runner's pod that a pool may set. It cannot set others, such as host paths or privileges."""

    labels: Labels = Field(default_factory=dict)
    """Labels of the pool's Deployments and their pods, for queues, quotas and costs. Labels of the platform and of
    Motet override them."""

    annotations: Annotations = Field(default_factory=dict)
    """Annotations of the pods, for tools that read them. Annotations of the platform override them."""

    resources: Resources = Resources()
    node_selector: Labels = Field(default_factory=dict)
    """Labels that a runner's node must have."""

    tolerations: Annotated[list[Toleration], Field(max_length=32)] = Field(default_factory=list)
    """Taints of nodes that runners tolerate."""

    topology_spread_constraints: Annotated[list[TopologySpread], Field(max_length=8)] = Field(default_factory=list)
    """How runners are spread over zones and nodes."""

    affinity: Affinity | None = None
    """On which nodes runners run, and near which pods."""

    scheduler_name: ObjectReference | None = None
    """The name of another scheduler for the pods. Absent: Kubernetes' default scheduler."""

    priority_class_name: ObjectReference | None = None
    """The PriorityClass of the pods. It decides which pods run when nodes have too few resources."""

    runtime_class_name: ObjectReference | None = None
    """The RuntimeClass of the pods, such as `nvidia`."""

    service_account_name: ObjectReference | None = None
    """A ServiceAccount for the pods, instead of the chart's. Tenants must grant it access to their Secrets. The chart's
    policy `poolAccounts` refuses it if you may neither create pods in the pool's namespace nor impersonate the
    account."""

    env: Annotated[
        list[EnvironmentVariable],
        Field(max_length=64),
        UniqueBy("name"),
    ] = Field(default_factory=list)
    """Variables of the runner's process, also with `motet up`."""

    rules: ClassVar = (
        _not_reserved("labels", "motet.dev/", "app.kubernetes.io/", "pod-template-hash"),
        _not_reserved(
            "annotations",
            "motet.dev/",
            "controller.kubernetes.io/",
            "container.apparmor.security.beta.kubernetes.io/",
        ),
    )
