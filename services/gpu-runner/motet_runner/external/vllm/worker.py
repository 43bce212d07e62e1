"""Lets vLLM compute what plans say. Each plan is an iteration of vLLM with exactly the plan's rows.

vLLM has no way to leave a request out of an iteration. So a row that a plan leaves out is aborted, and comes again with
the tokens that it has by then; vLLM finds their KV in its prefix cache. A part of a prompt is a request of its own that
begins alike: its one token is dropped.

A page of the plan is as large as a block of vLLM, and a row has as many of both. Which ones they are is vLLM's
business: page numbers mean nothing here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from motet.clock import Clock
from motet_runner.external.vllm.adapter_loads import AdapterLoads
from motet_runner.external.vllm.driven import Ask, Driven, Produced
from motet_runner.external.vllm.options import options_of
from motet_runner.plan import RowJoin, RowStep, StepPlan, StepResult

MAX_STEPS = 10_000
"""vLLM's iterations for one plan. vLLM cuts a prompt that is longer than its own limit."""


class LostStep(RuntimeError):
    """vLLM does not compute what it was asked to."""


@dataclass(slots=True)
class _Row:
    join: RowJoin
    tokens: list[int]
    running: str = ""
    """The name of its request, while vLLM computes it"""


class Worker:
    def __init__(self, driven: Driven, clock: Clock, eos_token_ids: frozenset[int]) -> None:
        self._driven = driven
        self._clock = clock
        self._eos = eos_token_ids
        self._rows: dict[int, _Row] = {}
        self._loads = AdapterLoads(driven, clock)
        self._names = 0
        self._usual: tuple[int, ...] | None = None
        """The plan's rows of the newest iteration, if they alone run now"""
        self._sampling: list[_Row] = []
        """The rows that the newest iteration sampled"""

    def compute(self, plan: StepPlan) -> StepResult:
        for number in plan.leaves:
            self._stop([self._rows.pop(number)])
        for join in plan.joins:
            self._rows[join.row] = _Row(join, list(join.tokens))
        self._loads.forget(plan.gone)
        arrived, failed = self._loads.advance(plan.loads, plan.loading, hurry=plan.hurry)
        began = self._clock()
        produced = self._iterate(plan) if plan.count else []
        return StepResult(
            number=plan.number,
            sampled=[one.token for one in produced],
            logprobs={place: one.logprobs for place, one in enumerate(produced) if one.logprobs is not None},
            model_calls=1,
            seconds=self._clock() - began,
            arrived=tuple(arrived),
            failed=tuple(failed),
        )

    def _iterate(self, plan: StepPlan) -> list[Produced]:
        """The next tokens of the rows that sample, in the plan's order."""
        if not (plan.only_decodes and plan.decodes.rows is self._usual):
            self._arrange(plan)
        parts = {self._add_part(step) for step in plan.prefills if not step.samples} - {""}
        found = self._until_all([row.running for row in self._sampling], parts)
        self._usual = None if plan.prefills else plan.decodes.rows
        produced = []
        for row in self._sampling:
            one = found[row.running]
            row.tokens.append(one.token)
            if one.ended:
                row.running, self._usual = "", None
            produced.append(one)
        return produced

    def _arrange(self, plan: StepPlan) -> None:
        """Exactly the rows that this plan samples run."""
        sampled = [step.row for step in plan.rows if step.samples]
        self._stop(self._rows[number] for number in self._rows.keys() - set(sampled))
        self._sampling = [self._rows[number] for number in sampled]
        for row in self._sampling:
            if not row.running:
                row.running = self._add(row, row.tokens, self._options(row))

    def _add_part(self, step: RowStep) -> str:
        row = self._rows[step.row]
        if not self._driven.facts.shares_prefixes:
            return ""  # nobody would find what it has computed
        options: dict[str, object] = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
        return self._add(row, row.tokens[: step.start + step.count], options)

    def _add(self, row: _Row, tokens: list[int], options: dict[str, object]) -> str:
        self._names += 1
        name = str(self._names)
        join = row.join
        salt = join.prefix_salt.hex() or f"{join.request} {join.choice}"
        self._driven.add(Ask(name, tuple(tokens), options, self._loads.number_of(join.adapter), salt))
        return name

    def _options(self, row: _Row) -> dict[str, object]:
        join = row.join
        return options_of(
            join.sampling,
            seed=join.seed,
            choice=join.choice,
            output_tokens=len(row.tokens) - join.prompt_tokens,
            eos_token_ids=self._eos,
            vocabulary=self._driven.facts.vocabulary,
        )

    def _stop(self, rows: Iterable[_Row]) -> None:
        running = [row for row in rows if row.running]
        if running:
            self._usual = None
            self._driven.abort([row.running for row in running])
            for row in running:
                row.running = ""

    def _until_all(self, rows: list[str], parts: set[str]) -> dict[str, Produced]:
        """One token of each. Usually that is one iteration of vLLM."""
        found: dict[str, Produced] = {}
        wanted = {*rows, *parts}
        for _ in range(MAX_STEPS):
            for one in self._driven.step():
                if one.name not in wanted:
                    raise LostStep("vLLM computes a request that was not in the plan")
                wanted.remove(one.name)
                found[one.name] = one
            if not wanted:
                return found
            # A prompt was cut. The others must not get a second token, which no plan knows of.
            early = [name for name, one in found.items() if not one.ended]
            if early:
                self._driven.abort(early)
                for name in early:
                    found[name] = found[name]._replace(ended=True)
        raise LostStep("vLLM does not come to the end of an iteration")
