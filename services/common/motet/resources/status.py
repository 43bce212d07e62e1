"""The status of adapters and pools, as the operator writes it. A reader ignores fields of a newer operator.

A status has no list that grows with the number of other objects: it counts runners and does not name them.
"""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from motet.resources.fields import MAX_REPLICAS, Digest, DnsLabel, ResourceModel, ServedName

MAX_MESSAGE = 1024
MAX_MODULES = 64
MAX_COUNT = 2**53 - 1
"""The largest whole number that every JSON parser can represent exactly."""

ADAPTER_CONDITIONS = {
    "Ready": "a request for this adapter would be served now; otherwise it has the reason of the first condition below "
    "that is not True",
    "Accepted": "the pool exists and accepts this adapter: its namespace, base model and name",
    "ArtifactReady": "the files are fetched, and digest and format are verified",
    "Certified": "a runner has checked that the adapter fits the base model and changes its answers",
    "Loaded": "as many runners hold it as `placement.minReplicas` asks for",
    "Reconciling": "work is in progress; absent when there is none",
    "Stalled": "nothing will happen until somebody changes something",
}
POOL_CONDITIONS = {
    "Ready": "all desired runners serve with the newest revision",
    "Accepted": "the pool may run: its namespace is prepared, and its group agrees on the base model",
    "Available": "at least one runner serves",
    "Progressing": "runners are starting, leaving or being replaced",
    "AdaptersHealthy": "no adapter of the pool has failed",
    "ScalingActive": "the number of runners follows demand, and no other client writes it",
    "Reconciling": "work is in progress; absent when there is none",
    "Stalled": "nothing will happen until somebody changes something",
}

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Runners = Annotated[int, Field(ge=0, le=2 * MAX_REPLICAS)]
"""At most twice the highest number in a manifest, because a rollout adds new runners before old ones leave."""

Fraction = Annotated[str, Field(max_length=32)]


class StatusModel(ResourceModel):
    """A part of a status."""

    model_config = ConfigDict(extra="ignore")


class Condition(StatusModel):
    """As Kubernetes has them. An absent condition means Unknown."""

    type: Annotated[str, Field(max_length=64, pattern=r"^[A-Z][A-Za-z]*$")]
    """What is answered."""

    status: Literal["True", "False", "Unknown"]
    """The answer."""

    reason: Annotated[str, Field(max_length=128, pattern=r"^[A-Z][A-Za-z0-9]*$")]
    """Why, in one word that programs may compare."""

    message: Annotated[str, Field(max_length=MAX_MESSAGE)]
    """Why, in a sentence, and what to do next."""

    last_transition_time: Annotated[datetime, Field(strict=False)]
    """When `status` last changed."""

    observed_generation: Count | None = None
    """The generation of the object that the answer is about."""

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
    """The bytes that serve, as a runner found them."""

    digest: Digest | None = None
    """Of configuration, weights, and a chat template or tokenizer files of its own."""

    short_digest: Annotated[str, Field(max_length=12)] | None = None
    """Its first twelve hex digits, for `kubectl get`."""

    size_bytes: Count | None = None
    """Of the files together."""

    rank: Annotated[int, Field(ge=0, le=65_536)] | None = None
    """The largest of its matrices."""

    alpha: Annotated[str, Field(max_length=32)] | None = None
    """As text, since it need not be a whole number."""

    target_modules: Annotated[
        tuple[Annotated[str, Field(max_length=253)], ...], Field(max_length=MAX_MODULES, strict=False)
    ] = ()
    """The layers that it changes."""

    format: Annotated[str, Field(max_length=32)] | None = None
    """How it is written, such as `peft`."""

    checker: Count | None = None
    """The version of the checks that it passed. A runner with another version checks it again."""


class LoRAAdapterStatus(StatusModel):
    """What the operator found. An adapter's places are counted, not listed."""

    observed_generation: Count | None = None
    """The generation of the object that this status is about."""

    conditions: Conditions = ()
    """Answers, one of each type."""

    model_name: Annotated[str, Field(max_length=127)] | None = None
    """What clients of any tenant call it: tenant/modelName."""

    base_model: ServedName | None = None
    """What the pool serves."""

    artifact: Artifact | None = None
    desired_replicas: Runners | None = None
    """Runners that should hold it."""

    loaded_replicas: Runners | None = None
    """Runners that hold it."""

    placement_summary: Fraction | None = None
    """Loaded of desired, such as 2/3; only the first where it loads on demand."""

    last_load_time: Annotated[datetime, Field(strict=False)] | None = None
    """When a runner last loaded it."""


class AdapterCounts(StatusModel):
    """The pool's adapters."""

    registered: Count = 0
    """Adapters that refer to the pool and are accepted."""

    loaded: Count = 0
    """Those of them that a runner holds."""

    failed: Count = 0
    """Those of them that cannot be served."""

    summary: Fraction | None = None
    """Loaded of registered, such as 118/200."""


class Slots(StatusModel):
    """Places for adapters in device memory."""

    total: Count = 0
    """Adapters that fit into the runners' device memory."""

    used: Count = 0
    """Those that are there."""


class ServingPoolStatus(StatusModel):
    """What the operator found."""

    observed_generation: Count | None = None
    """The generation of the object that this status is about."""

    conditions: Conditions = ()
    """Answers, one of each type."""

    served_name: ServedName | None = None
    """What clients call the base model."""

    desired_replicas: Runners | None = None
    """Runners that are wanted now, whoever decided it."""

    replicas: Runners | None = None
    """Runners that exist."""

    staying_replicas: Runners | None = None
    """Those that stay: neither leaving nor there for a time beside what they replace. An autoscaler takes it for how
    many there are."""

    ready_replicas: Runners | None = None
    """Runners that serve."""

    updated_replicas: Runners | None = None
    """Runners that serve with the newest revision."""

    draining_replicas: Runners | None = None
    """Runners that finish what they have and take nothing new."""

    replica_summary: Fraction | None = None
    """Ready of wanted, such as 3/4."""

    selector: Annotated[str, Field(max_length=1024)] | None = None
    """Which pods are the pool's; a HorizontalPodAutoscaler asks for it."""

    adapters: AdapterCounts | None = None
    """Adapters of the pool, counted."""

    slots: Slots | None = None
    """Room for adapters in device memory."""

    current_revision: DnsLabel | None = None
    """The revision that serves."""

    update_revision: DnsLabel | None = None
    """The revision that is being rolled out; equal to the current one when nothing is."""
