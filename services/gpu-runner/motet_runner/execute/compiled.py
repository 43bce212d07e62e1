"""A loaded model in the compiled kernels: its linears packed and, for some families, its whole forward pass."""

from collections.abc import Generator, Iterator
from dataclasses import replace

import structlog
import torch

from motet_kernels.cpp import Library, PagedAttention
from motet_kernels.cpp.linear import PACKED_TYPES
from motet_runner.execute.fused import fused_forward
from motet_runner.execute.model import Forward, LoadedModel, probes, tolerance_of
from motet_runner.execute.packed_linears import LinearPacking
from motet_runner.execute.recorded import RecordedModel
from motet_runner.memory.out_of_memory import is_out_of_memory

log = structlog.get_logger(__name__)


class CompiledModel:
    """Brings a model to the compiled kernels, a part at a time, so that others can compute between two parts.

    They compute with the model's modules, of which some have packed weights by then. No sequence may live across a
    part: results change in their last digits.
    """

    def __init__(self, loaded: LoadedModel, library: Library) -> None:
        self.fused: Forward | None = None
        """At the end: computes what the modules compute, if it gives the same logits"""
        self.shortage = ""
        """Why not all weights are packed, if memory does not suffice for that"""
        self._loaded = loaded
        self._library = library

    def parts(self) -> Iterator[None]:
        """To be run in inference mode."""
        loaded = self._loaded
        if loaded.dtype not in PACKED_TYPES or loaded.device.type != "cpu":
            return
        packing = LinearPacking(loaded.model, loaded.linears, loaded.linear_groups, self._library)
        try:
            expected = yield from _collected(probes(loaded))
            recorded = RecordedModel(loaded) if loaded.rope is None else None
            yield
            yield from packing.parts()
            fused = self._forward(packing, recorded)
            if fused is None:
                return
            trial = replace(loaded, fused=fused)
            ours = yield from _collected(probes(trial, lambda pages: PagedAttention(self._library, pages)))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            # What is packed serves, the other linears stay as they are.
            self.shortage = str(error).strip().partition("\n")[0] or "out of memory"
            log.warning("weights_not_packed", linears=packing.unpacked, of=packing.total, reason=self.shortage)
            return
        difference = float((ours - expected).abs().max())
        if difference <= tolerance_of(expected):
            self.fused = fused
        else:
            log.warning("fused_forward_differs", architecture=loaded.architecture, difference=difference)

    def _forward(self, packing: LinearPacking, recorded: RecordedModel | None) -> Forward | None:
        if recorded is None:  # rotations depend on the lengths of sequences
            return None
        of_family = fused_forward(self._loaded.model, packing.packed, self._library)
        return of_family or recorded.forward(packing.packed, self._library)


def _collected(rows: Iterator[torch.Tensor]) -> Generator[None, None, torch.Tensor]:
    found = []
    for some in rows:
        found.append(some)
        yield
    return torch.cat(found)


def use_compiled(loaded: LoadedModel, library: Library) -> None:
    """All parts at once."""
    compiled = CompiledModel(loaded, library)
    with torch.inference_mode():
        for _ in compiled.parts():
            pass
    loaded.fused = compiled.fused
