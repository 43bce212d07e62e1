"""A thread for one component alone."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

Answer = TypeVar("Answer")

_Calls = SimpleQueue[Callable[[], None] | None]


class OwnThread:
    """Runs calls in order in its own thread. In a gateway, the event loop's threads tokenise prompts, so a call there
    could wait for many tenants' requests. A call that hangs does not keep the process alive, as it would in an
    executor's thread."""

    def __init__(self, name: str) -> None:
        self._calls: _Calls = SimpleQueue()
        self._thread = Thread(target=_work, args=(self._calls,), name=name, daemon=True)
        self._started = self._closed = False

    async def run(self, do: Callable[[], Answer]) -> Answer:
        """Raises RuntimeError if the thread is closed, and what `do` raises."""
        if self._closed:
            raise RuntimeError(f"the thread {self._thread.name} is closed")
        if not self._started:
            self._started = True
            self._thread.start()
        answer: Future[Answer] = Future()
        self._calls.put(partial(_answer, answer, do))
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        """End the thread after the calls that it has."""
        self._closed = True
        self._calls.put(None)


def _work(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        call()


def _answer(answer: Future[Answer], do: Callable[[], Answer]) -> None:
    if not answer.set_running_or_notify_cancel():
        return  # the caller no longer waits
    try:
        result = do()
    except BaseException as error:
        answer.set_exception(error)
    else:
        answer.set_result(result)
