"""Which values there are, that Helm refuses a misspelt one by its name, and that every value is explained."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.helm import CRDS, MOTET, VARIANTS, HelmFailed, Object, helm, named, render, with_values

SCHEMA: Object = json.loads((MOTET / "values.schema.json").read_text())
HELMS_OWN = {"global", "motet-crds"}


def nodes(schema: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    """The schema of every value of this chart, with its path."""
    for name, inner in schema.get("properties", {}).items():
        if path or name not in HELMS_OWN:
            yield f"{path}/{name}", inner
            yield from nodes(inner, f"{path}/{name}")


def resolved(node: Object) -> Object:
    return SCHEMA["$defs"][node["$ref"].rsplit("/", 1)[1]] | node if "$ref" in node else node


def test_every_value_has_a_description_and_a_default_or_parts() -> None:
    for path, node in nodes(SCHEMA):
        assert node.get("description", "").endswith("."), path
        assert ("default" in node) != ("properties" in node), path


def test_no_object_accepts_unknown_values() -> None:
    """Maps accept any key, and have a type for their values. Kubernetes checks the rest."""
    kubernetes = {"nodeAffinity", "podAffinity", "podAntiAffinity", "labelSelector", "namespaceSelector", "podSelector"}

    def check(node: Any, path: str) -> None:
        if isinstance(node, list):
            for inner in node:
                check(inner, path)
        if not isinstance(node, dict):
            return
        if node.get("type") == "object" and path.rsplit("/", 1)[1] not in kubernetes | HELMS_OWN:
            extra = node.get("additionalProperties")
            assert extra is False or "type" in extra, path
        for key in ("properties", "$defs"):
            for name, inner in node.get(key, {}).items():
                check(inner, f"{path}/{name}")
        check(node.get("items"), f"{path}/items")

    check(SCHEMA, "/")


def test_the_values_file_has_exactly_the_values_of_the_schema() -> None:
    def paths(value: Any, node: Object, path: str) -> Iterator[str]:
        if isinstance(value, dict) and "properties" in node and "default" not in node:
            for name, inner in value.items():
                yield from paths(inner, node["properties"][name], f"{path}/{name}")
        else:
            yield path

    values = yaml.safe_load((MOTET / "values.yaml").read_text())
    assert set(paths(values, SCHEMA, "")) == {path for path, node in nodes(SCHEMA) if "default" in node}


def test_every_value_has_a_line_in_the_readme() -> None:
    readme = (MOTET / "README.md").read_text()
    for path, node in nodes(SCHEMA):
        if "default" in node:
            assert f"| `{path.removeprefix('/').replace('/', '.')}` |" in readme, path


def test_code_in_the_readme_has_no_entities() -> None:
    """Markdown does not decode them in code: a reader would see `&lt;fullname>`."""
    assert re.findall(r"`[^`\n]*&\w+;[^`\n]*`", (MOTET / "README.md").read_text()) == []


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("gatewey.replicas=1", "at '': additional properties 'gatewey' not allowed"),
        ("gateway.replica=1", "at '/gateway': additional properties 'replica' not allowed"),
        ("runner.image.tagg=1", "at '/runner/image': additional properties 'tagg' not allowed"),
        ("networkPolicy.dns.port=53", "at '/networkPolicy/dns': additional properties 'port' not allowed"),
        ("gateway.replicas=many", "at '/gateway/replicas': got string, want null or integer"),
        (
            "gateway.podDisruptionBudget.maxUnavailable=0",
            "at '/gateway/podDisruptionBudget/maxUnavailable': minimum: got 0, want 1",
        ),
        ("predictor.replicas=2", "at '/predictor/replicas': maximum: got 2, want 1"),
        ("env.MOTET_TIMESCALE=fast", "at '': invalid propertyName 'MOTET_TIMESCALE'"),
        ("runner.env.MOTET_RUNNER_RANK=high", "at '': invalid propertyName 'MOTET_RUNNER_RANK'"),
        ("env.9=x", "at '': invalid propertyName '9'"),
        ("env.MOTET_TIME_SCALE=1", "at '/env/MOTET_TIME_SCALE': got number, want string"),
        ("tls.source=Vault", "at '/tls/source': value must be one of 'Chart', 'CertManager', 'Existing'"),
        ("pools.namespaces=null", "at '/pools': missing property 'namespaces'"),
        ("pools.namespaces={A}", "at '/pools/namespaces/0': 'A' does not match pattern"),
        ("runner.image.digest=sha256:1", "at '/runner/image/digest': 'sha256:1' does not match pattern"),
        ("database.url=mysql://x", "at '/database/url': 'mysql://x' does not match pattern"),
        ("motet-crds.keep=false", "at '': additional properties 'keep' not allowed"),
        (
            "admissionPolicies.sourcePrefix.prefixes={pvc://adapters/{namespace\\}}",
            "at '/admissionPolicies/sourcePrefix/prefixes/0': 'pvc://adapters/{namespace}' does not match pattern",
        ),
        (
            "tls.source=CertManager",
            "tls.certManager.issuerRef.name is empty: name the ClusterIssuer that signs, or set tls.source to Chart",
        ),
        (
            "scheduler.image.tag=latest",
            "the image tag of scheduler is latest, which does not say what runs: set a version",
        ),
    ],
)
def test_helm_refuses_a_mistake_and_names_it(given: str, sentence: str) -> None:
    with pytest.raises(HelmFailed) as refused:
        helm("template", "motet", str(MOTET), f"--set={given}")
    assert sentence in str(refused.value)


@pytest.mark.parametrize("name", ["m" * 41, "motet.prod", "1motet"])
def test_a_release_name_that_no_service_can_begin_with_is_refused(name: str) -> None:
    with pytest.raises(HelmFailed) as refused:
        helm("template", name, str(MOTET))
    assert f"{name} cannot begin the names of objects: give the release another name, or set fullnameOverride" in str(
        refused.value
    )
    assert f"name: {'m' * 40}-gateway\n" in helm("template", name, str(MOTET), f"--set=fullnameOverride={'m' * 40}")


def test_variables_that_are_not_motets_are_allowed() -> None:
    gateway = named(render({"env": {"HTTPS_PROXY": "http://proxy:3128"}}), "Deployment", "motet-gateway")
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container["env"]


@pytest.mark.parametrize("chart", [MOTET, CRDS], ids=lambda chart: chart.name)
def test_helm_lint_accepts_the_charts(chart: Path) -> None:
    said = helm("lint", "--strict", str(chart))
    assert re.search(r"\[(WARNING|ERROR)\]", said) is None, said


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_helm_lint_accepts_the_chart_with_any_values(values: Object, tmp_path: Path) -> None:
    said = helm("lint", "--strict", str(MOTET), with_values(values, tmp_path))
    assert re.search(r"\[(WARNING|ERROR)\]", said) is None, said


def test_dependencies_need_no_network(tmp_path: Path) -> None:
    said = helm("dependency", "list", str(MOTET))
    assert re.search(r"motet-crds\s+\S+\s+file://../motet-crds\s+unpacked", said)
    helm("package", str(MOTET), f"--destination={tmp_path}")
    (package,) = tmp_path.glob("*.tgz")
    assert render(chart=package) != []
