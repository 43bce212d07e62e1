"""An engine on the event loop of its runner's service: no thread, no process, no pipe."""

import asyncio
from collections.abc import Callable

from motet.clock import Clock
from motet_runner.engine_client import EngineDied
from motet_runner.engine_loop import EngineLoop
from motet_runner.engine_messages import Command, EngineOutputs
from motet_runner.interface import Engine


class InProcessEngine:
    """Each iteration takes `step_seconds` of the event loop's time. `die` ends it, as when its process is killed."""

    def __init__(self, engine: Engine, *, clock: Clock, step_seconds: float = 0.0) -> None:
        self.step_seconds = step_seconds
        self._loop = EngineLoop(engine, clock=clock)
        self._commands: list[Command] = []
        self._posted = asyncio.Event()
        self._death = ""

    def post(self, command: Command) -> None:
        self._commands.append(command)
        self._posted.set()

    def die(self, why: str) -> None:
        self._death = why
        self._posted.set()

    async def run(self, receive: Callable[[EngineOutputs], None]) -> None:
        while True:
            await self._wait(self._loop.command_wait_seconds())
            if self._death:
                raise EngineDied(self._death)
            commands, self._commands = self._commands, []
            self._posted.clear()
            self._loop.apply(commands)
            if (outputs := self._loop.turn()) is not None:
                receive(outputs)

    async def _wait(self, seconds: float | None) -> None:
        """Until the next iteration: at least as long as one takes, and for commands if there is nothing to do."""
        await asyncio.sleep(self.step_seconds)
        if seconds != 0.0:
            try:
                async with asyncio.timeout(seconds):
                    await self._posted.wait()
            except TimeoutError:
                pass
