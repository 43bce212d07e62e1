"""The memory that keeps adapters for their next load; what lies where, `plan/host_adapters.py` says.

It is one piece, made at the start, so that no load waits for an allocation. Without it, all loads read the disk.
"""

import weakref
from contextlib import suppress

import numpy as np
import structlog
import torch

from motet_runner.memory.host_limit import available_host_bytes
from motet_runner.memory.out_of_memory import is_out_of_memory

log = structlog.get_logger(__name__)


def adapter_memory(size: int, *, pinned: bool) -> torch.Tensor | None:
    """[bytes]. `pinned`: for a GPU, to which pages that cannot move are copied faster, and beside its work. None: there
    is no such memory."""
    if not size:
        return None
    try:
        # The kernel would end the process instead of refusing some of it.
        if size > (available := available_host_bytes()):
            raise MemoryError(f"{available >> 20} MiB are available")
        # The operating system gives it page by page, at the first write: adapters that never come take none.
        memory = np.zeros(size, dtype=np.uint8)
        if pinned:
            _pin(memory)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) and not isinstance(error, torch.cuda.CudaError):
            raise
        result = "adapters that have left the device load from the disk"
        log.warning("no_memory_for_adapters", mib=size >> 20, reason=str(error), result=result)
        return None
    return torch.from_numpy(memory)


def _pin(memory: np.ndarray) -> None:
    """PyTorch's own pinned memory has a power of two of bytes, which may be nearly twice as many."""
    cuda = torch.cuda.cudart()
    if failed := int(cuda.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)):
        with suppress(RuntimeError):  # CUDA tells the error once more, after the launch of a kernel
            torch.ones(1, dtype=torch.uint8, device="cuda")
    torch.cuda.check_error(failed)
    weakref.finalize(memory, cuda.cudaHostUnregister, memory.ctypes.data)
