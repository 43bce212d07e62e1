"""What the chart makes for other operators. No API server of the tests knows their kinds."""

import re
from base64 import b64decode

from cryptography import x509

from motet.resources.status import ADAPTER_CONDITIONS, POOL_CONDITIONS
from testbed.tree import ROOT
from tests.charts.helm import COMPONENTS, NAMESPACE, Object, of_kind, pod_templates, render, title

MONITORS: Object = {
    "pools": {"namespaces": ["a", "b"]},
    "metrics": {
        "serviceMonitor": {"enabled": True, "interval": "30s", "labels": {"release": "prometheus"}},
        "podMonitor": {"enabled": True},
    },
}


CONDITIONS = {"ServingPool": POOL_CONDITIONS, "LoRAAdapter": ADAPTER_CONDITIONS}


def test_the_chart_makes_none_of_them_by_default() -> None:
    assert of_kind(render(), "ServiceMonitor", "PodMonitor", "PrometheusRule", "Certificate") == []


def test_prometheus_reads_every_service_once() -> None:
    objects = render(MONITORS)
    (monitor,) = of_kind(objects, "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    # With honorLabels the label `namespace` of a metric about an object is not renamed to that of the pod.
    assert endpoint == {"port": "metrics", "path": "/metrics", "interval": "30s", "honorLabels": True}
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    read = [
        one["metadata"]["labels"]["app.kubernetes.io/component"]
        for one in of_kind(objects, "Service")
        if monitor["spec"]["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
        and endpoint["port"] in {port["name"] for port in one["spec"]["ports"]}
    ]
    assert sorted(read) == sorted(COMPONENTS)


def test_prometheus_reads_the_runners_of_every_pool_namespace() -> None:
    objects = render(MONITORS)
    monitors = of_kind(objects, "PodMonitor")
    assert [one["metadata"]["namespace"] for one in monitors] == ["a", "b"]
    runner = pod_templates(objects)["the operator's runner"]["spec"]["containers"][0]
    for monitor in monitors:
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in {port["name"] for port in runner["ports"]}


def test_alerts_ask_for_metrics_and_labels_that_exist() -> None:
    objects = render({"metrics": {"prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}}})
    (rule,) = of_kind(objects, "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    services = {one["metadata"]["name"] for one in of_kind(objects, "Service")}
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    known = {
        name: set(re.findall(r"`(\w+)`", labels))
        for name, labels in re.findall(r"^\| `(motet_\w+)` \| \w+ \| ([^|]*) \|", page, re.MULTILINE)
    }
    (group,) = rule["spec"]["groups"]
    assert len({one["alert"] for one in group["rules"]}) == len(group["rules"]) == 7
    for alert in group["rules"]:
        asked = re.findall(r"(motet_\w+)\{([^}]*)\}", alert["expr"])
        assert len(asked) == alert["expr"].count("motet_"), alert
        for name, selector in asked:
            labels = dict(re.findall(r'(\w+)=~?"([^"]*)"', selector))
            assert labels.pop("job") in services, alert
            assert labels.keys() <= known[name], alert
            if name == "motet_object_condition":
                assert labels["type"] in CONDITIONS[labels["kind"]], alert
        assert alert["expr"].count("(") == alert["expr"].count(")"), alert
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert alert["annotations"].keys() == {"summary", "description"}
        told = set(re.findall(r"\$labels\.(\w+)", str(alert["annotations"])))
        assert told <= {"namespace", "name"}
        assert not told or "max by (namespace, name)" in alert["expr"], "an aggregation keeps no other labels"


def test_cert_manager_makes_every_secret_that_is_mounted() -> None:
    issuer = {"name": "private", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    values = {
        "pools": {"namespaces": ["a", "b"]},
        "tls": {"source": "CertManager", "certManager": {"issuerRef": issuer}},
    }
    objects = render(values)
    assert [title(one) for one in of_kind(objects, "Secret") if not title(one).endswith("-features-key")] == []
    made = {}
    for one in of_kind(objects, "Certificate"):
        spec = one["spec"]
        assert spec["issuerRef"] == issuer
        assert {"server auth", "client auth"} <= set(spec["usages"])
        made[one["metadata"]["namespace"], spec["secretName"]] = spec["dnsNames"]
    wanted = {(NAMESPACE, f"motet-{name}-tls"): [f"{name}.motet.internal"] for name in COMPONENTS}
    assert made == wanted | {(where, "motet-runner-tls"): ["runner.motet.internal"] for where in ("a", "b")}


def test_each_certificate_of_the_chart_has_one_role() -> None:
    """A server decides by the names in a certificate: with a second name its owner could act in a second role."""
    made = {}
    for one in of_kind(render({"pools": {"namespaces": ["a"]}}), "Secret"):
        if one["metadata"]["name"].endswith("-tls"):
            certificate = x509.load_pem_x509_certificate(b64decode(one["data"]["tls.crt"]))
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            made[one["metadata"]["name"]] = [str(name.value) for name in names]
    assert made == {f"motet-{name}-tls": [f"{name}.motet.internal"] for name in (*COMPONENTS, "runner")}


def test_with_existing_secrets_the_chart_makes_none() -> None:
    objects = render({"tls": {"source": "Existing"}})
    made = [title(one) for one in of_kind(objects, "Secret", "Certificate")]
    assert [one for one in made if not one.endswith("-features-key")] == []
    for template in pod_templates(objects).values():
        for volume in template["spec"].get("volumes", []):
            if "secret" in volume:
                assert volume["secret"]["secretName"].endswith(("-tls", "-keys", "-features-key"))
