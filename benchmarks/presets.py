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

Predictions are perfect: `s3` knows the bucket, `oracle` the length; `paged-chunk` promises the 80 % quantile of all
answers. Clients give no limit, except for `orca`, whose promise is that limit: the next power of two above the answer.

`iteration_vs_request` compares the throughput of `ft-max` and `request-level` with as many places and pages. A step
takes 1 + 0.004 for each of its tokens. A request-level batch is a rectangle, as in the systems that Orca was compared
with: prompts are padded to the longest one, and an answer that ended still costs a token in every step until the
longest one ends. Prompts have 32 to 512 tokens and answers 1 to 128, evenly.

    python -m benchmarks.presets [--requests 4000] [--in-plan 800] [--data FOLDER] [--json]
"""

import csv
import gzip
import os
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import exp, inf, isinf, log
from pathlib import Path
from statistics import NormalDist, fmean

from benchmarks.harness import Result, arguments, percentile, report
from motet import promises
from motet.domain import PAGE_TOKENS, RequestId, pages_for
from motet.promises import PromiseRule
from motet_runner.interface import NewSequence, Sampling, State
from motet_runner.plan import PRESETS, Planner, Preset, StepPlan, StepResult
from motet_runner.plan.joining import choose, passed_over

COMPARED = PRESETS | {"paged": replace(PRESETS["paged-chunk"], overcommit=inf)}
"""`paged` is what the default preset comes to when the supervisor raises its overcommit: pages on demand."""
BASELINE = "ft-max"
TARGETS = {"s3": 6.5, "oracle": 11.0, "paged": 17.0}
"""On Alpaca-like lengths, as factors over the baseline."""
STEP, STEP_PER_TOKEN = 1.0, 0.004
ITERATION_VS_REQUEST = 1.7
PLACES = (8, 32)
WINDOW = 64
"""Requests among which a preset may choose."""
LONGEST_LIVES = 4
"""The memory of the saturated plan, in requests of the longest life."""
WARM_UP = 0.25
AZURE = {"azure_conv": "azure_llm_2023_conv.csv.gz", "azure_code": "azure_llm_2023_code.csv.gz"}
GOES_ON, ENDS = 0, 1
"""Tokens. The second one stops every sequence."""


@dataclass(frozen=True, slots=True)
class Request:
    prompt: int
    output: int

    @property
    def limit(self) -> int:
        """The `max_tokens` of a client that knows its answers roughly."""
        return 1 << (self.output - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    context: int
    requests: list[Request]

    @property
    def q80(self) -> int:
        return int(percentile([request.output for request in self.requests], 0.8))

    def max_tokens(self, preset: Preset, request: Request) -> int:
        longest = self.context - request.prompt
        return min(request.limit, longest) if preset.promise is PromiseRule.MAX_TOKENS else longest

    def expected(self, name: str, request: Request) -> int:
        return request.output if name in ("s3", "oracle") else self.q80

    def promise(self, name: str, request: Request) -> int:
        """Pages of the first promise."""
        return promises.pages_by_rule(
            COMPARED[name].promise,
            request.prompt,
            self.max_tokens(COMPARED[name], request),
            expected=self.expected(name, request),
            context_tokens=self.context,
        )


# -- lengths -----------------------------------------------------------------------------------------------------------


def lognormal(mean: float, sigma: float, count: int) -> list[int]:
    """Even quantiles of a lognormal law with this mean."""
    mu = log(mean) - sigma**2 / 2
    at = NormalDist().inv_cdf
    return [max(1, round(exp(mu + sigma * at((index + 0.5) / count)))) for index in range(count)]


def lognormal_workload(
    name: str, context: int, means: tuple[float, float], sigmas: tuple[float, float], count: int
) -> Workload:
    chance = random.Random(1)
    prompts, outputs = (lognormal(mean, sigma, count) for mean, sigma in zip(means, sigmas, strict=True))
    chance.shuffle(prompts)
    chance.shuffle(outputs)
    pairs = zip(prompts, outputs, strict=True)
    fitting = [Request(prompt, min(output, context - prompt)) for prompt, output in pairs if prompt < context]
    return Workload(name, context, fitting)


def azure_workload(name: str, path: Path, context: int, count: int) -> Workload:
    """The first requests of a trace, in its order; those that exceed the context are left out."""
    with gzip.open(path, "rt") as file:
        rows = ((int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file))
        fitting = (Request(max(1, tokens), out) for tokens, out in rows if out >= 1 and tokens + out <= context)
        return Workload(name, context, list(islice(fitting, count)))


def workloads(count: int, data: Path | None, *, tell: bool = False) -> Iterator[Workload]:
    yield lognormal_workload("alpaca", 2048, (19.3, 58.45), (0.6, 1.0), count)
    yield lognormal_workload("sharegpt", 2048, (161.31, 337.99), (1.3, 1.0), count)
    for name, file in AZURE.items():
        path = data / "traces" / file if data else None
        if path is None or not path.is_file():
            if tell:
                print(f"{name}: left out; --data or TEST_DATA names no folder with traces/{file}")
            continue
        yield azure_workload(name, path, 8192, count)


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


def held_by(workload: Workload, name: str, requests: Iterable[Request]) -> Held:
    """What requests hold while they generate. At step t there are the prompt and t - 1 output tokens in memory."""
    preset = COMPARED[name]
    steps, tokens, pages = 0, 0, 0.0
    for request in requests:
        promise = workload.promise(name, request)
        most = promises.max_pages(request.prompt, workload.max_tokens(preset, request))
        for length in range(request.prompt, request.prompt + request.output):
            needed = pages_for(length)
            while needed > promise:
                promise = promises.doubled_pages(promise, most)
            pages += needed if isinf(preset.overcommit) else promise / preset.overcommit
            tokens += length
        steps += request.output
    return Held(steps, tokens, pages)


# -- the real plan in virtual time -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Waiting:
    """A request that has arrived, as `motet_runner.plan.joining` looks at it."""

    arrival: int
    promise: int
    request: Request
    passed_over: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What one iteration computed, and what lay in memory while it did."""

    prefills: list[int]
    """Tokens of each prompt."""
    decodes: int
    tokens: int
    """Tokens in memory."""
    pages: int
    """Pages that hold them."""
    promised: int
    """Pages."""

    @property
    def computed(self) -> int:
        return sum(self.prefills) + self.decodes


class VirtualWorker:
    """Takes no time and no tensors. It knows whose the rows are, and which token is the last of each."""

    def __init__(self) -> None:
        self.outputs: dict[RequestId, int] = {}
        """Request → its output tokens."""
        self._left: dict[int, int] = {}
        """Row → output tokens that are still to come."""

    def run(self, plan: StepPlan) -> StepResult:
        for row in plan.leaves:
            del self._left[row]
        for join in plan.joins:
            self._left[join.row] = self.outputs[join.request] - (len(join.tokens) - join.prompt_tokens)
        sampled = []
        for step in plan.rows:
            if step.samples:
                self._left[step.row] -= 1
                sampled.append(GOES_ON if self._left[step.row] else ENDS)
        return StepResult(number=plan.number, sampled=tuple(sampled), model_calls=1)


def iterate(planner: Planner, worker: VirtualWorker) -> Step:
    """One iteration of the plan."""
    plan = planner.plan()
    if plan is None:
        raise RuntimeError("somebody waits, and the plan lets nobody run")
    step = Step(
        [row.count for row in plan.prefills],
        len(plan.decodes),
        sum(sequence.scheduled for sequence in planner.sequences),
        planner.memory.pages.capacity - planner.memory.pages.free,
        planner.memory.ledger.promised,
    )
    planner.collect(worker.run(plan))
    outputs, _ = planner.take_outputs()
    failed = [output.request for output in outputs if output.error]
    if failed:
        raise RuntimeError(f"the plan gave up {failed}")
    return step


class Runner:
    """A plan whose memory and places are filled as soon as the preset allows."""

    def __init__(self, workload: Workload, name: str, *, pages: int, places: int) -> None:
        self.workload, self.name, self.preset, self.places = workload, name, COMPARED[name], places
        self.unlimited = isinf(self.preset.overcommit)
        self.planner = Planner(
            pages=pages,
            preset=self.preset,
            places=places,
            chunk_tokens=self.preset.prefill_tokens or 0,
            max_length=workload.context,
            vocabulary=2,
            max_adapters=1,
            pages_of_rank=lambda _: 1,
        )
        # No promise exceeds the pages, so with this factor none is ever refused.
        self.planner.commands.set_overcommit(places if self.unlimited else self.preset.overcommit)
        self.coming = deque(workload.requests)
        self.waiting: list[Waiting] = []
        self.worker = VirtualWorker()
        self.arrivals = 0

    @property
    def saturated(self) -> bool:
        return bool(self.waiting)

    @property
    def busy(self) -> bool:
        return bool(self.coming or self.waiting or len(self.planner.sequences))

    def step(self) -> Step:
        self._arrive()
        self._admit()
        return iterate(self.planner, self.worker)

    def _arrive(self) -> None:
        while self.coming and len(self.waiting) < WINDOW:
            request = self.coming.popleft()
            self.arrivals += 1
            self.waiting.append(Waiting(self.arrivals, self.workload.promise(self.name, request), request))

    def _admit(self) -> None:
        joining = choose(
            self.waiting, self.preset, places=self.places - len(self.planner.sequences), pages=self._free_pages()
        )
        if not joining:
            return
        for one in passed_over(self.waiting, joining):
            one.passed_over += 1
        for one in joining:
            self.planner.commands.add(self._new(one))
            self.waiting.remove(one)

    def _free_pages(self) -> int:
        """What new requests may be promised; sequences that are parked come back first. Where promises have no limit,
        pages that nobody holds or is about to take."""
        parked = sum(sequence.wanted for sequence in self.planner.sequences if sequence.state is State.PARKED)
        if not self.unlimited:
            return self.planner.memory.ledger.free - parked
        if parked:
            return 0
        return self.planner.memory.pages.free - sum(
            sequence.promise for sequence in self.planner.sequences if not sequence.started
        )

    def _new(self, one: Waiting) -> NewSequence:
        request, name = one.request, RequestId(f"r{one.arrival}")
        self.worker.outputs[name] = request.output
        return NewSequence(
            request=name,
            epoch=1,
            prompt=(GOES_ON,) * request.prompt,
            promise=one.promise,
            sampling=Sampling(
                max_tokens=self.workload.max_tokens(self.preset, request), stop_token_ids=frozenset([ENDS])
            ),
        )


@dataclass(frozen=True, slots=True)
class Saturated:
    """A plan whose memory was kept full: means over its steps."""

    tokens: float
    sequences: float
    share: float
    """Of the memory that held tokens."""


def saturate(workload: Workload, name: str) -> Saturated:
    pages = LONGEST_LIVES * pages_for(workload.context)
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
    runner = Runner(workload, name, pages=places * pages_for(workload.context), places=places)
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
    pages = LONGEST_LIVES * pages_for(workload.context)
    requests = workload.requests
    print(
        f"{workload.name}: {len(requests)} requests, on average {fmean(r.prompt for r in requests):.1f} tokens in and "
        f"{fmean(r.output for r in requests):.1f} out, model maximum {workload.context}; {pages} pages of "
        f"{PAGE_TOKENS} tokens, {len(in_plan.requests)} requests in the plan"
    )
    sums = {name: held_by(workload, name, requests) for name in COMPARED if not COMPARED[name].request_level}
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
    return [result for pair in pairs for result in residency(*pair)] + batching(min(count, 1500))


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
