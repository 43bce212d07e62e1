"""The way between the host and a device: numbers that go there, numbers that come back, and marks in the device's work.

Neither direction waits for the device. What comes back may be read once a later mark has passed.
"""

from typing import Any, Protocol

import numpy as np
import torch

from motet.clock import Clock
from motet_runner.memory.upload import uploaded


class Mark(Protocol):
    """A place in the order of the device's work"""

    def passed(self) -> bool:
        """Whether all work before it is done"""

    def wait(self) -> None:
        """Until it is"""

    def seconds_since(self, earlier: Any) -> float:
        """Between two marks that have passed"""


class Link(Protocol):
    device: torch.device

    def upload(self, numbers: np.ndarray) -> torch.Tensor:
        """A copy of them on the device. The array may be changed at once."""

    def download(self, numbers: torch.Tensor) -> torch.Tensor:
        """A copy of them on the host, which may be read once a later mark has passed."""

    def mark(self) -> Mark: ...


class _Passed:
    def __init__(self, at: float) -> None:
        self._at = at

    @staticmethod
    def passed() -> bool:
        return True

    @staticmethod
    def wait() -> None:
        """Nothing is under way."""

    def seconds_since(self, earlier: "_Passed") -> float:
        return self._at - earlier._at


class SameMemory:
    """A CPU in the place of a device: all work is done when it is launched."""

    device = torch.device("cpu")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    @staticmethod
    def upload(numbers: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(numbers.copy())

    @staticmethod
    def download(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.clone()

    def mark(self) -> Mark:
        return _Passed(self._clock())


class _Event:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def passed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: "_Event") -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1000


class PinnedMemory:
    """Through pinned memory, in the order of the device's current stream. PyTorch gives pinned memory out again only
    when the copies that were made with it have ended."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def upload(self, numbers: np.ndarray) -> torch.Tensor:
        return uploaded(numbers, self.device)

    @staticmethod
    def download(numbers: torch.Tensor) -> torch.Tensor:
        there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        return there.copy_(numbers, non_blocking=True)

    def mark(self) -> Mark:
        return _Event(torch.cuda.current_stream(self.device))


def link_to(device: torch.device, clock: Clock) -> Link:
    """`clock`: for marks of a CPU. A GPU has its own."""
    return PinnedMemory(device) if device.type == "cuda" else SameMemory(clock)
