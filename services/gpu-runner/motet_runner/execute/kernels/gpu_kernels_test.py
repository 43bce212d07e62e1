"""The test of a GPU's kernels on the model that they are to serve: attention and add_lora compute what torch computes.
Compilers and drivers differ from machine to machine; the results must not.

A model's fused forward is tested when it is made (see `packed_model`).
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from motet.errors import SetupError
from motet_kernels import LinearGroup, PlacedAdapter, Segment, TorchBackend
from motet_kernels.reference import add_lora
from motet_kernels.run_layout import SCALE_ROWS
from motet_runner.execute.adapters.lora_linears import LoraLinears
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.gate.allowed_error import allowed, rms
from motet_runner.execute.gate.gate import Gate
from motet_runner.execute.kernels.roles import Kernels
from motet_runner.memory.out_of_memory import device_has_failed

RANKS = (8, 24, 64, 128, 144)
"""The ranks of the test's adapters: one for each size of tile, and one that needs several tiles. Every other adapter
scales the linears' own results."""

_SCALE = 2.0


@runtime_checkable
class TakesGroups(Protocol):
    """A back end that adds to all linears of a group at once, for a fused forward"""

    def add_lora_together(self, y: torch.Tensor, x: torch.Tensor, linears: Sequence[str], batch: Any) -> None: ...


def fault_of(loaded: LoadedModel, kernels: Kernels, gate: Gate) -> str:
    """Why these kernels cannot serve this model; empty if they can. Raises SetupError if the device has failed for good
    in the test, so that no other kernels can serve in this process."""
    try:
        with torch.inference_mode():
            if difference := _lora_differs(loaded, kernels):
                return f"add_lora gives other numbers (off by {difference:.2g})"
            return _result_of(gate.fault_of(kernels))
    except Exception as error:  # compilers and drivers may raise anything
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        if device_has_failed(error):
            raise SetupError(
                f"The {loaded.device} failed in the test of kernels {kernels.name} ({reason}), and computes nothing "
                "more in this process. Set engine.kernels to torch."
            ) from error
        return reason


def _result_of(parts: Generator[None, None, str]) -> str:
    while True:
        try:
            next(parts)
        except StopIteration as ended:
            return str(ended.value)


def _lora_differs(loaded: LoadedModel, kernels: Kernels) -> float:
    """For one group of each shape → the first error that rounding does not explain; 0 if there is none"""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(loaded.device, loaded.dtype)

    tested: list[tuple[int, list[int]]] = []
    for group in LoraLinears(loaded.linears, loaded.dtype, kernels.add_lora, loaded.linear_groups).groups:
        shape = group.inputs, list(group.outputs.values())
        if shape not in tested:
            tested.append(shape)
            if difference := _group_differs(group, kernels, random):
                return difference
    return 0.0


def _group_differs(group: LinearGroup, kernels: Kernels, random: Callable[..., torch.Tensor]) -> float:
    """The error for one group, with an adapter of each rank and rows without adapter. In a group of several linears,
    only the first adapter changes all linears."""
    like = random(0)
    device, dtype = like.device, like.dtype
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    layout_of = kernels.add_lora.make([group], empty, dtype, 0).layout
    torchs_layout_of = TorchBackend([group], empty, dtype, copy_bytes=0).layout
    scaled = [number % 2 == 1 for number in range(len(RANKS))]
    in_runs = [rank + SCALE_ROWS * scales for rank, scales in zip(RANKS, scaled, strict=True)]
    layouts, torchs = ([of(rank) for rank in in_runs] for of in (layout_of, torchs_layout_of))
    memory, torchs_memory = (empty.new_zeros(sum(one.bytes for one in some)) for some in (layouts, torchs))
    matrices: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor, float]]] = {path: {} for path in group.outputs}
    scales: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {path: {} for path in group.outputs}
    segments: list[Segment] = []
    torchs_segments: list[Segment] = []
    offset = torchs_offset = 0
    for number, (rank, layout, torchs_layout) in enumerate(zip(RANKS, layouts, torchs, strict=True)):
        name, paths = str(rank), list(group.outputs)
        if number and len(paths) > 1:
            left = paths.pop(number % len(paths))
            matrices[left][name] = like.new_zeros(1, group.inputs), like.new_zeros(group.outputs[left], 1), 1.0
        for path in paths:
            width = group.outputs[path]
            a, b = random(rank, group.inputs) / group.inputs**0.5, random(width, rank) / rank**0.5
            run = memory[offset : offset + layout.bytes]
            layout.write(run, path, a, b, _SCALE)
            stored_a, stored_b = layout.stored(run, path)
            matrices[path][name] = (stored_a, stored_b.t(), 1.0)
            torchs_run = torchs_memory[torchs_offset : torchs_offset + torchs_layout.bytes]
            torchs_layout.write(torchs_run, path, stored_a[:rank], stored_b[:rank].t(), 1.0)
            if scaled[number]:
                layout.write_scaling(run, path, 1 + random(width).float() / 4, random(width).float())
                d, e = (one.float() for one in layout.scaling(run, path))
                torchs_layout.write_scaling(torchs_run, path, 1 + d, e)
                scales[path][name] = 1 + d.double(), e
        first = 4 * len(segments)
        last = first + (1 if rank == RANKS[0] else 3)
        changed = frozenset(paths)
        products = [of(rank).rank * scaled[number] for of in (layout_of, torchs_layout_of)]
        segments.append(Segment(first, last, PlacedAdapter(name, offset, layout.rank, changed, products[0])))
        torchs_adapter = PlacedAdapter(name, torchs_offset, torchs_layout.rank, changed, products[1])
        torchs_segments.append(Segment(first, last, torchs_adapter))
        offset += layout.bytes
        torchs_offset += torchs_layout.bytes
    backend = kernels.add_lora.make([group], memory, dtype, 0)
    batch = backend.make_batch(segments)
    x = random(4 * len(segments), group.inputs)
    before = {path: random(len(x), width) for path, width in group.outputs.items()}
    expected = [add_lora(y, x, segments, matrices[path], scales[path]) for path, y in before.items()]
    known = {path: y.clone() for path, y in before.items()}
    torchs_backend = TorchBackend([group], torchs_memory, dtype, copy_bytes=0)
    torchs_batch = torchs_backend.make_batch(torchs_segments)
    for path, y in known.items():
        torchs_backend.add_lora(y, x, path, torchs_batch)
    together = torch.cat(list(before.values()), dim=1)
    if isinstance(backend, TakesGroups):
        backend.add_lora_together(together, x, list(before), batch)
    for path, y in before.items():
        backend.add_lora(y, x, path, batch)
    found = [list(before.values())]
    if isinstance(backend, TakesGroups):
        found.append(list(together.split(list(group.outputs.values()), dim=1)))
    for results in found:
        for result, torchs_result, right in zip(results, known.values(), expected, strict=True):
            error = rms(result - right)
            if not error <= allowed(rms(torchs_result - right), right, dtype):
                return error
    return 0.0
