"""Operators and schedulers of this version and of the one before, side by side on one API server."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.cluster.cluster import Cluster
from testbed.cluster.operators import OperatorNamespaces, OperatorProcess, site
from tests.kube.replay import ReadyMaker, SiteState
from tests.kube.schedulers import WAITS_FOR_RUNNERS, SchedulerProgram
from tests.support.previous_version import version_before

pytestmark = pytest.mark.kube

MOST = 3
"""The most runners at any time: two, and one more during a rollout."""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment that makes a process run the version before."""
    installed = version_before(tmp_path_factory.mktemp("before"))
    return {"PYTHONPATH": os.pathsep.join((str(installed), os.environ.get("PYTHONPATH", "")))}


@pytest.fixture
def home(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorNamespaces]:
    with cluster.inside(), site(cluster, tmp_path_factory.mktemp("versions")) as made:
        yield made


@pytest.mark.parametrize("operators", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("scheduler_is_old", [False, True], ids=["beside-this-version", "beside-the-version-before"])
def test_row_45_operators_of_two_versions_run_side_by_side_and_replace_each_other(
    cluster: Cluster, home: OperatorNamespaces, before: dict[str, str], scheduler_is_old: bool, operators: int
) -> None:
    tenant, named = home.tenant(), []
    where = (f"--namespace={home.pools}", "--selector=motet.dev/pool=demo")
    cluster.apply(home.pool(replicas=2, drainTimeoutSeconds=1))
    versions = [{}, before, {}] if scheduler_is_old else [before, {}, before]
    with (
        SchedulerProgram(home, env=before if scheduler_is_old else WAITS_FOR_RUNNERS) as scheduler,
        ReadyMaker(SiteState(home), most=MOST, done_at_once=scheduler_is_old).running() as kubelet,
    ):
        for number, version in enumerate(versions[:operators]):
            name = f"by-{number}"
            named.append(name)
            cluster.apply(home.adapter(name, tenant))
            with OperatorProcess(home, f"operator-{number}", env=version) as operator:
                cluster.wait_for(lambda: scheduler.adapters().keys() == {f"{tenant}/{one}" for one in named})
                for one in named:
                    cluster.wait_for(lambda: home.conditions("lora", one, tenant)["Accepted"]["status"] == "True")  # noqa: B023
                # The pods of the two versions differ: each version rolls the pool once.
                cluster.wait_for(lambda: _has_rolled(home, where), "two runners of one revision", within_s=60)
                assert scheduler.told()["pools"][0]["replicas"] == 2
                operator.program.assert_alive()
            said = operator.program.log.read_text().splitlines()
            assert [line for line in said if "Traceback" in line or '"level": "error"' in line] == [], version
            assert kubelet.excess == [], version
        said = scheduler.log.read_text().splitlines()
        assert [line for line in said if "Traceback" in line or '"level": "error"' in line] == []


def _has_rolled(home: OperatorNamespaces, where: tuple[str, ...]) -> bool:
    pods = [one for one in home.cluster.items("pods", *where) if "deletionTimestamp" not in one["metadata"]]
    ready = home.conditions("spool", "demo", home.pools)["Ready"]["status"]
    return (len(home.cluster.items("deployments", *where)), len(pods), ready) == (1, 2, "True")


def test_the_previous_version_runs_its_own_code(before: dict[str, str]) -> None:
    """Otherwise the tests in this file would prove nothing."""
    here = Path(__file__).parents[2] / "operator" / "motet_operator" / "sync.py"
    there = Path(before["PYTHONPATH"].split(os.pathsep)[0], "motet_operator", "sync.py")
    assert there.read_text() != here.read_text()
