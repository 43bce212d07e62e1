"""A loaded model in the kernels that serve: its linears packed and, for some families, its whole forward pass."""

from collections.abc import Iterator
from functools import partial

import structlog
import torch

from motet_runner.execute.forward import Forward, MakeForward
from motet_runner.execute.fused import CompiledForward, TorchForward, fused_forward, of_a_fused_family
from motet_runner.execute.gate import Gate, linear_fault, not_judged, reason_of
from motet_runner.execute.kernels import Kernels
from motet_runner.execute.model import LoadedModel
from motet_runner.execute.packed_linears import LinearPacking, Packed
from motet_runner.execute.recorded import RecordedModel
from motet_runner.memory.out_of_memory import device_has_failed

log = structlog.get_logger(__name__)


class PackedModel:
    """Brings a model to the kernels, a part at a time, so that others can compute between two parts.

    They compute with the model's modules, of which some have packed weights by then. No sequence may live across a
    part: results change in their last digits.
    """

    def __init__(self, loaded: LoadedModel, kernels: Kernels, gate: Gate) -> None:
        self.fused: Forward | None = None
        """At the end: computes what the modules compute, if it passes the gate"""
        self.note = ""
        """What does not serve, or is not packed, and why"""
        self._loaded = loaded
        self._kernels = kernels
        self._gate = gate

    def parts(self) -> Iterator[None]:
        """To be run in inference mode."""
        loaded, kernels, how = self._loaded, self._kernels, self._kernels.packing
        if how is None or loaded.dtype not in how.dtypes:
            return
        groups, of_family = loaded.linear_groups, loaded.rope is None and of_a_fused_family(loaded.model)
        if how.only_fused and not of_family:
            return
        if not of_family and not how.takes_groups_apart:
            groups = [(path,) for group in groups for path in group]
        recorded = None
        if loaded.rope is None:  # otherwise rotations depend on the lengths of sequences
            yield from self._gate.prepare(kernels)
            if kernels.library is not None:
                recorded = RecordedModel(loaded)
                yield
        packing = LinearPacking(loaded.model, loaded.linears, groups, how, linear_fault)
        yield from self._pack(packing)
        if loaded.rope is None:
            yield from self._fuse(packing.packed, recorded)

    def _pack(self, packing: LinearPacking) -> Iterator[None]:
        """As much as fits. The other linears stay as they are."""
        try:
            yield from packing.parts()
        except Exception as error:
            if device_has_failed(error):
                raise
            packing.fault = reason_of(error)
        if packing.fault:
            self.note = f"some weights are not packed: {packing.fault}"
            log.warning("weights_not_packed", linears=packing.unpacked, of=packing.total, reason=packing.fault)

    def _fuse(self, packed: dict[str, Packed], recorded: RecordedModel | None) -> Iterator[None]:
        """If that is of a known family, or was recorded"""
        try:
            fused = self._forward(packed, recorded)
            fault = "" if fused is None else (yield from self._gate.fault_of_forward(self._kernels, fused))
        except Exception as error:
            fault = not_judged(error)
        if fault:
            self.note = f"the model's modules serve, and not the forward pass of these kernels: {fault}"
            log.warning("fused_forward_differs", architecture=self._loaded.architecture, reason=fault)
        else:
            self.fused = fused

    def _forward(self, packed: dict[str, Packed], recorded: RecordedModel | None) -> Forward | None:
        library = self._kernels.library
        of_family = fused_forward(self._loaded.model, packed, _maker(self._kernels))
        if of_family is not None or recorded is None or library is None:
            return of_family
        return recorded.forward(packed, library)


def _maker(kernels: Kernels) -> MakeForward:
    if kernels.makes_forward is not None:
        return kernels.makes_forward
    return TorchForward if kernels.library is None else partial(CompiledForward, kernels.library)


def pack(loaded: LoadedModel, kernels: Kernels) -> None:
    """All parts at once."""
    packed = PackedModel(loaded, kernels, Gate(loaded))
    with torch.inference_mode():
        for _ in packed.parts():
            pass
    loaded.fused = packed.fused
