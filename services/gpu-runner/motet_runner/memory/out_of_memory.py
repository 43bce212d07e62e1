"""Tells errors of memory from others."""

import torch


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch has a class for errors of device memory. If the driver itself has none left, or the host, only the words
    in the first line show it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    first_line = str(error).strip().partition("\n")[0]
    return any(words in first_line for words in ("allocat", "ALLOC_FAILED", "out of memory"))


def device_has_failed(error: Exception) -> bool:
    """Whether the device computes nothing more in this process: it was lost, or a kernel went wrong on it."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)
