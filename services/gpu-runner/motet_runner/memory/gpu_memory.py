"""How much of a GPU's memory a runner may take.

Each runner takes at most its share of the GPU's whole memory, so that several runners fit on one GPU. Pure, except
`GpuMemory.of`, which reads the device.
"""

from dataclasses import dataclass
from typing import Self

import torch

from motet.errors import SetupError

GIB = 1 << 30

CONTEXT_BYTES = 768 << 20
"""The memory that a process takes besides its tensors, for the driver and its libraries. It is a constant: on a shared
GPU, the memory of one process cannot be measured."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    total: int
    free: int
    held: int
    """How many bytes this process holds in tensors"""

    @classmethod
    def of(cls, device: torch.device) -> Self:
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_allocated(device))

    def left(self, percent: int) -> int:
        """How many more bytes this process may take, if its total is limited to `percent` of the GPU."""
        return min(self.total * percent // 100 - CONTEXT_BYTES - self.held, self.free)

    def check_weights(self, needed: int, percent: int, dtype: str) -> None:
        """Raises SetupError if weights of `needed` bytes do not fit, before they are read."""
        left = self.left(percent)
        if needed <= left:
            return
        share = self.total * percent // 100
        if needed + CONTEXT_BYTES + self.held <= share:
            raise SetupError(
                f"The model's weights take {needed / GIB:.1f} GiB in {dtype}, and of the GPU's {self.total / GIB:.1f} "
                f"GiB only {self.free / GIB:.1f} GiB are free: other processes hold the rest. End those, or lower "
                "engine.memoryUtilizationPercent of the other runners on this GPU."
            )
        fits = max(0, left) / GIB
        smallest = (needed + CONTEXT_BYTES) * 100 / percent / GIB
        raise SetupError(
            f"The model's weights take {needed / GIB:.1f} GiB in {dtype}, and of the GPU's {self.total / GIB:.1f} GiB "
            f"the runner may take {fits:.1f} GiB for them (engine.memoryUtilizationPercent: {percent}). This model "
            f"needs a GPU of more than {smallest:.1f} GiB. What fits here: weights of less than {fits:.1f} GiB, as of "
            "a model with fewer parameters or in a narrower engine.dtype."
        )
