"""A simulated server: it runs a handler for each stream that a client opens."""

import asyncio
from collections.abc import Callable
from typing import Any

from motet.errors import MotetError
from motet.health import Health
from motet.transport import (
    HANDLER_END_SECONDS,
    CallFailed,
    DownloadMethod,
    Handlers,
    StatusCode,
    StreamMethod,
    status_of,
)
from motet_simulator.world.ends import End
from motet_simulator.world.loop import ProcessLoop
from motet_simulator.world.statuses import OK, STOPPED, Aborted
from motet_simulator.world.wires import Wires


class SimulatedServer:
    def __init__(
        self, wires: Wires, host: str, loop: ProcessLoop, address: str, handlers: Handlers, *, process: Health
    ) -> None:
        self.address = address
        self.host = host
        self.loop = loop
        self._wires = wires
        self._handlers = handlers
        self.running: dict[asyncio.Task[None], End] = {}
        self._process = process
        self._stops = False

    async def set_ready(self, ready: bool, why: str = "") -> None:
        self._process.set_ready(ready, why)

    def open(self, end: End) -> None:
        """A client opens a stream."""
        if end.status is not None:
            return
        end.begun = True
        if self._stops:
            end.end_now(STOPPED)
            return
        handle = self._handlers.get(end.stream.method)
        if handle is None:
            end.end_now((StatusCode.UNIMPLEMENTED, "Method not found!"))
            return
        task = end.task = self.loop.create_task(self._run(end, handle), name=end.stream.name)
        self.running[task] = end
        task.add_done_callback(lambda task: self.running.pop(task, None))

    async def _run(self, end: End, handle: Callable[..., Any]) -> None:
        try:
            match end.stream.method:
                case StreamMethod():
                    await handle(end)
                case DownloadMethod():
                    async for answer in handle(await end.request()):
                        await end.send(answer)
                case _:
                    await end.send(await handle(await end.request()))
            end.end_now(OK)
        except Aborted:
            pass
        except CallFailed:
            pass  # the client is gone
        except MotetError as error:
            end.end_now(status_of(error))
        except asyncio.CancelledError:
            end.end_now(STOPPED)
            raise
        except Exception as error:
            end.end_now((StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}"))
            # gRPC prints it to the server's log only, and many clients go on without an answer.
            self.loop.call_exception_handler(
                {"message": f"the handler of {end.stream.name!r} failed", "exception": error}
            )

    async def stop(self, grace: float) -> None:
        """Take no more calls, and give those that run `grace` seconds to end."""
        await self.set_ready(False, "stopping")
        self._wires.stop_listening(self)
        self._stops = True
        if self.running and grace:
            await asyncio.wait(list(self.running), timeout=grace)
        cancelled = list(self.running)
        for task in cancelled:
            task.cancel()
        if cancelled:
            await asyncio.wait(cancelled, timeout=HANDLER_END_SECONDS)
