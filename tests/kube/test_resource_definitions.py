"""Our resource definitions, as files, on a real API server."""

from pathlib import Path

import pytest
import yaml

from testbed.cluster.control_plane import Cluster
from testbed.tree import ROOT

pytestmark = pytest.mark.kube

FILES = sorted((ROOT / "crds").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_definition_is_accepted_and_established(cluster: Cluster, file: Path) -> None:
    cluster.kubectl("apply", "--server-side", f"--filename={file}")
    waiting = ("wait", "--for=condition=Established", f"--filename={file}", "--timeout=20s")
    cluster.wait_for(lambda: cluster.kubectl(*waiting))  # without any conditions, kubectl fails at once
    for definition in yaml.safe_load_all(file.read_text()):
        conditions = cluster.get("customresourcedefinition", definition["metadata"]["name"])["status"]["conditions"]
        # The server accepts a schema that is not structural, but prunes fields wrongly. Only this condition says so.
        assert [one for one in conditions if one["type"] == "NonStructuralSchema"] == []
