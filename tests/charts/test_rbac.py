"""Who may do what. A test on a live cluster proves with the audit log that every right is used."""

import itertools

import pytest

from tests.charts.helm import NAMESPACE, VARIANTS, Object, of_kind, render, title

Right = tuple[str, str, str]
"""Where (a namespace, or * for all), what, verb."""

every_variant = pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)

POOLS = "motet-pools"
OPERATOR = {
    *itertools.product("*", ("motet.dev/loraadapters", "motet.dev/servingpools"), ("list", "watch")),
    *itertools.product("*", ("motet.dev/loraadapters/status", "motet.dev/servingpools/status"), ("patch",)),
    *itertools.product("*", ("/namespaces",), ("list", "watch")),
    *itertools.product("*", ("/events",), ("create", "patch")),
    ("*", "/nodes", "list"),
    (NAMESPACE, "coordination.k8s.io/leases", "create"),
    *itertools.product([NAMESPACE], ("coordination.k8s.io/leases=motet-operator",), ("get", "update")),
    *itertools.product([POOLS], ("apps/deployments",), ("list", "watch", "create", "patch", "delete")),
    *itertools.product([POOLS], ("/pods",), ("get", "list", "watch", "patch", "delete")),
    *itertools.product([POOLS], ("policy/poddisruptionbudgets",), ("list", "watch", "create", "patch")),
}
IN_POOLS = ("apps/deployments", "/pods", "policy/poddisruptionbudgets")
SCHEDULER = {
    (NAMESPACE, "coordination.k8s.io/leases", "create"),
    *itertools.product([NAMESPACE], ("coordination.k8s.io/leases=motet-scheduler",), ("get", "update")),
}
TEST = {
    (NAMESPACE, "motet.dev/loraadapters", "create"),
    ("*", "apiextensions.k8s.io/customresourcedefinitions=loraadapters.motet.dev", "get"),
    ("*", "apiextensions.k8s.io/customresourcedefinitions=servingpools.motet.dev", "get"),
}


def rights(objects: list[Object]) -> dict[str, set[Right]]:
    """The rights of each ServiceAccount, through every binding of the chart."""
    roles = {(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]): one for one in objects}
    found: dict[str, set[Right]] = {}
    for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding"):
        namespace = binding["metadata"].get("namespace")
        role = roles[binding["roleRef"]["kind"], namespace, binding["roleRef"]["name"]]
        for subject in binding["subjects"]:
            assert subject["kind"] == "ServiceAccount"
            assert ("ServiceAccount", subject["namespace"], subject["name"]) in roles
            held = found.setdefault(subject["name"], set())
            for rule in role["rules"]:
                whats = [f"{group}/{what}" for group in rule["apiGroups"] for what in rule["resources"]]
                names = rule.get("resourceNames")
                whats = [f"{what}={name}" for what in whats for name in names] if names else whats
                held |= set(itertools.product([namespace or "*"], whats, rule["verbs"]))
    return found


def test_every_component_has_only_the_rights_that_it_needs() -> None:
    """Gateway, predictor, supervisor and runners have none."""
    assert rights(render()) == {"motet-operator": OPERATOR, "motet-scheduler": SCHEDULER, "motet-test": TEST}


def test_runners_have_only_the_rights_that_tenants_grant() -> None:
    objects = render({"pools": {"namespaces": ["a", "b"]}})
    accounts = {title(one) for one in of_kind(objects, "ServiceAccount")}
    assert {"ServiceAccount a/motet-runner", "ServiceAccount b/motet-runner"} <= accounts
    assert "motet-runner" not in rights(objects)


def test_permissions_for_pools_are_granted_per_namespace() -> None:
    held = rights(render({"pools": {"namespaces": ["a", "b"]}}))["motet-operator"]
    assert {where for where, what, _ in held if what in IN_POOLS} == {"a", "b"}


@every_variant
def test_no_role_grants_everything_or_the_right_to_grant_more(values: Object) -> None:
    for role in of_kind(render(values), "Role", "ClusterRole"):
        for rule in role["rules"]:
            said = {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
            assert not any("*" in one for one in said), title(role)
            assert not said & {"escalate", "bind", "impersonate"}, title(role)
            assert not said & {"secrets", "serviceaccounts/token", "pods/exec", "nodes/proxy"}, title(role)
            assert "nodes" not in said or rule["verbs"] == ["list"], title(role)


def labelled(objects: list[Object], audience: str) -> set[tuple[str, str]]:
    """What the chart adds to a role of the cluster."""
    return {
        (what, verb)
        for role in of_kind(objects, "ClusterRole")
        if role["metadata"]["labels"].get(f"rbac.authorization.k8s.io/aggregate-to-{audience}") == "true"
        for rule in role["rules"]
        for what, verb in itertools.product(rule["resources"], rule["verbs"])
    }


def test_tenants_manage_their_adapters_and_see_pools() -> None:
    objects = render()
    for audience in ("edit", "admin"):
        held = labelled(objects, audience)
        assert {what for what, _ in held} == {"loraadapters"}
        assert {"create", "patch", "delete"} <= {verb for _, verb in held}
    held = labelled(objects, "view")
    assert held == set(itertools.product(("loraadapters", "servingpools"), ("get", "list", "watch")))


def test_only_the_operator_writes_a_status() -> None:
    for role in of_kind(render(), "Role", "ClusterRole"):
        for rule in role["rules"]:
            if any(what.endswith("/status") for what in rule["resources"]):
                assert role["metadata"]["name"] == "motet-operator"


@pytest.mark.parametrize(("switch", "role"), [("aggregate", "motet-tenant"), ("platformAdmin", "motet-platform-admin")])
def test_roles_for_people_can_be_left_out(switch: str, role: str) -> None:
    def names(values: Object) -> set[str]:
        return {one["metadata"]["name"] for one in of_kind(render(values), "ClusterRole")}

    assert role in names({})
    assert role not in names({"rbac": {switch: False}})
