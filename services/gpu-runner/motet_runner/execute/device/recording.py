"""Work of a device that is recorded once and computed again and again, over what then lies in the same tensors."""

from collections.abc import Callable
from typing import Protocol

import torch

WARM_UP_CALLS = 2
"""Before a capture: what is compiled or allocated at the first call must not be part of it."""


class Recording(Protocol):
    def replay(self) -> None:
        """Launch the work once more."""


class Recorder(Protocol):
    def record(self, compute: Callable[[], None]) -> Recording:
        """`compute` reads and writes tensors that stay where they are, and it may be called for that."""


class _Again:
    def __init__(self, compute: Callable[[], None]) -> None:
        self._compute = compute

    def replay(self) -> None:
        self._compute()


class CallAgain:
    """On a CPU: the same function over the same tensors"""

    @staticmethod
    def record(compute: Callable[[], None]) -> Recording:
        compute()
        return _Again(compute)


class CudaGraphs:
    """CUDA graphs. They run one after the other, so all of them share the memory for what is between."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], None]) -> Recording:
        model = torch.cuda.current_stream(self._device)
        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(model)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_CALLS):
                compute()
        model.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            compute()
        return graph


def recorder_for(device: torch.device) -> Recorder:
    return CudaGraphs(device) if device.type == "cuda" else CallAgain()
