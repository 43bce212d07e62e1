"""Finds out whether an error means that memory did not suffice, or that the device has failed."""

import torch


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch has a class for errors of device memory. If the driver or the host has no memory left, only words in the
    error's first line say so."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    first_line = str(error).strip().partition("\n")[0]
    return any(words in first_line for words in ("allocat", "ALLOC_FAILED", "out of memory"))


def device_has_failed(error: Exception) -> bool:
    """True if the device computes nothing more in this process: the device was lost, or a kernel crashed."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)
