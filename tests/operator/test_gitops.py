"""An object that is as its manifest asks for is done for Flux, Helm and Argo CD, and one that needs somebody is not."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from motet_operator.cluster.status_documents import adapter_status, pool_status
from motet_operator.reconcile import AdapterReplica, AdapterReport, PoolObject, View, reconcile
from motet_operator.reconcile.revisions import revision_of, template_of
from testbed.tree import ROOT
from tests.operator.builders import DIGEST, adapter, instance, pool, view
from tests.support.gitops import health_script, kstatus

CONFIG = yaml.safe_load((ROOT / "examples/gitops/argocd-cm.yaml").read_text())["data"]["resource.customizations"]
argo = health_script(yaml.safe_load(CONFIG)["motet.dev/*"]["health.lua"])

SERVING = AdapterReport(serving_digest=DIGEST, replicas=(AdapterReplica(runner="r0", tier="device", digest=DIGEST),))
BROKEN = AdapterReport(failure_code="adapter_incompatible", failure_message="no such layer")


def world(of: PoolObject, *runners: bool, report: AdapterReport | None = None, **spec: Any) -> View:
    """A pool with runners, each ready or not, and an adapter."""
    one = adapter(**spec)
    return view(
        pools=[of],
        adapters=[one],
        instances=[
            instance(f"r{number}", revision_of(of.resource.object_name, template_of(of)), ready=ready)
            for number, ready in enumerate(runners)
        ],
        adapter_reports={one.resource.object_name: report} if report is not None else {},
    )


def verdicts(place: View, *, generation: int = 1) -> tuple[tuple[str, str], tuple[str, str]]:
    """Of kstatus and of Argo CD: about the pool, and about the adapter."""
    plan = reconcile(place)
    pool_of, adapter_of = (
        {"metadata": {"generation": generation}, "status": status}
        for status in (pool_status(plan.pools[0], {}), adapter_status(plan.adapters[0]))
    )
    return (kstatus(pool_of), argo(pool_of).status), (kstatus(adapter_of), argo(adapter_of).status)


DONE, WORKING, BAD = ("Current", "Healthy"), ("InProgress", "Progressing"), ("Failed", "Degraded")
UNKNOWN_POOL = {"poolRef": {"name": "nowhere"}}
BUILTIN = {"autoscaling": {"mode": "Builtin", "minReplicas": 0, "maxReplicas": 3}}


@pytest.mark.parametrize(
    ("place", "of_pool", "of_adapter"),
    [
        (world(pool(), True, report=SERVING), DONE, DONE),
        (world(pool(), True, report=replace(SERVING, replicas=())), DONE, DONE),
        (world(pool(replicas=0)), DONE, DONE),
        (world(pool(replicas=0), report=replace(SERVING, replicas=())), DONE, DONE),
        (world(pool(replicas=0, **BUILTIN)), DONE, DONE),
        (world(pool(), True, suspend=True), DONE, DONE),
        (world(pool(replicas=0), suspend=True, **UNKNOWN_POOL), DONE, DONE),
        (world(pool(replicas=0), True), WORKING, WORKING),
        (world(pool(), False), WORKING, WORKING),
        (world(pool()), WORKING, WORKING),
        (world(pool(), True), DONE, WORKING),
        (world(pool(), True, **UNKNOWN_POOL), DONE, WORKING),
        (world(pool(), True, report=BROKEN), DONE, BAD),
        (world(pool(replicas=0), report=BROKEN), DONE, BAD),
        (world(replace(pool(), namespace_prepared=False)), BAD, BAD),
    ],
)
def test_tools_wait_only_for_what_still_comes(
    place: View, of_pool: tuple[str, str], of_adapter: tuple[str, str]
) -> None:
    assert verdicts(place) == (of_pool, of_adapter)


def test_a_change_that_the_operator_has_not_seen_is_not_done() -> None:
    assert verdicts(world(pool(), True, report=SERVING), generation=2) == (WORKING, WORKING)
    assert argo({"metadata": {"generation": 1}}).status == "Progressing"
