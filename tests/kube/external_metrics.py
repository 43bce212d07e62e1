"""An external metrics API, like that of a metrics adapter or KEDA: values that a test sets, over HTTPS.

An APIService registers it, so that a real HorizontalPodAutoscaler asks it through the API server.
"""

import base64
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from testbed.cluster.cluster import Cluster
from testbed.cluster.network import CONTROL_PLANE

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
ROOT = f"/apis/{GROUP}/{VERSION}"
SERVICE = "external-metrics"

Series = tuple[str, frozenset[tuple[str, str]]]


@dataclass
class ExternalMetrics:
    """The values, and which requests came."""

    values: dict[Series, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def set(self, name: str, value: int | None, **labels: str) -> None:
        """None: the value is unknown."""
        series = (name, frozenset(labels.items()))
        self.values.pop(series, None)
        if value is not None:
            self.values[series] = value

    def answer(self, url: str) -> tuple[int, dict[str, Any]]:
        parts = urlsplit(url)
        if parts.path == ROOT:
            resource = {"name": "*", "singularName": "", "namespaced": True, "kind": "ExternalMetricValueList"}
            resources = [resource | {"verbs": ["get"]}]
            return 200, {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": f"{GROUP}/{VERSION}",
                "resources": resources,
            }
        name = parts.path.rpartition("/")[2]
        selector = parse_qs(parts.query).get("labelSelector", [""])[0]
        self.asked.append(f"{name}{{{selector}}}")
        wanted = {tuple(term.split("=", 1)) for term in selector.split(",") if term}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        items = [
            {"metricName": name, "metricLabels": dict(labels), "timestamp": now, "value": str(value)}
            for (known, labels), value in self.values.items()
            if known == name and wanted <= labels
        ]
        return 200, {
            "kind": "ExternalMetricValueList",
            "apiVersion": f"{GROUP}/{VERSION}",
            "metadata": {},
            "items": items,
        }


@contextmanager
def external_metrics(cluster: Cluster, namespace: str) -> Iterator[ExternalMetrics]:
    """Register and serve it until the end of the block. Call it inside the cluster's network."""
    assert cluster.authority is not None, "registers an API with a control plane of our own"
    metrics = ExternalMetrics()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, document = metrics.answer(self.path)
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Log nothing: the API server asks for its health every second."""

    pair = cluster.authority.serving(SERVICE, [f"{SERVICE}.{namespace}.svc"])
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(pair.certificate, pair.key)
    with ThreadingHTTPServer((CONTROL_PLANE, 0), Handler) as server:
        server.daemon_threads = True
        server.socket = trust.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
        thread.start()
        try:
            cluster.apply(
                *_registration(namespace, server.server_address[1], cluster.authority.pair.certificate.read_bytes())
            )
            name = f"apiservice/{VERSION}.{GROUP}"
            cluster.kubectl("wait", "--for=condition=Available", name, "--timeout=30s")
            yield metrics
        finally:
            cluster.kubectl("delete", "apiservice", f"{VERSION}.{GROUP}", "--ignore-not-found")
            server.shutdown()
            thread.join()


def _registration(namespace: str, port: int, authority: bytes) -> list[dict[str, Any]]:
    where = {"name": SERVICE, "namespace": namespace}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": where,
            "spec": {"clusterIP": "None", "ports": [{"name": "https", "port": 443, "targetPort": port}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": where | {"labels": {"kubernetes.io/service-name": SERVICE}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [CONTROL_PLANE], "conditions": {"ready": True}}],
            "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"{VERSION}.{GROUP}"},
            "spec": {
                "group": GROUP,
                "version": VERSION,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "service": where | {"port": 443},
                "caBundle": base64.b64encode(authority).decode(),
            },
        },
    ]
