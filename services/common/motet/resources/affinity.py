"""On which nodes a pool's runners run, and near which pods, with the names that Kubernetes uses."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from motet.resources.fields import LabelKey, LabelValue, ResourceModel
from motet.resources.namespaces import LabelSelector
from motet.resources.validation_rules import Rule

Weight = Annotated[int, Field(ge=1, le=100)]


class NodeRequirement(ResourceModel):
    """One thing asked of a node's labels."""

    key: LabelKey
    """Which label."""

    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """How the label is judged."""

    values: Annotated[list[LabelValue], Field(max_length=64)] = Field(default_factory=list)
    """For `In` and `NotIn`: the values compared with; for `Gt` and `Lt`: one whole number."""

    rules: ClassVar = (
        Rule(
            field="values",
            cel="(self.operator in ['Exists', 'DoesNotExist']) == (!has(self.values) || self.values.size() == 0)",
            message="values must be set unless operator is Exists or DoesNotExist",
            holds=lambda asked: (asked.operator in ("Exists", "DoesNotExist")) == (not asked.values),
        ),
    )


class NodeTerm(ResourceModel):
    """Nodes that meet every requirement."""

    match_expressions: Annotated[list[NodeRequirement], Field(min_length=1, max_length=16)]
    """Requirements that must all hold."""


class NodeTerms(ResourceModel):
    """Nodes that meet one term."""

    node_selector_terms: Annotated[list[NodeTerm], Field(min_length=1, max_length=8)]
    """Any of them will do."""


class PreferredNodes(ResourceModel):
    """Nodes that are better than others."""

    weight: Weight
    """How much."""

    preference: NodeTerm


class NodeAffinity(ResourceModel):
    """By the labels of nodes."""

    required_during_scheduling_ignored_during_execution: NodeTerms | None = None
    """No others."""

    preferred_during_scheduling_ignored_during_execution: Annotated[list[PreferredNodes], Field(max_length=8)] = Field(
        default_factory=list
    )
    """These first."""


class PodTerm(ResourceModel):
    """A place where pods of the pool's namespace are."""

    label_selector: LabelSelector
    """Which pods."""

    topology_key: LabelKey
    """The node label that makes a place, such as kubernetes.io/hostname."""


class PreferredPods(ResourceModel):
    """Places that are better than others."""

    weight: Weight
    """How much."""

    pod_affinity_term: PodTerm


class PodAffinity(ResourceModel):
    """By the pods that are there."""

    required_during_scheduling_ignored_during_execution: Annotated[list[PodTerm], Field(max_length=8)] = Field(
        default_factory=list
    )
    """No other places."""

    preferred_during_scheduling_ignored_during_execution: Annotated[list[PreferredPods], Field(max_length=8)] = Field(
        default_factory=list
    )
    """These first."""


class Affinity(ResourceModel):
    """Which nodes, and beside which pods. Pods of other namespaces cannot be named."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    """Where these pods are."""

    pod_anti_affinity: PodAffinity | None = None
    """Where these pods are not."""
