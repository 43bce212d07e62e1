"""A thread for one component: it never keeps the process alive."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from motet.own_thread import OwnThread
from tests.common.waiting import PATIENCE_S

HANGS = """
import asyncio, threading
from motet.own_thread import OwnThread

async def main():
    thread = OwnThread("hangs")
    asking = asyncio.create_task(thread.run(threading.Event().wait))
    await asyncio.sleep(0.1)
    asking.cancel()
    thread.close()

asyncio.run(main())
"""


async def test_calls_run_in_order_in_one_thread() -> None:
    thread, order = OwnThread("one"), list[int]()
    first, second = await asyncio.gather(
        thread.run(lambda: (order.append(1), threading.get_ident())[1]),
        thread.run(lambda: (order.append(2), threading.get_ident())[1]),
    )
    assert first == second != threading.get_ident()
    assert order == [1, 2]
    thread.close()


async def test_the_error_of_a_call_is_raised_and_the_next_call_works() -> None:
    thread = OwnThread("one")
    with pytest.raises(FileNotFoundError):
        await thread.run(Path("/nowhere/at/all").stat)
    assert await thread.run(lambda: 3) == 3
    thread.close()


async def test_a_closed_thread_takes_no_calls() -> None:
    thread = OwnThread("one")
    thread.close()
    with pytest.raises(RuntimeError, match="closed"):
        await thread.run(lambda: 3)


def test_a_process_ends_although_a_call_hangs() -> None:
    """A file system on the network may never answer."""
    subprocess.run([sys.executable, "-c", HANGS], check=True, timeout=PATIENCE_S / 4)
