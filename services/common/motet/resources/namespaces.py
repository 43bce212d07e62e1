"""Selects namespaces: all of them, one, or those with certain labels."""

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from motet.resources.fields import ALL_NAMESPACES, LabelKey, Labels, LabelValue, ResourceModel
from motet.resources.validation_rules import Rule


class LabelRequirement(ResourceModel):
    """A requirement for one label."""

    key: LabelKey
    """The name of the label."""

    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How the label is compared."""

    values: Annotated[list[LabelValue], Field(max_length=64)] = Field(default_factory=list)
    """For `In` and `NotIn`: the values to compare with."""

    rules: ClassVar = (
        Rule(
            field="values",
            cel="self.operator in ['Exists', 'DoesNotExist'] || (has(self.values) && self.values.size() > 0)",
            message="values must be set when operator is In or NotIn",
            reason="FieldValueRequired",
            holds=lambda asked: asked.operator in ("Exists", "DoesNotExist") or bool(asked.values),
        ),
        Rule(
            field="values",
            cel="self.operator in ['In', 'NotIn'] || !has(self.values) || self.values.size() == 0",
            message="values must not be set when operator is Exists or DoesNotExist",
            reason="FieldValueForbidden",
            holds=lambda asked: asked.operator in ("In", "NotIn") or not asked.values,
        ),
    )

    def matches(self, labels: dict[str, str]) -> bool:
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels


NAME = "kubernetes.io/metadata.name"
"""The label with the namespace's name. Kubernetes puts it on every namespace."""


class LabelSelector(ResourceModel):
    """Selects by labels. Both fields must match."""

    match_labels: Labels = Field(default_factory=dict)
    """Labels and their values, all of which must be there."""

    match_expressions: Annotated[list[LabelRequirement], Field(max_length=16)] = Field(default_factory=list)
    """Requirements that must all hold."""

    model_config = ConfigDict(json_schema_extra={"x-kubernetes-map-type": "atomic"})

    def matches(self, labels: dict[str, str]) -> bool:
        return self.match_labels.items() <= labels.items() and all(
            requirement.matches(labels) for requirement in self.match_expressions
        )

    @property
    def picks_one_only(self) -> bool:
        """Whether the selector asks for one namespace by its name."""
        return NAME in self.match_labels or any(
            asked.key == NAME and asked.operator == "In" and len(set(asked.values)) == 1
            for asked in self.match_expressions
        )

    @property
    def names(self) -> Iterable[str]:
        """The namespaces that the selector asks for by name. They need not exist."""
        yield from [self.match_labels[NAME]] if NAME in self.match_labels else []
        for asked in self.match_expressions:
            yield from asked.values if asked.key == NAME and asked.operator == "In" else []


class AllowedNamespaces(ResourceModel):
    """Which namespaces are admitted."""

    from_: Literal["Same", "All", "Selector"] = Field(default="Same", alias="from")
    """`Same`: the pool's own namespace. `All`: all namespaces. `Selector`: those that `selector` selects."""

    selector: LabelSelector | None = None

    rules: ClassVar = (
        Rule(
            field="selector",
            cel="self.from != 'Selector' || has(self.selector)",
            message="selector must be set when from is Selector",
            reason="FieldValueRequired",
            holds=lambda allowed: allowed.from_ != "Selector" or allowed.selector is not None,
        ),
        Rule(
            field="selector",
            cel="self.from == 'Selector' || !has(self.selector)",
            message="selector must not be set unless from is Selector",
            reason="FieldValueForbidden",
            holds=lambda allowed: allowed.from_ == "Selector" or allowed.selector is None,
        ),
    )

    @property
    def admits_one_only(self) -> bool:
        """Whether it can never admit more than one namespace."""
        return self.from_ == "Same" or (self.selector is not None and self.selector.picks_one_only)

    def admits(self, namespace: str, *, own: str, labels: dict[str, str]) -> bool:
        match self.from_:
            case "All":
                return True
            case "Same":
                return namespace == own
            case "Selector":
                assert self.selector is not None
                # Kubernetes sets this label itself. Locally we add it, so that a selector by name works there, too.
                return self.selector.matches({NAME: namespace} | labels)

    def admitted(self, *, own: str, known: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
        """The admitted namespaces, sorted; `("*",)` if all are. `known` has the labels of the namespaces that exist."""
        if self.selector is None:
            return (ALL_NAMESPACES,) if self.from_ == "All" else (own,)
        candidates = {own, *known, *self.selector.names}
        return tuple(
            sorted(name for name in candidates if self.admits(name, own=own, labels=dict(known.get(name, {}))))
        )
