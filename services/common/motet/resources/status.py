"""The status of adapters and pools, as the operator writes it. A reader ignores fields of a newer operator.

A status has no list that grows with the number of other objects: it counts runners and does not name them.
"""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from motet.resources.fields import MAX_REPLICAS, Digest, DnsLabel, ResourceModel, ServedName

MAX_MESSAGE = 1024
MAX_MODULES = 64
MAX_WARNINGS = 8
MAX_KERNELS = 8
MAX_REVISIONS = 5
MAX_COUNT = 2**53 - 1
"""The largest whole number that every JSON parser can represent exactly."""

ADAPTER_CONDITIONS = {
    "Ready": "a request for this adapter would be served now, or somebody wants it not to be (`Suspended`, "
    "`ScaledToZero`); otherwise it has the reason of the first condition below that is not True",
    "Accepted": "the pool exists and accepts this adapter: its namespace, base model and name",
    "ArtifactReady": "the files are fetched, and digest and format are verified",
    "Certified": "a runner has checked that the adapter fits the base model and changes its answers",
    "Loaded": "at least `placement.minReplicas` runners have the adapter in memory",
    "Reconciling": "work is in progress; otherwise the condition is absent",
    "Stalled": "nothing will happen until somebody changes something",
}
POOL_CONDITIONS = {
    "Ready": "all desired runners serve with the newest revision, or none is desired (`ScaledToZero`)",
    "Accepted": "the pool may run: its namespace is prepared, and its group agrees on the base model",
    "Available": "at least one runner serves",
    "Progressing": "runners are starting, leaving or being replaced",
    "AdaptersHealthy": "no adapter of the pool has failed",
    "ScalingActive": "the number of runners is set by the scheduler (`Builtin`) or by your autoscaler (`External`)",
    "SloKept": "one request alone keeps `spec.slo.tpotMilliseconds`; absent without such a target",
    "TenantsApplied": "what the pool says in `spec.tenants` is what the pool that decides for the group grants; absent "
    "without `spec.tenants`, and for the deciding pool itself",
    "Reconciling": "work is in progress; otherwise the condition is absent",
    "Stalled": "nothing will happen until somebody changes something",
}

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
MAX_RUNNERS = 2 * MAX_REPLICAS
"""Twice the highest number in a manifest, because a rollout adds new runners before old ones leave."""

Runners = Annotated[int, Field(ge=0, le=MAX_RUNNERS)]

Fraction = Annotated[str, Field(max_length=32)]


class StatusModel(ResourceModel):
    """A part of a status."""

    model_config = ConfigDict(extra="ignore")


class Condition(StatusModel):
    """A condition, in the form that Kubernetes uses. An absent condition means Unknown."""

    type: Annotated[str, Field(max_length=64, pattern=r"^[A-Z][A-Za-z]*$")]
    """What the condition is about."""

    status: Literal["True", "False", "Unknown"]
    """Whether the condition is true."""

    reason: Annotated[str, Field(max_length=128, pattern=r"^[A-Z][A-Za-z0-9]*$")]
    """Why, in one word that programs may compare."""

    message: Annotated[str, Field(max_length=MAX_MESSAGE)]
    """Why, in a sentence, and what to do next."""

    last_transition_time: Annotated[datetime, Field(strict=False)]
    """When `status` last changed."""

    observed_generation: Count | None = None
    """The generation of the object that the condition is about."""

    @property
    def holds(self) -> bool:
        return self.status == "True"


Conditions = Annotated[
    tuple[Condition, ...],
    Field(
        max_length=16,
        strict=False,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    ),
]


class Artifact(StatusModel):
    """The files of the revision that serves, as a runner found them."""

    digest: Digest | None = None
    """The digest of its configuration and weights, and of its own chat template and tokenizer files, if it has any."""

    short_digest: Annotated[str, Field(max_length=12)] | None = None
    """The first twelve hex digits of the digest, for `kubectl get`."""

    size_bytes: Count | None = None
    """The size of all files together."""

    rank: Annotated[int, Field(ge=0, le=65_536)] | None = None
    """The largest rank of its matrices."""

    alpha: Annotated[str, Field(max_length=32)] | None = None
    """The value of alpha, as text, because it may have a fraction."""

    target_modules: Annotated[
        tuple[Annotated[str, Field(max_length=253)], ...], Field(max_length=MAX_MODULES, strict=False)
    ] = ()
    """The layers that the adapter changes."""

    format: Annotated[str, Field(max_length=32)] | None = None
    """The format of the files, such as `peft`."""

    checker: Count | None = None
    """The version of the check that the files passed. A runner with another version checks them again."""

    base_digest: Digest | None = None
    """The digest of the base model that they were checked against."""

    proved_by: Annotated[
        tuple[Annotated[str, Field(max_length=64)], ...], Field(max_length=MAX_KERNELS, strict=False)
    ] = ()
    """The runners' kernels that have proved it: what they compute with it follows from its files. Empty: its engine
    proves nothing, or it serves on until it is proved again."""

    recorded_answers: Literal["Agree", "Differ"] | None = None
    """Whether the answers that were recorded where it was trained are those of this base model. Absent: it has
    none."""

    template_digest: Digest | None = None
    """The digest of the chat template that it brings, as runners read it. Absent: its prompts are rendered with the
    base model's."""

    warnings: Annotated[
        tuple[Annotated[str, Field(max_length=253)], ...], Field(max_length=MAX_WARNINGS, strict=False)
    ] = ()
    """What is served and may not be meant, such as target modules without tensors."""


class AdapterRevision(StatusModel):
    """A revision of an adapter, and what became of it."""

    source: Annotated[str, Field(max_length=2048)]
    """Where its files came from."""

    revision: Annotated[str, Field(max_length=253)] | None = None
    """The branch, tag or commit of a hub's repository."""

    digest: Digest | None = None
    """The digest of its files; absent if they were not fetched."""

    verdict: Literal["Checking", "Serving", "Draining", "Replaced", "Refused"]
    """`Draining`: it was replaced, and requests that began before still use it."""

    reason: Annotated[str, Field(max_length=128)] | None = None
    """Why it was refused, or, while it is `Checking`, why it is tried again; in one word."""

    time: Annotated[datetime, Field(strict=False)]
    """When it began to serve or was refused, or when its check began."""


class LoRAAdapterStatus(StatusModel):
    """The status of an adapter. It counts the runners that hold the adapter and does not name them."""

    observed_generation: Count | None = None
    """The generation of the object that this status is about."""

    conditions: Conditions = ()
    """The conditions, one of each type."""

    model_name: Annotated[str, Field(max_length=127)] | None = None
    """The name in requests of any tenant: tenant/modelName."""

    base_model: ServedName | None = None
    """The base model that the pool serves."""

    artifact: Artifact | None = None
    revisions: Annotated[tuple[AdapterRevision, ...], Field(max_length=MAX_REVISIONS, strict=False)] | None = None
    """The last revisions, the newest first. Two are live while a new one is checked, or requests still use the one
    before."""

    desired_replicas: Runners | None = None
    """How many runners should hold the adapter."""

    loaded_replicas: Runners | None = None
    """How many runners hold the adapter, counted up to 2000: a group may have several pools."""

    placement_summary: Fraction | None = None
    """Loaded and desired replicas, such as 2/3. Only the first number if the adapter is loaded on demand."""

    last_load_time: Annotated[datetime, Field(strict=False)] | None = None
    """When a runner last loaded the adapter."""


class AdapterCounts(StatusModel):
    """The numbers of the pool's adapters."""

    registered: Count = 0
    """How many adapters refer to the pool and are accepted."""

    loaded: Count = 0
    """How many of them a runner holds."""

    failed: Count = 0
    """How many of them cannot be served."""

    summary: Fraction | None = None
    """Loaded and registered adapters, such as 118/200."""


class Slots(StatusModel):
    """The slots for adapters in device memory."""

    total: Count = 0
    """How many adapters fit into the device memory of all runners together."""

    used: Count = 0
    """How many slots have an adapter."""


class ServingPoolStatus(StatusModel):
    """The status of a pool."""

    observed_generation: Count | None = None
    """The generation of the object that this status is about."""

    conditions: Conditions = ()
    """The conditions, one of each type."""

    served_name: ServedName | None = None
    """The name of the base model in requests."""

    desired_replicas: Runners | None = None
    """How many runners are wanted now."""

    replicas: Runners | None = None
    """How many runners exist."""

    staying_replicas: Runners | None = None
    """How many runners stay: they neither leave, nor exist only during a rollout. Autoscalers read this as the current
    number of replicas."""

    ready_replicas: Runners | None = None
    """How many runners serve."""

    updated_replicas: Runners | None = None
    """How many runners serve with the newest revision."""

    draining_replicas: Runners | None = None
    """How many runners finish their requests and get no new ones."""

    replica_summary: Fraction | None = None
    """Ready and wanted runners, such as 3/4."""

    selector: Annotated[str, Field(max_length=1024)] | None = None
    """The label selector of the pool's pods, for a HorizontalPodAutoscaler."""

    adapters: AdapterCounts | None = None
    """The numbers of the pool's adapters."""

    slots: Slots | None = None
    """Slots for adapters in device memory."""

    decides_for_group: bool | None = None
    """Whether the spec of this pool decides for its group: the base model, and who may use it and its adapters."""

    current_revision: DnsLabel | None = None
    """The revision that serves."""

    update_revision: DnsLabel | None = None
    """The revision that is being rolled out. Without a rollout it is the current one."""
