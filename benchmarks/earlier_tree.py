"""The tree of an earlier commit, whose processes run beside this one's."""

import io
import subprocess
import tarfile
from pathlib import Path

from benchmarks.harness import ROOT


def environment_of(commit: str, folder: Path) -> dict[str, str]:
    """Write the commit's tree to this folder → the environment of processes that import it."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    modules = [*folder.glob("*/motet_*/__init__.py"), *folder.glob("services/*/motet*/__init__.py")]
    packages = [folder, *(module.parent.parent for module in modules)]
    return {"PYTHONPATH": ":".join(map(str, packages)), "PYTHONSAFEPATH": "1"}
