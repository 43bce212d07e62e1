"""The iterations of a simulated runner: when its engine loop turns, and what it leaps over."""

from collections.abc import Callable

from motet_runner.engine_loop import EngineLoop
from motet_runner.engine_messages import Command, EngineOutputs
from motet_simulator.plan.clock import Alarm, VirtualClock
from motet_simulator.plan.engine import SimulatedEngine
from motet_simulator.plan.leaps import completed


class Iterations:
    def __init__(
        self, engine: SimulatedEngine, clock: VirtualClock, tell: Callable[[EngineOutputs], None], *, leaps: bool
    ) -> None:
        """`tell` is told what an iteration has brought, when it ends."""
        self.busy_seconds = 0.0
        """In which there were iterations."""
        self._engine = engine
        self._loop = EngineLoop(engine, clock=lambda: engine.now)
        self._clock = clock
        self._tell = tell
        self._leaps = leaps
        self._commands: list[Command] = []
        self._iterating = False
        self._leap: tuple[float, list[float], Alarm] | None = None
        """When a leap began, when its iterations end, and what happens after it."""
        self._wait: Alarm | None = None
        """The next look at an engine whose sequences all wait."""

    def post(self, command: Command) -> None:
        self._commands.append(command)
        now = self._clock.now
        if self._leap is not None:
            self._end_leap_early(now)
        elif not self._iterating:
            if self._wait is not None:
                self._wait.off = True
                self._wait = None
            self._iterating = True
            self._clock.iteration_at(now, self._turn)

    def _turn(self) -> None:
        """Begin an iteration. What it brings is known now, and told when it ends."""
        now = self._clock.now
        self._iterating, self._wait = True, None
        commands, self._commands = self._commands, []
        self._loop.apply(commands)
        if self._leaps and self._loop.may_leap and self._begin_leap(now):
            return
        if self._leaps and self._loop.owes_only_a_report and self._leap_to_report(now):
            return
        self._iterate(now)

    def _iterate(self, began: float) -> None:
        self._engine.now = began
        outputs = self._loop.turn()
        end = max(self._engine.now, self._clock.now)
        self.busy_seconds += end - began
        self._clock.iteration_at(end, self._iterated, outputs)

    def _iterated(self, outputs: EngineOutputs | None) -> None:
        self._iterating = False
        if outputs is not None:
            self._tell(outputs)
        if self._commands or (self._engine.has_work() and self._engine.computed):
            self._turn()
        elif self._engine.has_work():
            self._wait = self._clock.iteration_at(self._clock.now, self._turn)

    def _begin_leap(self, now: float) -> bool:
        ends = self._engine.foresee(now, self._loop.quiet_at)
        if ends:
            self._leap = (now, ends, self._clock.iteration_at(ends[-1], self._end_leap))
        return bool(ends)

    def _leap_to_report(self, now: float) -> bool:
        ends = self._engine.foresee(now, self._loop.quiet_at, most=1)
        if ends:
            self._take_leap(now, ends)
            self._clock.iteration_at(ends[0], self._iterated, self._loop.take())
        return bool(ends)

    def _end_leap(self) -> None:
        assert self._leap is not None
        began, ends, _ = self._leap
        self._take_leap(began, ends)
        self._turn()

    def _end_leap_early(self, now: float) -> None:
        """A command waits for the end of the iteration that is under way, which is still part of the leap."""
        assert self._leap is not None
        began, ends, alarm = self._leap
        alarm.off = True
        ends = ends[: completed(ends, now) + 1]
        self._take_leap(began, ends)
        self._iterating = True
        self._clock.iteration_at(ends[-1], self._iterated, None)

    def _take_leap(self, began: float, ends: list[float]) -> None:
        self._leap = None
        self._engine.leap(began, ends)
        self._loop.leapt(ends)
        self.busy_seconds += ends[-1] - began
