"""Runs mypy for `make lint`. A fresh clone copies the cache of another one, which saves almost a minute.

mypy uses a cached result while the file has the same hash, in any folder. Each checkout has its own copy: in a shared
cache, checkouts that differ would overwrite each other's results.
"""

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tools.kube.binaries import cache

OWN = Path(".mypy_cache")
KEPT = cache().parent / "mypy"


def run(mypy: Sequence[str], own: Path = OWN, kept: Path = KEPT) -> int:
    """Run mypy and return its status. A checkout without a cache copies the saved one, and saves its own afterwards."""
    fresh = not own.exists()
    if fresh and kept.exists():
        _copy(kept, own, lock=kept)
    status = subprocess.run(mypy, check=False).returncode
    if fresh and status == 0:
        _copy(own, kept, lock=kept)
    return status


def _copy(source: Path, target: Path, *, lock: Path) -> None:
    """Copy the cache, complete or not at all. If it cannot be written, mypy only takes longer."""
    unfinished = target.with_name(f"{target.name}.unfinished")
    with suppress(OSError):
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.with_suffix(".lock").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(source, unfinished)
            shutil.rmtree(target, ignore_errors=True)
            unfinished.rename(target)


if __name__ == "__main__":
    sys.exit(run([sys.executable, "-m", "mypy"]))
