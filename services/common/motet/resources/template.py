"""What of a runner's pod a pool may choose."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from motet.resources.rules import Rule
from motet.resources.shapes import (
    MAX_REPLICAS,
    EntriesDiffer,
    EnvName,
    LabelKey,
    Labels,
    LabelValue,
    ObjectReference,
    Quantities,
    Shape,
)


class Resources(Shape):
    """What a runner's container asks for and may use."""

    limits: Quantities = Field(default_factory=dict)
    """At most so much, such as `nvidia.com/gpu: 1`."""

    requests: Quantities = Field(default_factory=dict)
    """At least so much; a node must have it."""


class Toleration(Shape):
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


class TopologySpread(Shape):
    """How runners are spread. The pool's own runners are counted."""

    max_skew: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1
    """By how much places may differ."""

    topology_key: LabelKey
    """The node label that makes a place, such as topology.kubernetes.io/zone."""

    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = "ScheduleAnyway"
    """What happens to a runner that would make it worse."""


class EnvironmentVariable(Shape):
    """One variable of the runner's process."""

    name: EnvName
    """What the process reads."""

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
    )


class PodTemplate(Shape):
    """What of a runner's pod a pool may choose. What is not here (host paths, privileges) cannot be abused."""

    resources: Resources = Resources()
    node_selector: Labels = Field(default_factory=dict)
    """Labels that a runner's node must have."""

    tolerations: Annotated[list[Toleration], Field(max_length=32)] = Field(default_factory=list)
    """Taints that keep no runner away."""

    topology_spread_constraints: Annotated[list[TopologySpread], Field(max_length=8)] = Field(default_factory=list)
    """How runners are spread over zones and machines."""

    priority_class_name: ObjectReference | None = None
    """Who goes first when room is short."""

    runtime_class_name: ObjectReference | None = None
    """The container runtime's configuration, such as `nvidia`."""

    service_account_name: ObjectReference | None = None
    """Instead of the chart's. Tenants grant their Secrets to the one that is used."""

    env: Annotated[
        list[EnvironmentVariable],
        Field(max_length=64),
        EntriesDiffer("name"),
    ] = Field(default_factory=list)
    """Variables of the runner's process, locally too."""
