"""Compares what the presets make of the same KV memory, in virtual time: no model runs, and no clock is read.

Resident tokens are the tokens whose keys and values lie in memory, on average over the steps of a saturated runner. A
preset decides them by what it promises: each request holds its pages for as many steps as it generates tokens. The
figures are exact sums over the requests, made with the presets' own rules (`motet.promises`). `resident_*` is the ratio
to `ft-max`, which promises the model's maximum. `paged` is the default preset without a limit on promises: pages are
held once there are tokens for them. The real plan (composer, ledger, pages, parking) runs requests of the same lengths,
too, in a memory that they fill: `resident_*_in_plan`. Where answers are short, presets that limit the prompt tokens of
an iteration stay below their sums there: not enough sequences join to fill the memory.

The lengths are lognormal: Alpaca-like (means 19.3 in and 58.45 out, sigma 0.6 and 1.0) and ShareGPT-like (161.31 and
337.99, 1.3 and 1.0); the means are those of the PagedAttention paper. They are even quantiles, so no chance is in the
sums. The lengths of the Azure traces of 2023 are read from the folder that `--data` or TEST_DATA names.

Predictions are perfect: `s3` knows the bucket, `oracle` the length; `paged-promises` promises the 80 % quantile of all
answers. `paged-chunk` knows four quantiles of them, and nothing of the single answer; the module `memory_pressure`
compares its throughput with other ways, and `misprediction` says what wrong promises of `s3` cost. Clients give no
limit, except for `orca`, whose promise is that limit: the next power of two above the answer.

`iteration_vs_request` compares the throughput of `ft-max` and `request-level` with as many places and pages. A step
takes 1 + 0.004 for each of its tokens. A request-level batch is a rectangle, as in the systems that Orca was compared
with: prompts are padded to the longest one, and an answer that ended still costs a token in every step until the
longest one ends. Prompts have 32 to 512 tokens and answers 1 to 128, evenly.

    python -m benchmarks.presets [--requests 4000] [--in-plan 800] [--data FOLDER] [--json]
"""

import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from math import isinf
from pathlib import Path
from statistics import fmean

from benchmarks import memory_pressure, misprediction
from benchmarks.harness import Result, arguments, report
from benchmarks.virtual_plan import COMPARED, Request, Runner, Workload, workloads
from motet import promises
from motet.domain import PAGE_TOKENS, pages_for

BASELINE = "ft-max"
TARGETS = {"s3": 6.5, "oracle": 11.0, "paged": 17.0}
"""On Alpaca-like lengths, as factors over the baseline."""
STEP, STEP_PER_TOKEN = 1.0, 0.004
ITERATION_VS_REQUEST = 1.7
PLACES = (8, 32)
LONGEST_LIVES = 4
"""The memory of the saturated plan, in requests of the longest life."""
WARM_UP = 0.25


# -- exact sums --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """Sums over the steps of requests."""

    steps: int
    tokens: int
    """Tokens in memory."""
    pages: float
    """Pages that nobody else could be promised."""

    @property
    def tokens_per_page(self) -> float:
        return self.tokens / self.pages


def has_sums(name: str) -> bool:
    """True if what a request holds depends on itself alone."""
    return not COMPARED[name].request_level and COMPARED[name].admission == "promises"


def held_by(workload: Workload, name: str, requests: Iterable[Request]) -> Held:
    """What requests hold while they generate. At step t there are the prompt and t - 1 output tokens in memory."""
    preset = COMPARED[name]
    steps, tokens, pages = 0, 0, 0.0
    for request in requests:
        promise = workload.promise(name, request)
        most = promises.max_pages(request.prompt, workload.max_tokens(preset, request), page_tokens=PAGE_TOKENS)
        for length in range(request.prompt, request.prompt + request.output):
            needed = pages_for(length, PAGE_TOKENS)
            while needed > promise:
                promise = promises.doubled_pages(promise, most)
            pages += needed if isinf(preset.overcommit) else promise / preset.overcommit
            tokens += length
        steps += request.output
    return Held(steps, tokens, pages)


@dataclass(frozen=True, slots=True)
class Saturated:
    """A plan whose memory was kept full: means over its steps."""

    tokens: float
    sequences: float
    share: float
    """Of the memory that held tokens."""


def saturate(workload: Workload, name: str) -> Saturated:
    pages = LONGEST_LIVES * pages_for(workload.context, PAGE_TOKENS)
    runner = Runner(workload, name, pages=pages, places=pages)
    tokens, sequences = list[int](), list[int]()
    while runner.coming:
        step = runner.step()
        tokens.append(step.tokens)
        sequences.append(step.decodes + len(step.prefills))
    begin = int(WARM_UP * len(tokens))
    mean = fmean(tokens[begin:])
    return Saturated(mean, fmean(sequences[begin:]), mean / (pages * PAGE_TOKENS))


# -- iteration-level against request-level batches ---------------------------------------------------------------------


def spread_workload(count: int) -> Workload:
    """Prompts of 32 to 512 tokens and answers of 1 to 128, evenly."""
    chance = random.Random(2)
    prompts = [32 + 481 * index // count for index in range(count)]
    outputs = [1 + 128 * index // count for index in range(count)]
    chance.shuffle(prompts)
    chance.shuffle(outputs)
    requests = [Request(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
    return Workload("spread", 1024, requests)


def virtual_time(workload: Workload, name: str, places: int, *, rectangle: bool) -> float:
    """How long all requests take. With `rectangle`, a batch is padded to its longest prompt and keeps its size."""
    runner = Runner(workload, name, pages=places * pages_for(workload.context, PAGE_TOKENS), places=places)
    time, size = 0.0, 0
    while runner.busy:
        step = runner.step()
        tokens = step.computed
        if rectangle:
            size = len(step.prefills) or size
            tokens = size * max(step.prefills, default=1)
        time += STEP + STEP_PER_TOKEN * tokens
    return time


# -- the comparison ----------------------------------------------------------------------------------------------------


def residency(workload: Workload, in_plan: Workload) -> list[Result]:
    suffix = "" if workload.name == "alpaca" else f"_{workload.name}"
    pages = LONGEST_LIVES * pages_for(workload.context, PAGE_TOKENS)
    requests = workload.requests
    print(
        f"{workload.name}: {len(requests)} requests, on average {fmean(r.prompt for r in requests):.1f} tokens in and "
        f"{fmean(r.output for r in requests):.1f} out, model maximum {workload.context}; {pages} pages of "
        f"{PAGE_TOKENS} tokens, {len(in_plan.requests)} requests in the plan"
    )
    sums = {name: held_by(workload, name, requests) for name in COMPARED if has_sums(name)}
    plans = {name: saturate(in_plan, name) for name in COMPARED}
    results = []
    for name, plan in plans.items():
        line = f"  {name:<13} "
        if name in sums:
            exact = sums[name].tokens_per_page / sums[BASELINE].tokens_per_page
            line += f"sums: {sums[name].tokens_per_page * pages:5.0f} resident tokens, {exact:5.2f} x {BASELINE}; "
            target = TARGETS.get(name) if not suffix else None
            said = f">= {target:g} x {BASELINE}" if target else ""
            holds = exact >= target if target else None
            results.append(Result(f"resident_{name}{suffix}", exact, "x", said, holds))
        ratio = plan.tokens / plans[BASELINE].tokens
        line += f"plan: {plan.tokens:5.0f} of {plan.sequences:5.1f} sequences, {plan.share:5.1%} of memory, "
        print(f"{line}{ratio:5.2f} x")
        results.append(Result(f"resident_{name}{suffix}_in_plan", ratio, "x"))
    return results


def batching(count: int) -> list[Result]:
    workload = spread_workload(count)
    print(f"step = {STEP:g} + {STEP_PER_TOKEN:g} per token; {count} requests, prompts 32 … 512, answers 1 … 128")
    padded, unpadded = {}, {}
    for places in PLACES:
        ours = virtual_time(workload, BASELINE, places, rectangle=False)
        padded[places] = virtual_time(workload, "request-level", places, rectangle=True) / ours
        unpadded[places] = virtual_time(workload, "request-level", places, rectangle=False) / ours
        print(
            f"  {places} places: iteration-level has {padded[places]:.2f} x the throughput of request-level batches, "
            f"{unpadded[places]:.2f} x if those need no padding"
        )
    least = min(padded.values())
    target = f">= {ITERATION_VS_REQUEST} x"
    return [
        Result("iteration_vs_request", least, "x", target, least >= ITERATION_VS_REQUEST),
        Result("iteration_vs_unpadded", min(unpadded.values()), "x"),
    ]


def measure(count: int, count_in_plan: int, data: Path | None) -> list[Result]:
    pairs = zip(workloads(count, data, tell=True), workloads(count_in_plan, data), strict=True)
    held = [result for pair in pairs for result in residency(*pair)]
    wrong = misprediction.measure(next(workloads(memory_pressure.MANY_SHORT * count_in_plan, None)))
    return held + memory_pressure.measure(count_in_plan, data) + wrong + batching(min(count, 1500))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=4000, help="requests of each workload in the sums")
    parser.add_argument("--in-plan", type=int, default=800, help="requests of each workload that the plan runs")
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("TEST_DATA"), help="a folder with traces/azure_llm_2023_*.csv.gz"
    )
    given = parser.parse_args()
    report("presets", measure(given.requests, given.in_plan, given.data), as_json=given.json)


if __name__ == "__main__":
    main()
