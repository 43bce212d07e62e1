"""Runs one trial."""

import gc
import traceback
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from pathlib import Path

from motet_simulator.trials.draw import draw_plan
from motet_simulator.trials.inject import Faults
from motet_simulator.trials.invariants import check_now, check_quiet
from motet_simulator.trials.logs import errors_go_to
from motet_simulator.trials.plan import SECONDS, Plan
from motet_simulator.trials.system import System
from motet_simulator.world import TimeStandsStill, Wires, World
from motet_simulator.world.nothing_real import nothing_real
from motet_simulator.world.wires import Record

QUIET_SECONDS = 60.0
"""After the last fault, in this time everything must have ended, or answers must still get tokens: there may be more
requests for an adapter than the only runner that may have it can answer."""
MAX_QUIET_SECONDS = 120.0
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
    asked: int
    """Requests. One whose gateways never come back is not asked."""
    answered: int
    effective_faults: int
    """Of the plan, those that did something."""
    turns: int


class Violation(Exception):
    """Something happened that must never happen."""


def run_trial(plan: Plan, record: Record = lambda *_: None, *, until: float = inf) -> Outcome:
    """`record` gets each message that one process sends to another: when, on which stream, and its bytes. `until`: when
    it ends at the latest; whether all has ended is not looked at before."""
    collects = gc.isenabled()
    gc.disable()  # one collection after a trial takes less time than many in it
    try:
        with nothing_real():
            return _Trial(plan, record).run(until)
    finally:
        if collects:
            gc.enable()


def messages_of(seed: int) -> str:
    """A digest of all messages of this trial: equal if everything has happened in the same way."""
    digest = sha256()

    def record(at: float, stream: str, message: bytes) -> None:
        digest.update(f"{at!r} {stream} {len(message)} ".encode() + message)

    run_trial(draw_plan(seed), record)
    return digest.hexdigest()


class _Trial:
    def __init__(self, plan: Plan, record: Record) -> None:
        self._plan = plan
        self._world = World(plan.seed)
        self._wires = Wires(self._world, record)
        self._problem = ""
        self._closed = False
        self._system = System(plan, self._world, self._wires, self._object)
        self._faults = Faults(self._world, self._wires, self._system)

    def run(self, until: float = inf) -> Outcome:
        with errors_go_to(self._object, self._plan):
            return self._run(until)

    def _run(self, until: float) -> Outcome:
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
                world.at(fault.at, self._faults.inject, fault)
            self._check_again()
            first_look, end = SECONDS + SHORT_QUIET_SECONDS, SECONDS + QUIET_SECONDS
            world.run(min(until, first_look if plan.seed % 8 else end))
            if until > world.now:
                while not _is_quiet(system) and world.now < SECONDS + MAX_QUIET_SECONDS:
                    before = _tokens(system)
                    world.run(world.now + LOOK_SECONDS)
                    if world.now >= end and _tokens(system) == before:
                        break
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
        return Outcome(plan, problem, world.now, len(system.clients), answered, self._faults.effective, world.turns)

    def _object(self, what: str) -> None:
        if not self._closed:
            self._problem = self._problem or what

    def _check_again(self) -> None:
        if self._problem:
            raise Violation(self._problem)
        check_now(self._system)
        self._world.after(CHECK_SECONDS if self._world.now < SECONDS else QUIET_CHECK_SECONDS, self._check_again)


def _tokens(system: System) -> int:
    """That clients have got."""
    return sum(len(client.tokens) for client in system.clients)


def _is_quiet(system: System) -> bool:
    try:
        check_quiet(system)
    except AssertionError:
        return False
    return True
