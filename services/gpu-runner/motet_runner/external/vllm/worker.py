"""Lets vLLM compute what plans say. Each plan is an iteration of vLLM with exactly the plan's rows.

vLLM has no way to leave a request out of an iteration. So a row that a plan leaves out is aborted, and comes again with
the tokens that it has by then; vLLM finds their KV in its prefix cache. A part of a prompt is a request of its own that
begins alike: its one token is dropped.

A row with a mask gets its bits before each of its iterations. A row whose bits are late is left out, and nobody waits.

A page of the plan is as large as a block of vLLM, and a row has as many of both. Which ones they are is vLLM's
business: page numbers mean nothing here.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from motet.clock import Clock
from motet_runner.external.vllm.adapter_loads import HURRY_SECONDS, AdapterLoads
from motet_runner.external.vllm.adapter_proofs import AdapterProofs
from motet_runner.external.vllm.driven import Ask, Driven, LostStep, Penalties, Produced
from motet_runner.external.vllm.options import options_of, seed_of
from motet_runner.mask_threads import MaskThreads
from motet_runner.plan import RowJoin, RowStep, StepPlan, StepResult

MAX_STEPS = 10_000
"""vLLM's iterations for one plan. vLLM cuts a prompt that is longer than its own limit."""


@dataclass(slots=True, eq=False)
class _Row:
    join: RowJoin
    tokens: list[int]
    running: str = ""
    """The name of its request, while vLLM computes it"""

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.join.prompt_tokens


class Worker:
    def __init__(
        self,
        driven: Driven,
        clock: Clock,
        eos_token_ids: frozenset[int],
        *,
        share_prefixes: bool,
        proofs: AdapterProofs | None = None,
    ) -> None:
        """`share_prefixes`: between requests. Without it, each finds only the KV of its own earlier iterations."""
        self._driven = driven
        self._clock = clock
        self._eos = eos_token_ids
        self._share_prefixes = share_prefixes
        self._rows: dict[int, _Row] = {}
        self.loads = AdapterLoads(driven, clock)
        self._proofs = proofs
        self._names = 0
        self._usual: tuple[int, ...] | None = None
        """The plan's rows of the newest iteration, if they alone run now"""
        self._sampling: list[_Row] = []
        """The rows that the newest iteration sampled"""
        self._masked: list[_Row] = []
        """Those of them that have masks"""
        self._threads = MaskThreads()
        self._seconds = 0.0
        """Of the newest iteration"""

    def compute(self, plan: StepPlan) -> StepResult:
        for number in plan.leaves:
            self._stop([self._rows.pop(number)])
        for join in plan.joins:
            self._rows[join.row] = _Row(join, list(join.tokens))
        self.loads.forget(plan.gone)
        arrived, failed = self.loads.advance(plan.loads, plan.loading, hurry=plan.hurry)
        result = StepResult(number=plan.number, arrived=tuple(arrived), failed=tuple(failed))
        if plan.count:
            began = self._clock()
            self._iterate(plan, result)
            result.seconds = self._seconds = self._clock() - began
        if plan.proof is not None and not plan.proof.paused and self._proofs is not None:
            result.proved = self._proofs.advance(
                plan.proof,
                self.loads.number_of(plan.proof.digest),
                stop_others=lambda: self._stop(self._rows.values()),
                wait_seconds=HURRY_SECONDS if plan.hurry else 0.0,
            )
        return result

    def wait_for_masks(self, seconds: float) -> None:
        self._threads.wait(seconds)

    def _iterate(self, plan: StepPlan, result: StepResult) -> None:
        """The next tokens of the rows that sample, in the plan's order"""
        usual = plan.only_decodes and plan.decodes.rows is self._usual
        if not usual:
            self._sampling = [self._rows[step.row] for step in plan.rows if step.samples]
            self._masked = [row for row in self._sampling if row.join.mask is not None]
        allowed = self._allowed()
        result.late = tuple(row.join.row for row in self._masked if row not in allowed)
        left_out = {row for row in self._masked if not allowed.get(row)}
        if left_out or not usual:
            self._arrange(left_out)
        for row, bits in allowed.items():
            if bits:
                self._driven.allow(row.running, bits)
        parts = {self._add_part(step) for step in plan.prefills if not step.samples or step.row in result.late}
        found = self._until_all([row.running for row in self._sampling if row not in left_out], parts)
        result.model_calls = 1 if found else 0
        self._usual = None if plan.prefills or left_out else plan.decodes.rows
        produced = [None if row in left_out else self._take(row, found[row.running]) for row in self._sampling]
        result.sampled = [None if one is None else one.token for one in produced]
        result.logprobs = {
            place: one.logprobs for place, one in enumerate(produced) if one is not None and one.logprobs is not None
        }

    def _allowed(self) -> dict[_Row, bytes]:
        """The bits of the rows whose masks are there; empty if they leave no token"""
        if not self._masked:
            return {}
        masks = [(row, row.join.mask) for row in self._masked if row.join.mask is not None]
        self._threads.make([mask for _, mask in masks], spent=self._seconds)
        allowed = {}
        for row, mask in masks:
            if not mask.late and (bits := mask.allowed) is not None:
                if row.output_tokens < row.join.sampling.min_tokens:
                    bits = without(bits, self._options(row)["stop_token_ids"])
                allowed[row] = bits if bits.strip(b"\0") else b""
        return allowed

    def _take(self, row: _Row, one: Produced) -> Produced | None:
        if one.ended:
            row.running, self._usual = "", None
        mask = row.join.mask
        if mask is not None and not mask.take(one.token, row.output_tokens):
            return None
        row.tokens.append(one.token)
        return one

    def _arrange(self, left_out: Collection[_Row]) -> None:
        """Exactly the rows that this plan samples run, without those that are left out."""
        running = [row for row in self._sampling if row not in left_out]
        self._stop(set(self._rows.values()) - set(running))
        for row in running:
            if not row.running:
                row.running = self._add(row, row.tokens, self._options(row), samples=True)

    def _add_part(self, step: RowStep) -> str:
        row = self._rows[step.row]
        options = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
        return self._add(row, row.tokens[: step.start + step.count], options)

    def _add(self, row: _Row, tokens: list[int], options: dict[str, Any], *, samples: bool = False) -> str:
        self._names += 1
        name = str(self._names)
        join = row.join
        shared = join.prefix_salt.hex() if self._share_prefixes else ""
        salt = shared or f"{join.request} {join.choice}"
        ask = Ask(name, tuple(tokens), options, self.loads.number_of(join.adapter), salt)
        if samples:
            penalties = Penalties(join.sampling.presence_penalty, join.sampling.frequency_penalty)
            ask = ask._replace(masked=join.mask is not None, penalties=penalties, output_tokens=row.output_tokens)
        self._driven.add(ask)
        return name

    def _options(self, row: _Row) -> dict[str, Any]:
        join, again = row.join, 0 if self._driven.facts.noise_by_position else row.output_tokens
        return options_of(
            join.sampling,
            seed=None if join.seed_is_drawn else seed_of(join.seed, join.choice, again),
            output_tokens=row.output_tokens,
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
        if not wanted:
            return found
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


def without(allowed: bytes, tokens: Iterable[int]) -> bytes:
    """The bits of a mask, less these tokens"""
    bits = bytearray(allowed)
    for token in tokens:
        if token // 8 < len(bits):
            bits[token // 8] &= ~(1 << token % 8)
    return bytes(bits)
