"""Reads a checked adapter into host memory, on a thread of its own, so that no iteration waits for a disk (PU-07).

The result is ready to be copied to the device: in the engine's data type, multiplied by the scale, and in the back
end's layout. The part that has been read may be copied while the rest is read.
"""

import threading

import numpy as np
import torch

from motet.errors import AdapterIncompatible
from motet_kernels import RunLayout
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.weight_reader import WeightReader, has_changed

PACE_SECONDS = 1.0
"""The thread waits at most this time for the engine's next iteration, and then reads on."""


class HostLoad:
    """The load of one adapter into host memory. All sequences that wait for the adapter share it.

    The engine allows a number of bytes in each iteration, because reading takes time from the engine's thread. The
    thread is a daemon: if the file system hangs, the load never ends, and the process can still exit.
    """

    def __init__(self, adapter: AdapterLayout, layout: RunLayout, *, pinned: bool) -> None:
        self.layout = layout
        self.run: torch.Tensor | None = None
        """[bytes] in `layout`, in pinned memory if the device is a GPU; None before anything is read. It holds zeros
        for linears that the adapter does not change."""
        self.linears: frozenset[str] = frozenset()
        """The linears that the adapter changes; known once `run` is set"""
        self.read_bytes = 0
        """The first `read_bytes` bytes of `run` are final."""
        self._adapter = adapter
        self._pinned = pinned
        self._condition = threading.Condition()
        self._done = 0
        self._allowed = 0.0
        self._given_up = False
        self._ended = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="adapter-load", daemon=True).start()

    def allow(self, size: float) -> None:
        """Let the thread read `size` more bytes than so far."""
        with self._condition:
            self._allowed = self._done + size
            self._condition.notify()

    def give_up(self) -> None:
        """The adapter is no longer needed: read no further."""
        with self._condition:
            self._given_up = True
            self._condition.notify()

    def ended(self, wait_seconds: float = 0.0) -> bool:
        """True if everything has been read from the file that was checked. Raises the error of the reading thread."""
        ended = self._ended.wait(wait_seconds)
        if self._error is not None:
            raise self._error
        return ended

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._read_all()
        except BaseException as error:  # `ended` raises it on the engine's thread
            self._error = error
        self._ended.set()

    def _read_all(self) -> None:
        try:
            linears = {linear.module: linear for linear in self._adapter.linears}
        except (OSError, ValueError) as error:
            raise has_changed(self._adapter) from error
        unknown = next((module for module in linears if module not in self.layout.offsets), None)
        if unknown is not None:
            raise AdapterIncompatible(
                f"The adapter has weights for {unknown}, which is not a linear layer of this model. Check the adapter "
                "against this model first."
            )
        with WeightReader(self._adapter) as matrices:
            run = _zeros(self.layout.bytes, pinned=self._pinned)
            self.linears = frozenset(linears)
            self.run = run
            for group in self.layout.groups:
                self.read_bytes = self.layout.begin(group)
                for module in group.outputs:
                    linear = linears.get(module)
                    if linear is None:
                        continue
                    self._keep_pace()
                    self.layout.write(run, module, matrices.read(linear.a), matrices.read(linear.b), linear.scale)
                    self._done += linear.a.bytes + linear.b.bytes
            self.read_bytes = self.layout.bytes

    def _keep_pace(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._done < self._allowed or self._given_up, PACE_SECONDS)
            if self._given_up:
                raise _GivenUp


class _GivenUp(Exception):
    pass


def _zeros(size: int, *, pinned: bool) -> torch.Tensor:
    if pinned:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    # The operating system gives this memory page by page, at the first write. torch.zeros would write all of it.
    return torch.from_numpy(np.zeros(size, dtype=np.uint8))
