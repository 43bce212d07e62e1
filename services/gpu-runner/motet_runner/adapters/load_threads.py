"""Threads that read adapters, for their loads, proofs and slabs. To start one takes about as long as to read a small
adapter, and its first memory is new to it: so one waits for the next.

They are daemons: if the file system hangs, the read never ends, and the process can still exit.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], None]

MAX_IDLE = 4


class LoadThreads:
    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Work]] = []

    def run(self, work: Work) -> None:
        """`work` raises nothing. Raises RuntimeError if there are no more threads available."""
        try:
            orders = self._idle.pop()
        except IndexError:
            orders = SimpleQueue()
            threading.Thread(target=self._serve, args=(orders,), name="adapter-load", daemon=True).start()
        orders.put(work)

    def _serve(self, orders: "SimpleQueue[Work]") -> None:
        while True:
            orders.get()()
            if len(self._idle) >= MAX_IDLE:
                return
            self._idle.append(orders)


THREADS = LoadThreads()
"""Of this process"""
