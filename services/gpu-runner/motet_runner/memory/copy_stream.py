"""In which order adapters are copied to a device, beside what the model computes there."""

from typing import Protocol

import torch


class Copied(Protocol):
    """A place in the order of the copies"""

    def passed(self) -> bool:
        """Whether all copies before it have ended"""

    def wait(self) -> None:
        """Until they have"""


class CopyStream(Protocol):
    def copy(self, to: torch.Tensor, of: torch.Tensor) -> None:
        """After all that the model has been told to compute so far: it may still read what was there."""

    def mark(self) -> Copied: ...

    def let_model_wait(self) -> None:
        """What the model is told from now on comes after the copies so far. Nobody waits here."""


class _Ended:
    @staticmethod
    def passed() -> bool:
        return True

    @staticmethod
    def wait() -> None:
        """Copies end before they return."""


class InOrder:
    """Of a CPU, which does one thing after the other"""

    @staticmethod
    def copy(to: torch.Tensor, of: torch.Tensor) -> None:
        to.copy_(of)

    @staticmethod
    def mark() -> Copied:
        return _Ended()

    @staticmethod
    def let_model_wait() -> None:
        """The copies have ended."""


class _Event:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def passed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class OwnStream:
    """Of a GPU, which copies while it computes"""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, to: torch.Tensor, of: torch.Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(of, non_blocking=True)

    def mark(self) -> Copied:
        return _Event(self._stream)

    def let_model_wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def copy_stream_for(device: torch.device) -> CopyStream:
    return OwnStream(device) if device.type == "cuda" else InOrder()
