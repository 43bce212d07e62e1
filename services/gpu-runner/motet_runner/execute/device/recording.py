"""Work of a device that is recorded once and computed again and again, over what then lies in the same tensors."""

from collections.abc import Callable
from typing import Protocol

import torch

from motet_runner.memory.out_of_memory import is_out_of_memory

WARM_UP_CALLS = 2
"""Before a capture: what is compiled or allocated at the first call must not be part of it."""


class Recording(Protocol):
    def replay(self) -> None:
        """Launch the work once more."""


class NotRecorded(Exception):
    """This work cannot be recorded, and can be launched as it is."""

    def __init__(self, error: Exception) -> None:
        # The error of the end of a capture hides the one that ended it.
        first: BaseException = error
        while first.__context__ is not None:
            first = first.__context__
        super().__init__(str(first).strip().partition("\n")[0])
        self.for_memory = isinstance(first, Exception) and is_out_of_memory(first)


class Recorder(Protocol):
    def record(self, compute: Callable[[], None]) -> Recording:
        """`compute` reads and writes tensors that stay where they are, and it may be called for that. Raises
        NotRecorded."""


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
        try:
            # Only this thread: another one may ask for pinned memory meanwhile, for an adapter that it reads.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                compute()
        except (MemoryError, RuntimeError) as error:  # such as one of a model that asks the device for a value
            raise NotRecorded(error) from error
        return graph


def recorder_for(device: torch.device) -> Recorder:
    return CudaGraphs(device) if device.type == "cuda" else CallAgain()
