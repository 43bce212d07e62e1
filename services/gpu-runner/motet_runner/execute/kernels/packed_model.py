"""A loaded model in the kernels that serve: its linears packed and, for most families, its whole forward pass."""

from collections.abc import Collection, Iterator

import structlog

from motet_runner.execute.forward.fused import fused_forward, of_a_fused_family
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.program import SWITCHED_ON, RecordedModel
from motet_runner.execute.forward.protocol import Forward
from motet_runner.execute.gate.allowed_error import linear_fault
from motet_runner.execute.gate.gate import Gate, not_judged, reason_of
from motet_runner.execute.kernels.roles import Kernels
from motet_runner.execute.pack.linear_packing import LinearPacking, Packed
from motet_runner.memory.out_of_memory import device_has_failed

log = structlog.get_logger(__name__)


class PackedModel:
    """Converts a model for the kernels, a part at a time, so that the engine can compute between two parts.

    Until the last part, the model's modules compute, some of them with packed weights. No sequence may live during a
    part, because results change in their last digits.
    """

    def __init__(
        self, loaded: LoadedModel, kernels: Kernels, gate: Gate, switched_on: Collection[str] = SWITCHED_ON
    ) -> None:
        """`switched_on`: optimizations of a recorded forward pass"""
        self.fused: Forward | None = None
        """Set at the end: the fused forward pass, if it passes the gate"""
        self.note = ""
        """Which parts do not serve, or are not packed, and why"""
        self._loaded = loaded
        self._kernels = kernels
        self._gate = gate
        self._switched_on = switched_on

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
        if loaded.rope is None:  # otherwise rotations depend on sequences' lengths
            yield from self._gate.prepare(kernels)
            if kernels.library is not None:
                recorded = RecordedModel(loaded)
                yield
        packing = LinearPacking(loaded.model, loaded.linears, groups, how, linear_fault)
        yield from self._pack(packing)
        if loaded.rope is None:
            yield from self._fuse(packing.packed, recorded)

    def _pack(self, packing: LinearPacking) -> Iterator[None]:
        """Packs as many linears as fit into memory. The rest stay unpacked."""
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
        """Makes the fused forward pass, if it was recorded or the family is known."""
        try:
            fused = self._forward(packed, recorded)
            fault = "" if fused is None else (yield from self._gate.fault_of_forward(self._kernels, fused))
        except Exception as error:
            fault = not_judged(error)
        if fault:
            log.warning("fused_forward_differs", architecture=self._loaded.architecture, reason=fault)
        else:
            self.fused = fused
            # If linears are unpacked, there is a note already, and it says why there is no fused forward pass.
            if fused is None and recorded is not None and not self.note:
                fault = recorded.fault  # already in the log
        if fault:
            self.note = f"the model's modules serve, and not the forward pass of these kernels: {fault}"

    def _forward(self, packed: dict[str, Packed], recorded: RecordedModel | None) -> Forward | None:
        library = self._kernels.library
        if recorded is not None and library is not None:
            return recorded.forward(packed, library, self._switched_on)
        make = self._kernels.makes_forward
        return None if make is None else fused_forward(self._loaded.model, packed, make)
