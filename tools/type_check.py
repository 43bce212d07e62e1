"""mypy, for `make lint`. In a fresh clone it begins with what it learned in another: seconds of CPU, not over a minute.

What it learned of a file counts while the file has the same hash, wherever it lies. Each checkout has a cache of its
own, which begins as a copy: in one for all, checkouts that differ would take each other's place.
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
    """Returns its status. A checkout without a cache takes the kept one, and keeps its own for the next."""
    fresh = not own.exists()
    if fresh and kept.exists():
        _copy(kept, own, lock=kept)
    status = subprocess.run(mypy, check=False).returncode
    if fresh and status == 0:
        _copy(own, kept, lock=kept)
    return status


def _copy(source: Path, target: Path, *, lock: Path) -> None:
    """Whole or not at all. Without room or rights there is none, and mypy takes its time."""
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
