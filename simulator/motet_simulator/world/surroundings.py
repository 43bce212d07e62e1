"""What a simulated process finds around it, where a real one finds a machine."""

from collections.abc import Callable
from pathlib import Path
from random import Random

from motet.surroundings import Surroundings
from motet_simulator.world.process import Process
from motet_simulator.world.time import World

START_OF_TIME = 1_800_000_000.0

UNSYNCED_SECONDS = 5.0
"""What was written in this time without a sync may be lost with the machine."""


class SimulatedDisk:
    """The files of one machine. They outlive its processes."""

    def __init__(self) -> None:
        self.files: dict[Path, bytes] = {}
        self.full = False
        self.kill_in_write: Callable[[], None] | None = None
        """Ends the process inside its next write."""
        self._unsynced: dict[Path, list[tuple[float, bytes | None]]] = {}
        """When each file was replaced without a sync, and what was there before."""
        self._locks: dict[Path, Process] = {}

    def of(self, process: Process) -> "ProcessDisk":
        return ProcessDisk(self, process)

    def lock(self, path: Path, process: Process) -> None:
        holder = self._locks.get(path)
        if holder is not None and holder.alive:
            raise BlockingIOError(f"{holder.name} has locked {path}")
        self._locks[path] = process

    def unlock(self, path: Path, process: Process) -> None:
        """Only a lock of this process: another one may have taken it after its end."""
        if self._locks.get(path) is process:
            del self._locks[path]

    def write(self, path: Path, content: bytes, process: Process, *, synced: bool = False) -> None:
        if not process.alive:
            return  # what it does in the moment of its end
        if self.full:
            process.world.on_met("disk full", process.host)
            raise OSError(28, "No space left on device")
        kill, self.kill_in_write = self.kill_in_write, None
        world = process.world
        if kill is not None and world.draw("killed before it has written", path, world.now) < 0.5:
            kill()
            return
        if synced:
            self._unsynced.pop(path, None)
        else:
            self._unsynced.setdefault(path, []).append((world.now, self.files.get(path)))
        self.files[path] = content
        if kill is not None:
            kill()

    def lose_unsynced(self, world: World) -> None:
        """The machine went off. A file that was replaced a moment ago is any of those that were there, or empty."""
        for path, replaced in self._unsynced.items():
            earlier = [before for at, before in replaced if world.now - at < UNSYNCED_SECONDS]
            could_be = [*earlier, b"", self.files.get(path)] if earlier else [self.files.get(path)]
            found = could_be[int(world.draw("lost", path, world.now) * len(could_be))]
            if found is None:
                self.files.pop(path, None)
            else:
                self.files[path] = found
        self._unsynced.clear()


class ProcessDisk:
    """A disk as one process sees it."""

    def __init__(self, disk: SimulatedDisk, process: Process) -> None:
        self._disk = disk
        self._process = process

    def read(self, path: Path) -> bytes:
        try:
            return self._disk.files[path]
        except KeyError:
            raise FileNotFoundError(str(path)) from None

    def replace(self, path: Path, content: bytes) -> None:
        self._disk.write(path, content, self._process)

    def remove(self, path: Path) -> None:
        if self._process.alive:
            self._disk.files.pop(path, None)

    def lock(self, path: Path) -> "_LockedFile":
        self._disk.lock(path, self._process)
        return _LockedFile(self._disk, path, self._process)


class _LockedFile:
    def __init__(self, disk: SimulatedDisk, path: Path, process: Process) -> None:
        self._disk = disk
        self._path = path
        self._process = process

    def read(self) -> bytes:
        return self._disk.files.get(self._path, b"")

    def write(self, content: bytes) -> None:
        self._disk.write(self._path, content, self._process, synced=True)

    def close(self) -> None:
        self._disk.unlock(self._path, self._process)


class _Watchdog:
    def __init__(self, end: float, late: Callable[[], None], process: Process) -> None:
        self._late = late
        self._loop = process.loop
        self._end = end
        self._timer = self._loop.call_at(end, self._on_time)

    @property
    def in_time(self) -> bool:
        return self._loop.time() < self._end

    def until(self, end: float) -> None:
        self.stop()
        self._end = end
        self._timer = self._loop.call_at(end, self._on_time)

    def stop(self) -> None:
        self._timer.cancel()

    def _on_time(self) -> None:
        self._late()


def surroundings_of(process: Process, disk: SimulatedDisk) -> Surroundings:
    ids = Random(f"{process.world.seed} {process.name} ids")
    return Surroundings(
        clock=process.loop.time,
        wall=lambda: START_OF_TIME + process.world.now + process.machine.wall_error,
        random=Random(f"{process.world.seed} {process.name}"),
        new_id=lambda size: ids.randbytes(size).hex(),
        disk=disk.of(process),
        watchdog=lambda end, late: _Watchdog(end, late, process),
        network=process.network,
    )
