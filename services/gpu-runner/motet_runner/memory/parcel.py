"""Numbers that are copied together: a copy to or from a device takes as long as a kernel, even for a few numbers."""

from collections.abc import Sequence

import numpy as np
import torch

from motet_runner.memory.link import Link

_TYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.float64): torch.float64}


class Parcel(dict[str, np.ndarray]):
    """Arrays of 64-bit numbers by name, for one copy to the device"""

    def send(self, link: Link) -> dict[str, torch.Tensor]:
        """The arrays on the device"""
        if not self:
            return {}
        together = link.upload(np.concatenate([array.reshape(-1).view(np.int64) for array in self.values()]))
        parts = together.split([array.size for array in self.values()])
        return {
            name: part.view(_TYPES[array.dtype]).view(array.shape)
            for part, (name, array) in zip(parts, self.items(), strict=True)
        }


class Returning:
    """Tensors of any type, in one copy from the device"""

    def __init__(self, link: Link, tensors: Sequence[torch.Tensor]) -> None:
        self._like = [(tensor.dtype, tensor.shape, tensor.numel() * tensor.itemsize) for tensor in tensors]
        together = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
        self._bytes = link.download(together)

    def read(self) -> list[torch.Tensor]:
        """The tensors on the host. Call this only when a mark after the copy has passed."""
        parts = self._bytes.split([size for _, _, size in self._like])
        # A part may begin at any byte; a view of another type must be aligned.
        return [part.clone().view(dtype).view(shape) for part, (dtype, shape, _) in zip(parts, self._like, strict=True)]
