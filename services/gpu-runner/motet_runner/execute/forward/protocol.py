"""The protocol of forward passes without modules."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from motet_kernels import LoraBackend
from motet_kernels.decoder_weights import DecoderWeights
from motet_runner.execute.batch.flat_batch import FlatBatch


class Forward(Protocol):
    """A model's forward pass in one compiled call, or in few operators"""

    def use_lora(self, backend: LoraBackend[Any]) -> None:
        """Sets the back end that adds LoRA to the linears. Before this call, no batch may have LoRA."""

    def __call__(self, batch: FlatBatch) -> torch.Tensor:
        """Logits [kept rows, vocabulary]"""


MakeForward = Callable[[DecoderWeights[Any], torch.nn.Module], Forward]
"""Gets a Llama-shaped model's weights and the module that computes its rotations."""
