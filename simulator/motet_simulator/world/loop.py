"""The event loop of one simulated process. It has tasks, timers and a clock of its own, and nothing else.

Threads, sockets, signals and child processes are not there: whoever asks for them gets NotImplementedError. A function
for a thread (`asyncio.to_thread`) runs at once, and its result comes a moment later.
"""

import asyncio
import contextvars
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, TypeVarTuple

from motet_simulator.world.time import World

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

THREAD_SECONDS = 0.001
"""How long a function in a thread takes."""

RETRIEVE_SECONDS = 1.0
"""In this time somebody must take the error of a failed task. Who waits for the task takes it at once; who waits for
another one before, a little later."""


class ProcessLoop(asyncio.BaseEventLoop):
    """`rate` is how fast its clock goes, and `start` what it shows when the process starts. Two processes on two
    machines never agree."""

    dead = False
    """Whether its process has ended."""

    def __init__(
        self, world: World, *, name: str = "", rate: float = 1.0, start: float = 0.0, failed: Callable[[str], None]
    ) -> None:
        super().__init__()
        self.name = name
        self.after_turn: Callable[[], None] = lambda: None
        """Called after each turn, unless the process has ended in it."""
        self._world = world
        self._rate = rate
        self._zero = start - world.now * rate
        self._failed = failed
        self._ready: deque[asyncio.Handle] = deque()
        self._turn_due = False
        self._paused_at = self._resume_at = 0.0
        self.tasks: dict[asyncio.Task[Any], None] = {}
        """Those that have not ended."""

    def __repr__(self) -> str:
        return f"<{self.name}, next: {', '.join(map(_described, self._ready)) or 'nothing'}>"

    def __del__(self) -> None:
        """It holds nothing that must be closed."""

    # ------------------------------------------------------------------------------------------------ faults of a world

    def kill(self) -> None:
        """Nothing of this process runs any more, no `finally` either."""
        self.dead = True
        self._ready.clear()

    def pause(self, seconds: float) -> None:
        """Nothing runs for this long. Messages and timers wait."""
        if not self.pauses:
            self._paused_at = self._world.now
        self._resume_at = max(self._resume_at, self._world.now + seconds)

    @property
    def pauses(self) -> bool:
        return self._resume_at > self._world.now

    @property
    def arrival(self) -> float:
        """When a message that is handled now came, at the earliest."""
        return self._paused_at if self._resume_at == self._world.now else self._world.now

    # ------------------------------------------------------------------------------------------------------------ turns

    def _turn(self) -> None:
        self._turn_due = False
        if self.dead:
            return
        if self._resume_at > self._world.now:
            self._schedule_turn()
            return
        ready = self._ready
        events._set_running_loop(self)  # noqa: SLF001 - as `runs` does: there are 30 000 turns in a trial
        try:
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:  # noqa: SLF001
                    try:  # as `handle._run` does, with a call less
                        handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]  # noqa: SLF001
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:
                        what = f"Exception in callback {_described(handle)}"
                        self.call_exception_handler({"message": what, "exception": error})
                if self.is_closed():  # by what it did
                    return
        finally:
            events._set_running_loop(None)  # noqa: SLF001
        if ready:
            self._schedule_turn()
        self._world.turns += 1
        self.after_turn()

    @contextmanager
    def runs(self) -> Iterator[None]:
        """Who asks asyncio for the event loop gets this one."""
        events._set_running_loop(self)  # noqa: SLF001
        try:
            yield
        finally:
            events._set_running_loop(None)  # noqa: SLF001

    def _schedule_turn(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            self._world.at(self._resume_at, self._turn)

    def _timer_due(self, timer: asyncio.TimerHandle) -> None:
        if not self.dead and not timer._cancelled:  # noqa: SLF001
            self._ready.append(timer)
            self._schedule_turn()

    # ----------------------------------------------------------------------------------------------- what asyncio calls

    def time(self) -> float:
        return self._zero + self._world.now * self._rate

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self.dead:
            self._ready.append(handle)
            if not self._turn_due:  # mostly it is
                self._schedule_turn()
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        if not self.dead:
            self._world.at((when - self._zero) / self._rate, self._timer_due, timer)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer is skipped when its time comes."""

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> "asyncio.Task[T]":
        task = asyncio.Task(coro, loop=self, name=None if name is None else str(name), context=context)
        self.tasks[task] = None
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: "asyncio.Task[Any]") -> None:
        self.tasks.pop(task, None)
        if task._log_traceback:  # noqa: SLF001 - nobody has taken its error yet
            self.call_later(RETRIEVE_SECONDS, self._object_unless_retrieved, task)

    def _object_unless_retrieved(self, task: "asyncio.Task[Any]") -> None:
        if task._log_traceback:  # noqa: SLF001
            self._failed(f"nobody notices that the task {task.get_name()!r} has failed: {task.exception()!r}")

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = self.create_future()
        try:
            result = func(*args)
        except Exception as error:
            self.call_later(THREAD_SECONDS, _unless_done, future, future.set_exception, error)
        else:
            self.call_later(THREAD_SECONDS, _unless_done, future, future.set_result, result)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.dead:
            self._failed(f"{context.get('message')}: {context.get('exception')!r}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return events._get_running_loop() is self  # noqa: SLF001

    def is_closed(self) -> bool:
        return self.dead

    async def shutdown_asyncgens(self) -> None: ...

    async def shutdown_default_executor(self, timeout: float | None = None) -> None: ...


def _unless_done(future: "asyncio.Future[Any]", settle: Callable[[Any], None], value: Any) -> None:
    if not future.done():
        settle(value)


def _described(handle: asyncio.Handle) -> str:
    callback = handle._callback  # type: ignore[attr-defined]  # noqa: SLF001
    owner = getattr(callback, "__self__", None)
    return f"the task {owner.get_name()!r}" if isinstance(owner, asyncio.Task) else repr(callback)
