"""The real plan of a runner (composer, ledger, pages, parking) in virtual time, and the lengths of the requests that
benchmarks run in it. No model runs, and no clock is read."""

import csv
import gzip
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import exp, inf, isinf, log
from pathlib import Path
from statistics import NormalDist

from benchmarks.harness import percentile
from motet import promises
from motet.domain import PAGE_TOKENS, RequestId
from motet.errors import Declined
from motet.promises import PromiseRule
from motet_runner.interface import NewSequence, ParkedNow, Sampling, State
from motet_runner.plan import PRESETS, Planner, Preset, StepPlan, StepResult
from motet_runner.plan.joining import choose, passed_over

COMPARED = PRESETS | {"paged": replace(PRESETS["paged-promises"], overcommit=inf)}
"""`paged` is the default preset without a limit on promises: pages on demand."""
WINDOW = 64
"""Requests among which a preset may choose."""
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
    def quantiles(self) -> tuple[int, int, int, int]:
        """q50, q80, q90 and q95 of all answers: what running statistics come to."""
        outputs = [request.output for request in self.requests]
        q50, q80, q90, q95 = (int(percentile(outputs, share)) for share in (0.5, 0.8, 0.9, 0.95))
        return q50, q80, q90, q95

    @property
    def q80(self) -> int:
        return self.quantiles[1]

    def max_tokens(self, preset: Preset, request: Request) -> int:
        longest = self.context - request.prompt
        return min(request.limit, longest) if preset.promise is PromiseRule.MAX_TOKENS else longest

    def expected(self, name: str, request: Request) -> int:
        return request.output if name in ("s3", "oracle") else self.q80

    def promise(self, name: str, request: Request, mistaken: float = 1.0) -> int:
        """Pages of the first promise, by an estimate that is wrong by this factor."""
        return promises.pages_by_rule(
            COMPARED[name].promise,
            request.prompt,
            self.max_tokens(COMPARED[name], request),
            expected=max(1, round(mistaken * self.expected(name, request))),
            context_tokens=self.context,
            page_tokens=PAGE_TOKENS,
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


# -- the real plan in virtual time -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Waiting:
    """A request that has arrived, as `motet_runner.plan.joining` looks at it."""

    arrival: int
    promise: int
    request: Request
    mistaken: float = 1.0
    """By which factor its estimate is wrong."""
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
    """Pages, if promises are what keeps others out."""
    parked: list[RequestId]
    """Requests that lost their pages before it."""
    ended: list[RequestId]

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
        planner.memory.ledger.total,
        [],
        [],
    )
    planner.collect(worker.run(plan))
    outputs, events = planner.take_outputs()
    step.parked.extend(event.request for event in events if isinstance(event, ParkedNow))
    step.ended.extend(output.request for output in outputs if output.finish)
    failed = [output.request for output in outputs if output.error]
    if failed:
        raise RuntimeError(f"the plan gave up {failed}")
    return step


class Runner:
    """A plan whose memory and places are filled as soon as the preset allows."""

    def __init__(
        self,
        workload: Workload,
        name: str,
        *,
        pages: int,
        places: int,
        mistaken: Callable[[int], float] = lambda _: 1.0,
    ) -> None:
        """`mistaken`: by which factor the estimate for the request of this arrival is wrong."""
        self.workload, self.name, self.preset, self.places = workload, name, COMPARED[name], places
        self.unlimited = isinf(self.preset.overcommit)
        self.planner = Planner(
            page_tokens=PAGE_TOKENS,
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
        self.mistaken, self.quantiles = mistaken, workload.quantiles
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
            factor = self.mistaken(self.arrivals)
            promise = self.workload.promise(self.name, request, factor)
            self.waiting.append(Waiting(self.arrivals, promise, request, factor))

    def _admit(self) -> None:
        if self.preset.admission == "forecast":
            while self.waiting and len(self.planner.sequences) < self.places and self._is_added(self.waiting[0]):
                del self.waiting[0]
            return
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

    def _is_added(self, one: Waiting) -> bool:
        try:
            self.planner.commands.add(self._new(one))
        except Declined:
            return False
        return True

    def _free_pages(self) -> int:
        """What new requests may be promised: nothing while sequences are parked, which come back first. Where promises
        have no limit, pages that nobody holds or is about to take."""
        if any(sequence.state is State.PARKED for sequence in self.planner.sequences):
            return 0
        if not self.unlimited:
            return self.planner.memory.ledger.free
        return self.planner.memory.pages.free - sum(
            sequence.promise for sequence in self.planner.sequences if not sequence.started
        )

    def _new(self, one: Waiting) -> NewSequence:
        request, name = one.request, RequestId(f"r{one.arrival}")
        self.worker.outputs[name] = request.output
        q50, q80, q90, q95 = (max(1, round(one.mistaken * quantile)) for quantile in self.quantiles)
        return NewSequence(
            request=name,
            epoch=1,
            prompt=(GOES_ON,) * request.prompt,
            promise=one.promise,
            quantiles=(q50, q80, q90, q95),
            sampling=Sampling(
                max_tokens=self.workload.max_tokens(self.preset, request), stop_token_ids=frozenset([ENDS])
            ),
        )
