"""How much memory the host has for what an engine keeps there: parked sequences, by default, and adapters."""

from collections.abc import Iterator
from math import inf
from pathlib import Path

import psutil

SHARE_OF_AVAILABLE = 4
"""The divisor of the available memory: parked sequences may take a quarter. The rest is for loading, the page cache and
other processes."""

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def default_host_bytes(kv_bytes: int, *, share_of_kv: int, available: int) -> int:
    """`kv_bytes` divided by `share_of_kv`, but at most a quarter of the `available` bytes."""
    return min(kv_bytes // share_of_kv, available // SHARE_OF_AVAILABLE)


def available_host_bytes(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """The available memory of the machine, or of the container or systemd unit if its limit is lower."""
    available = psutil.virtual_memory().available
    return int(min(available, *(_available_in(group) for group in _groups(cgroups, own))))


def _groups(cgroups: Path, own: Path) -> Iterator[Path]:
    """This process's control group (version 2), and those around it: each may have a limit."""
    try:
        (name,) = [line.removeprefix("0::/") for line in own.read_text().splitlines() if line.startswith("0::/")]
    except (OSError, ValueError):
        name = ""
    innermost = cgroups / name
    yield from (innermost, *(group for group in innermost.parents if group.is_relative_to(cgroups)))


def _available_in(group: Path) -> float:
    try:
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
        return max(0, int(limit) - int(used) + _idle_file_bytes(group))
    except (OSError, ValueError):  # no limit: the file is missing, or says "max"
        return inf


def _idle_file_bytes(group: Path) -> int:
    """The inactive page cache, such as a model's files. Linux counts it as used, but can reclaim it."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
