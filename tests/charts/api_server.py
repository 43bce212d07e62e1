"""As much of an API server as Helm asks while it renders: which kinds there are, and lists of objects."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from tests.charts.helm import Object, render

LOOKED_UP = {
    ("v1", "Secret"),
    ("v1", "ConfigMap"),
    ("apps/v1", "Deployment"),
    ("apps/v1", "ReplicaSet"),
    ("motet.dev/v1alpha1", "ServingPool"),
    ("motet.dev/v1alpha1", "LoRAAdapter"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"),
}

NAME = "API server"
"""Of its thread"""


@contextmanager
def api_server(folder: Path, *objects: Object) -> Iterator[str]:
    """Serves the objects. Returns the path of a kubeconfig for it."""
    kinds = sorted(LOOKED_UP | {(one["apiVersion"], one["kind"]) for one in render()})
    answers = _discovery(kinds) | _lists(kinds, objects)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            found = answers.get(self.path.split("?")[0].rstrip("/"))
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(found or missing).encode()
            self.send_response(200 if found else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, name=NAME, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        config = folder / "kubeconfig.json"
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
        parts = {"clusters": [cluster], "users": [{"name": "u", "user": {}}], "contexts": [context]}
        config.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **parts, "current-context": "x"}))
        try:
            yield str(config)
        finally:  # also where Helm fails: a server that is closed and goes on asks without end whether somebody calls
            server.shutdown()
            thread.join()


def _discovery(kinds: list[tuple[str, str]]) -> dict[str, Object]:
    versions = sorted({version for version, _ in kinds})
    groups = [
        {"name": one.split("/")[0], "versions": [named], "preferredVersion": named}
        for one in versions
        if "/" in one
        for named in ({"groupVersion": one, "version": one.split("/")[1]},)
    ]
    found: dict[str, Object] = {
        "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.3"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
    }
    for version in versions:
        resources = [
            {"name": _plural(kind), "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get", "list"]}
            for its, kind in kinds
            if its == version
        ]
        found[_base(version)] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
    return found


def _lists(kinds: list[tuple[str, str]], objects: tuple[Object, ...]) -> dict[str, Object]:
    """Each object, and the lists of its kind: in all namespaces and in its own."""
    found: dict[str, Object] = {}
    for version, kind in kinds:
        those = [one for one in objects if (one["apiVersion"], one["kind"]) == (version, kind)]
        listed = {"apiVersion": version, "kind": f"{kind}List", "metadata": {}}
        found[f"{_base(version)}/{_plural(kind)}"] = listed | {"items": those}
        for namespace in {one["metadata"]["namespace"] for one in those}:
            here = [one for one in those if one["metadata"]["namespace"] == namespace]
            place = f"{_base(version)}/namespaces/{namespace}/{_plural(kind)}"
            found[place] = listed | {"items": here}
            found |= {f"{place}/{one['metadata']['name']}": one for one in here}
    return found


def _plural(kind: str) -> str:
    """Good enough for the kinds that are looked up."""
    return f"{kind.lower()}s"


def _base(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"
