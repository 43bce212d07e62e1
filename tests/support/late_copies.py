"""A stream of copies that is late: what forgets to wait for it finds the numbers of before."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from motet_runner.memory.copy_stream import CopyStream
from motet_runner.memory.marks import Mark


@dataclass
class _Mark:
    passed: Callable[[], bool]
    wait: Callable[[], None]
    number: int

    @staticmethod
    def seconds_since(earlier: "_Mark") -> float:
        return 0.001


class LateCopies(CopyStream):
    """A stream whose copies end when the test says so, or when the model or the host has to wait for them"""

    def __init__(self) -> None:
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.launched = self.ended = 0
        self.model_waited = 0

    def follow_model(self, mark: object = None) -> None:
        """The CPU has computed what the model was told."""

    def copy(self, to: torch.Tensor, of: torch.Tensor) -> None:
        self.waiting.append((to, of))
        self.launched += 1

    def end(self, launched: int | None = None) -> None:
        """The first `launched` of all copies; None: all"""
        count = len(self.waiting) if launched is None else max(0, launched - self.ended)
        with torch.inference_mode():
            for to, of in self.waiting[:count]:
                to.copy_(of)
        self.ended += count
        del self.waiting[:count]

    def mark(self) -> Any:
        launched = self.launched
        return _Mark(lambda: self.ended >= launched, lambda: self.end(launched), launched)

    def model_mark(self) -> Mark:
        return Mark(0.0)

    def let_model_wait(self, mark: _Mark | None = None) -> None:
        self.model_waited += bool(self.waiting)
        self.end(None if mark is None else mark.number)
