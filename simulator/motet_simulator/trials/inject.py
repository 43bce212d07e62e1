"""Faults of a plan, when their time has come, and how many of them did something."""

from collections.abc import Callable
from typing import Any

from motet_simulator.trials.lies import Liar
from motet_simulator.trials.plan import BUSIEST, LEADER, SECONDS, Fault, FaultKind
from motet_simulator.trials.system import System
from motet_simulator.world import Wires, World

AGAIN_SECONDS = 0.5

MET_LATER: frozenset[FaultKind] = frozenset(
    {
        "source away",
        "source slow",
        "leases away",
        "leases garbled",
        "disk full",
        "kill in write",
        "partition",
        "slow",
    }
)
"""They do something once somebody fetches, writes, asks the API server or sends a message."""


class Faults:
    def __init__(self, world: World, wires: Wires, system: System) -> None:
        self._world = world
        self._wires = wires
        self._system = system
        self.effective = 0
        """How many did something."""
        self._unmet: dict[tuple[str, str], int] = {}
        """How many of a kind are in one place, and nothing has met them."""
        self._ends: dict[tuple[str, str], float] = {}
        """When the faults of a kind end in one place."""
        world.on_met = self._on_met

    def inject(self, fault: Fault) -> None:
        """What it would befall may not be there now, such as a process between two lives: then a little later."""
        if self._begins(fault):
            self.effective += fault.kind not in MET_LATER
        elif self._world.now < SECONDS:
            self._world.after(AGAIN_SECONDS, self.inject, fault)

    def _begins(self, fault: Fault) -> bool:
        """False: what it would befall is not there."""
        system, wires, kind, seconds = self._system, self._wires, fault.kind, fault.seconds
        known = {LEADER: system.leading_host, BUSIEST: system.busiest_host}
        host, other = (known.get(name, name) for name in (fault.host, fault.other))
        way = f"{host} {other}" if host and other else ""
        match kind:
            case "source away":
                system.sources.away_until[host] = self._lasts(kind, host, seconds)
            case "source slow":
                system.sources.slow_until[host] = self._lasts(kind, host, seconds)
            case "leases away":
                system.leases.away = True
                self._lasts(kind, "", seconds, setattr, system.leases, "away", False)
            case "leases garbled":
                system.leases.garbled = True
                self._lasts(kind, "", seconds, setattr, system.leases, "garbled", False)
            case "lease deleted":
                return system.delete_lease()
            case "disk full":
                system.fill_disk(host, True)
                self._lasts(kind, host, seconds, system.fill_disk, host, False)
            case "kill in write" if system.kill_in_write(host, seconds):
                self._lasts(kind, host, seconds)
            case "new base":
                system.replace_base()
            case "break" if way:
                return wires.break_streams(host, other)
            case "partition" if way:
                self._lasts(kind, way, seconds)
                wires.partition(host, other, seconds)
            case "slow" if way:
                self._lasts(kind, way, seconds)
                wires.slow(host, other, seconds)
            case _:
                return self._begins_in_process(fault, host)
        return True

    def _begins_in_process(self, fault: Fault, host: str) -> bool:
        system, kind, seconds = self._system, fault.kind, fault.seconds
        process, runner = system.processes.get(host), system.runners.get(host)
        if process is None or not process.alive:
            return False
        match kind:
            case "kill":
                system.kill(host, seconds)
            case "power off":
                system.power_off(host, seconds)
            case "pause":
                process.pause(seconds)
            case "clock jumps" if system.objects.draining:
                process.machine.wall_error += 100 * (self._world.draw("jump", fault.at) - 0.5)
            case "drain" if runner is not None and system.operator is not None:
                if host in system.objects.draining and (kind, host) not in self._ends:
                    return False  # for a new base model
                system.set_drain(host, True)
                self._lasts(kind, host, seconds, system.set_drain, host, False)
            case "lies":
                self._wires.lies[host] = Liar(system, host, f"{self._world.seed} {fault.at}").says
                self._lasts(kind, host, seconds, self._wires.tells_truth, host)
            case "engine dies" if runner is not None:
                runner.engine.die()
            case "engine hangs" if runner is not None:
                runner.engine.hang()
                self._lasts(kind, process.name, seconds, runner.engine.go_on)
            case "engine slows" if runner is not None:
                runner.engine.slowness = 20.0
                self._lasts(kind, process.name, seconds, setattr, runner.engine, "slowness", 1.0)
            case _:
                return False
        return True

    def _on_met(self, kind: str, where: str) -> None:
        self.effective += self._unmet.pop((kind, where), 0)

    def _lasts(
        self, kind: FaultKind, where: str, seconds: float, end: Callable[..., None] | None = None, *args: Any
    ) -> float:
        """When a fault ends that begins now: not before another one of this kind there. Calls `end` then."""
        key, now = (kind, where), self._world.now
        if self._ends.get(key, 0.0) <= now:
            self._unmet[key] = 0
        if kind in MET_LATER:
            self._unmet[key] = self._unmet.get(key, 0) + 1
        until = self._ends[key] = max(self._ends.get(key, 0.0), now + seconds)

        def end_if_last() -> None:
            if self._ends[key] == until and end is not None:
                end(*args)

        self._world.at(until, end_if_last)
        return until
