"""Stops a stack, whatever is left of it: `motet up`, only its operator, only some services, or only files."""

import asyncio
import fcntl
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from motet.clock import monotonic
from motet.processes import LifecycleConfig, ProcessManager, ProcessRecords, is_alive
from motet.processes.linux import kill_session, send
from motet.processes.manager import kill_unrecorded
from motet_operator.local.lock import StackLock, is_held, read_holder
from motet_operator.local.state_directory import StateDirectory

STOP_SECONDS = 60.0
"""How long an orderly stop may take before the processes are killed."""


def what_runs(layout: StateDirectory) -> list[str]:
    """Names of the running processes of this state directory, including the operator."""
    records = [
        *ProcessRecords(layout.operator_records).read().values(),
        *ProcessRecords(layout.service_records).read().values(),
    ]
    return [record.name for record in records if record.alive]


async def take_down(layout: StateDirectory, *, seconds: float = STOP_SECONDS) -> list[str]:
    """Stop the stack of a state directory, and return the names of its processes when all have ended.

    Idempotent: if the stack has already ended, it removes the files that are left.
    """
    if not layout.data.is_dir():
        return []
    async with _only_one_at_a_time(layout.data, 3 * seconds):
        return await _take_down(layout, seconds)


@asynccontextmanager
async def _only_one_at_a_time(folder: Path, seconds: float) -> AsyncIterator[None]:
    """Of several `motet down`s one signals `motet up`: a second signal would mean to kill everything at once."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        await _within(seconds, lambda: _is_first(file))
        yield
    finally:
        os.close(file)


def _is_first(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system that locks no folders: then nobody can tell
    return True


async def _take_down(layout: StateDirectory, seconds: float) -> list[str]:
    lock = StackLock(layout.lock, to_stop=True)

    def decided() -> bool:
        """Another `motet down`, and a command that only looks, end by themselves."""
        return lock.take() or read_holder(layout.lock).is_up

    await _within(2 * seconds, decided)
    running = what_runs(layout)
    if not lock.take() and (up := read_holder(layout.lock)).is_up:
        holder = up.identity
        send(holder, signal.SIGTERM)
        send(holder, signal.SIGCONT)  # if ctrl-Z has stopped it

        def released() -> bool:
            return not is_held(layout.lock)

        if not await _within(seconds, released):
            kill_session(holder)
            send(holder, signal.SIGKILL)  # in the foreground it is in the session of its shell
            await _within(5.0, released)
        # It releases the lock before its process has ended.
        await _within(5.0, lambda: not is_alive(holder))
        running.append("motet up")
        await _within(2 * seconds, lambda: lock.take() or is_alive(holder))  # another `motet down` may be first
    with lock:  # no new stack may start while the rest of the old one stops
        await finish(layout, seconds=seconds)
    return running


async def finish(layout: StateDirectory, *, seconds: float = STOP_SECONDS, grace: float | None = None) -> None:
    """Stop the processes that a dead or ending `motet up` left. The caller holds the lock."""
    # The operator stops its services in order. If it does not end, it is killed, and its services are stopped below.
    await _stop_recorded(ProcessRecords(layout.operator_records), grace=seconds if grace is None else grace)
    await _stop_recorded(ProcessRecords(layout.service_records), grace=10.0 if grace is None else grace)
    layout.clear_run()


async def _stop_recorded(records: ProcessRecords, *, grace: float) -> None:
    manager = ProcessManager(records, config=LifecycleConfig(stop_grace=grace), clock=monotonic)
    await manager.stop_all()
    kill_unrecorded(records)


async def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = monotonic() + seconds
    while not condition():
        if monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True
