"""A file system of a test's own, which can be full or read-only."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.machine import lacking


@contextmanager
def small_disk(place: Path, size: str = "64m") -> Iterator[Path]:
    """At `place`, if this machine lets us mount one. `size` as `mount` takes it."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        lacking("the right to mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
