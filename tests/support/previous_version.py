"""The version before this one, as a wheel built from its commit.

Each of the two versions must read what the other one has written.
"""

import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

from testbed.tree import ROOT

COMMIT = "618f349048a92de9ea4ed72fb83846e27946e516"
"""The commit that counts as the version before. Each release sets it to the commit of that release."""


def version_before(folder: Path) -> Path:
    """A folder with the version before. A process that has it first on its path runs that version."""
    archive = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=True).stdout
    source, installed = folder / "source", folder / "installed"
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(source, filter="data")
    (wheel,) = WheelBuilder(str(source)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as packed_wheel:
        packed_wheel.extractall(installed)
    return installed


def run_before(installed: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of the version before, and wait for its end."""
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        env=os.environ | {"PYTHONPATH": str(installed)} | (env or {}),
        capture_output=True,
        text=True,
        check=False,
    )
