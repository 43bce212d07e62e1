"""vLLM's workers: with several GPUs each has a process of its own.

None of them outlives the engine's process, and that process ends as soon as one of them has. Nothing stays in /dev/shm.
"""

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from multiprocessing import connection
from pathlib import Path

import structlog

from motet.errors import ModelFolderError
from motet_runner.engine_process import disconnect

log = structlog.get_logger(__name__)

EXTENSION = "motet_runner.external.vllm.worker_extension.EndsWithTheEngine"
"""Each worker imports it before all else."""
SHARED = Path("/dev/shm")  # noqa: S108 - where Linux has shared memory
REMOVER = """
import os, sys
for name in sys.stdin.read().split():
    try:
        os.unlink(os.path.join(sys.argv[1], name))
    except OSError:
        pass
"""
"""A process that removes files when this one has ended, in whatever way"""
BOUND_CORES = "VLLM_CPU_OMP_THREADS_BIND"
LOADING_SECONDS = 0.2
"""Between two looks at what workers share, while they load"""


_CLAIMS: list[socket.socket] = []
"""Open as long as this process lives"""


def threads_of_each(usable: int, cores: int, threads: int | None, workers: int) -> int:
    """The threads of each worker on a CPU. `usable`: of the cores, what a quota leaves"""
    most = min(threads or cores, cores)
    if most < workers:
        raise ModelFolderError(
            f"engine.parallel has {workers} workers, and this runner has {most} cores: each worker needs a core."
        )
    return max(1, min(most, usable) // workers)


def bind_cores(cores: Sequence[int], threads: int, workers: int) -> None:
    """Unless the pool has said which: then other runners may have those that this one would claim."""
    if BOUND_CORES not in os.environ:
        os.environ[BOUND_CORES] = bound_cores(cores, threads, workers)


def bound_cores(cores: Sequence[int], threads: int, workers: int) -> str:
    """Cores for the threads of each worker, as BOUND_CORES names them, of which no other runner of this network
    namespace has bound any. If there are too few, the threads are not bound. Pods do not see each other's claims: two
    without a quota on one machine may bind the same cores, unless the kubelet gives each cores of its own."""
    own = _claimed(cores, threads * workers)
    if not own:
        return "nobind"
    return "|".join(",".join(map(str, own[one * threads : (one + 1) * threads])) for one in range(workers))


def _claimed(cores: Sequence[int], count: int) -> list[int]:
    """`count` of these cores; none, if other processes have claimed too many. A name of a socket is free again when its
    process has ended, in whatever way."""
    claims: dict[int, socket.socket] = {}
    for core in cores:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0motet-vllm-core-{core}")
        except OSError:
            claim.close()
            continue
        claims[core] = claim
        if len(claims) == count:
            _CLAIMS.extend(claims.values())
            return list(claims)
    for claim in claims.values():
        claim.close()
    return []


class Watch:
    """Of the workers that this process starts from now on."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._all_load = threading.Event()
        # Not in the thread: vLLM changes its variables meanwhile, and they are what a process is started with.
        self._remover = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", REMOVER, str(SHARED)], stdin=subprocess.PIPE, start_new_session=True
        )
        threading.Thread(target=self._end_with_workers, name="workers", daemon=True).start()

    def loaded(self) -> None:
        """From now on, no worker may end: vLLM would wait for its answer for ever."""
        self._all_load.set()

    def _end_with_workers(self) -> None:
        try:
            self._wait_for_end()
            log.error("worker_ended", workers=self._workers)
        except Exception:  # from now on nobody would see a worker end
            log.exception("workers_not_watched", workers=self._workers)
        finally:  # also if the log cannot be written
            disconnect()
            os._exit(1)

    def _wait_for_end(self) -> None:
        """Of any of them"""
        told = self._remover.stdin
        assert told is not None
        known: set[str] = set()
        while True:
            last = self._all_load.wait(LOADING_SECONDS)
            workers = multiprocessing.active_children()
            found = shared_by([os.getpid(), *(one.pid for one in workers if one.pid is not None)]) - known
            told.write("".join(f"{name}\n" for name in found).encode())
            told.flush()
            known |= found
            if last:
                break
        if len(workers) == self._workers:
            connection.wait([one.sentinel for one in workers])


def shared_by(pids: Iterable[int]) -> set[str]:
    """The files in /dev/shm that these processes use"""
    found = set()
    for pid in pids:
        try:
            used = Path("/proc", str(pid), "maps").read_text().splitlines()
        except OSError:
            continue  # it has ended
        for line in used:
            path = Path(line.split(maxsplit=5)[-1])
            if path.parent == SHARED and path.exists():
                found.add(path.name)
    return found
