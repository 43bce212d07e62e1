"""The roles of back ends: to add adapters, to attend, to multiply, to compute a whole forward pass. Each role is filled
separately, so a back end may have only some roles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from motet_kernels import LinearGroup
from motet_kernels.cpp import Library
from motet_runner.execute.adapters.add_lora import AddLora
from motet_runner.execute.forward.protocol import MakeForward
from motet_runner.execute.forward.trial import MakeAttention
from motet_runner.execute.pack.linear_packing import Packing


@dataclass(frozen=True)
class LargestWork:
    """The largest work that a back end may get"""

    rows: int
    """The rows of an iteration"""
    decodes: int
    """The decodes among these rows"""
    max_rank: int
    groups: Sequence[LinearGroup]
    heads: int
    head_dim: int
    layer_bytes: int
    """The bytes of the longest sequence's keys and values in one layer"""


@dataclass(frozen=True)
class BackEnd:
    """A role is None if the back end does not have it."""

    name: str
    add_lora: AddLora | None = None
    attention: MakeAttention | None = None
    packing: Packing | None = None
    """How the back end packs weights"""
    makes_forward: MakeForward | None = None
    """Makes the fused forward of a Llama-shaped model"""
    library: Library | None = None
    """The compiled library, which runs recorded programs. The gate judges it before it serves."""
    has_threads: bool = False
    """True if its number of threads can be chosen"""
    room_bytes: Callable[[LargestWork], int] = lambda _: 0
    """The bytes that the back end keeps on a GPU beside weights, pages and copies of adapters"""


@dataclass(frozen=True)
class Kernels:
    """The back ends that serve, by role"""

    back_ends: Sequence[BackEnd]
    """The back ends that have a role here, the best first"""
    add_lora: AddLora
    attention: MakeAttention
    packing: Packing | None
    """None: the model stays as it was loaded."""
    makes_forward: MakeForward | None
    library: Library | None
    """None: no program is recorded."""

    @property
    def name(self) -> str:
        """The name in the log"""
        return " + ".join(one.name for one in self.back_ends)

    @property
    def compiled(self) -> bool:
        """True if a back end was compiled on this machine, for its CPU"""
        return any(one.library is not None for one in self.back_ends)

    @property
    def has_threads(self) -> bool:
        return all(one.has_threads for one in self.back_ends)

    def room_bytes(self, work: LargestWork) -> int:
        return sum(one.room_bytes(work) for one in self.back_ends)


def by_role(*back_ends: BackEnd) -> Kernels:
    """Fills each role with the first back end that has it. Together, the back ends have at least add_lora and
    attention. A forward pass serves only if attention and add_lora are of the same back end. A packing that is
    `only_fused` serves only together with its own back end's forward pass."""
    add_lora = next(one for one in back_ends if one.add_lora is not None)
    attention = next(one for one in back_ends if one.attention is not None)
    packing = next((one for one in back_ends if one.packing is not None), None)
    forward = next((one for one in back_ends if one.makes_forward is not None or one.library is not None), None)
    if forward is not add_lora or forward is not attention:
        forward = None
    if packing is not forward and packing is not None and packing.packing is not None and packing.packing.only_fused:
        packing = None
    assert add_lora.add_lora is not None
    assert attention.attention is not None
    in_a_role = (add_lora, attention, packing, forward)
    return Kernels(
        back_ends=[one for one in back_ends if any(one is other for other in in_a_role)],
        add_lora=add_lora.add_lora,
        attention=attention.attention,
        packing=None if packing is None else packing.packing,
        makes_forward=None if forward is None else forward.makes_forward,
        library=None if forward is None else forward.library,
    )
