"""Measures how many tokens of keys and values a runner holds by each way of managing memory, live: all processes run.

A runner has memory for 4 sequences of the model's maximum of 2,048 tokens. Clients keep more requests waiting than any
way can hold, with lengths like Alpaca's (see `benchmarks.presets`, which computes the same in virtual time).
`live_resident_*` is the mean of the tokens in memory over the runner's iterations, divided by that of `ft-max`; of
`contiguous` it is compared with `s3`, whose pages may lie anywhere. An iteration counts if it comes after the first
quarter of the requests has joined (of `ft-max`, which few fill: after one in 20) and before the last one has. The model
is small.

The clients force the length of each answer, and it ends by itself, so that the predictor learns from it; 64 answers
come before the others. Clients give the model's maximum as `max_tokens`. How much the product is told differs:

- nothing: biases prefer one token to all others, and the end token to the rest. A frequency penalty makes the first one
  less likely each time, until the end comes first. Long answers miss their length by a few tokens;
- `min_tokens`, for `s3`: no estimate is less, so it knows the bucket. Then the end is preferred to all tokens;
- the length, for `oracle`: it is `max_tokens` and the end is ignored. Then no estimate is asked for.

    python -m benchmarks.memory [--requests 1200] [--waiting 48] [--only WAY …] [--json]
"""

import asyncio
import json
import random
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.engine_run import Ask, random_prompt
from benchmarks.harness import Result, arguments, report
from benchmarks.random_llama import SCRATCH, LlamaShape, random_llama
from benchmarks.served_stack import DONE, StreamingClient, serving
from benchmarks.virtual_plan import lognormal_workload

CONTEXT = 2048
SEQUENCES = 4
"""Of the model's maximum that the memory holds"""
PLACES = 256
SHAPE = LlamaShape(
    vocabulary=512, width=128, feed_forward=256, layers=4, heads=4, kv_heads=2, context=CONTEXT, dtype="float32"
)
KV_MIB = 16
"""Of keys and values for these sequences by a model of this shape"""
END = 1
"""The token that ends an answer"""
REPEATED = 2
LARGEST_BIAS, LARGEST_PENALTY = 100, 2
"""That a client may ask for"""
BIAS_OF_END = 10
"""More than the model prefers any token to another"""
TAUGHT = 64
"""Answers from which the predictor learns first"""
LEAST = {"s3": 6.0, "oracle": 10.3, "paged-chunk": 16.5}
"""As factors over the baseline"""
CONTIGUOUS = 0.95
"""Of the tokens that `s3` holds"""


@dataclass(frozen=True, slots=True)
class Way:
    preset: str
    requests_share: float
    """How many of the requests it gets: a way that holds fewer sequences at a time takes longer for each."""
    engine: dict[str, Any] = field(default_factory=dict)
    told: str = "nothing"
    """Of the length of an answer"""
    warm_up: float = 0.25
    """The share of its requests that join before iterations count"""


WAYS = {
    # The longest answers decide its figure: of so few requests nearly all have to count.
    "ft-max": Way("ft-max", 0.4, warm_up=0.05),
    "s3": Way("s3", 0.5, told="least"),
    "contiguous": Way("s3", 0.5, {"contiguous": True}, told="least"),
    "oracle": Way("oracle", 0.7, told="length"),
    "paged-chunk": Way("paged-chunk", 1.0),
}
BASELINE = "ft-max"


@dataclass
class ForcedClient(StreamingClient):
    """Its answers have the length that is asked for."""

    told: str = "nothing"

    def is_whole(self, answer: bytes, ask: Ask) -> bool:
        return DONE in answer if self.told == "nothing" else super().is_whole(answer, ask)

    def body_of(self, ask: Ask) -> dict[str, Any]:
        body = super().body_of(ask) | {"priority": 1}
        if self.told == "length":
            return body
        body |= {"ignore_eos": False, "max_tokens": CONTEXT - len(ask.prompt)}
        if self.told == "least":
            return body | {"min_tokens": ask.output - 1, "logit_bias": {str(END): LARGEST_BIAS}}
        before_end = ask.output - 1.5  # between the last time that the repeated token is preferred, and the first not
        penalty = min(LARGEST_PENALTY, (LARGEST_BIAS - BIAS_OF_END) / max(1.0, before_end))
        preferred = min(LARGEST_BIAS, BIAS_OF_END + penalty * before_end)
        biases = {str(REPEATED): preferred, str(END): BIAS_OF_END}
        return body | {"frequency_penalty": penalty, "logit_bias": biases}


# -- one way -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """Means over the iterations that count."""

    tokens: float
    sequences: float
    milliseconds: float
    parked: float
    """The share of the requests that ever lost their pages"""
    moved: int
    """Pages of runs that were moved so that holes closed, in all iterations"""


def held_in(lines: Iterable[dict[str, Any]], requests: int, warm_up: float) -> Held:
    """`lines` of a step trace"""
    joined, parked = set[str](), set[str]()
    begin = TAUGHT + warm_up * (requests - TAUGHT)
    tokens, sequences, times, moved = list[int](), list[int](), list[float](), 0
    for line in lines:
        joined.update(line.get("promises", ()))
        parked.update(park["request"] for park in line.get("parks", ()))
        moved += line.get("moved", 0)
        if begin <= len(joined) < requests:
            tokens.append(line["context"] + line["prefill"])
            sequences.append(line["decode"])
            times.append(line["ms"])
    if not tokens:
        raise SystemExit(f"{requests} requests do not fill the memory; raise --requests")
    return Held(fmean(tokens), fmean(sequences), fmean(times), len(parked) / requests, moved)


def asks(count: int) -> list[Ask]:
    workload = lognormal_workload("alpaca", CONTEXT, (19.3, 58.45), (0.6, 1.0), count)
    drawn = random.Random(0)
    return [Ask(random_prompt(drawn, one.prompt, SHAPE.vocabulary), one.output) for one in workload.requests]


def run(name: str, given: Namespace) -> Held:
    way = WAYS[name]
    asked = asks(TAUGHT + int(way.requests_share * given.requests))
    engine = {
        "preset": way.preset,
        "dtype": SHAPE.dtype,
        "kvCacheMiB": KV_MIB,
        "maxModelLength": CONTEXT,
        "maxConcurrentSequences": PLACES,
        "prefixCache": False,
        **way.engine,
    }
    with tempfile.TemporaryDirectory(prefix="mt", dir="/tmp") as folder:
        trace = Path(folder) / "steps.jsonl"
        env = {"MOTET_RUNNER_KERNELS": "torch", "MOTET_RUNNER_THREADS": "1", "MOTET_STEP_TRACE": str(trace)}
        with serving(Path(folder), random_llama(SHAPE, SCRATCH), (), engine=engine, env=env) as stack:
            asyncio.run(_serve(ForcedClient(stack.port, told=way.told), asked, given))
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
    held = held_in(lines, len(asked), way.warm_up)
    share = held.tokens / (SEQUENCES * CONTEXT)
    print(
        f"  {name:<12} {held.tokens:6.0f} resident tokens of {held.sequences:5.1f} sequences, {share:5.1%} of memory; "
        f"{held.milliseconds:.1f} ms an iteration, {held.parked:.1%} ever parked, {held.moved} pages moved",
        flush=True,
    )
    return held


async def _serve(client: ForcedClient, asked: Sequence[Ask], given: Namespace) -> None:
    try:
        await client.ask_in_turn(asked[:TAUGHT], at_once=SEQUENCES)
        await client.ask_in_turn(asked[TAUGHT:], at_once=PLACES // 2 + given.waiting)
    finally:
        await client.close()


# -- all of them -------------------------------------------------------------------------------------------------------


def measure(given: Namespace) -> list[Result]:
    print(f"memory for {SEQUENCES} sequences of {CONTEXT} tokens, {given.requests} requests at most")
    found = {name: run(name, given) for name in WAYS if name in {BASELINE, *given.only}}
    results = []
    for name in islice(found, 1, None):
        of, least = ("s3", CONTIGUOUS) if name == "contiguous" else (BASELINE, LEAST[name])
        if of in found:
            result = "contiguous_s3" if name == "contiguous" else f"live_resident_{name.partition('-')[0]}"
            ratio = found[name].tokens / found[of].tokens
            results.append(Result(result, ratio, "x", f">= {least:g} x {of}", ratio >= least))
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=1200, help="requests of the way that holds the most")
    parser.add_argument("--waiting", type=int, default=48, help="requests that wait, beside those that may run")
    parser.add_argument("--only", nargs="+", default=list(WAYS), choices=list(WAYS), help="beside the baseline")
    given = parser.parse_args()
    report("memory", measure(given), as_json=given.json)


if __name__ == "__main__":
    main()
