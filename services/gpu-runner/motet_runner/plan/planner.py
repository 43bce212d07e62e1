"""Plans iterations: takes commands and results of iterations, and says what the next iteration computes.

A step is planned, launched by a worker and collected. The next one may be planned while this one runs: what is
scheduled counts as computed then, and sampled tokens whose values are not known yet count as tokens. What must be
copied between device and host is part of a plan, before its rows: that is why a page is never reused before its copy
has ended.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from motet.domain import PAGE_TOKENS, Digest, ParkMethod, RequestId
from motet.errors import Declined, InvalidRequest, MotetError, NotFinite, Overloaded
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.interface import (
    AdapterFailed,
    Event,
    Finish,
    Logprobs,
    NewSequence,
    Sampling,
    SequenceOutput,
    State,
    StateChanged,
)
from motet_runner.plan.admission import refuse_what_cannot_be, too_long_beside_adapter
from motet_runner.plan.composer import Iteration, PromptTokensBeside, Work, compose
from motet_runner.plan.decode_round import DecodeRound, may_go_on
from motet_runner.plan.length_rope import LengthRope
from motet_runner.plan.presets import Preset
from motet_runner.plan.prompt_scores import PromptScores
from motet_runner.plan.self_protection import SelfProtection
from motet_runner.plan.sequence import Sequence
from motet_runner.plan.sequence_memory import MAX_PARKED, SequenceMemory
from motet_runner.plan.sequence_table import SequenceTable
from motet_runner.plan.size_limit import SizeLimit
from motet_runner.plan.step_plan import DecodeRows, RowStep, StepPlan, StepResult
from motet_runner.plan.suspect_turns import SuspectTurns

_NOT_FINITE = (
    "The model's results for this request are infinite or not numbers. If the request uses an adapter, try the base "
    "model, and tell the adapter's owner."
)


_OUT_OF_MEMORY = (
    "The runner has no memory to compute this request; try again, or lower engine.memoryUtilizationPercent."
)


class Planner:
    def __init__(
        self,
        *,
        pages: int,
        preset: Preset,
        places: int,
        chunk_tokens: int,
        max_length: int,
        vocabulary: int,
        max_adapters: int,
        pages_of_rank: Callable[[int], int],
        eos_token_ids: frozenset[int] = frozenset(),
        host_pages: int = 0,
        protect_after_steps: int = 0,
        prefix_cache: bool = True,
        window: int | None = None,
        rope: LengthRope | None = None,
        cheaper: Callable[[Sequence], ParkMethod] = lambda _: ParkMethod.RECOMPUTE,
        beside: PromptTokensBeside | None = None,
    ) -> None:
        self.sequences = SequenceTable()
        # A sequence whose window leaves pages does not hold the first pages of its prefix, which sharing needs.
        self.memory = SequenceMemory(
            self.sequences,
            pages=pages,
            host_pages=host_pages,
            max_adapters=max_adapters,
            pages_of_rank=pages_of_rank,
            prefix_cache=prefix_cache and window is None,
        )
        self.adapters = self.memory.adapters
        self.preset = preset
        self.places = places
        self.chunk = SizeLimit(chunk_tokens, least=PAGE_TOKENS)
        """How many prompt tokens an iteration may compute."""
        self._beside = beside
        self.max_length = min(max_length, pages * PAGE_TOKENS)
        self.vocabulary = vocabulary
        self.eos_token_ids = eos_token_ids
        self.window = window
        """How many tokens a token attends to, itself included, if all layers have such a window."""
        self.rope = rope
        self.supervised = False
        self.steps = 0
        """Iterations planned so far."""
        self._arrivals = 0
        self._turns = SuspectTurns()
        self._protection = SelfProtection(
            self.sequences,
            self.memory,
            protect_after_steps=protect_after_steps,
            cheaper=cheaper,
            give_up=self._give_up,
        )
        self._launched: deque[_Launched] = deque()
        self._latest: _Latest | None = None
        self._round: DecodeRound | None = None
        """The decoding that the latest iteration was part of, from its second iteration on"""
        self._outputs: list[SequenceOutput] = []

    def has_work(self) -> bool:
        changes = self._launched or self.memory.copies or self._outputs or self.sequences.events
        return bool(changes) or self.adapters.busy or any(self._may_act(sequence) for sequence in self.sequences)

    def check(self) -> None:
        """Recount everything; raises AssertionError with the numbers."""
        self.sequences.check()
        self.memory.check()
        for sequence in self.sequences:
            assert sequence.state in (State.LOADING, State.PARKED) or self.adapters.is_here(sequence.adapter), sequence
            sampling = sum(one.samples_of(sequence) for one in self._launched)
            assert sequence.pending == sampling, (sequence.request, sequence.pending)

    # -- commands ----------------------------------------------------------------------------------------------------

    def add(self, new: NewSequence) -> Sequence:
        """Take a sequence in; raises Declined when it does not fit now, InvalidRequest when it never will."""
        ledger, adapter_pages = self.memory.ledger, self.adapters.pages_of(new.adapter)
        error = self.adapters.too_large(new.adapter) or self._too_long(new)
        if error is not None:
            raise error
        promisable = ledger.limit_beside(adapter_pages)
        refuse_what_cannot_be(new, max_length=self.max_length, vocabulary=self.vocabulary, promisable=promisable)
        known = self.sequences.get(new.request)
        if known is not None:
            if known.new.epoch >= new.epoch:
                raise Declined(f"Request {new.request} is here already, under epoch {known.new.epoch}.")
            self._remove(known)
        self._arrivals += 1
        sequence = Sequence(
            new=new,
            arrival=self._arrivals,
            promise=new.promise,
            tokens=[*new.prompt, *new.delivered],
            state=State.WAITING,
        )
        self._begin_keys(sequence)
        # It holds the pages that it shares from now on: only then are they charged once.
        self.memory.share_cached(sequence, new.promise)
        free = self._promisable(new.adapter)
        if new.promise > free:
            self.memory.release(sequence)
            raise Declined(
                f"{new.promise} pages were promised and {max(0, free)} can be given beside the adapters in use; "
                "try another runner or wait."
            )
        ledger.promise(new.request, new.promise)
        self.sequences.add(sequence)
        if not self.adapters.is_here(sequence.adapter):
            self.sequences.enter(sequence, State.LOADING)
            self.adapters.want(sequence.adapter)
        self.memory.announce_overflow(sequence)
        return sequence

    def cancel(self, request: RequestId, epoch: int | None = None) -> Sequence | None:
        """Forget a sequence and free its pages at once; None when there is none of that epoch."""
        sequence = self.sequences.get(request)
        if sequence is None or epoch not in (None, sequence.new.epoch):
            return None
        self._remove(sequence)
        return sequence

    def extend(self, request: RequestId, epoch: int, promise: int, extended: int) -> bool:
        sequence = self._promised(request, epoch, promise)
        return sequence is not None and self.memory.extend(sequence, extended)

    def park(self, request: RequestId, epoch: int, promise: int, wanted: int, method: ParkMethod) -> bool:
        sequence = self._promised(request, epoch, promise)
        if sequence is None or sequence.parked_times >= MAX_PARKED:
            return False
        self.memory.park(sequence, wanted, method, by_itself=False)
        return True

    def resume(self, request: RequestId, epoch: int, promise: int) -> bool:
        sequence = self.sequences.of_epoch(request, epoch)
        if sequence is None or sequence.state is not State.PARKED:
            return False
        return self.memory.resume(sequence, min(promise, max(sequence.most_pages, 1)))

    def load_adapter(self, adapter: Digest, layout: AdapterLayout) -> None:
        """Say where an adapter is on this machine. It loads as soon as it can have its pages."""
        new = not self.adapters.is_known(adapter)
        self.adapters.register(adapter, layout)
        if not new:
            return
        too_large = self.adapters.too_large(adapter)
        if too_large is not None:
            self.sequences.events.append(AdapterFailed(adapter, too_large))
        for sequence in [sequence for sequence in self.sequences if sequence.adapter == adapter]:
            error = too_large or self._too_long(sequence.new)
            if error is not None:
                self._give_up(sequence, error)

    def drop_adapter(self, adapter: Digest) -> None:
        """Forget an adapter once no sequence uses it."""
        self.adapters.drop(adapter)

    def set_overcommit(self, factor: float) -> None:
        self.memory.ledger.overcommit = factor

    # -- plan --------------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next iteration, with its pages taken; None if there is nothing to compute or copy now.

        An iteration for one suspect is announced first: None with the event comes before it.
        """
        return self._plan_as_before() or self._plan_anew()

    def _plan_as_before(self) -> StepPlan | None:
        """What `_plan_anew` would find out too, if the sequences that decode only go on."""
        decoding, memory = self._round_now(), self.memory
        if decoding is None or decoding.ended:
            return None
        beginning = decoding.beginning_a_page
        if len(beginning) > memory.pages.free:
            return None
        new_pages = {}
        for sequence in beginning:
            memory.grow(sequence, sequence.scheduled + 1)
            pages = memory.rows.new_pages_of(sequence)
            if pages and sequence.row is not None:
                new_pages[sequence.row] = pages
        self.steps += 1
        decodes = DecodeRows(decoding.rows, decoding.schedule(), new_pages)
        if self.window is not None:
            for sequence in decoding.sequences:
                memory.release_left(sequence, self.window)
        self._launched.append(_Launched(decoding.sequences, decodes, decoding.restarts))
        return StepPlan(number=self.steps, decodes=decodes, adapters=decoding.adapters)

    def _round_now(self) -> DecodeRound | None:
        """The latest iteration's decoding, unless the next iteration may be another one."""
        latest, memory = self._latest, self.memory
        if (
            latest is None
            or latest.runnable is not self.sequences.runnable()
            or memory.copies
            or not self.adapters.still
            or (not self.supervised and self.sequences.parked())
        ):
            return None
        if self._round is None and may_go_on(latest.decodes, latest.runnable):
            self._round = DecodeRound(latest.runnable, latest.adapters)
        return self._round

    def _plan_anew(self) -> StepPlan | None:
        self._latest = self._round = None
        protection = self._protection
        protection.answer_overflows(supervised=self.supervised, idle=not self._launched)
        if not self.supervised:
            protection.resume_parked()
        self._share_cached()
        protection.load_before_others_run()
        iteration = self._next_iteration()
        nobody_runs = not iteration and not self._launched and not self.sequences.runnable()
        protection.load_beside(nobody_runs=nobody_runs)
        news = self._turns.announce(iteration)
        if news:
            self.sequences.events += news
            iteration = Iteration()
        loads, gone = self.adapters.take_changes()
        loading = self.adapters.loading()
        if not iteration and not self.memory.copies and not gone and not loading:
            return None
        self.steps += bool(iteration)
        for work in iteration.work:
            if not work.sequence.started:
                self.memory.count_cached(work.sequence)
        iteration.begin()
        decodes = DecodeRows.of([self._schedule(work) for work in iteration.decodes])
        prefills = tuple(self._schedule(work) for work in iteration.prefills)
        leaves, joins = self.memory.rows.take_changes()
        copies, self.memory.copies = tuple(self.memory.copies), []
        moves, self.memory.moves = tuple(self.memory.moves), []
        plan = StepPlan(
            number=self.steps,
            copies=copies,
            moves=moves,
            leaves=leaves,
            joins=joins,
            decodes=decodes,
            prefills=prefills,
            adapters={adapter: self.adapters.first_page_of(adapter) for adapter in iteration.adapters},
            gone=gone,
            loads=loads,
            loading=loading,
            hurry=not self.sequences.runnable(),
        )
        self._launched.append(
            _Launched(
                [work.sequence for work in iteration.decodes],
                decodes,
                [work.sequence.restarts for work in iteration.decodes],
                iteration.prefills,
                prefills,
                [work.sequence.restarts for work in iteration.prefills],
            )
        )
        # After a suspect, others have their turn, and know when it is computed again.
        if iteration.decodes and not iteration.prefills and iteration.suspect is None:
            self._latest = _Latest(self.sequences.runnable(), iteration.decodes, plan.adapters)
        return plan

    def _next_iteration(self) -> Iteration:
        suspects_first = self._turns.suspects_first
        iteration, short = self._protection.take_pages(self._compose(suspects_first=suspects_first))
        if not iteration and short:
            # Without pages for the one whose turn it is, the others may still have theirs.
            iteration, short = self._protection.take_pages(self._compose(suspects_first=not suspects_first))
        if not iteration and short and not self._launched:
            self._protection.make_way()
        return iteration

    def _compose(self, *, suspects_first: bool) -> Iteration:
        return compose(
            [
                sequence
                for sequence in self.sequences.runnable()
                if sequence.may_be_scheduled and (sequence.started or not self._waits_for_parent(sequence))
            ],
            self.preset,
            chunk_tokens=self.chunk.size,
            places=self.places,
            suspects_first=suspects_first,
            free_pages=self.memory.free,
            beside=self._beside,
        )

    def _share_cached(self) -> None:
        """Sequences that will start soon look once more: others may have computed their pages meanwhile."""
        fresh = (sequence for sequence in self.sequences.runnable() if sequence.row is None)
        for sequence in islice(fresh, self.places):
            self.memory.share_cached(sequence, sequence.promise)

    def _waits_for_parent(self, sequence: Sequence) -> bool:
        """Whether the parent of a sequence that has not started is about to compute pages that both need. It waits only
        for one that came earlier and can go on, so no sequences wait for each other."""
        if sequence.new.parent is None or self.preset.request_level:
            return False
        parent = self.sequences.get(sequence.new.parent)
        if parent is None or parent.arrival >= sequence.arrival or parent.stands_at_promise:
            return False
        mine, other = sequence.chain, parent.chain
        if parent.state not in (State.WAITING, State.PREFILL) or mine is None or other is None:
            return False
        mine.extend(sequence.tokens, (len(sequence.tokens) - 1) // PAGE_TOKENS)
        other.extend(parent.tokens, len(parent.tokens) // PAGE_TOKENS)
        return min(mine.pages_in_common(other), sequence.promise) > mine.cached

    def _schedule(self, work: Work) -> RowStep:
        sequence = work.sequence
        if sequence.state is State.WAITING:
            self.sequences.enter(sequence, State.PREFILL)
        row = self.memory.rows.step_of(work)
        sequence.scheduled += work.count
        if self.window is not None:
            self.memory.release_left(sequence, self.window)
        sequence.pending += work.samples
        return row

    # -- collect -----------------------------------------------------------------------------------------------------

    def collect(self, result: StepResult) -> None:
        """Take in what the oldest launched iteration has brought. Sequences that have gone meanwhile are left out."""
        launched = self._launched.popleft()
        self._take_loads(result)
        sampled = iter(result.sampled)
        logprobs = result.logprobs
        decoding = zip(
            launched.decoding, launched.decodes.rows, launched.decodes.starts, launched.decoding_restarts, strict=True
        )
        for place, (sequence, row, start, restarts) in enumerate(decoding):
            token = next(sampled)
            sequence.pending -= 1
            if self._is_computed(sequence, row, result):
                if sequence.restarts == restarts:
                    sequence.computed = start + 1
                    if sequence.suspect:
                        self._say_progress(sequence)
                self._sampled(sequence, token, logprobs.get(place) if logprobs else None)
        place = len(launched.decoding)
        for work, step, restarts in zip(launched.prefills, launched.steps, launched.restarts, strict=True):
            sequence = work.sequence
            sequence.pending -= work.samples
            token = next(sampled) if work.samples else None
            if self._is_computed(sequence, step.row, result):
                if sequence.restarts == restarts:
                    sequence.computed = work.start + work.count
                    if not work.samples or sequence.suspect:
                        self._say_progress(sequence)
                scored = not result.prompt_logprobs or self._take_scores(sequence, result.prompt_logprobs.get(step.row))
                if work.samples and scored:
                    self._sampled(sequence, token, logprobs.get(place))
            place += work.samples
        if not result.retries:
            self.chunk.fitted(result.model_calls)
        elif launched.prefills:
            self.chunk.did_not_fit(self.chunk.size)

    def take_outputs(self) -> tuple[list[SequenceOutput], list[Event]]:
        """Tokens and events since the last call."""
        outputs, self._outputs = self._outputs, []
        events, self.sequences.events = self.sequences.events, []
        return outputs, events

    def _take_loads(self, result: StepResult) -> None:
        for one in result.arrived:
            arrived = self.adapters.arrived(one.number, one.seconds)
            if arrived is not None:
                for sequence in self._waiting_for(arrived):
                    self.sequences.enter(sequence, State.WAITING)
        for other in result.failed:
            failed = self.adapters.failed(other.number)
            if failed is not None:
                adapter, effects = failed
                self.memory.copies += effects
                self._adapter_failed(adapter, other.error)

    def _adapter_failed(self, adapter: Digest, error: MotetError) -> None:
        """A failed load fails only the sequences that wait for it (PU-07)."""
        self.sequences.events.append(AdapterFailed(adapter, error))
        for sequence in self._waiting_for(adapter):
            self._give_up(sequence, error)

    def _is_computed(self, sequence: Sequence, row: int, result: StepResult) -> bool:
        """Whether this result is for a sequence. It may have gone meanwhile, or it goes now."""
        if sequence not in self.sequences:
            return False
        if row not in result.out_of_memory:
            return True
        self._give_up(sequence, Overloaded(_OUT_OF_MEMORY))
        return False

    def _say_progress(self, sequence: Sequence) -> None:
        percent = 100 * sequence.computed // len(sequence.tokens)
        changed = StateChanged(sequence.request, sequence.new.epoch, sequence.state, percent)
        self.sequences.events.append(changed)

    def _take_scores(self, sequence: Sequence, scores: PromptScores | None) -> bool:
        """Log probabilities of the prompt that the client does not have yet: what is computed again after a park may
        be scored again. → False if the sequence cannot go on"""
        if scores is None:
            return True
        if not scores.finite:
            self._give_up(sequence, NotFinite(_NOT_FINITE))
            return False
        first, news = sequence.to_score, list(scores.logprobs[sequence.to_score - scores.first :])
        if news:
            new, index = sequence.new, sequence.output_tokens
            output = SequenceOutput(new.request, new.epoch, new.choice, index, [], prompt_index=first)
            output.prompt_logprobs = news
            self._outputs.append(output)
            sequence.to_score += len(news)
        return True

    def _sampled(self, sequence: Sequence, token: int | None, logprob: Logprobs | None) -> None:
        """Write the next token; if it is the last, the sequence leaves and its pages are free (S3-07, PU-11)."""
        if token is None:
            self._give_up(sequence, NotFinite(_NOT_FINITE))
            return
        new, tokens = sequence.new, sequence.tokens
        index = len(tokens) - sequence.prompt_tokens
        tokens.append(token)
        if sequence.chain is not None and sequence.computed // PAGE_TOKENS > sequence.chain.cached:
            self.memory.add_to_cache(sequence)
        finish = self._finish(new.sampling, token, index + 1)
        logprobs = [] if logprob is None else [logprob]
        self._outputs.append(SequenceOutput(new.request, new.epoch, new.choice, index, [token], logprobs, finish))
        if finish is not None:
            self._remove(sequence)
            return
        if sequence.restarts_after is not None and len(sequence.tokens) > sequence.restarts_after:
            self.memory.restart(sequence)
            self._begin_keys(sequence)
        elif sequence.state is State.PREFILL:
            self.sequences.enter(sequence, State.DECODE)
        if sequence.promise < sequence.most_pages and sequence.state is not State.PARKED:
            self.memory.announce_overflow(sequence)

    def _begin_keys(self, sequence: Sequence) -> None:
        """None of its keys is computed. Say which pages may hold them, and how long they stay right."""
        new, rope, tokens = sequence.new, self.rope, len(sequence.tokens)
        salt = rope.salt(len(new.prompt), tokens) if rope is not None else b""
        sequence.chain = self.memory.chain_of(new, salt)
        sequence.restarts_after = rope.restarts_after(tokens) if rope is not None else None

    def _finish(self, sampling: Sampling, token: int, output_tokens: int) -> Finish | None:
        if token in sampling.stop_token_ids or (token in self.eos_token_ids and not sampling.ignore_eos):
            return Finish.STOP
        return Finish.LENGTH if output_tokens >= sampling.max_tokens else None

    # -- sequences ---------------------------------------------------------------------------------------------------

    def _may_act(self, sequence: Sequence) -> bool:
        if sequence.state is State.LOADING:  # what it holds may be in the way of its adapter
            return bool(sequence.pages) and self.adapters.is_known(sequence.adapter)
        return sequence.state is not State.PARKED or not self.supervised

    def _waiting_for(self, adapter: Digest) -> list[Sequence]:
        return [s for s in self.sequences if s.state is State.LOADING and s.adapter == adapter]

    def _too_long(self, new: NewSequence) -> InvalidRequest | None:
        pages = self.memory.pages.capacity
        return too_long_beside_adapter(new, adapter_pages=self.adapters.pages_of(new.adapter), pages=pages)

    def _promisable(self, adapter: Digest) -> int:
        """What a new sequence of this adapter may be promised now. Without a supervisor, parked sequences are sure to
        come back, with their adapters."""
        parked = [] if self.supervised else self.sequences.parked()
        in_use = self.adapters.pages_in_use(adapter, *(sequence.adapter for sequence in parked))
        ledger = self.memory.ledger
        return ledger.limit_beside(in_use) - ledger.promised - sum(sequence.wanted for sequence in parked)

    def _promised(self, request: RequestId, epoch: int, promise: int) -> Sequence | None:
        """The sequence that a command names, unless it is parked or has another promise now."""
        sequence = self.sequences.of_epoch(request, epoch)
        if sequence is None or sequence.promise != promise or sequence.state is State.PARKED:
            return None
        return sequence

    def _remove(self, sequence: Sequence) -> None:
        self.memory.release(sequence)
        self.sequences.remove(sequence)

    def _give_up(self, sequence: Sequence, error: MotetError) -> None:
        new, index = sequence.new, sequence.output_tokens
        failed = SequenceOutput(new.request, new.epoch, new.choice, index, [], finish=Finish.FAILED, error=error)
        self._outputs.append(failed)
        self._remove(sequence)


@dataclass(frozen=True, slots=True)
class _Launched:
    """An iteration that is not collected: who takes part, what the worker was told, and each sequence's `restarts` when
    it was planned."""

    decoding: list[Sequence]
    decodes: DecodeRows
    decoding_restarts: list[int]
    prefills: list[Work] = field(default_factory=list)
    steps: tuple[RowStep, ...] = ()
    restarts: list[int] = field(default_factory=list)

    def samples_of(self, sequence: Sequence) -> int:
        """How many tokens of a sequence it samples."""
        decodes = sum(one is sequence for one in self.decoding)
        return decodes + sum(work.samples for work in self.prefills if work.sequence is sequence)


class _Latest(NamedTuple):
    """The latest iteration, if it only decoded."""

    runnable: list[Sequence]
    """Those that could run when it was planned"""
    decodes: list[Work]
    adapters: dict[Digest, int]
