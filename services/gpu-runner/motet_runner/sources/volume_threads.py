"""Reads volumes, each with a few threads of its own: a volume that hangs, such as a network volume whose server is
away, does not block readers of other volumes."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from motet_runner.daemon_threads import CallHangs, DaemonThreads, result_of
from motet_runner.sources.fetch_errors import temporary

THREADS_PER_VOLUME = 2

T = TypeVar("T")


class Progress:
    """When a call last got something from its volume, or from the runner's own disk. The call's thread writes this
    time, and the service reads it."""

    def __init__(self, volume: "_Volume", volume_seconds: float, disk_seconds: float) -> None:
        self._volume = volume
        self._volume_seconds = volume_seconds
        self._disk_seconds = disk_seconds
        self.began = False
        self.reads = False
        """True while the call waits for the volume."""
        self._at = time.monotonic()

    @contextmanager
    def running(self) -> Iterator[None]:
        self._at = time.monotonic()
        self.began = True
        self._volume.running.add(self)
        try:
            yield
        finally:
            self._volume.running.discard(self)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The context of a read from the volume. Outside of this context, a call waits only for the runner's own
        disk."""
        self._note()
        self.reads = True
        try:
            yield
        finally:
            self.reads = False
            self._note()

    def _note(self) -> None:
        self._at = self._volume.progressed_at = time.monotonic()

    @property
    def hangs_at(self) -> float:
        """When the call counts as hanging. A call that has not begun hangs only when all running calls hang, and the
        volume has given nothing for its time limit."""
        if self.began:
            return self._at + (self._volume_seconds if self.reads else self._disk_seconds)
        given = max(self._at, self._volume.progressed_at) + self._volume_seconds
        return max([given, *(one.hangs_at for one in tuple(self._volume.running))])

    @property
    def waits_for_disk(self) -> bool:
        """True if the call waits for the runner's own disk, or has not begun because all running calls wait for it."""
        before = (self,) if self.began else tuple(self._volume.running)
        return bool(before) and not any(one.reads for one in before)


class _Volume:
    def __init__(self, name: str) -> None:
        self.threads = DaemonThreads(f"volume {name}", THREADS_PER_VOLUME)
        self.progressed_at = 0.0
        self.running: set[Progress] = set()


class VolumeThreads:
    def __init__(self, *, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self.by_name: dict[str, _Volume] = {}

    async def run(
        self,
        volume: str,
        call: Callable[[Progress], T],
        *,
        discard: Callable[[T], object],
        disk_seconds: float,
        owner: str = "",
        urgent: bool = False,
    ) -> T:
        """Run a call that reads this volume, each time within `Progress.reading`. Urgent calls come first, and owners
        take turns: a volume may be shared. Raises AdapterFetchFailed if a read
        gets nothing for `stall_seconds`, and CallHangs if the runner's own disk takes longer than `disk_seconds`
        between two reads. The thread may go on hanging; a late result goes to `discard`."""
        self.by_name = {name: one for name, one in self.by_name.items() if not one.threads.unused or name == volume}
        of_volume = self.by_name.setdefault(volume, _Volume(volume))
        progress = Progress(of_volume, self._stall_seconds, disk_seconds)

        def work() -> T:
            with progress.running():
                return call(progress)

        def seconds_left() -> float:
            left = progress.hangs_at - time.monotonic()
            if left <= 0 and progress.waits_for_disk:
                raise CallHangs(disk_seconds)
            if left <= 0:
                raise temporary(
                    f"The volume {volume} does not answer: nothing came from it for {self._stall_seconds:g} s. Motet "
                    "tries again automatically. See whether its server is up."
                )
            return min(left, self._stall_seconds)  # then look again: by then, the call may wait for the disk

        submitted = of_volume.threads.submit(work, owner=owner, urgent=urgent)
        return await result_of(submitted, seconds_left, discard)


def mount_of(path: Path) -> str:
    """The mount point of a path, from the list of mounts: a call to the file system itself may hang."""
    try:
        lines = Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return "/"
    mounts = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split(" ", 2)[1]) for line in lines)
    inside = f"{path}/"  # there are hundreds of mounts on some machines, and a Path of each would take milliseconds
    return max((mount for mount in mounts if inside.startswith(f"{mount.rstrip('/')}/")), key=len, default="/")
