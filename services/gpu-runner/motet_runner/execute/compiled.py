"""A loaded model in the compiled kernels: its linears packed and, for some families, its whole forward pass."""

import structlog
import torch

from motet_kernels.cpp import Library, PagedAttention
from motet_kernels.cpp.linear import PACKED_TYPES
from motet_runner.execute.fused import fused_forward
from motet_runner.execute.model import LoadedModel, probe_logits, tolerance_of
from motet_runner.execute.packed_linears import pack_linears

log = structlog.get_logger(__name__)


def use_compiled(loaded: LoadedModel, library: Library) -> None:
    """From now on this model computes with packed weights. It has a fused forward if that gives the same logits.

    No sequence may live: results change in their last digits.
    """
    if loaded.dtype not in PACKED_TYPES or loaded.device.type != "cpu":
        return
    with torch.inference_mode():
        expected = probe_logits(loaded)
        packed = pack_linears(loaded.model, loaded.linears, loaded.linear_groups, library)
        loaded.fused = fused_forward(loaded.model, packed, library)
        if loaded.fused is None:
            return
        ours = probe_logits(loaded, lambda pages: PagedAttention(library, pages))
        difference = float((ours - expected).abs().max())
        if not difference <= tolerance_of(expected):
            loaded.fused = None
            log.warning("fused_forward_differs", architecture=loaded.architecture, difference=difference)
