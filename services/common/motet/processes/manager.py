"""Keeps a set of processes running. The caller declares the set as often as it likes; the process manager starts, stops
and replaces what differs.

When a process manager ends, its processes may go on. The next one adopts them, by pid and start time in the records.
"""

import asyncio
import hashlib
import os
import random
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from motet.clock import Clock
from motet.processes import launch, linux
from motet.processes.lifecycle import (
    CouldNotStart,
    Died,
    Effect,
    Event,
    Lifecycle,
    LifecycleConfig,
    LivenessProbed,
    Phase,
    ReadinessProbed,
    Started,
    StopRequested,
    TimePassed,
    new_lifecycle,
    step,
)
from motet.processes.linux import ProcessIdentity
from motet.processes.records import ProcessRecord, ProcessRecords

log = structlog.get_logger(__name__)

MANAGED_BY_VARIABLE = "MOTET_KEPT_BY"
"""Every process that a process manager starts has this variable, with the folder of the records. With it we find a
process that has no record, because the process manager died before it could write one."""

PROBE_SECONDS = 0.05
"""The time between two readiness probes of a process that is starting. It is short, so that readiness is seen soon."""

PROBE_SHARE = 0.02
"""Once this share of the time that it has been starting is longer, that is the time: probes of a process that loads for
a minute would take seconds of CPU time, beside the load."""

PROBE_READY_SECONDS = 2.0
"""The same for a ready process. The process manager sees a death without a probe."""

Probe = Callable[[], Awaitable[bool]]


async def always_ready() -> bool:
    return True


def probe_pause(unready_seconds: float) -> float:
    return max(PROBE_SECONDS, PROBE_SHARE * unready_seconds)


def at_once() -> float:
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    name: str
    """Unique in one process manager, and usable as a file name."""

    kind: str
    command: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to our own environment."""

    cwd: Path | None = None
    probe: Probe = field(default=always_ready, compare=False)
    """The readiness probe: whether the process does its work. Must return in about a second."""

    alive: Probe | None = field(default=None, compare=False)
    """The liveness probe. A process may be alive and not ready. None: it counts as alive until it ends."""

    replace_stopped: bool = field(default=False, compare=False)
    """Replace it soon after SIGSTOP has stopped it, before its liveness probes say that it hangs."""

    restart_wait: Callable[[], float] = field(default=at_once, compare=False)
    """How many seconds a restart waits at least. Asked when the process has died."""

    stop_order: int = 0
    """The order in which `stop_all` stops processes: those with the smallest number first. The next ones are stopped
    only after these have ended."""

    version: str = ""
    """The version of the program. A running process of another version is replaced."""

    @property
    def fingerprint(self) -> str:
        parts = [*self.command, *(f"{name}={value}" for name, value in sorted(self.env.items())), self.version]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    name: str
    kind: str
    pid: int | None
    phase: Phase
    restarts: int
    failures: int
    exit_status: int | None
    reason: str
    log: Path

    @property
    def ready(self) -> bool:
        return self.phase is Phase.READY


class ProcessManager:
    def __init__(
        self,
        records: ProcessRecords,
        *,
        clock: Clock,
        config: LifecycleConfig | None = None,
        changed: Callable[[], None] | None = None,
    ) -> None:
        self._records = records
        self._config = config or LifecycleConfig()
        self._clock = clock
        self._changed = changed or (lambda: None)
        self.processes: dict[str, _ManagedProcess] = {}
        self._specs: dict[str, ProcessSpec] = {}
        self._process_ended = asyncio.Event()
        self._adopted = False
        self._ended_before: dict[str, int] = {}
        """The restarts of processes that ended while no process manager was there, until they are started."""

    @property
    def folder(self) -> Path:
        return self._records.folder

    @property
    def own_pids(self) -> set[int]:
        """The pids of the children that this process manager waits for."""
        return {process.child.pid for process in self.processes.values() if process.child is not None}

    def statuses(self) -> list[ProcessStatus]:
        return [process.status() for process in self.processes.values()]

    def recorded(self, name: str) -> ProcessRecord | None:
        """The record of a process on disk. An earlier process manager may have written it."""
        return self._records.read().get(name)

    def adopt(self, specs: Iterable[ProcessSpec]) -> None:
        """Take over the processes that an earlier process manager has left, those that equal their spec with it. Starts
        nothing, and stops nothing. The first call does this, also one of `apply` or `stop_all`."""
        if self._adopted:
            return
        wanted = {spec.name: spec for spec in specs}
        records = self._records.read()
        self._adopted = True
        kill_unrecorded(self._records)
        if not any(record.alive for record in records.values()):
            self._records.clear()  # they are of an earlier stack, whose restarts do not count for this one
            return
        for name, record in records.items():
            if record.alive:
                spec = wanted.get(name)
                same = spec is not None and spec.fingerprint == record.fingerprint
                self._add(spec if spec is not None and same else _as_recorded(record), record.restarts).adopt(record)
            else:
                self._ended_before[name] = record.restarts + 1
                self._records.remove(name)

    def apply(self, specs: Iterable[ProcessSpec]) -> None:
        """Make the running set equal to `specs`. Returns at once; the work is done in the background."""
        self._specs = {spec.name: spec for spec in specs}
        self.adopt(self._specs.values())
        ended_before, self._ended_before = self._ended_before, {}
        for name, spec in self._specs.items():
            process = self.processes.get(name)
            if process is None:
                self._add(spec, ended_before.get(name, 0)).tick()
            elif process.fingerprint != spec.fingerprint:
                log.info("process_replaced", process=name)
                process.handle(StopRequested())
        for name in self.processes.keys() - self._specs.keys():
            self.processes[name].handle(StopRequested())

    async def stop_all(self) -> None:
        """Stop everything in order. Returns when no process is left."""
        self._specs = {}
        self.adopt(())
        while self.processes:
            self._process_ended.clear()
            order = min(process.spec.stop_order for process in self.processes.values())
            for process in [process for process in self.processes.values() if process.spec.stop_order == order]:
                process.handle(StopRequested())
            if any(process.spec.stop_order == order for process in self.processes.values()):
                await self._process_ended.wait()

    def kill(self, name: str, reason: str) -> None:
        """Kill one process and all its children, without a grace period. It counts as a death, so it is restarted."""
        process = self.processes.get(name)
        if process is not None and process.identity is not None and process.life.phase is not Phase.STOPPING:
            log.warning("process_killed", process=name, pid=process.identity.pid, reason=reason)
            process.kill_reason = reason
            process.kill()

    def kill_all(self) -> None:
        """Kill everything now, without a grace period. Call `stop_all` as well."""
        for process in list(self.processes.values()):
            process.kill()

    def release(self) -> None:
        """Leave all processes running, for the next process manager to adopt."""
        for process in self.processes.values():
            process.unwatch()
        self.processes.clear()

    # ---------------------------------------------------------------------------------------------- for _ManagedProcess

    def record(self, process: "_ManagedProcess") -> None:
        try:
            self._records.write(process.as_record())
        except OSError as error:
            # A full disk must not prevent a restart. `kill_unrecorded` finds a process without a record.
            log.warning("process_record_failed", process=process.spec.name, error=str(error))

    def ended(self, process: "_ManagedProcess") -> None:
        self._records.remove(process.spec.name)
        del self.processes[process.spec.name]
        spec = self._specs.get(process.spec.name)
        if spec is not None:
            self._add(spec).tick()
        self._process_ended.set()
        self._changed()

    def changed(self) -> None:
        self._changed()

    def _add(self, spec: ProcessSpec, restarts: int = 0) -> "_ManagedProcess":
        process = _ManagedProcess(self, spec, self._config, self._clock)
        process.life = replace(process.life, restarts=restarts)
        self.processes[spec.name] = process
        return process


def kill_unrecorded(records: ProcessRecords) -> None:
    """Kill processes that a process manager with these records has started but not recorded."""
    known = {record.identity for record in records.read().values()}
    for stray in linux.session_leaders_with(MANAGED_BY_VARIABLE, str(records.folder)):
        if stray not in known:
            log.warning("unrecorded_process_killed", pid=stray.pid)
            linux.kill_session(stray)


def _as_recorded(record: ProcessRecord) -> ProcessSpec:
    """A spec made from a record: enough to watch a process and to stop it."""
    return ProcessSpec(
        name=record.name, kind=record.kind, command=(), log=Path(record.log), stop_order=record.stop_order
    )


class _ManagedProcess:
    """One process: gives events to its lifecycle, and carries out the effects."""

    def __init__(self, manager: ProcessManager, spec: ProcessSpec, config: LifecycleConfig, clock: Clock) -> None:
        self.spec = spec
        self.fingerprint = spec.fingerprint
        """Of the process that runs now. For an adopted process it may differ from the fingerprint of `spec`."""
        self.child: subprocess.Popen[bytes] | None = None
        self.identity: ProcessIdentity | None = None
        self.kill_reason = ""
        self._last = ProcessIdentity(0, 0)
        self._manager = manager
        self._config = config
        self._clock = clock
        self.life: Lifecycle = new_lifecycle(clock())
        self._pidfd: int | None = None
        self._awaiting: asyncio.Handle | None = None
        """The next attempt to learn of its death, while there is no `_pidfd`."""

        self._timer: asyncio.TimerHandle | None = None
        self._readiness_task: asyncio.Task[None] | None = None
        self._liveness_task: asyncio.Task[None] | None = None
        self._log_offset = 0

    def status(self) -> ProcessStatus:
        return ProcessStatus(
            name=self.spec.name,
            kind=self.spec.kind,
            pid=self.identity.pid if self.identity is not None else None,
            phase=self.life.phase,
            restarts=self.life.restarts,
            failures=self.life.failures,
            exit_status=self.life.exit_status,
            reason=self.life.reason,
            log=self.spec.log,
        )

    def as_record(self) -> ProcessRecord:
        """A dead process is recorded as well, with its last pid, so that others can read why it died."""
        return ProcessRecord(
            name=self.spec.name,
            kind=self.spec.kind,
            pid=self._last.pid,
            start_ticks=self._last.start_ticks,
            boot=linux.boot_id(),
            fingerprint=self.fingerprint,
            log=str(self.spec.log),
            phase=self.life.phase.value,
            restarts=self.life.restarts,
            failures=self.life.failures,
            exit_status=self.life.exit_status,
            ready=self.life.phase is Phase.READY,
            stop_order=self.spec.stop_order,
            reason=self.life.reason,
        )

    def tick(self) -> None:
        self.handle(TimePassed())

    def adopt(self, record: ProcessRecord) -> None:
        self.life = replace(self.life, was_ready=record.ready, reason=record.reason)
        self.fingerprint = record.fingerprint
        self._log_offset = launch.size_of(self.spec.log)
        log.info("process_adopted", process=self.spec.name, pid=record.pid)
        self._watch(record.identity, adopted=True)

    def handle(self, event: Event) -> None:
        before = self.life
        self.life, effects = step(self.life, event, self._clock(), self._config)
        for effect in effects:
            match effect:
                case Effect.START:
                    self._start()
                case Effect.TERMINATE:
                    self._stop_probing()
                    if self.identity is not None:
                        linux.send(self.identity, signal.SIGTERM)
                case Effect.KILL:
                    self.kill()
                case Effect.REPLACE:
                    self._manager.kill(self.spec.name, f"it did not answer for {self._config.liveness_seconds:g} s")
                case Effect.REPLACE_STOPPED:
                    self._manager.kill(self.spec.name, "it was stopped by SIGSTOP")
        self._set_timer()
        if self.life.phase is Phase.GONE:
            self.unwatch()
            self._manager.ended(self)
        elif (before.phase, before.restarts) != (self.life.phase, self.life.restarts):
            self._manager.record(self)
            self._manager.changed()

    def kill(self) -> None:
        if self.identity is not None:
            linux.kill_session(self.identity)

    def unwatch(self) -> None:
        self._stop_probing()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._awaiting is not None:
            self._awaiting.cancel()
            self._awaiting = None
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _start(self) -> None:
        self._log_offset = launch.size_of(self.spec.log)
        try:
            self.child = launch.start(
                self.spec.command,
                env={**self.spec.env, MANAGED_BY_VARIABLE: str(self._manager.folder)},
                log=self.spec.log,
                cwd=self.spec.cwd,
            )
        except OSError as error:
            log.error("process_start_failed", process=self.spec.name, error=str(error))
            self.handle(CouldNotStart(f"{self.spec.command[0]} cannot be started: {error}"))
            return
        stat = linux.read_stat(self.child.pid)
        assert stat is not None, "a child that nobody has waited for is still in /proc"
        log.info("process_started", process=self.spec.name, pid=self.child.pid, restarts=self.life.restarts)
        self._watch(stat.identity)

    def _watch(self, identity: ProcessIdentity, *, adopted: bool = False) -> None:
        self.identity = self._last = identity
        self.handle(Started(adopted=adopted))
        self._await_death(identity.pid)
        self._readiness_task = asyncio.create_task(self._probe_readiness(), name=f"readiness of {self.spec.name}")
        if self.spec.alive is not None and self._config.liveness_seconds:
            self._liveness_task = asyncio.create_task(
                self._probe_liveness(self.spec.alive), name=f"liveness of {self.spec.name}"
            )

    def _await_death(self, pid: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # an adopted process that has just ended
            self._awaiting = loop.call_soon(self._on_death)
        except OSError as error:  # no descriptor is free, for example: it runs, so keep it, and try again
            log.warning("process_not_watched", process=self.spec.name, pid=pid, error=str(error))
            self._awaiting = loop.call_later(PROBE_READY_SECONDS, self._await_death, pid)
        else:
            loop.add_reader(self._pidfd, self._on_death)

    def _on_death(self) -> None:
        self.unwatch()
        if self.identity is not None:
            linux.kill_session(self.identity)  # kill its children, too, before the kernel can use its pid again
        status = self.child.wait() if self.child is not None else None
        self.child = None
        self.identity = None
        reason = self._death_reason(status)
        if self.life.phase is not Phase.STOPPING:
            log.warning("process_died", process=self.spec.name, exit_status=status, reason=reason)
        wait = self.spec.restart_wait()
        self.handle(Died(status, reason, random.random(), wait))  # noqa: S311 - spreads restarts, guards nothing

    def _death_reason(self, status: int | None) -> str:
        if self.kill_reason:
            reason, self.kill_reason = self.kill_reason, ""
            return reason
        if status is not None and status < 0:
            with suppress(ValueError):
                return f"killed by {signal.Signals(-status).name}"
        last_line = launch.last_log_line(self.spec.log, since=self._log_offset)
        return last_line or ("ended" if status is None else f"ended with status {status}")

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.life.due is not None:
            delay = max(0.0, self.life.due - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self.tick)

    async def _probe_readiness(self) -> None:
        unready_since = self._clock()
        while True:
            try:
                healthy = await self.spec.probe()
            except Exception as error:
                log.debug("readiness_probe_failed", process=self.spec.name, error=str(error))
                healthy = False
            self.handle(ReadinessProbed(healthy, stopped=self._is_to_replace_as_stopped()))
            if self.life.phase is Phase.READY:
                launch.trim(self.spec.log)
                await asyncio.sleep(PROBE_READY_SECONDS)
                unready_since = self._clock()
            else:
                await asyncio.sleep(probe_pause(self._clock() - unready_since))

    def _is_to_replace_as_stopped(self) -> bool:
        watched = self.spec.replace_stopped and self._config.liveness_seconds > 0
        return watched and self.identity is not None and linux.is_stopped(self.identity)

    async def _probe_liveness(self, alive: Probe) -> None:
        while True:
            at, answer = self._clock(), False
            try:
                async with asyncio.timeout(self._config.liveness_period):
                    answer = await alive()
            except Exception as error:
                log.debug("liveness_probe_failed", process=self.spec.name, error=str(error))
            self.handle(LivenessProbed(answer, at))
            await asyncio.sleep(max(0.0, at + self._config.liveness_period - self._clock()))

    def _stop_probing(self) -> None:
        for task in (self._readiness_task, self._liveness_task):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        self._readiness_task = self._liveness_task = None
