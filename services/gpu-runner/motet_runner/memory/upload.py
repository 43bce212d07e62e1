"""Numbers on their way to a device."""

import numpy as np
import torch


def uploaded(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """On a CPU the array itself. On a GPU a copy, for which nobody waits: the array may be changed at once, and PyTorch
    gives the pinned memory out again only when the copy has ended."""
    tensor = torch.from_numpy(numbers)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
