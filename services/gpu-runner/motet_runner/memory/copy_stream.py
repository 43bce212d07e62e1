"""In which order adapters and pages are copied to a device and from it, beside what the model computes there."""

import time
from typing import Any, Protocol

import torch

from motet_runner.memory.marks import GpuMark, Mark, PassedMark


class CopyStream(Protocol):
    def follow_model(self, mark: Any = None) -> None:
        """The copies from now on come after `mark`, of the model; None: after all that the model has been told to
        compute so far, because it may still read what was there, or write what is copied."""

    def copy(self, to: torch.Tensor, of: torch.Tensor) -> None:
        """After all copies so far"""

    def mark(self) -> Mark:
        """Of the copies so far"""

    def model_mark(self) -> Mark:
        """Of what the model has been told so far"""

    def let_model_wait(self, mark: Any = None) -> None:
        """What the model is told from now on comes after `mark`, of this stream; None: after all copies so far. Nobody
        waits here."""


class InOrder:
    """Of a CPU, which does one thing after the other"""

    @staticmethod
    def follow_model(mark: Any = None) -> None:
        """What the model was told is done."""

    @staticmethod
    def copy(to: torch.Tensor, of: torch.Tensor) -> None:
        to.copy_(of)

    @staticmethod
    def mark() -> Mark:
        return PassedMark(time.perf_counter())

    model_mark = mark

    @staticmethod
    def let_model_wait(mark: Any = None) -> None:
        """The copies have ended."""


class OwnStream:
    """Of a GPU, which copies while it computes"""

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
    return OwnStream(device) if device.type == "cuda" else InOrder()
