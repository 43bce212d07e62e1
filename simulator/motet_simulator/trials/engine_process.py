"""An engine's process, simulated: `EngineLoop` around the fake engine. An iteration takes as long as it is told to."""

import asyncio
from collections.abc import Callable

from motet.clock import Clock
from motet_runner.engine_client import EngineDied
from motet_runner.engine_loop import EngineLoop
from motet_runner.engine_messages import Command, EngineOutputs
from motet_simulator.fake_engine import FakeEngine

PIPE_SECONDS = 0.0002


class EngineEnds(Exception):
    """What this engine computes ends its process."""


class EngineProcess:
    """It runs in the event loop of its runner, but what it does takes its own time."""

    def __init__(self, engine: FakeEngine, *, clock: Clock, step_seconds: float = 0.0) -> None:
        self.engine = engine
        self._loop = EngineLoop(engine, clock=clock)
        self.step_seconds = step_seconds
        self.slowness = 1.0
        self._commands: list[Command] = []
        self._woken = asyncio.Event()
        self.hangs = False
        self.has_hung = False
        """It hangs, or did before."""
        self.has_turned = False
        """Its loop took a turn since this was set to False last: nothing else changes its sequences."""
        self._unchecked = False
        self._died = ""
        self._went_on = asyncio.Event()

    def check(self) -> None:
        """Recount all its books, if it took a turn since they were recounted last. Raises AssertionError."""
        if self._unchecked:
            self._unchecked = False
            self.engine.check()

    # ----------------------------------------------------------------------------------------------------------- faults

    def die(self, why: str = "killed by signal 9") -> None:
        self._died = why
        self._woken.set()
        self._went_on.set()

    def hang(self) -> None:
        self.hangs = self.has_hung = True
        self._went_on.clear()

    def go_on(self) -> None:
        self.hangs = False
        self._went_on.set()

    # ------------------------------------------------------------------------------------------ what a runner calls

    def post(self, command: Command) -> None:
        self._commands.append(command)
        self._woken.set()

    async def run(self, receive: Callable[[EngineOutputs], None]) -> None:
        loop = self._loop
        while True:
            commands, self._commands = self._commands, []
            self._woken.clear()
            loop.apply(commands)
            before = self.engine.planner.steps
            try:
                outputs = loop.turn()
            except EngineEnds as error:
                raise EngineDied(f"The engine has ended: {error}.") from None
            self.has_turned = self._unchecked = True
            stepped = self.engine.planner.steps > before
            await asyncio.sleep(self.step_seconds * self.slowness if stepped else PIPE_SECONDS)
            while self.hangs and not self._died:
                await self._went_on.wait()
            if self._died:
                raise EngineDied(f"The engine has ended: {self._died}.")
            if outputs is not None:
                receive(outputs)
            elif (wait := loop.command_wait_seconds()) != 0:
                await self._until_command(wait)

    async def _until_command(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            pass
        if self._died:
            raise EngineDied(f"The engine has ended: {self._died}.")
