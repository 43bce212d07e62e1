"""A loaded model in the kernels that serve: its linears packed and, for some families, its whole forward pass."""

from collections.abc import Iterator
from functools import partial

import structlog
import torch

from motet_runner.execute.forward import Forward, MakeForward
from motet_runner.execute.fused import CompiledForward, TorchForward, fused_forward, of_a_fused_family
from motet_runner.execute.gate import Gate, linear_fault
from motet_runner.execute.kernels import Kernels
from motet_runner.execute.model import LoadedModel
from motet_runner.execute.packed_linears import LinearPacking, Packed
from motet_runner.execute.recorded import RecordedModel
from motet_runner.memory.out_of_memory import is_out_of_memory

log = structlog.get_logger(__name__)


class PackedModel:
    """Brings a model to the kernels, a part at a time, so that others can compute between two parts.

    They compute with the model's modules, of which some have packed weights by then. No sequence may live across a
    part: results change in their last digits.
    """

    def __init__(self, loaded: LoadedModel, kernels: Kernels, gate: Gate) -> None:
        self.fused: Forward | None = None
        """At the end: computes what the modules compute, if it passes the gate"""
        self.fault = ""
        """Why these kernels cannot serve this model. Nothing is packed then."""
        self.note = ""
        """What does not serve, or is not packed, and why"""
        self._loaded = loaded
        self._kernels = kernels
        self._gate = gate

    def parts(self) -> Iterator[None]:
        """To be run in inference mode."""
        loaded, kernels = self._loaded, self._kernels
        if kernels.packing is None or loaded.dtype not in kernels.packing.dtypes:
            return
        groups, may_be_fused = loaded.linear_groups, loaded.rope is None and of_a_fused_family(loaded.model)
        if kernels.packing.only_fused and not may_be_fused:
            return
        if not may_be_fused and not kernels.packing.takes_groups_apart:
            groups = [(path,) for group in groups for path in group]
        packing = LinearPacking(loaded.model, loaded.linears, groups, kernels.packing, linear_fault)
        try:
            self._gate.prepare(kernels)
            yield
            if kernels.library is not None:  # a GPU's were tested before they were chosen
                self.fault = yield from self._gate.fault_of(kernels)
                if self.fault:
                    return
            recorded = None
            if kernels.library is not None and loaded.rope is None:
                recorded = RecordedModel(loaded)
                yield
            yield from packing.parts()
            if packing.fault:
                self.note = f"some weights are not packed: {packing.fault}"
                log.warning("weights_differ", linears=packing.unpacked, of=packing.total, reason=packing.fault)
            fused = self._forward(packing.packed, recorded) if loaded.rope is None else None
            if fused is None:  # of no such family; or its rotations depend on the lengths of sequences
                return
            fault = yield from self._gate.fault_of_forward(kernels, fused)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            # What is packed serves, the other linears stay as they are.
            shortage = str(error).strip().partition("\n")[0] or "out of memory"
            self.note = f"some weights are not packed: {shortage}"
            log.warning("weights_not_packed", linears=packing.unpacked, of=packing.total, reason=shortage)
            return
        if fault:
            self.note = f"the model's modules serve, and not the forward pass of these kernels: {fault}"
            log.warning("fused_forward_differs", architecture=loaded.architecture, reason=fault)
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
