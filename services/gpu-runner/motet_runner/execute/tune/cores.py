"""The cores that this process may use, by its affinity and its quota."""

import math
import os
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """A fraction of a core does not count: its thread would stop in mid-step, and the other threads would wait."""
    return max(1, math.floor(min(allowed_cores(), quota())))


def allowed_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(mount: Path = MOUNT, own_groups: Path = OWN_GROUPS) -> float:
    """The smallest quota, in cores, of this process's control groups; infinite without any."""
    least = math.inf
    for line in _text(own_groups).splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:  # version 2
            folders = [mount / part for part in _upwards(group)]
            least = min([least, *(_of_max(_text(folder / "cpu.max")) for folder in folders)])
        elif "cpu" in controllers.split(","):
            for root in (mount / "cpu", mount / controllers):
                least = min([least, *(_of_version_1(root / part) for part in _upwards(group))])
    return least


def _upwards(group: str) -> list[str]:
    """The group and all its parents. The last one is the root of the mount: in a container, the container's group."""
    parts = group.strip("/").split("/")
    return ["/".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _of_max(text: str) -> float:
    """The quota in cores, from the text "quota period" (both in microseconds). A quota of "max" is infinite."""
    match text.split():
        case [quota, period] if quota != "max":
            return int(quota) / int(period)
    return math.inf


def _of_version_1(folder: Path) -> float:
    return _of_max(f"{_text(folder / 'cpu.cfs_quota_us')} {_text(folder / 'cpu.cfs_period_us')}".replace("-1", "max"))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
