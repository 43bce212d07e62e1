"""Torch's back ends: `torch_back_end` serves at first and where no other serves; EXACT serves in exact mode."""

from motet_kernels import ExactBackend, TorchBackend
from motet_runner.execute.adapters.add_lora import AddLora
from motet_runner.execute.forward.fused import TorchForward
from motet_runner.execute.kernels.roles import BackEnd
from motet_runner.execute.pack.linear_packing import TorchPacking
from motet_runner.memory.paged import READ_BYTES


def torch_back_end(*, packed: bool) -> BackEnd:
    """`packed`: True to pack weights, and to give some families a forward pass of few operators."""
    return BackEnd(
        "torch",
        AddLora(
            lambda groups, memory, dtype, copy_bytes: TorchBackend(groups, memory, dtype, copy_bytes=copy_bytes),
            TorchBackend.tile,
            TorchBackend.copies,
        ),
        lambda _: None,
        TorchPacking() if packed else None,
        TorchForward if packed else None,
        has_threads=True,
        room_bytes=lambda work: max(READ_BYTES["cuda"], work.layer_bytes),  # gathered pages
    )


EXACT = BackEnd(
    "exact",
    AddLora(
        lambda groups, memory, dtype, _: ExactBackend(groups, memory, dtype), ExactBackend.tile, ExactBackend.copies
    ),
    lambda _: None,  # tiles have their own attention
)
