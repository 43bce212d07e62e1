"""The change from torch's kernels to the compiled kernels, in parts so short that a request may come at any time. If no
kernels were compiled, torch's kernels get packed weights in the same way.

The engine calls `advance` while no sequence lives, and each call does one part. While weights are being packed, torch's
kernels compute, with the weights that are packed so far. Then the new kernels compute, and the last parts measure their
best settings. When a part fails, the change ends, and the engine keeps its present kernels.
"""

import time
from collections.abc import Callable, Collection, Iterator

import structlog
import torch

from motet_runner.execute.adapters.lora_linears import LoraLinears
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.protocol import Forward
from motet_runner.execute.gate.gate import Gate
from motet_runner.execute.kernels.kernel_choice import KernelChoice
from motet_runner.execute.kernels.packed_model import PackedModel
from motet_runner.execute.kernels.roles import Kernels

log = structlog.get_logger(__name__)

BUILD_CHECK_SECONDS = 0.25

Switch = Callable[[Kernels, Forward | None], None]
"""Uses these kernels and this forward from now on."""

Tune = Callable[[Kernels], Iterator[None]]
"""Measures, in parts, these kernels' best settings, and uses them from then on."""

Told = Callable[[Kernels, str], None]
"""Is told that these kernels serve now, with a note: what does not serve, or is not packed, and why."""


class KernelChange:
    def __init__(
        self,
        choice: KernelChoice,
        loaded: LoadedModel,
        gate: Gate,
        linears: LoraLinears,
        *,
        switch: Switch,
        tune: Tune,
        switched_on: Collection[str],
    ) -> None:
        """`switched_on`: see PackedModel"""
        self._choice = choice
        self._loaded = loaded
        self._gate: Gate | None = gate
        """None once nothing is left to judge: the gate holds logits, which take memory"""
        self._linears = linears
        self._switch = switch
        self._tune = tune
        self._switched_on = switched_on
        self._parts: Iterator[None] | None = None

    def begin(self, kernels: Kernels) -> None:
        """Use these kernels first."""
        assert self._gate is not None
        with torch.inference_mode():
            for _ in self._bring(kernels, self._choice.began):
                pass
            if self._choice.waiting:  # now, while no request waits
                for _ in self._gate.prepare(kernels):
                    pass
        self._forget_gate()

    def advance(self) -> float | None:
        """Do the next part, if there is one. Call this while no sequence lives.

        → the seconds after which a next part may exist; None: nothing is left to do.
        """
        if self._parts is None:
            following = self._choice.built()
            if following is None:
                return BUILD_CHECK_SECONDS if self._choice.waiting else None
            self._parts = self._change(following)
        try:
            with torch.inference_mode():
                next(self._parts)
        except StopIteration:
            self._parts = None
            return None
        except Exception as error:  # the present kernels are complete
            self._parts = None
            self._choice.not_changed(error)
            self._forget_gate()
            return None
        finally:
            self._linears.follow()  # also linears that were packed just now
        return 0.0

    def _change(self, kernels: Kernels) -> Iterator[None]:
        began = time.monotonic()
        yield from self._bring(kernels, lambda *now: self._choice.changed(*now, seconds=time.monotonic() - began))
        self._forget_gate()

    def _bring(self, kernels: Kernels, told: Told) -> Iterator[None]:
        """Pack the model for these kernels, use them, and measure. Kernels that fail the gate are replaced."""
        assert self._gate is not None
        # A GPU's kernels were tested before they were chosen; torch's kernels are the reference.
        if kernels.compiled and (fault := (yield from self._gate.fault_of(kernels))):
            kernels = self._choice.refused(fault)
        packed = PackedModel(self._loaded, kernels, self._gate, self._switched_on)
        yield from packed.parts()
        self._switch(kernels, packed.fused)
        told(kernels, packed.note)
        yield
        try:
            yield from self._tune(kernels)
        except Exception:  # the kernels serve, tuned or not
            log.exception("kernels_not_tuned", serving=kernels.name)

    def _forget_gate(self) -> None:
        if not self._choice.waiting:
            self._gate = None
