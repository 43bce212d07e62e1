"""Compiles the launches of the GPU path for a Hopper card, on a machine that need not have one. Nothing runs.

python -m tests.gpu.hopper attention      prints what was compiled: one JSON line a kernel and variant
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import run
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from motet_kernels import LinearGroup, PlacedAdapter, Segment
from motet_kernels.gpu import layer_kernels
from motet_kernels.gpu.attention import GpuAttention
from motet_kernels.gpu.lora_backend import GpuBackend

STEPS = 3
"""Each with other numbers of rows and tokens; all but the first find everything compiled."""

HOPPER = GPUTarget("cuda", 90, 32)
PROCESSORS = 132
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class NoCard:
    """What Triton asks its driver before it compiles"""

    get_current_target = staticmethod(lambda: HOPPER)
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda _=None: 0)


@contextmanager
def compiled_launches() -> Iterator[list[tuple[str, Any]]]:
    """Launches only compile meanwhile: the kernels' names, and what was compiled."""
    compiled: list[tuple[str, Any]] = []
    launched = JITFunction.run

    def only_compile(kernel: Any, *arguments: Any, warmup: bool, **options: Any) -> None:
        compiled.append((kernel.__name__, launched(kernel, *arguments, warmup=True, **options)))

    properties = torch.cuda.get_device_properties
    driver.set_active(NoCard())
    JITFunction.run = only_compile
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=PROCESSORS)
    try:
        yield compiled
    finally:
        JITFunction.run = launched
        torch.cuda.get_device_properties = properties


def attention(
    dtype: torch.dtype, step: int, *, heads: int = 32, kv_heads: int = 8, width: int = 128, **how: Any
) -> None:
    """Decodes and parts of prompts, then a captured step of decodes; each step has other sequences and more of them."""
    attending = GpuAttention(torch.zeros(4, 3, 2, kv_heads, 16, width, dtype=dtype))
    table = np.zeros((9, 21), dtype=np.int32)
    counts = [1, 40, 1, 3, *[1] * step]
    before = 200 + 16 * step  # so that a table is 15, 16 and 17 pages wide
    described = [[sum(counts[:place]), count, before, place] for place, count in enumerate(counts)]
    batch = attending.make_batch(table, np.array(described, dtype=np.int64))
    query, key = (torch.zeros(sum(counts), count, width, dtype=dtype).transpose(0, 1) for count in (heads, kv_heads))
    for layer in range(3):
        attending.attend(query, key, key, layer, batch, scale=0.1, **how)
    fixed = attending.fixed_batch(8, 33)
    attending.refill(fixed, torch.zeros(8, dtype=torch.int32))
    attending.attend_written(torch.zeros(8, heads, width, dtype=dtype).transpose(0, 1), 1, fixed, scale=0.1, **how)


def lora(dtype: torch.dtype, step: int) -> None:
    """The four calls of a layer, with adapters of mixed ranks."""
    q, k, v = {"q": 4096}, {"k": 1024}, {"v": 1024}
    groups = [
        LinearGroup(4096, q | k | v),
        LinearGroup(4096, {"o": 4096}),
        LinearGroup(4096, {"gate": 14336, "up": 14336}),
        LinearGroup(14336, {"down": 4096}),
    ]
    backend = GpuBackend(groups, torch.zeros(1 << 20, dtype=torch.uint8), dtype)
    everywhere = frozenset(linear for group in groups for linear in group.outputs)
    segments = [
        Segment(row, row + 1 + step, PlacedAdapter(str(row), 4096 * row, 16 << row, everywhere))
        for row in range(3 + step)
    ]
    batch = backend.make_batch(segments)
    for group in groups:
        x, y = (torch.zeros(9, size, dtype=dtype) for size in (group.inputs, sum(group.outputs.values())))
        backend.add_lora_together(y, x, tuple(group.outputs), batch)


def layer(dtype: torch.dtype, step: int) -> None:
    rows = 5 + 3 * step
    hidden = torch.zeros(rows, 4096, dtype=dtype)
    weight = torch.zeros(4096, dtype=dtype)
    layer_kernels.add_norm(hidden, hidden.clone(), weight, 1e-5)
    layer_kernels.add_norm(hidden, hidden.clone(), weight, 1e-5, rows=torch.zeros(2 + step, dtype=torch.int64))
    places = torch.zeros(rows, dtype=torch.int32)
    of_head = torch.zeros(128, dtype=dtype)
    for norms in (None, layer_kernels.HeadNorms(of_head, of_head)):
        layer_kernels.rotate_and_write(
            torch.zeros(rows, (32 + 2 * 8) * 128, dtype=dtype),
            places,
            torch.zeros(64, 2, 64, dtype=torch.float32),
            torch.zeros(4, 2, 2, 8, 16, 128, dtype=dtype)[:, 1],
            places,
            places,
            heads=32,
            norms=norms,
            epsilon=1e-5,
        )
    layer_kernels.silu_multiply(torch.zeros(rows, 2 * 14336, dtype=dtype))


SCENES: dict[str, list[Callable[[int], None]]] = {
    "attention": [
        lambda step: attention(torch.bfloat16, step),
        lambda step: attention(torch.float16, step, heads=16, kv_heads=8, width=256, window=64, softcap=50.0),
        lambda step: attention(torch.bfloat16, step, heads=32, kv_heads=32, width=80),
        lambda step: attention(torch.float32, step, heads=8, kv_heads=2, width=64),
    ],
    "lora": [lambda step: lora(torch.bfloat16, step)],
    "layer": [lambda step: layer(torch.bfloat16, step)],
}


def memory_of(binary: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes that did not fit in them."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        told = run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(found) for found in re.findall(r"\b(?:REG|STACK|LOCAL):(\d+)", told))
    return {"registers": registers, "spilled": stack + local}


def main() -> None:
    for scene in SCENES[sys.argv[1]]:
        known: set[str] = set()
        for step in range(STEPS):
            with compiled_launches() as compiled:
                scene(step)
            for name, kernel in compiled:
                if kernel.hash not in known:
                    known.add(kernel.hash)
                    told = {"kernel": name, "step": step, "shared": kernel.metadata.shared}
                    print(json.dumps(told | memory_of(kernel.asm["cubin"])), flush=True)


if __name__ == "__main__":
    main()
