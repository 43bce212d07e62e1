"""What every goal is given: the device, its clock, the sizes, and the baselines that were brought along."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_goals.clock import Clock, CudaClock, Rehearsal


@dataclass(frozen=True, slots=True)
class Sizes:
    width: int = 4096
    wide: int = 11008
    rows: Sequence[int] = (1, 8, 32, 64)
    many_rows: int = 256
    rank: int = 16
    high_rank: int = 64
    highest_rank: int = 128
    ranks: Sequence[int] = (8, 16, 32, 64, 128)
    cold_bytes: int = 0
    """Of all sets of weights together, if MAX_SETS has as many; 0: four times the L2 cache"""
    shuffles: int = 1000
    prompt_tokens: Sequence[int] = (2048, 8192)
    stream_bytes: Sequence[int] = tuple(1 << power for power in range(20, 31))
    slab_bytes: int = 80 << 20
    heads: int = 32
    kv_heads: Sequence[int] = (32, 8)
    head_dim: int = 128
    contexts: Sequence[int] = (1024, 8192)
    sequences: int = 32
    one_context: int = 32768
    ragged: tuple[int, int] = (128, 8192)


MAX_SETS = 64
"""More would take long to record, and the cache is emptied before each replay anyway."""


TINY = Sizes(
    width=32,
    wide=48,
    rows=(1, 4),
    many_rows=6,
    rank=16,
    high_rank=16,
    highest_rank=32,
    ranks=(8, 16, 32),
    cold_bytes=1,
    shuffles=2,
    prompt_tokens=(24,),
    stream_bytes=(1 << 12,),
    slab_bytes=1 << 12,
    heads=4,
    kv_heads=(4, 2),
    head_dim=16,
    contexts=(24,),
    sequences=2,
    one_context=40,
    ragged=(3, 40),
)


@dataclass
class Bench:
    device: torch.device
    dtype: torch.dtype
    clock: Clock
    sizes: Sizes
    vllm: Path | None = None
    """The folder with vLLM's kernels"""
    vllm_python: Path | None = None
    """Of an environment with vLLM"""
    generator: torch.Generator | None = field(init=False)
    known_bandwidth: float = 0.0
    """See `twins.bandwidth`"""

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(0)

    @property
    def rehearsal(self) -> bool:
        return isinstance(self.clock, Rehearsal)

    @property
    def programs(self) -> int:
        """As many as the GPU's multiprocessors"""
        if self.device.type == "cpu":
            return 2
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def sets(self, size: int) -> int:
        """How many sets of weights of `size` bytes the calls of a replay go round through. The clock empties the cache
        before each replay."""
        cold = self.sizes.cold_bytes or 4 * int(torch.cuda.get_device_properties(self.device).L2_cache_size)
        return max(2, min(MAX_SETS, -(-cold // size)))

    def random(self, *size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(size, generator=self.generator, device=self.device, dtype=self.dtype).mul_(scale)

    def freed(self) -> None:
        """Give memory back between two figures."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def bench_here(vllm: Path | None, vllm_python: Path | None = None) -> Bench:
    """On the GPU, or a rehearsal."""
    if torch.cuda.is_available():
        return Bench(torch.device("cuda"), torch.bfloat16, CudaClock(), Sizes(), vllm, vllm_python)
    # bfloats are wrong in the interpreter
    return Bench(torch.device("cpu"), torch.float16, Rehearsal(), TINY, vllm, vllm_python)


def gpu_here() -> dict[str, Any]:
    """What was measured on; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": properties.L2_cache_size >> 20,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def cells(*axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Every combination; the last axis changes first."""
    return product(*axes)
