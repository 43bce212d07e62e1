"""Whole models of random weights on the GPU's kernels, and a decode step of one: everything that a graph would hold."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from benchmarks.gpu_goals.bench import Bench
from motet_kernels import LinearGroup, PlacedAdapter, Segment
from motet_kernels.decoder_weights import DecoderWeights, LayerWeights
from motet_kernels.gpu.attention import GpuAttention
from motet_kernels.gpu.decoder import GpuDecoder
from motet_kernels.gpu.lora_backend import GpuBackend, GpuLoraBatch
from motet_kernels.run_layout import SCALE_ROWS
from motet_kernels.torch_linear import TorchWeights

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    width: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 128


LLAMA_7B = Shape("7b", 4096, 11008, 32, 32, 32, 32000)
LLAMA_8B = Shape("8b", 4096, 14336, 32, 32, 8, 128256)
TINY_SHAPE = Shape("tiny", 64, 96, 2, 4, 2, 64, head_dim=16)


class Model:
    def __init__(self, bench: Bench, shape: Shape) -> None:
        self.bench, self.shape = bench, shape
        self._weights = self._random_weights()
        self.decoder = GpuDecoder(self._weights)

    @property
    def bytes_per_step(self) -> int:
        """Of the weights that a step reads: all but the embedding"""
        shape = self.shape
        of_layer = sum(group.inputs * sum(group.outputs.values()) for group in self.groups[:4])
        return (shape.layers * of_layer + shape.vocabulary * shape.width) * self.bench.dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        """Of a token"""
        shape = self.shape
        return 2 * shape.layers * shape.kv_heads * shape.head_dim * self.bench.dtype.itemsize

    @cached_property
    def groups(self) -> list[LinearGroup]:
        """Those of a layer, for each layer"""
        shape = self.shape
        heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        return [
            group
            for layer in range(shape.layers)
            for group in (
                LinearGroup(shape.width, {f"{layer}.q": heads, f"{layer}.k": kv, f"{layer}.v": kv}),
                LinearGroup(heads, {f"{layer}.o": shape.width}),
                LinearGroup(shape.width, {f"{layer}.gate": shape.feed_forward, f"{layer}.up": shape.feed_forward}),
                LinearGroup(shape.feed_forward, {f"{layer}.down": shape.width}),
            )
        ]

    @property
    def linears(self) -> list[str]:
        return [linear for group in self.groups for linear in group.outputs]

    def _random_weights(self) -> DecoderWeights[TorchWeights]:
        bench, shape = self.bench, self.shape

        def packed(inputs: int, *outputs: int) -> TorchWeights:
            weights = [bench.random(of_one, inputs, scale=inputs**-0.5) for of_one in outputs]
            together = TorchWeights(weights, reordered=False)
            for _ in together.parts(weights):
                pass
            return together

        def norm() -> torch.Tensor:
            return torch.ones(shape.width, dtype=bench.dtype, device=bench.device)

        heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        layers = [
            LayerWeights(
                attention_norm=norm(),
                qkv=packed(shape.width, heads, kv, kv),
                qkv_bias=(None,) * 3,
                q_norm=None,
                k_norm=None,
                o=packed(heads, shape.width),
                o_bias=None,
                mlp_norm=norm(),
                gate_up=packed(shape.width, shape.feed_forward, shape.feed_forward),
                gate_up_bias=(None,) * 2,
                down=packed(shape.feed_forward, shape.width),
                down_bias=None,
                scale=shape.head_dim**-0.5,
                window=None,
                linears=[
                    [f"{layer}.{linear}" for linear in group]
                    for group in (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
                ],
            )
            for layer in range(shape.layers)
        ]
        return DecoderWeights(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            epsilon=1e-5,
            embedding=bench.random(shape.vocabulary, shape.width),
            layers=layers,
            final_norm=norm(),
            head=packed(shape.width, shape.vocabulary),
            head_bias=None,
        )


class Adapters:
    """As many adapters on all linears of a model, one behind the other in memory."""

    def __init__(self, model: Model, number: int, rank: int, *, scale: bool = False) -> None:
        """`scale`: they scale the linears' own results, as DoRA does."""
        bench = model.bench
        empty = GpuBackend(model.groups, torch.empty(64, dtype=torch.uint8, device=bench.device), bench.dtype)
        layout = empty.layout(rank + SCALE_ROWS * scale)
        self._products = empty.layout(rank).rank * scale
        self.memory = bench.random(number * layout.bytes // bench.dtype.itemsize, scale=0.02).view(torch.uint8)
        self.layout, self.rank = layout, layout.rank
        self.backend = GpuBackend(model.groups, self.memory, bench.dtype)
        self._all = frozenset(model.linears)

    def placed(self, owner: int, linears: frozenset[str] | None = None) -> PlacedAdapter:
        """`linears`: those that it changes; None: all"""
        return PlacedAdapter(
            f"{owner} {linears is None}",
            owner * self.layout.bytes,
            self.rank,
            self._all if linears is None else linears,
            self._products,
        )

    def batch(self, owners: Sequence[int | None], linears: frozenset[str] | None = None) -> GpuLoraBatch:
        """Of a row for each owner; None: a row without an adapter"""
        batch = self.backend.fixed_batch(len(owners))
        if self._products:
            batch = self.backend.that_scales(batch)
        self.backend.fill(batch, self.segments(owners, linears))
        return batch

    def segments(self, owners: Sequence[int | None], linears: frozenset[str] | None = None) -> list[Segment]:
        return [
            Segment(row, row + 1, self.placed(owner, linears)) for row, owner in enumerate(owners) if owner is not None
        ]

    def stacked(self, linear: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Aᵀ [adapters, rank, inputs] and B [adapters, rank, outputs] of all adapters, where they lie"""
        return self.layout.matrices(self.memory.view(-1, self.layout.bytes), linear)


class DecodeStep:
    """One new token of each of `rows` sequences of `context` tokens."""

    def __init__(self, model: Model, rows: int, context: int) -> None:
        bench, shape = model.bench, model.shape
        self.model, self.rows, self.context = model, rows, context
        each = -(-context // PAGE_TOKENS)
        self._pages = bench.random(rows * each, shape.layers, 2, shape.kv_heads, PAGE_TOKENS, shape.head_dim)
        table = torch.randperm(rows * each, generator=bench.generator, device=bench.device).view(rows, each)
        self._attention = GpuAttention(self._pages)
        self._batch = self._attention.fixed_batch(rows, table=table.to(torch.int32))
        self._lengths = torch.full((rows,), context, dtype=torch.int32, device=bench.device)
        self._table_rows = torch.arange(rows, dtype=torch.int32, device=bench.device)
        ids = torch.randint(0, shape.vocabulary, (rows,), generator=bench.generator, device=bench.device)
        self._ids, self._keep = ids, torch.arange(rows, device=bench.device)
        places = torch.arange(context, dtype=torch.float32, device=bench.device)
        half = torch.arange(shape.head_dim // 2, dtype=torch.float32, device=bench.device)
        angles = places[:, None] * 10000.0 ** (-half / len(half))
        self._rotation = torch.stack((angles.cos(), angles.sin()), 1)

    def draw_tokens(self) -> None:
        """Other tokens"""
        self._ids.random_(0, self.model.shape.vocabulary, generator=self.model.bench.generator)

    @property
    def floor_bytes(self) -> int:
        return self.model.bytes_per_step + self.rows * self.context * self.model.kv_bytes

    def logits(self, lora: GpuLoraBatch | None = None) -> torch.Tensor:
        self._attention.refill(self._batch, self._lengths, table_rows=self._table_rows)
        return self.model.decoder(
            self._ids,
            self._keep,
            rotation=self._rotation,
            attention=self._attention,
            pages=self._pages,
            rows=self._batch,
            lora=lora,
        )

    def greedy(self, lora: GpuLoraBatch | None = None) -> torch.Tensor:
        return self.logits(lora).argmax(-1)


@contextmanager
def counted_kernels(bench: Bench) -> Iterator[list[str]]:
    """The kernels that run meanwhile on the device; without one, those that are launched by Triton."""
    if bench.device.type == "cpu":
        from motet_kernels.gpu.launches import traced_launches

        with traced_launches() as trace:
            yield trace
        return
    from torch.profiler import ProfilerActivity, profile

    names: list[str] = []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield names
        torch.cuda.synchronize()
    names += [event.name for event in profiler.events() or () if event.device_type.name == "CUDA"]
