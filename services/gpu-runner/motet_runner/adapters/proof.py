"""Proofs of adapters: the order for one, and what an engine has found.

The runner's service numbers its orders (`policy/proof_orders`), and the engine answers each of them once
(`plan/adapter_proofs`): with a `Proof`, or with an error. AdapterUnproved says what is wrong with the results. Another
error says why the engine has given up.
"""

from typing import NamedTuple

FAINT = 10
"""An adapter that moves the logits by less than this multiple of what the rows beside it move them is warned about."""


class ProofOrder(NamedTuple):
    """The kernels that serve are to prove an adapter."""

    number: int
    serves_meanwhile: bool = False
    """True: it was proved before, by other kernels or another version, and no request waits for this proof."""


class Proof(NamedTuple):
    """The adapter's results in the engine's memory are right, and it moves the logits."""

    kernels: str
    """That have read the adapter"""
    moved: float
    """The largest change of a logit by the adapter"""
    composition: float
    """The largest change of a logit of the base model by other rows in its batch"""

    @property
    def warning(self) -> str:
        """Empty if the adapter moves enough"""
        if self.moved >= FAINT * self.composition:
            return ""
        return (
            f"the adapter hardly changes anything: it moves the logits by {self.moved:.1e} at most, and other requests "
            f"in the same batch move them by {self.composition:.1e}"
        )
