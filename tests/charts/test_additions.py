"""What users add to Motet's pods, or leave out of them, so that they run on any cluster."""

from typing import Any

import pytest

from tests.charts.helm import ADDITIONS, COMPONENTS, NAMESPACE, HelmFailed, Object, containers, pod_templates, render
from tests.charts.test_templates import environment

LONG_LIVED = [*(f"Deployment {NAMESPACE}/motet-{name}" for name in COMPONENTS), "the operator's runner"]
DATABASE = {"database": {"url": "postgresql+asyncpg://db.example/motet"}}


def main_container(template: Object) -> Object:
    found: Object = template["spec"]["containers"][0]
    return found


def test_on_openshift_no_pod_names_a_user_and_all_else_stays_restricted() -> None:
    """There each namespace has its own range of users, and `restricted-v2` refuses all others."""
    users = ("runAsUser", "runAsGroup", "fsGroup")
    before = pod_templates(render(DATABASE))
    after = pod_templates(render({**DATABASE, "securityContext": {"pod": dict.fromkeys(users)}}))
    assert len(after) == 8
    for who, template in after.items():
        left = {name: value for name, value in before[who]["spec"]["securityContext"].items() if name not in users}
        assert template["spec"]["securityContext"] == left, who
        assert [one["securityContext"] for one in containers(template)] == [
            one["securityContext"] for one in containers(before[who])
        ], who


def test_security_settings_can_be_added_for_all_containers() -> None:
    added = {"container": {"capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}, "readOnlyRootFilesystem": False}}
    for who, template in pod_templates(render({**DATABASE, "securityContext": added})).items():
        for container in containers(template):
            assert container["securityContext"] == {"allowPrivilegeEscalation": False, **added["container"]}, who


@pytest.mark.parametrize("who", LONG_LIVED)
def test_every_component_takes_volumes_variables_and_sidecars(who: str) -> None:
    plain, template = pod_templates(render())[who], pod_templates(render(ADDITIONS))[who]
    own, *beside = template["spec"]["containers"]
    assert beside == ADDITIONS["gateway"]["sidecars"]
    before = main_container(plain)
    assert own["volumeMounts"] == [*before["volumeMounts"], *ADDITIONS["gateway"]["extraVolumeMounts"]]
    volumes = template["spec"]["volumes"]
    assert [one["name"] for one in volumes[:-1]] == [one["name"] for one in plain["spec"]["volumes"]]
    assert volumes[-1:] == ADDITIONS["gateway"]["extraVolumes"]
    added: dict[str, Any] = {"TOKEN": {"secretKeyRef": {"name": "mine", "key": "token"}}, "MOTET_LOG_LEVEL": "warning"}
    assert environment(own) == environment(before) | added | {"WITH_TOKEN": "token=$(TOKEN)"}
    names = [one["name"] for one in own["env"]]
    assert names.index("POD_UID") < names.index("TOKEN") < names.index("WITH_TOKEN"), "a variable names earlier ones"


@pytest.mark.parametrize("name", ["POD_IP", "MOTET_LOGLEVEL", "1"])
def test_an_added_variable_is_refused_if_the_chart_sets_it_or_nobody_knows_it(name: str) -> None:
    with pytest.raises(HelmFailed, match="/gateway/extraEnv/0/name"):
        render({"gateway": {"extraEnv": [{"name": name, "value": "x"}]}})


@pytest.mark.parametrize("how", ["extraEnv", "env"])
def test_a_variable_that_the_chart_takes_from_a_secret_is_written_once_if_the_user_sets_it(how: str) -> None:
    mine = {"MOTET_DATABASE_URL": "postgresql+asyncpg://mine/motet", "PGSSLROOTCERT": "/etc/mine/ca.crt"}
    own = {"extraEnv": [{"name": name, "value": value} for name, value in mine.items()], "env": mine}[how]
    database = DATABASE["database"] | {"authorities": {"configMapName": "who-signs-databases"}}
    objects = render({"database": database, **{name: {how: own} for name in ("gateway", "predictor", "operator")}})
    for who, template in pod_templates(objects).items():
        for container in containers(template):
            names = [one["name"] for one in container.get("env", ())]
            assert len(names) == len(set(names)), who
            if who.endswith(("gateway", "predictor", "migrate")):
                assert mine.items() <= environment(container).items(), who


def test_a_variable_that_is_added_twice_is_refused() -> None:
    twice = [{"name": "TOKEN", "value": "a"}, {"name": "TOKEN", "value": "b"}]
    for component in (*COMPONENTS, "runner"):
        with pytest.raises(HelmFailed, match=f"{component}.extraEnv has the variable TOKEN twice: keep one of them"):
            render({component: {"extraEnv": twice}})


def test_a_field_of_the_pod_cannot_be_set_by_env() -> None:
    for values in ({"env": {"POD_IP": "x"}}, {"runner": {"env": {"POD_IP": "x"}}}):
        with pytest.raises(HelmFailed, match="invalid propertyName 'POD_IP'"):
            render(values)


def test_all_pods_can_be_kept_on_nodes_of_one_architecture() -> None:
    everywhere = {"nodeSelector": {"kubernetes.io/arch": "arm64"}, "gateway": {"nodeSelector": {"disk": "fast"}}}
    templates = pod_templates(render(DATABASE | everywhere))
    assert len(templates) == 8
    for who, template in templates.items():
        extra = {"disk": "fast"} if who.endswith("-gateway") else {}
        assert template["spec"]["nodeSelector"] == {"kubernetes.io/arch": "arm64"} | extra, who


def test_a_component_may_be_on_other_nodes_than_the_rest() -> None:
    values = {"nodeSelector": {"disk": "slow"}, "gateway": {"nodeSelector": {"disk": "fast"}}}
    found = {who: one["spec"]["nodeSelector"]["disk"] for who, one in pod_templates(render(values)).items()}
    assert [who for who, disk in found.items() if disk == "fast"] == [f"Deployment {NAMESPACE}/motet-gateway"]


def test_the_operator_is_told_its_class() -> None:
    who = f"Deployment {NAMESPACE}/motet-operator"
    for values, told in (({}, ""), ({"operator": {"class": "staging"}}, "staging")):
        assert environment(main_container(pod_templates(render(values))[who]))["MOTET_CLUSTER_OPERATOR_CLASS"] == told
    with pytest.raises(HelmFailed, match="/operator/class"):
        render({"operator": {"class": "not a label"}})


@pytest.mark.parametrize(
    ("name", "component", "field"),
    [
        ("MOTET_CLUSTER_OPERATOR_CLASS", "operator", "operator.class"),
        ("MOTET_CLUSTER_POOL_NAMESPACES", "operator", "pools.namespaces"),
        ("MOTET_GATEWAY_AUTH", "gateway", "gateway.auth"),
        ("MOTET_RUNNER_MODEL_DIGEST", "runner", "spec.model.digest of each ServingPool"),
        ("MOTET_RUNNER_MODEL_REVISION", "runner", "spec.model.revision of each ServingPool"),
    ],
)
def test_a_variable_is_refused_if_other_objects_know_only_the_field_for_it(
    name: str, component: str, field: str
) -> None:
    for where, values in (
        ("env", {"env": {name: "x"}}),
        (f"{component}.env", {component: {"env": {name: "x"}}}),
        (f"{component}.extraEnv", {component: {"extraEnv": [{"name": name, "value": "x"}]}}),
    ):
        with pytest.raises(HelmFailed, match=f": {where} has the variable {name}: remove it there and set {field}\n"):
            render(values)
