"""The cosines and sines of a model's positions, from its own module."""

import torch
from torch import nn

from motet_kernels.positions import FIRST_POSITIONS


def rotations(rotary: nn.Module, positions: int, half_head: int) -> torch.Tensor:
    """[positions, 2, half a head] cosines and sines in fp32"""
    device: torch.device = rotary.inv_freq.device  # type: ignore[assignment] # a tensor
    both = rotary(torch.zeros(1, dtype=torch.float32, device=device), torch.arange(positions, device=device)[None])
    return torch.stack([table[0, :, :half_head].float() for table in both], dim=1)


def rotation_bytes(longest: int, head_dim: int) -> int:
    """The most bytes of the table for sequences of up to `longest` tokens. Its size doubles, and meanwhile the previous
    table, with fewer than `longest` positions, still exists."""
    return (max(FIRST_POSITIONS, 2 * longest) + longest) * head_dim * torch.float32.itemsize
