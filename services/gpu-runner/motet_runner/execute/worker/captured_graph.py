"""Work of a device that is captured once and computed again and again, over what then lies in the same tensors."""

from collections.abc import Callable

import torch

from motet_runner.memory.out_of_memory import is_out_of_memory

WARM_UP_CALLS = 2
"""Before a capture: what is compiled or allocated at the first call must not be part of it."""


Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Gets work on tensors that stay where they are, and may call it. → launches the work once more. Raises NotCaptured."""


class NotCaptured(Exception):
    """This work cannot be captured, and can be launched as it is."""

    def __init__(self, error: Exception) -> None:
        # The error of the end of a capture hides the one that ended it.
        first: BaseException = error
        while first.__context__ is not None:
            first = first.__context__
        super().__init__(str(first).strip().partition("\n")[0])
        self.for_memory = isinstance(first, Exception) and is_out_of_memory(first)


def call_again(compute: Callable[[], None]) -> Callable[[], None]:
    """On a CPU: the same function over the same tensors"""
    compute()
    return compute


class CudaGraphs:
    """CUDA graphs. They run one after the other, so all of them share the memory for what is between."""

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
            # Only this thread: another one may ask for pinned memory meanwhile, for an adapter that it reads.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                compute()
        except (MemoryError, RuntimeError) as error:  # such as one of a model that asks the device for a value
            raise NotCaptured(error) from error
        return graph.replay


def capture_for(device: torch.device) -> Capture:
    return CudaGraphs(device) if device.type == "cuda" else call_again
