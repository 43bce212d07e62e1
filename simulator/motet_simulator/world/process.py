"""A simulated process: an event loop, a host name, and what runs there."""

import asyncio
import warnings
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from motet_simulator.world.loop import ProcessLoop
from motet_simulator.world.network import SimulatedNetwork
from motet_simulator.world.time import World
from motet_simulator.world.wires import Wires

CLOSE_ATTEMPTS = 20


class Process:
    """It starts when it is made, and runs until it is killed or `main` returns.

    `host` is its place in the network: a process that is started again has the same one. `life` is how many processes
    there were on this host before.
    """

    def __init__(
        self,
        world: World,
        wires: Wires,
        host: str,
        life: int,
        main: "Callable[[Process], Coroutine[Any, Any, None]]",
        *,
        failed: Callable[[str], None],
    ) -> None:
        self.world = world
        self.host = host
        self.life = life
        self.name = f"{host}.{life}"
        rate = 1.0 + (world.draw("clock rate", host) - 0.5) * 2e-4
        self.loop = ProcessLoop(
            world, name=self.name, rate=rate, start=1e3 + 1e6 * world.draw("clock", host, life), failed=failed
        )
        self.network = SimulatedNetwork(wires, host, self.loop)
        self.machine = wires.host(host)
        self.machine.off = False
        self.ended = ""
        """Why it ended, once it has."""
        self.on_end: Callable[[Process], None] = lambda _: None
        """Called when it ends by itself."""
        self._wires = wires
        self._main = self.loop.create_task(main(self), name=self.name)
        self._main.add_done_callback(self._on_end)

    @property
    def alive(self) -> bool:
        return not self.loop.dead

    def kill(self, why: str = "killed", *, power: bool = False) -> None:
        """At once, as with SIGKILL: nothing more runs. Its peers hear from its kernel, unless the machine is off."""
        if self.alive:
            self.ended = why
            self.loop.kill()
            self._wires.host_died(self.host, power=power)

    def end(self, why: str) -> None:
        """As by `exit`: it is started again by whoever watches it."""
        if self.alive:
            self.kill(why)
            self.on_end(self)

    def pause(self, seconds: float) -> None:
        self.loop.pause(seconds)

    def _on_end(self, main: "asyncio.Task[None]") -> None:
        why = "cancelled" if main.cancelled() else repr(main.exception()) if main.exception() else "left"
        self.end(why)

    def raise_failure(self) -> None:
        """Raise what ended `main`, or an error if it has not ended."""
        if not self._main.done():
            raise TimeoutError(f"{self.name} has not ended: {list(self.loop.tasks)}")
        self._main.result()

    def close(self) -> None:
        """Give its memory back at the end of the simulation. Its coroutines have never ended: what they would do then
        goes nowhere."""
        self.loop.kill()
        with warnings.catch_warnings(), self.loop.runs():
            warnings.simplefilter("ignore")
            for task in list(self.loop.tasks):
                if task.done():  # its process was killed at that time
                    task._log_traceback = False  # noqa: SLF001
                    continue
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001
                coroutine = task.get_coro()
                for _ in range(CLOSE_ATTEMPTS):  # each await in a `finally` needs another attempt
                    with suppress(BaseException):
                        coroutine.close()
                        break
            self.loop.tasks.clear()
