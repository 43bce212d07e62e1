"""Copies between the host and a device in both directions, and marks in the device's work.

Neither direction waits for the device. Downloads may be read once a later mark has passed.
"""

import numpy as np
import torch

from motet.clock import Clock
from motet_runner.memory.marks import GpuMark, Mark
from motet_runner.memory.upload import uploaded


class Link:
    """For a CPU as the device, where each call ends only when its work is done."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        """`clock`: for marks of a CPU. A GPU's marks use its own clock."""
        self.device = device
        self._clock = clock

    def upload(self, numbers: np.ndarray) -> torch.Tensor:
        """A copy of the numbers on the device. The array may be changed at once."""
        return torch.from_numpy(numbers.copy())

    def download(self, numbers: torch.Tensor) -> torch.Tensor:
        """A copy of the numbers on the host, which may be read once a later mark has passed."""
        return numbers.clone()

    def mark(self) -> Mark:
        return Mark(self._clock())


class PinnedMemory(Link):
    """Copies through pinned memory, in the order of the device's current stream. PyTorch reuses pinned memory only
    after the copies that use this memory have ended."""

    def upload(self, numbers: np.ndarray) -> torch.Tensor:
        return uploaded(numbers, self.device)

    def download(self, numbers: torch.Tensor) -> torch.Tensor:
        there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        return there.copy_(numbers, non_blocking=True)

    def mark(self) -> Mark:
        return GpuMark(torch.cuda.current_stream(self.device))


def link_to(device: torch.device, clock: Clock) -> Link:
    return (PinnedMemory if device.type == "cuda" else Link)(device, clock)
