"""Sends the requests of `kubectl get`, without kubectl: for tests that ask twenty times a second."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

_CORE, _MOTET = "/api/v1", "/apis/motet.dev/v1alpha1"
_KINDS = {
    "configmaps": (_CORE, "configmap"),
    "events": (_CORE,),
    "pods": (_CORE, "pod"),
    "secrets": (_CORE, "secret"),
    "serviceaccounts": (_CORE, "serviceaccount"),
    "deployments": ("/apis/apps/v1", "deployment"),
    "replicasets": ("/apis/apps/v1",),
    "leases": ("/apis/coordination.k8s.io/v1", "lease"),
    "endpointslices": ("/apis/discovery.k8s.io/v1",),
    "poddisruptionbudgets": ("/apis/policy/v1", "pdb"),
    "loraadapters": (_MOTET, "lora", "loraadapters.motet.dev"),
    "servingpools": (_MOTET, "spool", "servingpools.motet.dev"),
}
_KINDS_OF_NO_NAMESPACE = {"namespaces": (_CORE,), "nodes": (_CORE, "node")}

_NAMES = {name: kind for kind, (_, *short) in (_KINDS | _KINDS_OF_NO_NAMESPACE).items() for name in (kind, *short)}


@dataclass(frozen=True)
class Read:
    path: str
    managed_fields: bool = False
    """Fields that kubectl shows only on request."""

    def shown(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Like kubectl: each item has its kind and version."""
        items = answer.get("items")
        if items is None:
            return self._without_managed_fields(answer)
        what = {"apiVersion": answer["apiVersion"], "kind": answer["kind"].removesuffix("List")}
        return {**answer, "kind": "List", "items": [self._without_managed_fields({**what, **one}) for one in items]}

    def _without_managed_fields(self, it: dict[str, Any]) -> dict[str, Any]:
        if not self.managed_fields:
            it["metadata"].pop("managedFields", None)
        return it


def read(*arguments: str) -> Read | None:
    """None if only kubectl understands these arguments."""
    words = [one for one in arguments if not one.startswith("-")]
    options = _options(one for one in arguments if one.startswith("-"))
    if options is None or len(words) not in (1, 2) or words[0] not in _NAMES:
        return None
    kind = _NAMES[words[0]]
    selectors = {key: options[key] for key in ("labelSelector", "fieldSelector") if key in options}
    if len(words) == 2 and (selectors or "all" in options):
        return None
    path = (_KINDS | _KINDS_OF_NO_NAMESPACE)[kind][0]
    if kind in _KINDS and "all" not in options:
        path += f"/namespaces/{quote(options.get('namespace', 'default'))}"
    path = "/".join((path, kind, *map(quote, words[1:])))
    return Read(path + (f"?{urlencode(selectors)}" if selectors else ""), "managed" in options)


_OPTIONS = {"--namespace": "namespace", "--selector": "labelSelector", "--field-selector": "fieldSelector"}
_FLAGS = {"--all-namespaces": "all", "-A": "all", "--show-managed-fields": "managed"}


def _options(given: Iterable[str]) -> Mapping[str, str] | None:
    found = {}
    for one in given:
        name, has_value, value = one.partition("=")
        known = _OPTIONS.get(name) if has_value else _FLAGS.get(name)
        if known is None:
            return None
        found[known] = value
    return found
