"""Work of a device that is captured once and replayed, on the current contents of the same tensors."""

from collections.abc import Callable

import torch

from motet_runner.memory.out_of_memory import is_out_of_memory

WARM_UP_CALLS = 2
"""Calls before a capture: first-call compilations and allocations must not be captured."""


Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Gets a function that works on tensors with fixed addresses, and may call this function. Returns a function that
launches the same work again. Raises NotCaptured."""


class NotCaptured(Exception):
    """This work cannot be captured, but can be launched normally."""

    def __init__(self, error: Exception) -> None:
        # The error at the end of a capture hides the first error, which ended the capture.
        first: BaseException = error
        while first.__context__ is not None:
            first = first.__context__
        super().__init__(str(first).strip().partition("\n")[0])
        self.for_memory = isinstance(first, Exception) and is_out_of_memory(first)


def call_again(compute: Callable[[], None]) -> Callable[[], None]:
    """For a CPU: replays by calling the same function"""
    compute()
    return compute


class CudaGraphs:
    """CUDA graphs. They run one after the other, so all of them share the memory for intermediate results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        model = torch.cuda.current_stream(self._device)
        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(model)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_CALLS):
                compute()
        model.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: another thread may allocate pinned memory meanwhile, to read an adapter.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                compute()
        except (MemoryError, RuntimeError) as error:  # such as from a model that asks the device for a value
            raise NotCaptured(error) from error
        return graph.replay


def capture_for(device: torch.device) -> Capture:
    return CudaGraphs(device) if device.type == "cuda" else call_again
