"""Types the commands of a page on the test cluster."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.cluster.cluster import Cluster
from testbed.cluster.product import provide_volume, remove
from testbed.tree import ROOT
from tests.docs.blocks import Shell
from tools.kube.binaries import find

# What pages use of the repository.
FOLDERS = ("charts", "examples", "crds")


@contextmanager
def page_shell(cluster: Cluster, folder: Path, *, timeout_s: float = 330) -> Iterator[Shell]:
    """A shell in a copy of the repository, with kubectl, helm and motet in the PATH, and a cluster with a free volume.
    At the end, what is left of the product is removed."""
    here, tools, scratch = (folder / name for name in ("motet", "tools", "scratch"))
    for name in FOLDERS:
        ignored = shutil.ignore_patterns(".mypy_cache", "__pycache__", "volumes")
        shutil.copytree(ROOT / name, here / name, symlinks=True, ignore=ignored)
    for one in (tools, scratch):
        one.mkdir()
    helm = find("helm")
    assert helm is not None, "helm is not built: run make kube"
    (tools / "kubectl").symlink_to(cluster.tool)
    (tools / "helm").symlink_to(helm)
    motet = shutil.which("motet", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert motet is not None, "motet is not installed: run make venv"
    (tools / "motet").symlink_to(motet)
    env = {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(scratch),
        "KUBECONFIG": str(cluster.kubeconfig),
        "LANG": "C.UTF-8",
    }
    with cluster.inside():
        remove(cluster)  # definitions that other tests have left do not belong to Helm
        provide_volume(cluster, folder)
        try:
            with Shell(here, scratch=scratch, env=env, timeout_s=timeout_s) as shell:
                yield shell
        finally:
            remove(cluster)
