"""The charts as Helm renders them, with sets of values that together use every template and every switch."""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from testbed.tree import ROOT
from tools.kube.binaries import find

CHARTS = ROOT / "charts"
MOTET, CRDS = CHARTS / "motet", CHARTS / "motet-crds"
RELEASE, NAMESPACE = "motet", "motet-system"
COMPONENTS = ("gateway", "scheduler", "predictor", "supervisor", "operator")
DIGEST = f"sha256:{'0' * 64}"

Object = dict[str, Any]

VARIANTS: dict[str, Object] = {
    "as it comes": {},
    "as small as it gets": {
        "crds": {"install": False},
        "tls": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "rbac": {"aggregate": False, "platformAdmin": False},
        "flowSchema": {"enabled": False},
        "admissionPolicies": {"warnings": {"enabled": False}},
        "gateway": {"replicas": 1, "auth": "none"},
        **{name: {"replicas": 1} for name in ("scheduler", "operator")},
    },
    "everything that can be asked for": {
        "fullnameOverride": "voices",
        "pools": {"namespaces": ["motet-pools", "more-pools", NAMESPACE]},
        "image": {"registry": "registry.example/team", "pullSecrets": ["pull"]},
        "env": {"MOTET_TIME_SCALE": "0.5"},
        "database": {
            "url": "postgresql+asyncpg://motet:secret@db.example/motet?ssl=verify-full",
            "authorities": {"configMapName": "who-signs-databases"},
        },
        "admissionPolicies": {
            name: {"enabled": True} for name in ("sourcePrefix", "requireDigest", "usePool", "maxReplicas")
        },
        "networkPolicy": {"clients": [{"namespaceSelector": {}}], "metrics": [], "adapterSources": {"to": []}},
        "gateway": {
            "replicas": None,
            "image": {"digest": DIGEST},
            "service": {"type": "LoadBalancer", "annotations": {"note": "outside"}},
            "database": {"existingSecret": {"name": "postgres"}},
        },
        "runner": {
            "image": {"digest": DIGEST},
            "diskLimit": "100Gi",
            "podLabels": {"team": "a"},
            "podAnnotations": {"note": "b"},
            "serviceAccount": {"annotations": {"note": "c"}},
            "env": {"MOTET_LOG_LEVEL": "debug"},
            "authorities": {"configMapName": "who-signs-mirrors", "key": "bundle.pem"},
        },
        **{
            name: {
                "podLabels": {"team": "a"},
                "podAnnotations": {"note": "b"},
                "serviceAccount": {"annotations": {"note": "c"}},
                "nodeSelector": {"disk": "fast"},
                "tolerations": [{"key": "dedicated", "operator": "Exists"}],
                "affinity": {"podAntiAffinity": {}},
                "podDisruptionBudget": {"mode": "Always"},
            }
            for name in ("scheduler", "predictor", "supervisor", "operator")
        },
    },
    "a database of its own Secret": {
        "database": {"existingSecret": {"name": "postgres", "key": "address"}},
        "tls": {"source": "Existing"},
        "gateway": {"keysSecret": "api-keys"},
        "operator": {
            "topologySpreadConstraints": [
                {"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
            ],
        },
    },
    "with other people's operators": {
        "tls": {"source": "CertManager", "certManager": {"issuerRef": {"name": "private"}}},
        "metrics": {
            "names": 200,
            "serviceMonitor": {"enabled": True, "labels": {"a": "b"}},
            "podMonitor": {"enabled": True},
            "prometheusRule": {"enabled": True, "labels": {"a": "b"}},
        },
    },
}
"""Sets of values, by what they are for."""

ADDED: Object = {
    "extraEnv": [
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "mine", "key": "token"}}},
        {"name": "MOTET_LOG_LEVEL", "value": "warning"},
    ],
    "env": {"WITH_TOKEN": "token=$(TOKEN)", "MOTET_LOG_LEVEL": "debug"},
    "extraVolumes": [{"name": "mine", "configMap": {"name": "mine", "optional": True}}],
    "extraVolumeMounts": [{"name": "mine", "mountPath": "/etc/mine", "readOnly": True}],
    "sidecars": [{"name": "proxy", "image": "proxy:1", "volumeMounts": [{"name": "mine", "mountPath": "/etc/mine"}]}],
}
ADDITIONS: Object = dict.fromkeys((*COMPONENTS, "runner"), ADDED)
"""Values that add something of the user's to every pod that lives on."""


class HelmFailed(Exception):
    """Its text is what Helm wrote to stderr."""


def helm(*arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = 120) -> str:
    """Returns what Helm prints. Raises HelmFailed."""
    tool = find("helm")
    assert tool is not None, "run make kube"
    with tempfile.TemporaryDirectory() as own:
        homes = {f"HELM_{kind}_HOME": own for kind in ("CACHE", "CONFIG", "DATA")}
        done = subprocess.run(
            [tool, *arguments],
            env=os.environ | homes | dict(environment or {}),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    if done.returncode != 0:
        raise HelmFailed(done.stderr)
    return done.stdout


def with_values(values: Object, folder: Path) -> str:
    """The option that gives Helm these values."""
    file = folder / "values.json"
    file.write_text(json.dumps(values))
    return f"--values={file}"


def render(values: Object | None = None, *, chart: Path = MOTET) -> list[Object]:
    """Returns every object of the chart, also those of hooks."""
    objects: list[Object] = json.loads(_rendered(json.dumps(values or {}), chart))
    return objects


@cache
def _rendered(values: str, chart: Path) -> str:
    """Cached as JSON, which is fast to read again: each test gets objects of its own, and may change them."""
    with tempfile.TemporaryDirectory() as own:
        given = with_values(json.loads(values), Path(own))
        text = helm("template", RELEASE, str(chart), f"--namespace={NAMESPACE}", given)
    return json.dumps([document for document in yaml.load_all(text, yaml.CSafeLoader) if document])


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def named(objects: list[Object], kind: str, name: str, namespace: str = NAMESPACE) -> Object:
    (found,) = [
        one
        for one in of_kind(objects, kind)
        if one["metadata"]["name"] == name and one["metadata"].get("namespace", namespace) == namespace
    ]
    return found


def title(one: Object) -> str:
    metadata = one["metadata"]
    return f"{one['kind']} {metadata.get('namespace', '')}/{metadata['name']}"


def runner_template(objects: list[Object]) -> Object:
    (data,) = [one["data"] for one in of_kind(objects, "ConfigMap") if "template.yaml" in one["data"]]
    template: Object = yaml.safe_load(data["template.yaml"])
    return template


def pod_templates(objects: list[Object]) -> dict[str, Object]:
    """Every pod that the chart or the operator makes, by who makes it."""
    found = {title(one): one["spec"]["template"] for one in of_kind(objects, "Deployment", "Job")}
    found |= {title(one): one for one in of_kind(objects, "Pod")}
    return found | {"the operator's runner": runner_template(objects)}


def containers(template: Object) -> list[Object]:
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]
