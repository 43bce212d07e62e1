"""What holds for any values: pods are safe, settings exist, ports agree, and each rendering is the same."""

import base64
import importlib
import json
import pkgutil
import re
from typing import Any

import pytest
import yaml
from cryptography import x509

from motet_runner.settings import Settings
from testbed.tree import ROOT, pyproject
from tests.charts.helm import (
    COMPONENTS,
    CRDS,
    DIGEST,
    NAMESPACE,
    VARIANTS,
    Object,
    containers,
    named,
    of_kind,
    pod_templates,
    render,
    runner_template,
    title,
)
from tools.reference.packages import PACKAGES
from tools.reference.settings_page import settings_of, variable

PORTS = {"gateway": 8000, "scheduler": 7101, "predictor": 7102, "supervisor": 7103, "runner": 7110}
METRICS = 9090
OF_THE_POD = {"POD_IP", "POD_NAME", "POD_NAMESPACE", "POD_UID"}
OF_THE_DRIVER = {"PGSSLROOTCERT"}
AUTHORITIES = "/etc/motet/authorities/ca.crt"
SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"

every_variant = pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)


def environment(container: Object) -> dict[str, Any]:
    """A container's variables. Each may occur only once."""
    names = [one["name"] for one in container["env"]]
    assert len(names) == len(set(names)), names
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


def known_settings() -> set[str]:
    found = set()
    for package in PACKAGES:
        root = importlib.import_module(package)
        for module in pkgutil.walk_packages(root.__path__, f"{package}."):
            if module.name.endswith(".settings"):
                for kind in settings_of(importlib.import_module(module.name)):
                    found |= {variable(kind, name) for name in kind.model_fields}
    return found


# Pods -----------------------------------------------------------------------------------------------------------------


@every_variant
def test_every_pod_satisfies_the_level_restricted(values: Object) -> None:
    for who, template in pod_templates(render(values)).items():
        spec = template["spec"]
        security = spec["securityContext"]
        assert security["runAsNonRoot"], who
        assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] == 65532, who
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, who
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), who
        for container in containers(template):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, who
        kinds = {kind for volume in spec.get("volumes", []) for kind in volume.keys() - {"name"}}
        assert kinds <= {"emptyDir", "secret", "configMap"}, who


@every_variant
def test_no_pod_gets_variables_for_services(values: Object) -> None:
    """The Service motet-gateway would set MOTET_GATEWAY_PORT, which is a setting, to tcp://…"""
    for who, template in pod_templates(render(values)).items():
        assert template["spec"]["enableServiceLinks"] is False, who


@every_variant
def test_only_pods_that_use_the_api_server_have_a_token(values: Object) -> None:
    objects = render(values)
    with_token = {
        who.rsplit("-", 1)[-1].rsplit(" ", 1)[-1]
        for who, template in pod_templates(objects).items()
        if template["spec"]["automountServiceAccountToken"]
    }
    assert with_token == {"operator", "scheduler", "runner", "test"}
    assert all(one["automountServiceAccountToken"] is False for one in of_kind(objects, "ServiceAccount"))


@every_variant
def test_every_container_requests_what_it_needs(values: Object) -> None:
    for who, template in pod_templates(render(values)).items():
        for container in containers(template):
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), who
            # The pool says how much memory a model may use.
            assert "memory" in container["resources"]["limits"] or container["name"] == "runner", who


@every_variant
def test_every_image_has_a_version(values: Object) -> None:
    version = pyproject()["project"]["version"]
    for who, template in pod_templates(render(values)).items():
        for container in containers(template):
            repository, _, rest = container["image"].rpartition("motet/")
            assert repository in ("", "registry.example/team/"), who
            assert re.fullmatch(rf"[a-z]+(:{re.escape(version)}|@{DIGEST})", rest), who


def test_a_digest_overrides_a_tag_and_the_components_tag_overrides_that_of_all() -> None:
    values = {
        "image": {"tag": "2.0"},
        "gateway": {"image": {"digest": DIGEST, "tag": "3.0"}},
        "scheduler": {"image": {"tag": "3.0"}},
    }
    images = {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]["containers"][0]["image"]
        for one in of_kind(render(values), "Deployment")
    }
    assert images["motet-gateway"] == f"motet/gateway@{DIGEST}"
    assert images["motet-scheduler"] == "motet/scheduler:3.0"
    assert images["motet-operator"] == "motet/operator:2.0"


@every_variant
def test_a_mount_has_its_volume_and_a_volume_its_mount(values: Object) -> None:
    for who, template in pod_templates(render(values)).items():
        volumes = [volume["name"] for volume in template["spec"].get("volumes", [])]
        mounts = {mount["name"] for one in containers(template) for mount in one.get("volumeMounts", [])}
        assert sorted(mounts) == sorted(volumes), who


@every_variant
def test_what_a_pod_mounts_or_reads_exists_or_is_made_by_the_user(values: Object) -> None:
    objects = render(values)
    there = {
        (one["kind"], one["metadata"]["namespace"], one["metadata"]["name"])
        for one in of_kind(objects, "Secret", "ConfigMap", "ServiceAccount")
    }
    there |= {
        ("Secret", one["metadata"]["namespace"], one["spec"]["secretName"]) for one in of_kind(objects, "Certificate")
    }
    if values.get("tls", {}).get("source") == "Existing":
        there |= {("Secret", NAMESPACE, f"motet-{component}-tls") for component in COMPONENTS}
        there |= {("Secret", "motet-pools", "motet-runner-tls")}
    if any("existingSecret" in one.get("database", {}) for one in (values, values.get("gateway", {}))):
        there |= {("Secret", NAMESPACE, "postgres")}
    if name := values.get("database", {}).get("authorities", {}).get("configMapName"):
        there |= {("ConfigMap", NAMESPACE, name)}
    pools = values.get("pools", {}).get("namespaces", ["motet-pools"])
    if name := values.get("runner", {}).get("authorities", {}).get("configMapName"):
        there |= {("ConfigMap", namespace, name) for namespace in pools}
    for who, template in pod_templates(objects).items():
        for namespace in pools if who == "the operator's runner" else [NAMESPACE]:
            spec = template["spec"]
            volumes = spec.get("volumes", [])
            secrets = [one["secret"] for one in volumes if "secret" in one]
            needed = {("Secret", one["secretName"]) for one in secrets if not one.get("optional")}
            needed |= {("ConfigMap", one["configMap"]["name"]) for one in volumes if "configMap" in one}
            needed |= {
                ("Secret", source["secretKeyRef"]["name"])
                for container in containers(template)
                for source in environment(container).values()
                if isinstance(source, dict) and "secretKeyRef" in source
            }
            if account := spec.get("serviceAccountName"):
                needed.add(("ServiceAccount", account))
            missing = {(kind, name) for kind, name in needed if (kind, namespace, name) not in there}
            assert missing == set(), f"{who} in {namespace}"


# Settings -------------------------------------------------------------------------------------------------------------


@every_variant
def test_every_variable_is_a_setting(values: Object) -> None:
    known = known_settings() | OF_THE_POD | OF_THE_DRIVER
    for who, template in pod_templates(render(values)).items():
        for container in containers(template):
            if container["name"] != "test":
                assert environment(container).keys() - known == set(), who


@every_variant
def test_certificates_are_mounted_where_processes_read_them(values: Object) -> None:
    for who, template in pod_templates(render(values)).items():
        for container in containers(template):
            mounts = {one["mountPath"] for one in container.get("volumeMounts", []) if one["name"] == "tls"}
            assert {environment(container).get("MOTET_TLS_DIR", "")} - {""} == mounts, f"{who}: {container['name']}"


def trusted(template: Object) -> tuple[Object, set[str]]:
    """The ConfigMap of authorities that a pod mounts, and the variables that name the file in it."""
    (volume,) = [one for one in template["spec"]["volumes"] if one["name"] == "authorities"]
    (container,) = template["spec"]["containers"]
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "authorities"]
    (item,) = volume["configMap"]["items"]
    assert f"{mount['mountPath']}/{item['path']}" == AUTHORITIES
    said = {name for name, value in environment(container).items() if value == AUTHORITIES}
    return {"name": volume["configMap"]["name"], "key": item["key"]}, said


def test_only_runners_trust_the_authorities_of_runners() -> None:
    named_ones = {"runner": {"authorities": {"configMapName": "who-signs", "key": "bundle.pem"}}}
    templates = pod_templates(render(named_ones))
    what, told = trusted(templates.pop("the operator's runner"))
    assert what == {"name": "who-signs", "key": "bundle.pem"}
    assert told == {"MOTET_RUNNER_FETCH_CA_FILE"}
    for template in (*templates.values(), runner_template(render())):
        assert "authorities" not in {volume["name"] for volume in template["spec"].get("volumes", [])}


def test_runners_are_told_the_limit_of_their_disk() -> None:
    for limit in ("", "10Gi"):
        template = pod_templates(render({"runner": {"diskLimit": limit}}))["the operator's runner"]
        told = environment(containers(template)[0]).get("MOTET_RUNNER_DISK_LIMIT", "")
        (volume,) = [one for one in template["spec"]["volumes"] if one["name"] == "data"]
        assert told == volume["emptyDir"].get("sizeLimit", "") == limit


def test_every_pod_that_connects_to_the_database_knows_its_authority() -> None:
    database = {"url": "postgresql+asyncpg://db.example/motet", "authorities": {"configMapName": "who-signs"}}
    templates = pod_templates(render({"database": database}))
    for who in (f"Deployment {NAMESPACE}/motet-predictor", f"Job {NAMESPACE}/motet-migrate"):
        assert trusted(templates[who]) == ({"name": "who-signs", "key": "ca.crt"}, {"PGSSLROOTCERT"})


@every_variant
def test_variables_that_refer_to_others_come_after_them(values: Object) -> None:
    """Kubernetes replaces $(NAME) only by variables that come before."""
    for who, template in pod_templates(render(values)).items():
        for container in containers(template):
            before: set[str] = set()
            for one in container["env"]:
                assert set(re.findall(r"\$\((\w+)\)", one.get("value", ""))) <= before, f"{who}: {one}"
                before.add(one["name"])


def test_the_users_variables_override_those_of_the_chart() -> None:
    values = {
        "logLevel": "warning",
        "env": {"MOTET_LOG_LEVEL": "error", "MOTET_LOG_FORMAT": "console"},
        "gateway": {"env": {"MOTET_LOG_LEVEL": "debug"}},
        "runner": {"env": {"MOTET_RUNNER_OUTBOX_KIB": "1"}},
    }
    objects = render(values)
    of = {who: environment(template["spec"]["containers"][0]) for who, template in pod_templates(objects).items()}
    gateway, scheduler = of[f"Deployment {NAMESPACE}/motet-gateway"], of[f"Deployment {NAMESPACE}/motet-scheduler"]
    assert (gateway["MOTET_LOG_LEVEL"], scheduler["MOTET_LOG_LEVEL"]) == ("debug", "error")
    assert gateway["MOTET_LOG_FORMAT"] == "console"
    assert of["the operator's runner"]["MOTET_RUNNER_OUTBOX_KIB"] == "1"


@pytest.mark.parametrize("days", [30, 3650, 10000])
def test_certificates_have_their_last_day_and_stay_after_uninstalling(days: int) -> None:
    """The annotation tells an upgrade what to renew: templates cannot read certificates."""
    made = of_kind(render({"tls": {"validityDays": days}}), "Secret")
    secrets = [one for one in made if "tls.crt" in one["data"]]
    for one in secrets:
        annotations = one["metadata"]["annotations"]
        assert annotations["helm.sh/resource-policy"] == "keep", title(one)
        made = x509.load_pem_x509_certificate(base64.b64decode(one["data"]["tls.crt"]))
        assert annotations["motet.dev/not-after"] == made.not_valid_after_utc.date().isoformat(), title(one)
        held = made.not_valid_after_utc - made.not_valid_before_utc
        assert held.days == (10 * days if title(one).endswith("-ca") else days), title(one)
    assert len(secrets) == 1 + len(COMPONENTS) + 1


def test_every_process_listens_on_every_address_of_its_pod_and_is_reached_at_the_pods_own() -> None:
    """IPv6 alone, both families, and `kubectl port-forward`, which connects to the loopback address."""
    of = {who: environment(template["spec"]["containers"][0]) for who, template in pod_templates(render()).items()}
    of |= {who.rpartition("-")[2]: found for who, found in of.items()}
    assert of["gateway"]["MOTET_GATEWAY_HOST"] == "::"
    assert of["predictor"]["MOTET_PREDICTOR_ADDRESS"] == "[::]:7102"
    assert of["supervisor"]["MOTET_SUPERVISOR_ADDRESS"] == "[::]:7103"
    for who, role in (("scheduler", "SCHEDULER"), ("the operator's runner", "RUNNER")):
        port = PORTS[role.lower()]
        assert of[who][f"MOTET_{role}_LISTEN"] == f"[::]:{port}"
        assert of[who][f"MOTET_{role}_ADDRESS"] == f"$(POD_IP):{port}"
    for who, found in of.items():
        for name, value in found.items():
            assert not re.search(r"0\.0\.0\.0|localhost|127\.", str(value)), f"{who}: {name}"


def test_the_operator_gets_every_pool_namespace() -> None:
    operator = named(render({"pools": {"namespaces": ["a", "b"]}}), "Deployment", "motet-operator")
    said = environment(operator["spec"]["template"]["spec"]["containers"][0])
    assert json.loads(said["MOTET_CLUSTER_POOL_NAMESPACES"]) == ["a", "b"]


# Ports and addresses --------------------------------------------------------------------------------------------------


@every_variant
def test_every_address_is_a_service_that_leads_to_a_listening_pod(values: Object) -> None:
    objects = render(values)
    services = {
        f"{one['metadata']['name']}.{one['metadata']['namespace']}.svc": one for one in of_kind(objects, "Service")
    }
    dialled = set()
    for template in pod_templates(objects).values():
        for container in containers(template):
            for value in environment(container).values():
                if isinstance(value, str) and (found := re.fullmatch(r"([a-z.-]+\.svc):(\d+)", value)):
                    host, port = found[1], int(found[2])
                    assert port in {one["port"] for one in services[host]["spec"]["ports"]}, value
                    dialled.add(port)
    assert dialled == {PORTS[name] for name in ("gateway", "scheduler", "predictor", "supervisor")}


@every_variant
def test_every_service_port_has_the_name_and_number_of_its_container_port(values: Object) -> None:
    objects = render(values)
    for service in of_kind(objects, "Service"):
        component = service["metadata"]["labels"]["app.kubernetes.io/component"]
        (deployment,) = [
            one
            for one in of_kind(objects, "Deployment")
            if service["spec"]["selector"].items() <= one["spec"]["template"]["metadata"]["labels"].items()
        ]
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        held = {one["name"]: one["containerPort"] for one in container["ports"]}
        assert set(held.values()) == {METRICS} | ({PORTS[component]} if component in PORTS else set())
        for port in service["spec"]["ports"]:
            assert held[port["targetPort"]] == port["port"], title(service)
    runner = runner_template(objects)["spec"]["containers"][0]
    assert {one["containerPort"] for one in runner["ports"]} == {PORTS["runner"], METRICS}


def test_streams_are_not_balanced_by_the_network() -> None:
    for service in of_kind(render(), "Service"):
        headless = service["spec"].get("clusterIP") == "None"
        assert headless == (service["metadata"]["name"] != "motet-gateway"), title(service)


def test_only_the_gateway_can_be_public_and_its_metrics_cannot() -> None:
    service = named(render({"gateway": {"service": {"type": "LoadBalancer"}}}), "Service", "motet-gateway")
    assert service["spec"]["type"] == "LoadBalancer"
    assert [port["port"] for port in service["spec"]["ports"]] == [PORTS["gateway"]]
    gateway = pod_templates(render())[f"Deployment {NAMESPACE}/motet-gateway"]["spec"]["containers"][0]
    assert "MOTET_GATEWAY_METRICS_DIR" not in environment(gateway), "with it /metrics is on the clients' port, too"


@every_variant
def test_every_long_lived_container_has_probes_at_the_port_of_its_health(values: Object) -> None:
    for who, template in pod_templates(render(values)).items():
        if who.startswith(("Job", "Pod")):
            continue
        for container in template["spec"]["containers"]:
            assert environment(container)["MOTET_METRICS_ADDRESS"] == f"[::]:{METRICS}"
            ports = {one["name"]: one["containerPort"] for one in container["ports"]}
            paths = {}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                get = container[probe]["httpGet"]
                assert ports[get["port"]] == METRICS, who
                paths[probe] = get["path"]
            assert (paths["livenessProbe"], paths["readinessProbe"]) == ("/livez", "/readyz"), who


def test_a_runner_may_take_twenty_minutes_to_load() -> None:
    probe = runner_template(render())["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 20 * 60
    assert probe["httpGet"]["path"] == "/readyz"


def test_pods_that_serve_clients_wait_until_others_send_nothing_more() -> None:
    templates = pod_templates(render())
    for who in ("the operator's runner", f"Deployment {NAMESPACE}/motet-gateway"):
        (container,) = templates[who]["spec"]["containers"]
        assert container["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}
    gateway = templates[f"Deployment {NAMESPACE}/motet-gateway"]["spec"]
    drain = 30  # of MOTET_GATEWAY_DRAIN_SECONDS
    assert gateway["terminationGracePeriodSeconds"] >= 5 + drain + 15


# Objects --------------------------------------------------------------------------------------------------------------


@every_variant
def test_every_object_has_labels_and_exists_once(values: Object) -> None:
    objects = [one for one in render(values) if one["kind"] != "CustomResourceDefinition"]
    titles = [title(one) for one in objects]
    assert len(titles) == len(set(titles))
    for one in objects:
        labels = one["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "motet", title(one)
        assert labels["app.kubernetes.io/managed-by"] == "Helm", title(one)


@every_variant
def test_rendering_twice_gives_the_same_except_for_keys(values: Object) -> None:
    def without_keys(objects: list[Object]) -> list[Object]:
        made = ("-tls", "-ca", "-features-key")
        return [
            one | {"data": None} if one["kind"] == "Secret" and title(one).endswith(made) else one for one in objects
        ]

    assert without_keys(render(values)) == without_keys(render(values | {"global": {}}))


def test_without_the_charts_own_keys_rendering_twice_gives_the_same() -> None:
    values = {"tls": {"source": "Existing"}, "gateway": {"featuresKeySecret": "kept-elsewhere"}}
    assert render(values) == render(values | {"global": {}})


@every_variant
def test_budgets_allow_the_eviction_of_broken_pods_and_exist_for_several_replicas(values: Object) -> None:
    objects = render(values)
    wanted = set()
    for deployment in of_kind(objects, "Deployment"):
        component = deployment["metadata"]["labels"]["app.kubernetes.io/component"]
        asked = values.get(component, {}).get("podDisruptionBudget", {}).get("mode") == "Always"
        if asked or deployment["spec"].get("replicas", 2) > 1:
            wanted.add(deployment["metadata"]["name"])
    budgets = of_kind(objects, "PodDisruptionBudget")
    assert {one["metadata"]["name"] for one in budgets} == wanted, "the operator makes those of runners, one a pool"
    assert all(one["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for one in budgets)
    assert all(one["spec"]["maxUnavailable"] >= 1 for one in budgets)


def test_an_autoscaler_can_set_the_gateways_replicas() -> None:
    deployment = named(render({"gateway": {"replicas": None}}), "Deployment", "motet-gateway")
    assert "replicas" not in deployment["spec"]


def test_pods_are_spread_by_default() -> None:
    for deployment in of_kind(render(), "Deployment"):
        spread = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert [one["topologyKey"] for one in spread] == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
        for one in spread:
            assert one["labelSelector"]["matchLabels"] == deployment["spec"]["selector"]["matchLabels"]


@every_variant
def test_the_runner_template_never_changes_for_the_operator_that_reads_it(values: Object) -> None:
    """Other content gets another name, so that a failed upgrade changes nothing for the operator before it."""

    def read(values: Object) -> str:
        objects = render(values)
        (operator,) = [one for one in of_kind(objects, "Deployment") if one["metadata"]["name"].endswith("operator")]
        (name,) = [
            one["configMap"]["name"]
            for one in operator["spec"]["template"]["spec"]["volumes"]
            if one["name"] == "runner"
        ]
        assert named(objects, "ConfigMap", name)["immutable"] is True
        return str(name)

    runner = values.get("runner", {})
    changed = values | {"runner": runner | {"env": {"MOTET_RUNNER_OUTBOX_KIB": "7"}}}
    other_operator = {"replicas": 3, "image": {"tag": "of-another-version"}}
    assert read(values) == read(values | {"operator": values.get("operator", {}) | other_operator}) != read(changed)


@every_variant
def test_volumes_on_disk_keep_no_node_from_a_cluster_autoscaler(values: Object) -> None:
    """It never removes a node with a pod that has an emptyDir on disk, unless an annotation names the volume."""
    for who, template in pod_templates(render(values)).items():
        if not who.startswith(("Job", "Pod")):
            empty = [volume["name"] for volume in template["spec"]["volumes"] if "emptyDir" in volume]
            named_ones = template["metadata"]["annotations"][SAFE_TO_EVICT]
            assert named_ones.split(",") == empty, who


def test_the_users_annotations_override_those_of_the_chart() -> None:
    mine = {"podAnnotations": {SAFE_TO_EVICT: "tmp"}}
    templates = pod_templates(render({"gateway": mine, "runner": mine}))
    for who in (f"Deployment {NAMESPACE}/motet-gateway", "the operator's runner"):
        assert templates[who]["metadata"]["annotations"][SAFE_TO_EVICT] == "tmp", who


def test_the_operator_knows_the_image_of_vllm_if_there_is_one() -> None:
    assert "images" not in runner_template(render())
    images = {
        "motet/vllm:1.2": {"repository": "motet/vllm", "tag": "1.2"},
        f"motet/vllm@{DIGEST}": {"repository": "motet/vllm", "digest": DIGEST},
    }
    for image, values in images.items():
        template = runner_template(render({"runner": {"vllm": {"image": values}}}))
        assert template["images"] == {"vllm": image}
        assert template["spec"] == runner_template(render())["spec"]


def test_the_runner_template_sets_no_field_that_a_pool_sets() -> None:
    """Two writers would overwrite each other's value of a field."""
    template = runner_template(render())
    (container,) = template["spec"]["containers"]
    assert container["name"] == "runner"
    pools = {"nodeSelector", "tolerations", "affinity", "topologySpreadConstraints", "priorityClassName"}
    pools |= {"schedulerName"}
    pools |= {"runtimeClassName", "terminationGracePeriodSeconds"}
    assert not pools & template["spec"].keys()
    assert {"command", "args"}.isdisjoint(container)


def test_the_database_is_migrated_before_this_version_starts() -> None:
    objects = render({"database": {"url": "postgresql+asyncpg://motet:secret@db.example/motet"}})
    job = named(objects, "Job", "motet-migrate")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-P", "-m", "motet.store"]
    needs = environment(container)["MOTET_DATABASE_URL"]["secretKeyRef"]["name"]
    before = named(objects, "Secret", needs)["metadata"]["annotations"]
    assert before["helm.sh/hook"] == job["metadata"]["annotations"]["helm.sh/hook"]
    assert int(before["helm.sh/hook-weight"]) < int(job["metadata"]["annotations"]["helm.sh/hook-weight"])


def test_another_database_restarts_only_those_that_use_it() -> None:
    def templates(password: str) -> dict[str, Object]:
        return pod_templates(render({"database": {"url": f"postgresql+asyncpg://motet:{password}@db.example/motet"}}))

    before, after = templates("one"), templates("two")
    restarted = {who for who in before if before[who] != after[who]}
    assert restarted == {f"Deployment {NAMESPACE}/motet-{name}" for name in ("gateway", "predictor")}


def test_by_default_one_policy_refuses_and_the_others_warn() -> None:
    def actions(values: Object) -> list[list[str]]:
        return [one["spec"]["validationActions"] for one in of_kind(render(values), "ValidatingAdmissionPolicyBinding")]

    assert actions({}) == [["Warn"], ["Warn"], ["Deny"]]
    off = {"warnings": {"enabled": False}, "poolAccounts": {"enabled": False}}
    assert actions({"admissionPolicies": off}) == []
    all_of_them = actions(VARIANTS["everything that can be asked for"])
    assert sorted(all_of_them) == [["Deny"]] * 5 + [["Warn"]] * 2


def test_a_policy_knows_the_default_of_a_pools_maximum_rank() -> None:
    policy = named(render(), "ValidatingAdmissionPolicy", "motet-lower-rank")
    ranks = [one["expression"].rpartition(" : ")[2] for one in policy["spec"]["variables"]]
    assert ranks == [str(Settings.model_fields["max_lora_rank"].default)] * 2


def test_without_a_database_the_predictor_uses_a_file() -> None:
    objects = render()
    assert of_kind(objects, "Job") == []
    predictor = named(objects, "Deployment", "motet-predictor")["spec"]["template"]["spec"]
    (schema,) = predictor["initContainers"]
    assert schema["command"] == ["python", "-P", "-m", "motet.store"]
    assert environment(schema)["MOTET_DATA_DIR"] == environment(predictor["containers"][0])["MOTET_DATA_DIR"]
    with_database = render({"database": {"url": "postgresql+asyncpg://db.example/motet"}})
    assert "initContainers" not in named(with_database, "Deployment", "motet-predictor")["spec"]["template"]["spec"]


@every_variant
def test_passwords_are_only_in_secrets(values: Object) -> None:
    for one in render(values):
        if one["kind"] != "Secret":
            assert "motet:secret@" not in yaml.safe_dump(one), title(one)


# Definitions, versions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [{}, {"crds": {"install": False}}], ids=["with", "without"])
def test_definitions_are_part_of_the_chart_unless_they_have_a_release_of_their_own(values: Object) -> None:
    definitions = of_kind(render(values), "CustomResourceDefinition")
    assert len(definitions) == (0 if values else 2)


def test_definitions_are_those_of_the_repository_and_stay_after_uninstalling() -> None:
    for definition in render(chart=CRDS):
        metadata = definition["metadata"]
        assert metadata.pop("annotations") == {"helm.sh/resource-policy": "keep"}
        file = ROOT / "crds" / f"{definition['spec']['group']}_{definition['spec']['names']['plural']}.yaml"
        assert definition == yaml.safe_load(file.read_text())


@pytest.mark.parametrize("chart", ["motet", "motet-crds"])
def test_a_chart_has_the_version_that_it_installs(chart: str) -> None:
    about = yaml.safe_load((ROOT / "charts" / chart / "Chart.yaml").read_text())
    version = pyproject()["project"]["version"]
    assert (about["version"], about["appVersion"], about["kubeVersion"]) == (version, version, ">=1.33.0-0")
    assert all(one["version"] == version for one in about.get("dependencies", []))
