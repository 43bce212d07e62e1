"""Measures attention over pages, compiled, against torch's attention.

- Gathered: the pages of all sequences are brought together, padded to the longest one, and torch attends to them. So
  does the engine without compiled kernels, but for few sequences at a time.
- Dense: torch attends to keys and values that already lie together, without padding. This is less work than any engine
  has; it is measured where all sequences are equally long.

Each alternates with the compiled attention in this process. As in a model with many layers, no call finds its pages in
a cache. It does not use a GPU.

    python -m benchmarks.attention [--heads 8] [--kv-heads 4] [--width 64] [--dtype bfloat16] [--threads 1] [--json]
"""

import argparse
import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness import Do, Pairs, Result, alternate, arguments, microseconds, report, skip
from motet_kernels.cpp import CannotBuild, Library, PagedAttention, build
from motet_kernels.cpp.attention import PAGE_TOKENS
from motet_runner.settings import KERNEL_CACHE

CASES: dict[str, list[tuple[int, int]]] = {
    "decode_8": [(127, 1)] * 8,
    "decode_32": [(127, 1)] * 32,
    "decode_long_8": [(2047, 1)] * 8,
    "decode_ragged_32": [(63 + 62 * number, 1) for number in range(32)],
    "decode_even_32": [(1023, 1)] * 32,
    "prompt_512": [(0, 512)],
    "chunk_of_2048": [(1536, 512)],
}
"""Tokens before and new rows of each sequence. `decode_ragged_32` and `decode_even_32` have the same context together.
"""


@dataclass(frozen=True)
class Sides:
    compiled: Do
    gathered: Do
    dense: Do | None
    bytes: int
    """Of the keys and values that a call reads"""


class Case:
    def __init__(self, given: argparse.Namespace, sequences: list[tuple[int, int]]) -> None:
        self.heads, self.kv_heads, self.width = given.heads, given.kv_heads, given.width
        self.dtype = getattr(torch, given.dtype)
        self.sequences = sequences
        self.scale = self.width**-0.5
        counts = [-(-(before + count) // PAGE_TOKENS) for before, count in sequences]
        of_a_token = 2 * self.kv_heads * self.width * self.dtype.itemsize
        self.bytes = sum(before + count for before, count in sequences) * of_a_token
        pages = sum(counts)
        self.layers = max(2, (given.rotated << 20) // (pages * PAGE_TOKENS * of_a_token))
        random = torch.Generator().manual_seed(0)
        self.pages = torch.randn((pages, self.layers, 2, self.kv_heads, PAGE_TOKENS, self.width), generator=random).to(
            self.dtype
        )
        order = iter(torch.randperm(pages, generator=random).tolist())
        self.table = np.zeros((len(sequences), max(counts)), dtype=np.int32)
        for row, count in enumerate(counts):
            self.table[row, :count] = [next(order) for _ in range(count)]
        rows = sum(count for _, count in sequences)
        self.query, self.key, self.value = (
            torch.randn((rows, heads, self.width), generator=random).to(self.dtype).transpose(0, 1)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        firsts = list(itertools.accumulate((count for _, count in sequences), initial=0))
        self.described = np.array(
            [
                (first, count, before, row)
                for row, ((before, count), first) in enumerate(zip(sequences, firsts, strict=False))
            ],
            dtype=np.int64,
        )

    def sides(self, library: Library) -> Sides:
        return Sides(self._compiled(library), self._gathered(), self._dense(), self.bytes)

    def _compiled(self, library: Library) -> Do:
        attention = PagedAttention(library, self.pages)
        batch = attention.make_batch(self.table, self.described)
        layers = itertools.cycle(range(self.layers))
        return lambda: attention.attend(self.query, self.key, self.value, next(layers), batch, scale=self.scale)

    def _gathered(self) -> Do:
        """Sequences with one row each, or one sequence with many."""
        blocks = self.pages.view(-1, PAGE_TOKENS * self.width)
        halves = torch.arange(2 * self.kv_heads).view(2, 1, self.kv_heads, 1)
        table = torch.from_numpy(self.table.astype(np.int64)) * (self.layers * 2 * self.kv_heads)
        first = (table[None, :, None, :] + halves).reshape(-1)
        layers = itertools.cycle(range(self.layers))
        scratch = blocks.new_empty((len(first), blocks.shape[1]))
        tokens = torch.arange(self.table.shape[1] * PAGE_TOKENS)
        positions = torch.cat([torch.arange(before, before + count) for before, count in self.sequences])
        seen = tokens <= positions[:, None]
        mask = torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~seen, float("-inf"))
        decodes = len(self.sequences) > 1

        def attend() -> torch.Tensor:
            seen_by = mask[:, None, None] if decodes else mask
            torch.index_select(blocks, 0, first + next(layers) * 2 * self.kv_heads, out=scratch)
            keys, values = scratch.view(2, len(self.sequences), self.kv_heads, -1, self.width)
            if decodes:
                query = self.query.transpose(0, 1).reshape(len(self.sequences), self.kv_heads, -1, self.width)
                return scaled_dot_product_attention(
                    query, keys, values, attn_mask=mask[:, None, None], scale=self.scale
                )
            return scaled_dot_product_attention(
                self.query[None], keys, values, attn_mask=seen_by, scale=self.scale, enable_gqa=True
            )

        return attend

    def _dense(self) -> Do | None:
        if len(set(self.sequences)) > 1 or self.sequences[0][1] > 1:
            return None
        count, (before, _) = len(self.sequences), self.sequences[0]
        kept = torch.randn((self.layers, 2, count, self.kv_heads, before + 1, self.width)).to(self.dtype)
        layers = itertools.cycle(range(self.layers))
        query = self.query.transpose(0, 1).reshape(count, self.kv_heads, -1, self.width)

        def attend() -> torch.Tensor:
            keys, values = kept[next(layers)]
            return scaled_dot_product_attention(query, keys, values, scale=self.scale)

        return attend


async def measure(given: argparse.Namespace, library: Library) -> list[Result]:
    results = []
    cases = {name: Case(given, sequences).sides(library) for name, sequences in CASES.items()}

    async def pairs(name: str, baseline: str, a: Do, b: Do) -> Pairs:
        a(), b()
        found = await alternate(
            microseconds(a, given.calls), microseconds(b, given.calls), pairs=given.pairs, turns=given.turns
        )
        print(f"{name}: {baseline} against ours: {found}")
        return found

    for name, sides in cases.items():
        gathered = await pairs(name, "gathered", sides.gathered, sides.compiled)
        ours = sorted(gathered.b)[len(gathered.b) // 2]
        print(f"  {sides.bytes / 1e6:.2f} MB of keys and values in {ours:.0f} us: {sides.bytes / ours / 1e3:.1f} GB/s")
        results += [
            Result(f"attention_{name}", ours, "us"),
            Result(f"attention_{name}_vs_gathered", gathered.ratio, "x", baseline="gathered pages", pairs=gathered),
        ]
        if sides.dense is not None:
            dense = await pairs(name, "dense", sides.dense, sides.compiled)
            results.append(
                Result(f"attention_{name}_vs_dense", dense.ratio, "x", baseline="dense tensors", pairs=dense)
            )
    ragged, even = cases["decode_ragged_32"], cases["decode_even_32"]
    total = await pairs("ragged lengths", "as much context in equal lengths", even.compiled, ragged.compiled)
    cost = 1 / total.ratio * even.bytes / ragged.bytes
    results.append(
        Result(
            "attention_follows_context", cost, "x", "<= 1.15", cost <= 1.15, "as much context in equal lengths", total
        )
    )
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--heads", type=int, default=8, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=4, help="heads of keys and values")
    parser.add_argument("--width", type=int, default=64, help="width of a head")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--threads", type=int, default=1, help="threads of both sides")
    parser.add_argument("--rotated", type=int, default=128, help="MiB of pages that the calls go round through")
    parser.add_argument("--calls", type=int, default=5, help="calls per figure")
    parser.add_argument("--turns", type=int, default=3, help="figures of each side per pair")
    parser.add_argument("--pairs", type=int, default=10, help="quiet pairs to measure")
    parser.add_argument("--cache", type=Path, default=KERNEL_CACHE.expanduser(), help="the folder of compiled kernels")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    try:
        built = build(given.cache)
    except CannotBuild as error:
        skip(f"no compiled kernels: {error}")
    print(f"compiled kernels: {built.instructions}")
    with torch.inference_mode():
        results = asyncio.run(measure(given, built.library))
    report("attention", results, as_json=given.json)


if __name__ == "__main__":
    main()
