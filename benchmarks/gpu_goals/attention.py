"""Attention of decodes over pages of keys and values (G12)."""

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_goals.bench import Bench
from benchmarks.gpu_goals.clock import Times, Way
from benchmarks.gpu_goals.figures import Figure
from benchmarks.gpu_goals.operator import beside
from benchmarks.gpu_goals.twins import bandwidth, reads
from benchmarks.harness import Do
from motet_kernels.gpu.attention import GpuAttention

PAGE_TOKENS = 16
LARGER_PAGE = 64
FLEX_PAGE = 128
"""The tokens of a block with which flex attention is fastest"""
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""What torch's attention may be on a GPU. Without this it would take plain products where none of them fits."""
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Decodes:
    """Sequences of these lengths, each with one new token, in several layers of keys and values that no cache holds."""

    def __init__(self, bench: Bench, heads: int, kv_heads: int, lengths: Sequence[int]) -> None:
        self.bench, self.lengths, self.kv_heads = bench, lengths, kv_heads
        self.width = bench.sizes.head_dim
        self.scale = self.width**-0.5
        of_token = 2 * kv_heads * self.width * bench.dtype.itemsize
        self.bytes = sum(lengths) * of_token
        self.layers = bench.sets(self.bytes)
        longest = -(-max(lengths) // FLEX_PAGE) * FLEX_PAGE
        shape = (self.layers, 2, len(lengths), kv_heads, longest, self.width)
        self.contiguous = bench.random(*shape)
        self.query = bench.random(heads, len(lengths), self.width)
        self._longest = longest

    def paged(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same keys and values in pages [pages, layers, 2, kv_heads, tokens, width] in any order, and the table."""
        each = self._longest // tokens
        number = len(self.lengths) * each
        table = torch.randperm(number, generator=self.bench.generator, device=self.bench.device)
        pages = self.contiguous.new_empty(number, self.layers, 2, self.kv_heads, tokens, self.width)
        apart = self.contiguous.unflatten(4, (each, tokens)).permute(2, 4, 0, 1, 3, 5, 6)
        pages[table] = apart.flatten(0, 1)
        return pages, table.view(len(self.lengths), each).to(torch.int32)

    @cached_property
    def small_pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.paged(PAGE_TOKENS)

    def ours(self, tokens: int) -> Do:
        pages, table = self.small_pages if tokens == PAGE_TOKENS else self.paged(tokens)
        attention = GpuAttention(pages)
        batch = attention.fixed_batch(len(self.lengths), table=table)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=self.bench.device)
        rows = torch.arange(len(lengths), dtype=torch.int32, device=self.bench.device)
        attention.refill(batch, lengths, table_rows=rows)
        following = itertools.cycle(range(self.layers))
        return lambda: attention.attend_written(self.query, next(following), batch, scale=self.scale)

    @cached_property
    def _mask(self) -> torch.Tensor | None:
        """None if all sequences fill their keys"""
        if min(self.lengths) == self._longest:
            return None
        places = torch.arange(self._longest, device=self.bench.device)
        lengths = torch.tensor(self.lengths, device=self.bench.device)
        return (places[None] < lengths[:, None])[:, None, None]

    def _attended(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        query = self.query.transpose(0, 1)[:, :, None]
        with sdpa_kernel(FUSED if self.bench.device.type == "cuda" else SDPBackend.MATH):
            return scaled_dot_product_attention(
                query, keys, values, attn_mask=self._mask, scale=self.scale, enable_gqa=True
            )[:, :, 0]

    def ideal(self) -> Do:
        """Torch's attention where keys and values of a sequence lie together"""
        following = itertools.cycle(range(self.layers))
        return lambda: self._attended(*self.contiguous[next(following)])

    def gather(self) -> Do:
        """The pages are brought together, then torch's attention"""
        pages, table = self.small_pages
        following = itertools.cycle(range(self.layers))

        def step() -> torch.Tensor:
            together = pages[table, next(following)].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
            return self._attended(*together)

        return step

    def flex(self) -> Do:
        """Torch's flex attention with pages"""
        from torch.nn.attention.experimental._paged_attention import PagedAttention
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        device = self.bench.device
        sequences, each = len(self.lengths), self._longest // FLEX_PAGE
        paging = PagedAttention(sequences * each, FLEX_PAGE, sequences, device=str(device))
        for sequence in range(sequences):
            paging.reserve(torch.tensor(sequence, device=device), torch.tensor(self._longest, device=device))
        everyone = torch.arange(sequences, device=device)
        places = torch.arange(self._longest, device=device).expand(sequences, -1)
        caches = self.contiguous.new_empty(self.layers, 2, 1, self.kv_heads, sequences * self._longest, self.width)
        for layer in range(self.layers):
            paging.assign(everyone, places, *self.contiguous[layer], *caches[layer])
        lengths = torch.tensor(self.lengths, device=device)

        def within(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
            del head, row
            return token < lengths[batch]

        logical = create_block_mask(
            within, sequences, None, 1, self._longest, device=str(device), BLOCK_SIZE=(FLEX_PAGE, FLEX_PAGE)
        )
        mask = paging.convert_logical_block_mask(logical, kv_len=lengths)
        torch.compiler.reset()  # after a few shapes it would compile no more
        attend = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention
        query = self.query.transpose(0, 1)[:, :, None].contiguous()
        following = itertools.cycle(range(self.layers))

        def step() -> torch.Tensor:
            keys, values = (cache.expand(sequences, -1, -1, -1) for cache in caches[next(following)])
            attended: torch.Tensor = attend(query, keys, values, block_mask=mask, scale=self.scale, enable_gqa=True)[
                :, :, 0
            ]
            return attended

        return step

    def check(self, do: Do) -> float:
        """How far the first call is from fp64, for the first and the last sequence"""
        attended = do()
        assert isinstance(attended, torch.Tensor)
        differences = []
        for sequence in {0, len(self.lengths) - 1}:
            keys, values = self.contiguous[0, :, sequence, :, : self.lengths[sequence]].double()
            group = self.query.shape[0] // self.kv_heads
            query = self.query[:, sequence].double().unflatten(0, (self.kv_heads, group))
            weights = (query @ keys.transpose(1, 2) * self.scale).softmax(-1)
            right = (weights @ values).flatten(0, 1)
            differences.append(float((attended[sequence].double() - right).norm() / right.norm()))
        return max(differences)

    def timed(self) -> Times:
        failed: dict[str, str] = {}
        ways: dict[str, Way] = {}
        makers = {
            "ours": lambda: self.ours(PAGE_TOKENS),
            "larger_pages": lambda: self.ours(LARGER_PAGE),
            "ideal": self.ideal,
            "gather": self.gather,
            "flex": self.flex,
        }
        for name, make in makers.items():
            try:
                do = make()
                difference = self.check(do)
                if not difference <= TOLERANCES[self.bench.dtype]:
                    raise ArithmeticError(f"it differs from fp64 by {difference:g}")
            except Exception as error:
                if name == "ours":
                    raise
                failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            ways[name] = Way(do, self.layers)
        times = self.bench.clock.compare(ways | {"twin": reads(self.bench, self.bytes)}, seconds=2.0)
        times.failed |= failed
        return times


def g12(bench: Bench) -> Iterator[Figure]:
    sizes = bench.sizes
    ragged = torch.Generator().manual_seed(0)
    low, high = sizes.ragged
    some = torch.randint(low, high + 1, (sizes.sequences,), generator=ragged).tolist()
    for kv_heads in sizes.kv_heads:
        many = "mha" if kv_heads == sizes.heads else "gqa"
        cases = {f"{many}_{context}": [context] * sizes.sequences for context in sizes.contexts}
        cases |= {f"{many}_ragged": some, f"{many}_one_{sizes.one_context}": [sizes.one_context]}
        for name, lengths in cases.items():
            times = (decodes := Decodes(bench, sizes.heads, kv_heads, lengths)).timed()
            alike = len(set(lengths)) == 1 and len(lengths) > 1
            share = times.pairs("twin", "ours")
            yield Figure(
                name=f"attention_share_of_read_{name}",
                value=share.ratio,
                unit="of a read",
                at_least=0.80 if not alike else 0.90 if many == "mha" else 0.85,
                spread=share.spread,
                floor=decodes.bytes / bandwidth(bench),
                twin=times.median("twin"),
                against=beside(times, {"ideal": 0.95, "gather": 3.0, "flex": 1.5, "larger_pages": None}),
                note=f"{times.median('ours'):.4g} us",
            )
            del decodes
            bench.freed()
