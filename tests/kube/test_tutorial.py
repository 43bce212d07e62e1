"""The tutorial, typed by somebody who does nothing but read it."""

import pytest

from tests.docs.blocks import Shell, blocks
from tests.kube.cluster import Cluster
from tests.repo.tree import ROOT

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1500)]

PAGE = ROOT / "docs" / "tutorials" / "kubernetes.md"


def test_the_tutorial_leads_from_an_empty_cluster_to_the_first_token_and_back(cluster: Cluster, shell: Shell) -> None:
    for block in blocks(PAGE):
        if block.runs:
            shell.run(block)
    everything = "namespaces,crds,clusterroles,clusterrolebindings,flowschemas,validatingadmissionpolicies"
    left = cluster.kubectl("get", everything, "--output=name")
    assert [name for name in left.splitlines() if "motet" in name] == []
