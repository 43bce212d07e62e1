"""Marks in the order of a device's work (events), which tell when the work before them is done."""

from typing import Any

import torch


class Mark:
    """For a CPU, where each call ends only when its work is done"""

    def __init__(self, at: float) -> None:
        self.at = at

    def passed(self) -> bool:
        """True if all work before the mark is done"""
        return True

    def wait(self) -> None:
        """Waits until all work before the mark is done"""

    def seconds_since(self, earlier: Any) -> float:
        """The time between two marks that have passed"""
        return float(self.at - earlier.at)


class GpuMark(Mark):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    def passed(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: "GpuMark") -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1000
