"""An upgrade to another operator.class is refused while the class before has objects, and only then."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from motet_operator.cluster import kinds
from motet_operator.cluster.kinds import Kind, selector
from tests.charts.api_server import NAME, api_server
from tests.charts.helm import MOTET, NAMESPACE, HelmFailed, Object, helm, with_values

POOLS = "motet-pools"


def operator(class_: str, *more: str) -> Object:
    """The operator's Deployment, as the release made it, with namespaces for pools."""
    settings = {"OPERATOR_CLASS": class_, "POOL_NAMESPACES": json.dumps([POOLS, *more])}
    env = [{"name": f"MOTET_CLUSTER_{name}", "value": value} for name, value in settings.items()]
    containers = [{"name": "operator", "env": env}, {"name": "proxy"}]
    return made("apps/v1", "Deployment", "motet-operator", NAMESPACE) | {
        "spec": {"template": {"spec": {"containers": containers}}}
    }


def made(version: str, kind: str, name: str, namespace: str) -> Object:
    metadata: Object = {"name": name, "namespace": namespace, "labels": {}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def of_class(it: Object, class_: str) -> Object:
    if class_:
        it["metadata"]["labels"]["motet.dev/operator-class"] = class_
    return it


def pool(class_: str = "", namespace: str = POOLS) -> Object:
    return of_class(made("motet.dev/v1alpha1", "ServingPool", "demo", namespace), class_)


def adapter(class_: str = "", namespace: str = "tenant", pool_in: str | None = POOLS) -> Object:
    it = of_class(made("motet.dev/v1alpha1", "LoRAAdapter", "legal", namespace), class_)
    return it | {"spec": {"poolRef": {"name": "demo"} | ({"namespace": pool_in} if pool_in else {})}}


def runners(class_: str = "", namespace: str = POOLS) -> Object:
    it = of_class(made("apps/v1", "Deployment", "demo-6c5", namespace), class_)
    it["metadata"]["labels"]["motet.dev/pool"] = "demo"
    return it


def upgrade(folder: Path, values: Object, *objects: Object) -> None:
    """Raises HelmFailed."""
    given = with_values({"crds": {"install": False}, "tls": {"source": "Existing"}} | values, folder)
    with api_server(folder, *objects) as config:
        how = ("--is-upgrade", "--dry-run=server", "--disable-openapi-validation")
        to = (f"--namespace={NAMESPACE}", f"--kubeconfig={config}", *how)
        helm("template", "motet", str(MOTET), *to, given)


STAGING: Object = {"operator": {"class": "staging"}}


@pytest.mark.parametrize(
    ("left", "named"),
    [
        (pool(), "ServingPool motet-pools/demo"),
        (adapter(), "LoRAAdapter tenant/legal"),
        (adapter("", POOLS, None), "LoRAAdapter motet-pools/legal"),
        (runners(), "Deployment motet-pools/demo-6c5"),
    ],
)
def test_an_object_of_the_class_before_refuses_the_upgrade(tmp_path: Path, left: Object, named: str) -> None:
    fix = "first give them the label motet.dev/operator-class=staging, and wait until the Deployments .* are gone"
    with pytest.raises(HelmFailed, match=f'from "" to "staging", .* no longer handle {named}: .*{fix}'):
        upgrade(tmp_path, STAGING, operator(""), left)


def test_objects_of_another_release_or_class_refuse_nothing(tmp_path: Path) -> None:
    theirs = "other-pools"
    handed_over = (pool("staging"), adapter("staging"), runners("staging"))
    another = (pool("", theirs), adapter("", "tenant2", theirs), runners("", theirs))
    web = made("apps/v1", "Deployment", "web", POOLS)
    upgrade(tmp_path, STAGING, operator(""), *handed_over, *another, web)
    upgrade(tmp_path, STAGING, operator("staging"), pool("staging"), adapter("staging"), runners("staging"))


def test_pools_of_a_namespace_that_the_upgrade_gives_back_count_as_well(tmp_path: Path) -> None:
    with pytest.raises(HelmFailed, match="would no longer handle ServingPool given-back/demo"):
        upgrade(tmp_path, STAGING, operator("", "given-back"), pool("", "given-back"))
    assert NAME not in [thread.name for thread in threading.enumerate()], "its server has ended"


def is_selected(it: Object, by: str) -> bool:
    """As an API server reads a selector: `key`, `!key` and `key=value`, all of which must hold"""
    labels = it["metadata"]["labels"]
    for term in by.split(","):
        key, _, value = term.removeprefix("!").partition("=")
        if (labels.get(key) == value if value else (key in labels) is not term.startswith("!")) is False:
            return False
    return True


@pytest.mark.parametrize("class_", ["", "staging"])
@pytest.mark.parametrize(
    ("kind", "make"), [(kinds.POOLS, pool), (kinds.ADAPTERS, adapter), (kinds.DEPLOYMENTS, runners)]
)
def test_an_operator_takes_the_objects_of_its_class_alone(
    kind: Kind, make: Callable[[str], Object], class_: str
) -> None:
    classes = ("", "staging", "production")
    assert [of for of in classes if is_selected(make(of), selector(kind, class_))] == [class_]
    assert not is_selected(made("apps/v1", "Deployment", "web", POOLS), selector(kinds.DEPLOYMENTS, class_))
