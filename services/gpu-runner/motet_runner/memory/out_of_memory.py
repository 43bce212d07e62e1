"""Tells errors of memory from others."""

import torch


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch has a class for errors of device memory. For host memory, only the word in the first line shows it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocat" in str(error).strip().partition("\n")[0]
