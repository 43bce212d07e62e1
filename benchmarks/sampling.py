"""Measures the sampler: 32 rows, 128,256 tokens, one thread, against the literal one that the tests use as reference.

Steep logits are like those of a trained model: a few tokens have most of the probability. Flat ones are like those of a
random model: nine tenths lie on tens of thousands of tokens, so that each row must be sorted as a whole.

`sampling_share_1b` is the time of top-p 0.9 on flat logits as a share of a step of a model of 1 B parameters. The step
is a stand-in: products of 32 rows with matrices of the same sizes in float32 (16 layers of 7, and the logits). It has
no attention, so the true share is smaller. `penalty_growth` is the time with penalties after 2,000 tokens, against 10.
It does not use a GPU.

    python -m benchmarks.sampling [--pairs 4] [--vocabulary 128256] [--layers 16] [--width 2048] [--json]
"""

import argparse
import asyncio
import time
from collections.abc import Callable

import torch

from benchmarks.harness import Measure, Result, alternate, arguments, percentile, report
from motet.domain import BASE, RequestId
from motet_runner.execute.batch.row_table import TableRow
from motet_runner.execute.sample.host_sampler import Sampler
from motet_runner.interface import Sampling
from testbed import reference_sampler

ROWS = 32
PROMPT = 64
SHARE_LIMIT, GROWTH_LIMIT = 0.10, 1.10
STEEP, FLAT = 8.0, 1.0
"""Standard deviations of the logits."""
LINEARS = 7
"""Of a layer of the benchmarks' random Llama: four of attention, three after it, all width x width."""

OPTIONS = {
    "greedy": Sampling(max_tokens=1),
    "temperature": Sampling(max_tokens=1, temperature=0.8),
    "top_p": Sampling(max_tokens=1, temperature=0.8, top_p=0.9),
    "top_k": Sampling(max_tokens=1, temperature=0.8, top_k=50),
}
PENALTIES = Sampling(max_tokens=1, presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.1)
EOS = frozenset({1})


def rows_after(tokens: int, sampling: Sampling, vocabulary: int) -> list[TableRow]:
    """Rows that have `tokens` tokens of output."""
    generator = torch.Generator().manual_seed(tokens)
    rows = []
    for number in range(ROWS):
        ids = torch.randint(vocabulary, (PROMPT + tokens,), generator=generator).tolist()
        request = RequestId(f"r{number}")
        rows.append(TableRow(number, request, ids, PROMPT, BASE, sampling, seed=number, choice=0))
    return rows


def kept_sampler(logits: torch.Tensor, sampling: Sampling, tokens: int = 10) -> Callable[[], None]:
    """A step of a sampler that has seen these rows before."""
    sampler, rows = Sampler(EOS), rows_after(tokens, sampling, logits.shape[1])

    def step() -> None:
        for row, token in zip(rows, sampler.sample(logits, rows).tokens, strict=True):
            assert token is not None
            row.tokens.append(token)

    step()
    return step


def literal_sampler(logits: torch.Tensor, sampling: Sampling, tokens: int = 10) -> Callable[[], None]:
    rows = rows_after(tokens, sampling, logits.shape[1])
    return lambda: _ignored(reference_sampler.sample(logits, rows, EOS))


def model_step(vocabulary: int, layers: int, width: int) -> Callable[[], None]:
    """The stand-in for a step of a model: products with as many bytes of weights."""
    weights = [torch.full((width, width), 1e-3) for _ in range(layers * LINEARS)]
    head = torch.full((vocabulary, width), 1e-3)
    rows = torch.ones(ROWS, width)

    def step() -> None:
        for weight in weights:
            torch.nn.functional.linear(rows, weight)
        torch.nn.functional.linear(rows, head)

    step()
    return step


def _ignored(_: object) -> None:
    pass


def seconds(step: Callable[[], None], calls: int = 1) -> Measure:
    async def measured() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            step()
        return (time.perf_counter() - began) / calls

    return measured


async def measure(given: argparse.Namespace) -> list[Result]:
    generator = torch.Generator().manual_seed(0)
    steep, flat = (torch.randn(ROWS, given.vocabulary, generator=generator) * width for width in (STEEP, FLAT))
    results = []
    for name, logits, sampling, tokens in (
        *((name, steep, sampling, 10) for name, sampling in OPTIONS.items()),
        ("top_p_flat", flat, OPTIONS["top_p"], 10),
        ("penalties_10", steep, PENALTIES, 10),
        ("penalties_2000", steep, PENALTIES, 2000),
    ):
        kept, literal = kept_sampler(logits, sampling, tokens), literal_sampler(logits, sampling, tokens)
        found = await alternate(seconds(kept), seconds(literal), pairs=given.pairs)
        print(f"{name}: {found}")
        results.append(Result(f"sample_{name}", percentile(found.a, 0.5) * 1e3, "ms", baseline="literal", pairs=found))
    early, late = (kept_sampler(steep, PENALTIES, tokens) for tokens in (10, 2000))
    growth = await alternate(seconds(late, 5), seconds(early, 5), pairs=given.pairs, turns=3)
    print(f"penalties at 2,000 tokens against 10: {growth}")
    results.append(
        Result("penalty_growth", growth.ratio, "x", f"<= {GROWTH_LIMIT}", growth.ratio <= GROWTH_LIMIT, "10", growth)
    )
    step = seconds(model_step(given.vocabulary, given.layers, given.width))
    for name, logits in (("sampling_share_1b", flat), ("sampling_share_1b_steep", steep)):
        shares = await alternate(seconds(kept_sampler(logits, OPTIONS["top_p"])), step, pairs=given.pairs, turns=3)
        # Of a step that ends with sampling.
        share = shares.ratio / (1 + shares.ratio)
        print(f"{name}: a step without sampling takes {percentile(shares.b, 0.5) * 1e3:.0f} ms; {shares}")
        results.append(
            Result(name, share, "", f"<= {SHARE_LIMIT}", share <= SHARE_LIMIT, "a step without sampling", shares)
        )
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=4, help="quiet pairs to measure")
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    given = parser.parse_args()
    # As is the engine's default on a CPU.
    torch.set_num_threads(1)
    with torch.inference_mode():
        report("sampling", asyncio.run(measure(given)), as_json=given.json)


if __name__ == "__main__":
    main()
