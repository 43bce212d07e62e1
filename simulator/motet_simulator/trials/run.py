"""Runs one trial."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from motet_simulator.trials.invariants import check_now, check_quiet
from motet_simulator.trials.logs import errors_go_to
from motet_simulator.trials.plan import SECONDS, Fault, FaultKind, Plan, draw_plan
from motet_simulator.trials.system import System
from motet_simulator.world import Process, TimeStandsStill, Wires, World
from motet_simulator.world.nothing_real import nothing_real

QUIET_SECONDS = 60.0
"""After the last fault, in this time everything must have ended."""
SHORT_QUIET_SECONDS = 16.0
"""When the first look at that comes. Of eight seeds one waits for the last look, for what only then would be wrong."""
LOOK_SECONDS = 4.0
CHECK_SECONDS, QUIET_CHECK_SECONDS = 0.2, 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    plan: Plan
    problem: str
    """Empty: nothing was wrong."""
    at: float
    answered: int
    turns: int


class Violation(Exception):
    """Something happened that must never happen."""


def run_trial(plan: Plan, record: Callable[[float, str, bytes], None] = lambda *_: None) -> Outcome:
    """`record` gets each message that one process sends to another: when, on which stream, and its bytes."""
    with nothing_real():
        return _Trial(plan, record).run()


def messages_of(seed: int) -> str:
    """A digest of all messages of this trial: equal if everything has happened in the same way."""
    digest = sha256()

    def record(at: float, stream: str, message: bytes) -> None:
        digest.update(f"{at!r} {stream} {len(message)} ".encode() + message)

    run_trial(draw_plan(seed), record)
    return digest.hexdigest()


class _Trial:
    def __init__(self, plan: Plan, record: Callable[[float, str, bytes], None]) -> None:
        self._plan = plan
        self._world = World(plan.seed)
        self._wires = Wires(self._world, record)
        self._problem = ""
        self._closed = False
        self._ends: dict[tuple[FaultKind, str], float] = {}
        """When the faults of a kind end in one place."""
        self._system = System(plan, self._world, self._wires, self._object)

    def run(self) -> Outcome:
        with errors_go_to(self._object):
            return self._run()

    def _run(self) -> Outcome:
        world, system, plan = self._world, self._system, self._plan
        try:
            for change in plan.changes:
                if change.at > 0:
                    world.at(change.at, system.change, change)
                else:
                    system.change(change)
            system.start_all()
            for ask in plan.asks:
                world.at(ask.at, system.ask, ask)
            for fault in plan.faults:
                world.at(fault.at, self._inject, fault)
            self._check_again()
            end = SECONDS + QUIET_SECONDS
            if plan.seed % 8:
                world.run(SECONDS + SHORT_QUIET_SECONDS)
                while world.now < end and not _is_quiet(system):
                    world.run(world.now + LOOK_SECONDS)
            else:
                world.run(end)
            check_quiet(system)
        except (Violation, AssertionError, TimeStandsStill) as error:
            self._problem = self._problem or str(error) or repr(error)
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            self._problem = self._problem or f"{error!r} in {last.name}, {Path(last.filename).name}:{last.lineno}"
        finally:
            problem, self._closed = self._problem, True
            system.close()
        answered = sum(client.answered for client in system.clients)
        return Outcome(plan, problem, world.now, answered, world.turns)

    def _object(self, what: str) -> None:
        if not self._closed:
            self._problem = self._problem or what

    def _check_again(self) -> None:
        if self._problem:
            raise Violation(self._problem)
        check_now(self._system)
        self._world.after(CHECK_SECONDS if self._world.now < SECONDS else QUIET_CHECK_SECONDS, self._check_again)

    def _inject(self, fault: Fault) -> None:
        system, seconds = self._system, fault.seconds
        match fault.kind:
            case "source away":
                system.sources.away_until[fault.host] = self._until(seconds, fault.kind, fault.host)
            case "source slow":
                system.sources.slow_until[fault.host] = self._until(seconds, fault.kind, fault.host)
            case "new base":
                system.replace_base()
            case _ if fault.host in system.processes:  # else a second scheduler, where there is one only
                self._inject_into(system.processes[fault.host], fault)

    def _inject_into(self, process: Process, fault: Fault) -> None:
        system, wires, world, seconds = self._system, self._wires, self._world, fault.seconds
        runner = system.runners.get(fault.host)
        match fault.kind:
            case "kill":
                system.kill(fault.host, seconds)
            case "kill in write":
                system.kill_in_write(fault.host, seconds)
            case "power off":
                system.power_off(fault.host, seconds)
            case "pause":
                process.pause(seconds)
            case "break":
                wires.break_streams(fault.host, fault.other)
            case "partition":
                wires.partition(fault.host, fault.other, seconds)
            case "slow":
                wires.slow(fault.host, fault.other, seconds)
            case "drain":
                system.set_drain(fault.host, True)
                self._after(seconds, fault.kind, fault.host, system.set_drain, fault.host, False)
            case "disk full":
                system.fill_disk(fault.host, True)
                self._after(seconds, fault.kind, fault.host, system.fill_disk, fault.host, False)
            case "clock jumps":
                process.machine.wall_error += 100 * (world.draw("jump", fault.at) - 0.5)
            case "leases away":
                system.leases.away = True
                self._after(seconds, fault.kind, "", setattr, system.leases, "away", False)
            case "leases garbled":
                system.leases.garbled = True
                self._after(seconds, fault.kind, "", setattr, system.leases, "garbled", False)
            case "engine dies" if runner is not None:
                runner.engine.die()
            case "engine hangs" if runner is not None:
                runner.engine.hang()
                self._after(seconds, fault.kind, process.name, runner.engine.go_on)
            case "engine slows" if runner is not None:
                runner.engine.slowness = 20.0
                self._after(seconds, fault.kind, process.name, setattr, runner.engine, "slowness", 1.0)

    def _until(self, seconds: float, kind: FaultKind, where: str) -> float:
        """When a fault ends that begins now: not before another one of this kind there."""
        key = kind, where
        self._ends[key] = max(self._ends.get(key, 0.0), self._world.now + seconds)
        return self._ends[key]

    def _after(self, seconds: float, kind: FaultKind, where: str, end: Callable[..., None], *args: Any) -> None:
        until = self._until(seconds, kind, where)

        def end_if_last() -> None:
            if self._ends[kind, where] == until:
                end(*args)

        self._world.at(until, end_if_last)


def _is_quiet(system: System) -> bool:
    try:
        check_quiet(system)
    except AssertionError:
        return False
    return True
