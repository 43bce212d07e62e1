"""Orders the copies of adapters and pages to and from a device relative to the model's work there."""

import time
from typing import Any

import torch

from motet_runner.memory.marks import GpuMark, Mark


class CopyStream:
    """For a CPU, which does one thing after the other: nothing has to wait."""

    def follow_model(self, mark: Any = None) -> None:
        """Later copies wait for `mark` in the model's work; None: for all of the model's work so far. That work may
        still read the copies' targets, or write their sources."""

    def copy(self, to: torch.Tensor, of: torch.Tensor) -> None:
        """Copies after all copies so far"""
        to.copy_(of)

    def mark(self) -> Mark:
        """A mark after the copies so far"""
        return Mark(time.perf_counter())

    def model_mark(self) -> Mark:
        """A mark after the model's work so far"""
        return Mark(time.perf_counter())

    def let_model_wait(self, mark: Any = None) -> None:
        """The model's later work waits for `mark` in this stream; None: for all copies so far. The caller does not
        wait."""


class OwnStream(CopyStream):
    """For a GPU, which copies while it computes"""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def follow_model(self, mark: GpuMark | None = None) -> None:
        if mark is None:
            self._stream.wait_stream(self._model)
        else:
            self._stream.wait_event(mark.event)

    def copy(self, to: torch.Tensor, of: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            to.copy_(of, non_blocking=True)

    def mark(self) -> Mark:
        return GpuMark(self._stream)

    def model_mark(self) -> Mark:
        return GpuMark(self._model)

    def let_model_wait(self, mark: GpuMark | None = None) -> None:
        if mark is None:
            self._model.wait_stream(self._stream)
        else:
            self._model.wait_event(mark.event)

    @property
    def _model(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)


def copy_stream_for(device: torch.device) -> CopyStream:
    return OwnStream(device) if device.type == "cuda" else CopyStream()
