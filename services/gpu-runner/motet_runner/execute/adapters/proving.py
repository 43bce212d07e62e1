"""What a worker needs to know of proofs (`execute/proof`)."""

from typing import Protocol

from motet_kernels import PlacedAdapter, RunLayout
from motet_runner.adapters.host_load import BaseLinearOf
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.proof import Proof, ProofOrder


class ProofUnderWay(Protocol):
    parts: int
    """How many parts are done"""

    def give_up(self) -> None: ...

    def advance(self, placed: PlacedAdapter, *, wait_seconds: float) -> bool:
        """Do the next part. `wait_seconds`: no sequence would have to wait, so go on for about as long; 0 if one would.
        → True if all is launched: `result` reads it once the device has computed it."""

    def result(self) -> Proof:
        """Raises AdapterUnproved."""


class Proves(Protocol):
    def begin(
        self, order: ProofOrder, layout: AdapterLayout, run_layout: RunLayout, base: BaseLinearOf | None
    ) -> ProofUnderWay:
        """Raises AdapterIncompatible."""
