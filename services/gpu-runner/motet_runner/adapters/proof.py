"""Proofs of adapters: the order for one, and what an engine has found.

The runner's service numbers its orders (`policy/proof_orders`), and the engine answers each of them once
(`plan/adapter_proofs`): with a `Proof`, or with an error. AdapterUnproved says what is wrong with the results. Another
error says why the engine has given up.
"""

import hashlib
import math
from typing import NamedTuple

from motet.errors import AdapterUnproved
from motet_runner.adapters.recorded_answers import Comparison

FAINT = 10
"""An adapter that moves the logits by less than this multiple of what the rows beside it move them is warned about."""


def build_with(build: str, kernels: str) -> str:
    """A name of all that a proof depends on but the machine. `build`: without kernels; empty: there is none"""
    return hashlib.blake2b(f"{build}\n{kernels}".encode(), digest_size=16).hexdigest() if build else ""


class ProofOrder(NamedTuple):
    """The kernels that serve are to prove an adapter."""

    number: int
    serves_meanwhile: bool = False
    """True: it was proved before, by other kernels or another version, and no request waits for this proof."""
    linears: bool = True
    """Whether its linears and its effect are to be proved"""
    recorded: bool = False
    """Whether its recorded answers are to be compared with what the engine computes"""


class Proof(NamedTuple):
    """The adapter's results in the engine's memory are right, and it moves the logits: as far as that was ordered."""

    kernels: str
    """That have read the adapter"""
    moved: float
    """The largest change of a logit by the adapter"""
    composition: float
    """The largest change of a logit of the base model by other rows in its batch"""
    linears: bool = True
    """False: only the recorded answers were compared. vLLM shows no linears: there, True means that it moves logits."""
    recorded: Comparison | None = None
    """What the recorded answers have shown; None: they were not compared."""

    @property
    def warnings(self) -> list[str]:
        found = [self.warning, self.recorded.difference if self.recorded is not None else ""]
        return [warning for warning in found if warning]

    @property
    def warning(self) -> str:
        """Empty if the adapter moves enough"""
        if not self.linears or self.moved >= FAINT * self.composition:
            return ""
        return (
            f"the adapter hardly changes anything: it moves the logits by {self.moved:.1e} at most, and other requests "
            f"in the same batch move them by {self.composition:.1e}"
        )


def check_effect(moved: float, composition: float, kernels: str) -> None:
    """Raises AdapterUnproved for an adapter that moves nothing, or to what is no number. Whose fault the latter is:
    `composition` is computed without any adapter."""
    if not math.isfinite(composition):
        raise unproved(
            "the base model's logits are not numbers on this runner, without any adapter: its device, its kernels "
            f"or the base model's files are at fault, and not the adapter. The kernels are {kernels}. Please "
            "restart or replace the runner.",
            reason="ProofFailed",
        )
    if not math.isfinite(moved):
        raise unproved(
            "with the adapter, logits are not numbers, and without it they are: its weights are too large for the "
            "engine's data type. Use a pool with a wider engine.dtype, or train with a smaller learning rate.",
            reason="NotNumbers",
        )
    if not moved > 0:
        raise unproved(
            "the adapter moves no logit of a short text: its weights are so small that the engine's data type "
            "rounds them away. Train on, or use a pool with a wider engine.dtype.",
            reason="NoEffect",
        )


def unproved(why: str, reason: str) -> AdapterUnproved:
    return AdapterUnproved(why[0].upper() + why[1:], reason=reason)
