"""The environment of a container: references, expansion, and the variables that a cluster adds."""

import json
from typing import Any

import pytest

from testbed.cluster.kubelet.environment import ConfigError, expand, field, of_services, resource
from testbed.cluster.kubelet.images import FOR_TESTS, NotPullable, image, parse
from testbed.cluster.network import API_PORT, CONTROL_PLANE
from tests.kube.pods import Pods, python

PRINT = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("$(A)/x", "1/x"),
        ("$(NOBODY)", "$(NOBODY)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A", "$A"),
        ("a$", "a$"),
    ],
)
def test_references_are_expanded(text: str, becomes: str) -> None:
    assert expand(text, {"A": "1"}) == becomes


def test_services_become_variables() -> None:
    service = {"spec": {"clusterIP": "10.0.0.7", "ports": [{"name": "web", "port": 8000}]}}
    headless = {"spec": {"clusterIP": "None", "ports": [{"port": 1}]}}
    services: dict[tuple[str, str], dict[str, Any]] = {("here", "my-app"): service, ("here", "quiet"): headless}
    env = of_services(services, "here")
    assert env["MY_APP_SERVICE_HOST"] == "10.0.0.7"
    assert env["MY_APP_SERVICE_PORT_WEB"] == "8000"
    assert env["MY_APP_PORT"] == env["MY_APP_PORT_8000_TCP"] == "tcp://10.0.0.7:8000"
    assert not [name for name in env if name.startswith("QUIET")]
    assert of_services(services, "elsewhere") == {}


def test_amounts_are_counted_in_units_and_rounded_up() -> None:
    container = {"resources": {"limits": {"cpu": "1500m", "memory": "1Gi"}}}
    pod = {"spec": {"containers": [container]}, "nodeAllocatable": {"cpu": "4"}}
    assert resource(pod, container, {"resource": "limits.cpu"}) == "2"
    assert resource(pod, container, {"resource": "limits.memory", "divisor": "1Mi"}) == "1024"
    assert resource(pod, {}, {"resource": "limits.cpu"}) == "4"


def test_a_field_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"spec\.nothing"):
        field({"spec": {}}, "spec.nothing")


def test_an_image_is_what_its_dockerfile_says_last() -> None:
    one = parse(
        'FROM a AS b\nENTRYPOINT ["x"]\nFROM c\nENV A=1 PATH=/x:$PATH\nUSER 65532\nENTRYPOINT ["y", \\\n "z"]\n'
    )
    assert (one.entrypoint, one.user, one.env) == (("y", "z"), "65532", {"A": "1"})
    with pytest.raises(NotPullable, match="shell form"):
        parse("FROM a\nENTRYPOINT run me")


def test_an_image_is_known_wherever_it_is_kept() -> None:
    assert image("registry.example/library/busybox:1.36") == FOR_TESTS["busybox"]
    with pytest.raises(NotPullable, match=r"registry\.example/motet/nothing"):
        image("registry.example/motet/nothing")


@pytest.mark.parametrize("deployable", ["gateway", "scheduler", "predictor", "supervisor", "runner", "operator"])
def test_every_deployable_has_an_image(deployable: str) -> None:
    digest = f"@sha256:{'0' * 64}"
    for reference in (f"motet/{deployable}:0.1.0", f"registry.example:5000/deep/motet/{deployable}{digest}"):
        assert image(reference).entrypoint[:3] == ("python", "-P", "-m")
        assert image(reference).compiled_kernels == (deployable == "runner")


@pytest.mark.kube
def test_a_container_gets_what_its_manifest_names(pods: Pods) -> None:
    metadata = {"name": "given", "namespace": pods.namespace}
    pods.cluster.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"WORD": "config"}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"word": "secret"}},
        {
            "apiVersion": "v1", "kind": "Service", "metadata": {**metadata, "name": "given"},
            "spec": {"ports": [{"port": 8000}]},
        },
    )  # fmt: skip
    env = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "COLOR", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['color']"}}},
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "given", "key": "word"}}},
        {"name": "NOTHING", "valueFrom": {"secretKeyRef": {"name": "given", "key": "none", "optional": True}}},
        {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1m"}}},
        {"name": "ADDRESS", "value": "$(POD_IP):8000 $(PRE_WORD)"},
    ]
    container = python(
        PRINT, env=env, envFrom=[{"configMapRef": {"name": "given"}, "prefix": "PRE_"}],
        resources={"requests": {"cpu": "250m"}},
    )  # fmt: skip
    name = pods.run(container, annotations={"color": "blue"}, restartPolicy="Never")
    pods.wait_phase(name, "Succeeded")
    said = json.loads(pods.logs(name))
    assert said["POD_IP"] == pods.status(name)["podIP"]
    assert said["NODE"] == "node-1"
    assert (said["COLOR"], said["SECRET"], said["PRE_WORD"], said["CPU"]) == ("blue", "secret", "config", "250")
    assert "NOTHING" not in said
    assert said["ADDRESS"] == f"{said['POD_IP']}:8000 config"
    assert said["GIVEN_SERVICE_PORT"] == "8000"
    assert (said["KUBERNETES_SERVICE_HOST"], said["KUBERNETES_SERVICE_PORT"]) == (CONTROL_PLANE, str(API_PORT))


@pytest.mark.kube
def test_service_links_can_be_refused_and_nothing_of_this_process_leaks(
    pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = {"name": "refused", "namespace": pods.namespace}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": refused}
    pods.cluster.apply({**service, "spec": {"ports": [{"port": 8000}]}})
    pods.cluster.wait_for(lambda: "REFUSED_SERVICE_PORT" in pods.finish(python(PRINT)), "a link")
    said = json.loads(pods.finish(python(PRINT), enableServiceLinks=False))
    assert not [name for name in said if name.startswith("REFUSED")]
    assert set(said) <= {
        *("PATH", "HOSTNAME", "HOME", "PWD", "LC_CTYPE"),
        *("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBERNETES_SERVICE_PORT_HTTPS"),
    }


@pytest.mark.kube
def test_an_image_of_ours_runs_this_checkout_as_its_own_user(pods: Pods) -> None:
    code = "import getpass, os, motet_gateway; print(getpass.getuser(), os.getuid(), os.getgid(), os.environ['HOME'])"
    restricted = {"runAsNonRoot": True, "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False}
    container = {"image": "registry.example/motet/gateway:0.1.0", "command": ["python", "-c", code]}
    assert pods.finish({**container, "securityContext": restricted}) == "motet 65532 65532 /tmp\n"
