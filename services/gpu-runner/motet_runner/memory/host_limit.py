"""How much memory the host has for what an engine keeps there: parked sequences, by default, and adapters."""

from pathlib import Path

import psutil

SHARE_OF_AVAILABLE = 4
"""The divisor of the available memory: parked sequences may take a quarter. The rest is for loading, the page cache and
other processes."""

_CGROUP = Path("/sys/fs/cgroup")


def default_host_bytes(kv_bytes: int, *, share_of_kv: int, available: int) -> int:
    """`kv_bytes` divided by `share_of_kv`, but at most a quarter of the `available` bytes."""
    return min(kv_bytes // share_of_kv, available // SHARE_OF_AVAILABLE)


def available_host_bytes(cgroup: Path = _CGROUP) -> int:
    """The available memory of the machine, or of the container if its limit is lower."""
    available = psutil.virtual_memory().available
    try:
        limit, used = (cgroup / "memory.max").read_text(), (cgroup / "memory.current").read_text()
        return min(available, max(0, int(limit) - int(used) + _idle_file_bytes(cgroup)))
    except (OSError, ValueError):  # no limit: the file is missing, or says "max"
        return available


def _idle_file_bytes(cgroup: Path) -> int:
    """The inactive page cache, such as a model's files. Linux counts it as used, but can reclaim it."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
