"""The kinds that the operator reads and writes, and where the API server keeps them."""

from dataclasses import dataclass
from typing import Any

from motet.resources import GROUP, VERSION

Object = dict[str, Any]
"""An object as the API server sends it."""


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    group: str
    version: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """The name as Roles use it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        within = f"/namespaces/{namespace}" if namespace and self.namespaced else ""
        return "/".join(part for part in (f"{root}{within}/{self.plural}", name, subresource) if part)

    def __str__(self) -> str:
        return self.name


ADAPTERS = Kind("LoRAAdapter", GROUP, VERSION, "loraadapters")
POOLS = Kind("ServingPool", GROUP, VERSION, "servingpools")
NAMESPACES = Kind("Namespace", "", "v1", "namespaces", namespaced=False)
DEPLOYMENTS = Kind("Deployment", "apps", "v1", "deployments")
PODS = Kind("Pod", "", "v1", "pods")
BUDGETS = Kind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets")
EVENTS = Kind("Event", "", "v1", "events")
NODES = Kind("Node", "", "v1", "nodes", namespaced=False)

DECLARED_KINDS = (ADAPTERS, POOLS, NAMESPACES)
"""Watched everywhere."""

OWNED_KINDS = (DEPLOYMENTS, PODS, BUDGETS)
"""Watched where pools live, and only those with our label."""

WATCHED = (*DECLARED_KINDS, *OWNED_KINDS)


POOL_LABEL = f"{GROUP}/pool"
CLASS_LABEL = f"{GROUP}/operator-class"


def selector(kind: Kind, operator_class: str) -> str:
    """The labels of the objects of a kind that an operator of this class handles; the others are another's."""
    if kind is NAMESPACES:
        return ""
    of_class = f"{CLASS_LABEL}={operator_class}" if operator_class else f"!{CLASS_LABEL}"
    return f"{POOL_LABEL},{of_class}" if kind in OWNED_KINDS else of_class


def uid_of(it: Object) -> str:
    return str(it["metadata"].get("uid", ""))


def version_of(it: Object) -> int:
    """The resourceVersion; of one kind, a greater number is newer."""
    return int(it["metadata"].get("resourceVersion") or 0)


def key_of(it: Object) -> tuple[str, str]:
    return it["metadata"].get("namespace", ""), it["metadata"]["name"]
