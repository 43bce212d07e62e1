"""The tutorial and the guides: the tests type every command, in order."""

import pytest

from testbed.cluster.cluster import Cluster
from testbed.tree import ROOT
from tests.docs.blocks import Shell, blocks, type_page

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1500)]

TUTORIAL = ROOT / "docs" / "tutorials" / "kubernetes.md"
GUIDES = [ROOT / "docs" / "guides" / f"{name}.md" for name in ("tenant", "platform")]
MADE_BY_THE_GUIDES = {"clusterrolebinding.rbac.authorization.k8s.io/motet-platform"}
"""The permissions that the reader of a guide gives to people, and takes back."""


def test_the_pages_lead_from_an_empty_cluster_through_the_guides_and_back(cluster: Cluster, shell: Shell) -> None:
    """The guides continue after the tutorial, so its last step, which removes everything, runs after them."""

    def everything() -> set[str]:
        kinds = "namespaces,crds,clusterroles,clusterrolebindings,flowschemas,validatingadmissionpolicies"
        return set(cluster.kubectl("get", kinds, "--output=name").split())

    last_step = TUTORIAL.read_text().splitlines().index("## 10. Remove everything") + 1
    tutorial = blocks(TUTORIAL)
    before = everything()
    type_page([block for block in tutorial if block.line < last_step], shell)
    type_page([block for page in GUIDES for block in blocks(page)], shell)
    type_page([block for block in tutorial if block.line > last_step], shell)
    assert everything() - before == MADE_BY_THE_GUIDES
