"""Reads a checked adapter into host memory, on a thread of its own, so that no iteration waits for a disk (PU-07).

What it hands over is ready to be copied to the device as it is: in the engine's data type, with the scale, in the
layout that the back end wants.
"""

import threading
from dataclasses import dataclass

import torch

from motet.errors import AdapterIncompatible
from motet_kernels import RunLayout
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class HostAdapter:
    layout: RunLayout
    run: torch.Tensor
    """[bytes], as `layout` says; in pinned memory if the device is a GPU"""
    linears: frozenset[str]
    """The linears that the adapter changes. The others are zeros."""


class HostLoad:
    """One adapter on its way into host memory. All who wait for the adapter share it.

    The thread is a daemon: if the file system hangs, the load never ends, and the process can still exit.
    """

    def __init__(self, adapter: AdapterLayout, layout: RunLayout, *, pinned: bool) -> None:
        self._adapter = adapter
        self._layout = layout
        self._pinned = pinned
        self._ended = threading.Event()
        self._read: HostAdapter | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="adapter-load", daemon=True).start()

    def result(self, wait_seconds: float) -> HostAdapter | None:
        """The adapter; None if it is not read after this time. Raises the error that reading has raised."""
        if not self._ended.wait(wait_seconds):
            return None
        if self._error is not None:
            raise self._error
        return self._read

    def _run(self) -> None:
        try:
            self._read = read_adapter(self._adapter, self._layout, pinned=self._pinned)
        except BaseException as error:  # `result` raises it on the engine's thread
            self._error = error
        self._ended.set()


def read_adapter(adapter: AdapterLayout, layout: RunLayout, *, pinned: bool = False) -> HostAdapter:
    """Raises AdapterFetchFailed if the file is not the one that was checked, AdapterIncompatible if the adapter was
    checked against another model."""
    linears = adapter.linears
    unknown = next((linear.module for linear in linears if linear.module not in layout.offsets), None)
    if unknown is not None:
        raise AdapterIncompatible(
            f"The adapter has weights for {unknown}, which is not a linear layer of this model. Check the adapter "
            "against this model first."
        )
    with torch.inference_mode(), WeightReader(adapter) as matrices:
        run = torch.zeros(layout.bytes, dtype=torch.uint8, pin_memory=pinned)
        for linear in linears:
            layout.write(run, linear.module, matrices.read(linear.a), matrices.read(linear.b), linear.scale)
    return HostAdapter(layout, run, frozenset(linear.module for linear in linears))
