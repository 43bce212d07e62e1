"""What the ways of managing memory make of a saturated runner, as throughput in virtual time.

A step takes 44 ms, 0.43 ms for each sequence that decodes and 0.18 ms for each prompt token: Llama-2-70B on eight A100
by the data of Splitwise, continued beyond 64 sequences. The throughput is that of the requests that end between the
first quarter of them and the step in which the last one begins. All run the real plan without a limit on
sequences, with prompts in chunks of 512 tokens but for the presets `ft-max`, `s3` and `oracle`:

- `promises`: promises of the 80 % quantile, whose sum the memory holds: the preset `paged-promises`;
- `forecast`: the largest need at any later step is forecast to fit, as by the preset `paged-chunk`. All it knows are
  four quantiles of all answers;
- `on demand`: as vLLM, which by default admits prompts as a whole (`scheduler_reserve_full_isl`). A request begins when
  its prompt has pages; when pages are short, the newest request loses its own and is computed again, before others
  begin;
- `ratio`: as SGLang. A request begins if the tokens that are left to all others, times one ratio, leave room for all of
  its own. The ratio falls from 0.7 to 0.098 in 600 steps. When pages are short, the requests with the fewest tokens
  lose theirs until 20 steps have room, and the ratio becomes what would have sufficed;
- `told`: as `forecast`, but it knows each length: what the best estimates could give, while requests begin by arrival.

`recomputed` is the share of computed tokens that had been computed before; `parked` that of requests that ever lost
their pages. Mistaken estimates are all halved or all doubled.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness import Result
from benchmarks.virtual_plan import Request, Runner, Step, Waiting, Workload, workloads
from motet.domain import PAGE_TOKENS, ParkMethod, RequestId, pages_for
from motet_runner.interface import NewSequence, State
from motet_runner.plan import Sequence

STEP_MS, SEQUENCE_MS, PROMPT_TOKEN_MS = 44.0, 0.43, 0.18
WARM_UP = 0.25
TOKENS = {"alpaca": 8192}
USUAL_TOKENS = 16384
"""Of keys and values."""
MANY_SHORT = 4
"""How many times as many requests there are where the memory holds hundreds at once."""
FIRST_RATIO, LAST_RATIO, RATIO_STEPS = 0.7, 0.098, 600
LONGEST_COUNTED = 4096
"""No request counts with more tokens of its answer."""
STEPS_WITH_ROOM = 20
PRESSED = ("azure_conv", "sharegpt")
"""The workloads on which pages are short."""
SURELY_LONGEST = (1 << 50,) * 4
"""Quantiles of an answer that ends at its `max_tokens`"""
MISTAKES: dict[str, float] = {"halved": 0.5, "doubled": 2.0}


class OnDemand(Runner):
    def __init__(self, workload: Workload, *, pages: int) -> None:
        super().__init__(workload, "paged", pages=pages, places=pages)
        self.planner.commands.supervised = True  # we resume, by the rule of this way

    def _admit(self) -> None:
        for sequence in self._parked():
            if not self._is_resumed(sequence):
                return
        while self.waiting and self._may_begin(*self._size(self.waiting[0].request)):
            self.planner.commands.add(self._new(self.waiting.pop(0)))

    def _size(self, request: Request) -> tuple[int, int]:
        """Its tokens, and how many its client lets come."""
        return request.prompt, self.workload.max_tokens(self.preset, request)

    def _parked(self) -> list[Sequence]:
        return self.planner.sequences.parked()

    def _is_resumed(self, sequence: Sequence) -> bool:
        if not self._may_begin(sequence.length, _left(sequence)):
            return False
        sequence.parked_times = 0  # of this way, the newest is the victim however often it was before
        return self.planner.commands.resume(
            sequence.request, sequence.new.epoch, pages_for(sequence.length, PAGE_TOKENS) + 1
        )

    def _may_begin(self, tokens: int, _left: int) -> bool:
        return pages_for(tokens, PAGE_TOKENS) <= self._pages_left()

    def _pages_left(self) -> int:
        """Pages that nobody holds or is about to take for a prompt."""
        to_take = (
            pages_for(one.length, PAGE_TOKENS) - len(one.pages)
            for one in self.planner.sequences
            if one.state is not State.PARKED and not one.decodes
        )
        return self.planner.memory.pages.free - sum(to_take)


class GlobalRatio(OnDemand):
    def __init__(self, workload: Workload, *, pages: int) -> None:
        super().__init__(workload, pages=pages)
        self._ratio = FIRST_RATIO
        self._begun = 0.0
        """What the answers of those that begin in this step count beyond the ratio: they count in full."""

    def _admit(self) -> None:
        self._ratio = max(LAST_RATIO, self._ratio - (FIRST_RATIO - LAST_RATIO) / RATIO_STEPS)
        self._retract()
        self._begun = 0.0
        super()._admit()

    def _may_begin(self, tokens: int, left: int) -> bool:
        running = [one for one in self.planner.sequences if one.state is not State.PARKED]
        if not running:
            return True
        to_come = sum(min(_left(one), LONGEST_COUNTED) for one in running)
        answer = min(left, LONGEST_COUNTED)
        if tokens + answer >= self._pages_left() * PAGE_TOKENS - self._ratio * to_come - self._begun:
            return False
        self._begun += (1 - self._ratio) * answer
        return True

    def _retract(self) -> None:
        running = [one for one in self.planner.sequences if one.decodes and one.state is not State.PARKED]
        pages = self.planner.memory.pages
        if pages.free >= sum(one.scheduled % PAGE_TOKENS == 0 for one in running):
            return
        running.sort(key=lambda one: (-one.output_tokens, len(one.new.prompt)))
        while len(running) > 1 and pages.free * PAGE_TOKENS < STEPS_WITH_ROOM * len(running):
            one = running.pop()
            self.planner.commands.park(one.request, one.new.epoch, one.promise, one.promise, ParkMethod.RECOMPUTE)
        decoded = sum(one.output_tokens + STEPS_WITH_ROOM for one in running)
        self._ratio = min(1.0, decoded / sum(one.new.sampling.max_tokens for one in running))


class Told(Runner):
    def __init__(self, workload: Workload, *, pages: int) -> None:
        super().__init__(workload, "paged-chunk", pages=pages, places=pages)

    def _new(self, one: Waiting) -> NewSequence:
        new, length = super()._new(one), one.request.output
        return replace(new, quantiles=SURELY_LONGEST, sampling=replace(new.sampling, max_tokens=length))


def _left(sequence: Sequence) -> int:
    """How many tokens may still come."""
    return sequence.new.sampling.max_tokens - sequence.output_tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    tokens_per_second: float
    recomputed: float
    parked: float


def virtual_milliseconds(step: Step) -> float:
    return STEP_MS + SEQUENCE_MS * step.decodes + PROMPT_TOKEN_MS * sum(step.prefills)


def run(runner: Runner, milliseconds_of: Callable[[Step], float] = virtual_milliseconds) -> Outcome:
    """All requests of the runner, from the first to the last. `milliseconds_of` is asked for each step."""
    requests = runner.workload.requests
    first = int(WARM_UP * len(requests))
    milliseconds, tokens, computed, ended = 0.0, 0, 0, 0
    parked: set[RequestId] = set()
    while runner.busy:
        step = runner.step()
        took = milliseconds_of(step)
        computed += step.computed
        parked.update(step.parked)
        ended += len(step.ended)
        if ended >= first and (runner.coming or runner.waiting):
            tokens += sum(runner.worker.outputs[request] for request in step.ended)
            milliseconds += took
    if not milliseconds:
        raise SystemExit(f"{len(requests)} requests do not fill the memory; raise --in-plan")
    once = sum(request.prompt + request.output - 1 for request in requests)
    return Outcome(1000 * tokens / milliseconds, 1 - once / computed, len(parked) / len(requests))


def _preset(name: str, factor: float = 1.0) -> Callable[[Workload, int], Runner]:
    return lambda workload, pages: Runner(workload, name, pages=pages, places=pages, mistaken=lambda _: factor)


WAYS: dict[str, Callable[[Workload, int], Runner]] = {
    "forecast": _preset("paged-chunk"),
    "promises": _preset("paged-promises"),
    "on demand": lambda workload, pages: OnDemand(workload, pages=pages),
    "ratio": lambda workload, pages: GlobalRatio(workload, pages=pages),
} | {f"{name} estimates": _preset("paged-chunk", factor) for name, factor in MISTAKES.items()}
TOLD: dict[str, Callable[[Workload, int], Runner]] = {"told": lambda workload, pages: Told(workload, pages=pages)}
OF_MEMORY = ("ft-max", "s3", "oracle")
"""The presets that are compared with both where promises of the model's maximum are one of them."""


def run_all(workload: Workload, ways: dict[str, Callable[[Workload, int], Runner]], tokens: int) -> dict[str, Outcome]:
    print(f"{workload.name}: {len(workload.requests)} requests, {tokens} tokens of keys and values")
    outcomes = {}
    for name, way in ways.items():
        found = outcomes[name] = run(way(workload, tokens // PAGE_TOKENS))
        print(
            f"  {name:<17} {found.tokens_per_second:6.0f} tokens/s, recomputed {found.recomputed:5.1%}, "
            f"ever parked {found.parked:5.1%}"
        )
    return outcomes


def measure(count: int, data: Path | None) -> list[Result]:
    given = {workload.name: workload for workload in workloads(count, data)}
    given["alpaca"] = next(workloads(MANY_SHORT * count, None))
    results = _against_baseline(given["alpaca"])
    found = {
        name: run_all(given[name], WAYS | TOLD if name in PRESSED else WAYS, TOKENS.get(name, USUAL_TOKENS))
        for name in given
    }
    gains = {name: _gain(ways, "on demand") for name, ways in found.items()}
    for name, gain in gains.items():
        results.append(Result(f"throughput_vs_paged_{name}", gain, "x"))
        results += [
            Result(f"mistaken_{how}_{name}", _gain(found[name], "on demand", f"{how} estimates"), "x")
            for how in MISTAKES
        ]
        if name in PRESSED:
            results.append(Result(f"told_vs_paged_{name}", _gain(found[name], "on demand", "told"), "x"))
    if not set(PRESSED) <= found.keys():
        return results
    worst = min(gain for name, gain in gains.items() if name != PRESSED[0])
    recomputed = max(found[name]["forecast"].recomputed for name in PRESSED)
    parked = max(found[name]["forecast"].parked / found[name]["on demand"].parked for name in PRESSED)
    ratio = min(_gain(ways, "ratio") for ways in found.values())
    return [
        *results,
        _at_least("throughput_vs_paged_pressure", gains[PRESSED[0]], 1.07),
        _at_least("throughput_vs_paged_worst", worst, 0.99),
        Result("recomputed_share", recomputed, "", "<= 0.05", recomputed <= 0.05),
        Result("parked_vs_paged", parked, "x", "<= 0.2 x", parked <= 0.2),
        _at_least("throughput_vs_ratio", ratio, 1.1),
    ]


def _against_baseline(workload: Workload) -> list[Result]:
    ways = {name: _preset(name) for name in OF_MEMORY} | {name: WAYS[name] for name in ("forecast", "on demand")}
    found = run_all(workload, ways, USUAL_TOKENS)
    return [
        _at_least("throughput_vs_ftmax", _gain(found, "ft-max"), 5.7),
        Result("paged_vs_ftmax", _gain(found, "ft-max", "on demand"), "x"),
        _at_least("s3_vs_ftmax", _gain(found, "ft-max", "s3"), 3.8),
        Result("oracle_vs_s3", _gain(found, "s3", "oracle"), "x"),
    ]


def _gain(found: dict[str, Outcome], over: str, way: str = "forecast") -> float:
    return found[way].tokens_per_second / found[over].tokens_per_second


def _at_least(name: str, value: float, least: float) -> Result:
    return Result(name, value, "x", f">= {least:g} x", value >= least)
