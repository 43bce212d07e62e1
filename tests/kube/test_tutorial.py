"""The tutorial, typed by somebody who does nothing but read it."""

import pytest

from tests.docs.blocks import Shell, blocks
from tests.kube.cluster import Cluster
from tests.repo.tree import ROOT

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1500)]

PAGE = ROOT / "docs" / "tutorials" / "kubernetes.md"


def test_the_tutorial_leads_from_an_empty_cluster_to_the_first_token_and_back(cluster: Cluster, shell: Shell) -> None:
    def everything() -> set[str]:
        kinds = "namespaces,crds,clusterroles,clusterrolebindings,flowschemas,validatingadmissionpolicies"
        return set(cluster.kubectl("get", kinds, "--output=name").split())

    before = everything()
    for block in blocks(PAGE):
        if block.runs:
            shell.run(block)
    assert everything() - before == set()
