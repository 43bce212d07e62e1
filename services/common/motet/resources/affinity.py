"""On which nodes a pool's runners run, and near which pods, with the names that Kubernetes uses."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from motet.resources.fields import LabelKey, LabelValue, ResourceModel
from motet.resources.namespaces import LabelSelector
from motet.resources.validation_rules import Rule

Weight = Annotated[int, Field(ge=1, le=100)]


class NodeRequirement(ResourceModel):
    """A requirement for one label of a node."""

    key: LabelKey
    """The name of the label."""

    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """How the label is compared."""

    values: Annotated[list[LabelValue], Field(max_length=64)] = Field(default_factory=list)
    """For `In` and `NotIn`: the values to compare with. For `Gt` and `Lt`: one whole number."""

    rules: ClassVar = (
        Rule(
            field="values",
            cel="(self.operator in ['Exists', 'DoesNotExist']) == (!has(self.values) || self.values.size() == 0)",
            message="values must be set unless operator is Exists or DoesNotExist",
            holds=lambda asked: (asked.operator in ("Exists", "DoesNotExist")) == (not asked.values),
        ),
        Rule(
            field="values",
            cel="!(self.operator in ['Gt', 'Lt']) || !has(self.values) || self.values.size() == 0 || "
            "(self.values.size() == 1 && self.values[0].matches('^[0-9]+$'))",
            message="values must be one whole number when operator is Gt or Lt",
            holds=lambda asked: (
                asked.operator not in ("Gt", "Lt")
                or not asked.values
                or (len(asked.values) == 1 and asked.values[0].isdecimal())
            ),
        ),
    )


class NodeTerm(ResourceModel):
    """Nodes that meet every requirement."""

    match_expressions: Annotated[list[NodeRequirement], Field(min_length=1, max_length=16)]
    """Requirements that must all hold."""


class NodeTerms(ResourceModel):
    """Nodes that meet one term."""

    node_selector_terms: Annotated[list[NodeTerm], Field(min_length=1, max_length=8)]
    """A node must meet at least one of them."""


class PreferredNodes(ResourceModel):
    """Nodes that are better than others."""

    weight: Weight
    """How much this preference counts, from 1 to 100."""

    preference: NodeTerm


class NodeAffinity(ResourceModel):
    """Which nodes, by their labels."""

    required_during_scheduling_ignored_during_execution: NodeTerms | None = None
    """Runners run only on these nodes."""

    preferred_during_scheduling_ignored_during_execution: Annotated[list[PreferredNodes], Field(max_length=8)] = Field(
        default_factory=list
    )
    """Runners run on these nodes if they can."""


class PodTerm(ResourceModel):
    """A domain of nodes (such as one node or one zone) in which there are certain pods of the pool's namespace."""

    label_selector: LabelSelector
    """The pods, by their labels."""

    topology_key: LabelKey
    """The node label whose values are the domains, such as kubernetes.io/hostname."""


class PreferredPods(ResourceModel):
    """Domains that are better than others."""

    weight: Weight
    """How much this preference counts, from 1 to 100."""

    pod_affinity_term: PodTerm


class PodAffinity(ResourceModel):
    """Which domains, by the pods in them."""

    required_during_scheduling_ignored_during_execution: Annotated[list[PodTerm], Field(max_length=8)] = Field(
        default_factory=list
    )
    """Always: with `podAffinity` runners run only in these domains, with `podAntiAffinity` in none of them."""

    preferred_during_scheduling_ignored_during_execution: Annotated[list[PreferredPods], Field(max_length=8)] = Field(
        default_factory=list
    )
    """If possible: with `podAffinity` runners run in these domains, with `podAntiAffinity` in others."""


class Affinity(ResourceModel):
    """On which nodes runners run, and near which pods. Only pods of the pool's namespace can be named."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    """Runners run in domains with these pods."""

    pod_anti_affinity: PodAffinity | None = None
    """Runners run in domains without these pods."""
