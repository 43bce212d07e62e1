"""What a thread has put into its queue, taken by another one."""

import queue
from typing import TypeVar

T = TypeVar("T")


def result_of_thread(found: "queue.Queue[T | BaseException]", wait_seconds: float) -> T | None:
    """None: there is none yet. Raises what the thread has raised."""
    try:
        result = found.get(timeout=wait_seconds) if wait_seconds else found.get_nowait()
    except queue.Empty:
        return None
    if isinstance(result, BaseException):
        raise result
    return result
