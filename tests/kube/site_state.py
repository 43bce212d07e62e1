"""What lies in the API server for one site of the tests, and who wrote what there."""

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import orjson

from testbed.cluster.cluster import CommandRefused
from testbed.cluster.operators import OperatorNamespaces

Object = dict[str, Any]

_PASSING = ("uid", "resourceVersion", "creationTimestamp", "managedFields", "lastTransitionTime")
"""Fields that differ between two equal objects."""


class SiteState:
    """The objects of a site and their writes."""

    def __init__(self, home: OperatorNamespaces) -> None:
        self._home, self._cluster = home, home.cluster
        assert self._cluster.audit_log is not None, "needs a cluster whose audit log can be read"
        self._audit, self._began = self._cluster.audit_log, self._cluster.audit_log.stat().st_size

    def __call__(self, kind: str) -> list[Object]:
        """The site's pools, adapters, deployments, budgets or pods."""
        match kind:
            case "pods":
                path = f"/api/v1/namespaces/{self._home.pools}/pods"
            case "deployments":
                path = f"/apis/apps/v1/namespaces/{self._home.pools}/deployments"
            case "poddisruptionbudgets":
                path = f"/apis/policy/v1/namespaces/{self._home.pools}/poddisruptionbudgets"
            case "servingpools":
                path = f"/apis/motet.dev/v1alpha1/namespaces/{self._home.pools}/servingpools"
            case _:
                path = f"/apis/motet.dev/v1alpha1/{kind}"
        items = self._cluster.call("GET", path)["items"]
        return [one for one in items if one["metadata"]["namespace"].startswith(self._home.name)]

    def runners(self) -> list[Object]:
        """Pods that nobody has deleted."""
        return [one for one in self("pods") if "deletionTimestamp" not in one["metadata"]]

    def make_ready(self, pod: Object) -> None:
        """Make a pod ready, as a kubelet would: nothing runs it here."""
        container = {"name": "runner", "ready": True, "restartCount": 0, "image": "", "imageID": ""}
        status = {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running"}
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
        with suppress(CommandRefused):  # another writer was faster
            self._cluster.call("PUT", path, pod | {"status": status | {"containerStatuses": [container]}})

    def state(self) -> Object:
        """Everything that is equal at two sites with the same changes."""
        return {
            "pools": in_order({**_lasting(one), "name": one["metadata"]["name"]} for one in self("servingpools")),
            "adapters": in_order({**_lasting(one), "name": one["metadata"]["name"]} for one in self("loraadapters")),
            "deployments": in_order(
                {
                    "name": one["metadata"]["name"],
                    "labels": one["metadata"]["labels"],
                    "annotations": one["metadata"]["annotations"],
                    "spec": _lasting(one["spec"]),
                    "pods": one["status"].get("replicas", 0),
                }
                for one in self("deployments")
            ),
            "budgets": in_order(
                {"name": one["metadata"]["name"], "spec": _lasting(one["spec"])} for one in self("poddisruptionbudgets")
            ),
            "pods": in_order(
                {
                    "labels": one["metadata"]["labels"],
                    "annotations": one["metadata"].get("annotations"),
                    "runner": [(each["image"], each.get("env")) for each in one["spec"]["containers"]],
                    "ready": is_ready(one),
                }
                for one in self("pods")
            ),
        }

    def history(self) -> list[Object]:
        """Every write at the site since then that was done, without Events and Leases."""
        with self._audit.open("rb") as log:
            log.seek(self._began)
            lines = [line for line in log.read().splitlines() if line.endswith(b"}")]
        # The name before they are parsed: most entries are of others, and tests look again and again.
        entries = [orjson.loads(line) for line in lines if self._home.name.encode() in line]
        return [
            entry
            for entry in entries
            if entry["verb"] in ("create", "update", "patch", "delete")
            and entry["responseStatus"]["code"] < 300
            and entry["objectRef"].get("namespace", "").startswith(self._home.name)
            and entry["objectRef"]["resource"] not in ("events", "leases")
        ]


def _lasting(it: Any) -> Any:
    if isinstance(it, dict):
        return {key: _lasting(value) for key, value in it.items() if key not in _PASSING}
    return [_lasting(one) for one in it] if isinstance(it, list) else it


def in_order(found: Iterable[Object]) -> list[Object]:
    return sorted(found, key=lambda one: json.dumps(one, sort_keys=True))


def is_ready(pod: Object) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ()))
