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
    """What a runner's container asks for and may use."""

    limits: Quantities = Field(default_factory=dict)
    """At most so much, such as `nvidia.com/gpu: 1`."""

    requests: Quantities = Field(default_factory=dict)
    """At least so much; a node must have it."""


class Toleration(ResourceModel):
    """A taint that keeps no runner away."""

    key: LabelKey | None = None
    """Of the taint; absent: every one."""

    operator: Literal["Equal", "Exists"] = "Equal"
    """How the taint's value is compared."""

    value: LabelValue | None = None
    """Of the taint."""

    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Of the taint; absent: every one."""

    toleration_seconds: Annotated[int, Field(ge=0, le=86_400)] | None = None
    """How long a taint that evicts is borne."""


class TopologySpread(ResourceModel):
    """How runners are spread. The pool's own runners are counted."""

    max_skew: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1
    """By how much places may differ."""

    topology_key: LabelKey
    """The node label that makes a place, such as topology.kubernetes.io/zone."""

    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = "ScheduleAnyway"
    """What happens to a runner that would make it worse."""


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
    """What the process reads; one that tunes libraries and loads no code, such as OMP_NUM_THREADS or NCCL_DEBUG. The
    chart's `runner.env` sets any."""

    value: Annotated[str, Field(max_length=4096)] = ""
    """What it says; no secrets, since everybody who may read the pool may read it."""

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
        message="must not begin with " + " or ".join(prefixes) + ": by those others know the pod",
        reason="FieldValueForbidden",
        holds=lambda template: not any(key.startswith(prefixes) for key in getattr(template, field)),
    )


class PodTemplate(ResourceModel):
    """What of a runner's pod a pool may choose. What is not here (host paths, privileges) cannot be abused."""

    labels: Labels = Field(default_factory=dict)
    """Of the pool's Deployments and their pods, for queues, quotas and costs. The platform's and Motet's own win."""

    annotations: Annotations = Field(default_factory=dict)
    """Of the pods, for what acts on pods. The platform's win."""

    resources: Resources = Resources()
    node_selector: Labels = Field(default_factory=dict)
    """Labels that a runner's node must have."""

    tolerations: Annotated[list[Toleration], Field(max_length=32)] = Field(default_factory=list)
    """Taints that keep no runner away."""

    topology_spread_constraints: Annotated[list[TopologySpread], Field(max_length=8)] = Field(default_factory=list)
    """How runners are spread over zones and machines."""

    affinity: Affinity | None = None
    """Which nodes, and beside which pods."""

    scheduler_name: ObjectReference | None = None
    """Who places the pods, instead of Kubernetes' own scheduler."""

    priority_class_name: ObjectReference | None = None
    """Who goes first when room is short."""

    runtime_class_name: ObjectReference | None = None
    """The container runtime's configuration, such as `nvidia`."""

    service_account_name: ObjectReference | None = None
    """Instead of the chart's. Tenants grant their Secrets to the one that is used. Who may neither create pods in the
    pool's namespace nor impersonate the account is refused by the chart's policy `poolAccounts`."""

    env: Annotated[
        list[EnvironmentVariable],
        Field(max_length=64),
        UniqueBy("name"),
    ] = Field(default_factory=list)
    """Variables of the runner's process, locally too."""

    rules: ClassVar = (
        _not_reserved("labels", "motet.dev/", "app.kubernetes.io/", "pod-template-hash"),
        _not_reserved(
            "annotations",
            "motet.dev/",
            "controller.kubernetes.io/",
            "container.apparmor.security.beta.kubernetes.io/",
        ),
    )
