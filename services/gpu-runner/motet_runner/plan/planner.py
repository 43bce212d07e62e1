"""Plans iterations: takes commands and results of iterations, and says what the next iteration computes.

A step is planned, launched by a worker and collected. The next step may be planned while this one runs: scheduled
tokens then count as computed, and sampled tokens count although their values are unknown. Copies between device and
host are part of a plan, before its rows: so a page is never reused before its copy has ended.

`commands` takes the commands, `next_iteration` chooses the sequences, `iteration_results` takes the results. Here the
parts are combined, and an iteration becomes the orders of a worker.
"""

import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Series
from typing import NamedTuple

from motet.domain import Digest, ParkMethod
from motet_runner.interface import DecodedTokens, Event, SequenceOutput, State
from motet_runner.plan.adapter_proofs import MAX_PLANS_WAITED, AdapterProofs
from motet_runner.plan.batch_cap import SloCap
from motet_runner.plan.chunk_round import ChunkRound, chunk_of, may_go_on_beside
from motet_runner.plan.commands import Commands
from motet_runner.plan.composer import PromptTokensBeside, Work, adapters_of
from motet_runner.plan.decode_round import DecodeRound, may_go_on
from motet_runner.plan.host_adapters import HostAdapters
from motet_runner.plan.iteration_results import IterationResults
from motet_runner.plan.launched import Launched
from motet_runner.plan.length_rope import LengthRope
from motet_runner.plan.next_iteration import NextIteration
from motet_runner.plan.presets import Preset
from motet_runner.plan.resident_adapters import MAX_LOADS
from motet_runner.plan.self_protection import SelfProtection
from motet_runner.plan.sequence import Sequence
from motet_runner.plan.sequence_lives import SequenceLives
from motet_runner.plan.sequence_memory import SequenceMemory
from motet_runner.plan.sequence_table import SequenceTable
from motet_runner.plan.size_limit import SizeLimit
from motet_runner.plan.step_plan import DecodeRows, RowStep, StepPlan, StepResult

_LEAST_CHUNK = 16
"""Prompt tokens of an iteration: with fewer, a model call takes hardly less memory."""


class Planner:
    def __init__(
        self,
        *,
        page_tokens: int,
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
        tpot_seconds: float | None = None,
        max_plans_waited: int = MAX_PLANS_WAITED,
        max_loads: int = MAX_LOADS,
        max_pages_beside: float = math.inf,
        host_adapters: HostAdapters | None = None,
        bytes_of_rank: Callable[[int], int] = lambda _: 0,
    ) -> None:
        """`page_tokens`: how many tokens a page holds. `tpot_seconds`: how long a token may take on average; None: as
        long as it takes. `max_plans_waited`: by a proof, until its turn comes. `max_loads`: of adapters, at a time.
        `max_pages_beside`: of the runs of all that load, if there is more than one. `bytes_of_rank`: of a run"""
        self._sequences = SequenceTable()
        # A sequence whose window leaves pages gives up the first pages of its prefix, which sharing needs.
        self._memory = SequenceMemory(
            self._sequences,
            page_tokens=page_tokens,
            pages=pages,
            host_pages=host_pages,
            max_adapters=max_adapters,
            pages_of_rank=pages_of_rank,
            prefix_cache=prefix_cache and window is None and not preset.contiguous,
            by_forecast=preset.admission == "forecast",
            contiguous=preset.contiguous,
            proofs=AdapterProofs(max_plans_waited),
            max_loads=max_loads,
            max_pages_beside=max_pages_beside,
            host_adapters=host_adapters,
            bytes_of_rank=bytes_of_rank,
        )
        self.adapters = self._memory.adapters
        self.chunk = SizeLimit(chunk_tokens, least=_LEAST_CHUNK)
        """How many prompt tokens an iteration may compute."""
        self.max_length = min(max_length, pages * page_tokens)
        self.window = window
        """How many tokens a token attends to, itself included, if all layers have such a window."""
        self.steps = 0
        """How many iterations were planned so far."""
        self.cap = None if tpot_seconds is None else SloCap(tpot_seconds, places)
        """Whoever drives the planner tells it how long iterations take."""
        self._lives = lives = SequenceLives(self._sequences, self._memory, rope)
        self._commands = Commands(
            self._sequences,
            self._memory,
            lives,
            max_length=self.max_length,
            vocabulary=vocabulary,
            window=window,
        )
        protection = SelfProtection(self._sequences, self._memory, protect_after_steps, cheaper, lives.give_up)
        self.next_iteration = NextIteration(
            self._sequences,
            self._memory,
            protection,
            self.chunk,
            preset=preset,
            places=places,
            beside=beside,
            cap=self.cap,
        )
        self._results = IterationResults(self._sequences, self._memory, lives, self.chunk, eos_token_ids)
        self._eos_token_ids = eos_token_ids
        self._launched: deque[Launched] = deque()
        self._latest: _Latest | None = None
        self._round: DecodeRound | None = None
        """The round of the latest iteration, from the round's second iteration on"""

    @property
    def sequences(self) -> SequenceTable:
        self._write_back()
        return self._sequences

    @property
    def memory(self) -> SequenceMemory:
        self._write_back()
        return self._memory

    @property
    def any_late(self) -> bool:
        """True if a sequence sits out iterations. Each iteration asks for this, and `sequences` would update all."""
        return bool(self._sequences.late)

    def has_work(self) -> bool:
        changes = (
            self._launched
            or self._memory.copies
            or self._lives.outputs
            or self._lives.decoded
            or self._sequences.events
        )
        return bool(changes) or self.adapters.busy or any(self._may_act(sequence) for sequence in self._sequences)

    def check(self) -> None:
        """Recount everything; raises AssertionError with the numbers."""
        self._write_back()
        self._sequences.check()
        self._memory.check()
        for sequence in self._sequences:
            assert sequence.state in (State.LOADING, State.PARKED) or self.adapters.is_here(sequence.adapter), sequence
            sampling = sum(one.samples_of(sequence) for one in self._launched)
            assert sequence.pending == sampling, (sequence.request, sequence.pending)

    # -- commands ----------------------------------------------------------------------------------------------------

    @property
    def commands(self) -> Commands:
        """Read it again for each command: it ends the round, because the next iteration may differ."""
        self._end_round()
        return self._commands

    def kernels_changed(self) -> None:
        """Other kernels serve from now on. Called while there is no sequence."""
        self.adapters.proofs.restart()

    # -- plan --------------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next iteration, with its pages taken; None if there is nothing to compute or copy.

        A suspect's iteration is announced first: the call before returns None and adds the event.
        """
        if self._sequences.late:
            self._sequences.take_back()
        self.adapters.another_plan()
        plan = self._plan_as_before() or self._plan_anew()
        self._memory.ledger.sequences_changed()
        return plan

    def _plan_as_before(self) -> StepPlan | None:
        """The result of `_plan_anew`, but faster, if the decoding sequences just continue."""
        decoding = self._round_now(beside_load=True)
        if decoding is None or decoding.ended:
            return None
        decodes = decoding.schedule(self._memory)
        if decodes is None:
            return None
        self.steps += 1
        self._launched.append(Launched(decoding.sequences, decodes, decoding.restarts, round=decoding))
        loading, proof = self.adapters.loading(), self.adapters.proving()
        return StepPlan(number=self.steps, decodes=decodes, adapters=decoding.adapters, loading=loading, proof=proof)

    def _round_now(self, *, beside_chunk: bool = False, beside_load: bool = False) -> DecodeRound | None:
        """The latest iteration's round, unless the next iteration may differ. `beside_chunk`: that of the decodes
        beside a chunk of a prompt, and none otherwise. `beside_load`: also while adapters load."""
        latest = self._latest
        if (
            latest is None
            or (latest.chunk is not None) is not beside_chunk
            or latest.runnable is not self._sequences.runnable()
            or self._may_choose(beside_load=beside_load)
            or (latest.masked and self._launched)
        ):
            return None
        if self._round is None and latest.may_go_on:
            self._round = self._round_of([work.sequence for work in latest.decodes], latest.adapters)
        return self._round

    def _plan_anew(self) -> StepPlan | None:
        self._end_round()
        iteration = self.next_iteration.choose(supervised=self._commands.supervised, idle=not self._launched)
        loads, gone = self.adapters.take_changes()
        loading, proof = self.adapters.loading(), self.adapters.proving()
        if not iteration and not self._memory.copies and not gone and not loading and proof is None:
            return None
        self.steps += bool(iteration)
        for work in iteration.work:
            if not work.sequence.started:
                self._memory.count_cached(work.sequence)
        self.next_iteration.begin(iteration)
        decodes = self._schedule_decodes(iteration.decodes)
        prefills = tuple(self._schedule(work) for work in iteration.prefills)
        leaves, joins = self._memory.rows.take_changes()
        copies, self._memory.copies = tuple(self._memory.copies), []
        moves, self._memory.moves = tuple(self._memory.moves), []
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
            proof=proof,
            hurry=not self._sequences.runnable() and not self._sequences.late,
        )
        self._launched.append(
            Launched(
                [work.sequence for work in iteration.decodes],
                decodes,
                [work.sequence.restarts for work in iteration.decodes],
                iteration.prefills,
                prefills,
                [work.sequence.restarts for work in iteration.prefills],
            )
        )
        chunk = chunk_of(iteration)
        # After a suspect, the others have their turn.
        if chunk is not None or (iteration.decodes and not iteration.prefills and iteration.suspect is None):
            runnable = self._sequences.runnable()
            masked = any(work.sequence.new.mask is not None for work in iteration.decodes)
            self._latest = _Latest(runnable, iteration.decodes, plan.adapters, chunk, iteration.prompts, masked)
        return plan

    def _schedule(self, work: Work) -> RowStep:
        if work.sequence.state is State.WAITING:
            self._sequences.enter(work.sequence, State.PREFILL)
        row = self._memory.rows.step_of(work)
        self._note_scheduled(work.sequence, work.count, samples=work.samples)
        return row

    def _schedule_decodes(self, decodes: list[Work]) -> DecodeRows:
        """As columns: an object for each would only be taken apart again."""
        rows: list[int] = []
        new_pages: dict[int, tuple[int, ...]] = {}
        row_of = self._memory.rows.row_of
        for work in decodes:
            sequence = work.sequence
            if sequence.state is State.WAITING:  # all of it but its newest token is in the prefix cache
                self._sequences.enter(sequence, State.PREFILL)
            row, pages = row_of(sequence)
            rows.append(row)
            if pages:
                new_pages[row] = pages
            self._note_scheduled(sequence, 1, samples=True)
        return DecodeRows(tuple(rows), tuple(work.start for work in decodes), new_pages)

    def _note_scheduled(self, sequence: Sequence, count: int, *, samples: bool) -> None:
        sequence.scheduled += count
        if self.window is not None:
            self._memory.release_left(sequence, sequence.to_keep(self.window))
        sequence.pending += samples

    # -- leap --------------------------------------------------------------------------------------------------------

    def plain_round(self) -> DecodeRound | None:
        """The round that just continues, if nothing is launched: `leap` may take its `plain_iterations`. Or one that is
        to begin: its first iteration needs no choice. Adapters may load, but none must arrive in these iterations."""
        return None if self._launched else self._round_now(beside_load=True) or self._round_of_all()

    def _round_of_all(self) -> DecodeRound | None:
        """A round of all that can run, if they all decode. A worker would have to be told which rows have gone."""
        if self._may_choose(beside_load=True):
            return None
        decoding = self.next_iteration.of_all_decodes()
        if not decoding:
            return None
        self._end_round()
        adapters = {one: self.adapters.first_page_of(one) for one in adapters_of(decoding)}
        masked = any(one.new.mask is not None for one in decoding)
        self._latest = _Latest(decoding, [], adapters, None, 0, masked)
        self._round = self._round_of(decoding, adapters)
        return self._round_now(beside_load=True)

    def _round_of(self, decoding: list[Sequence], adapters: dict[Digest, int]) -> DecodeRound:
        return DecodeRound(decoding, adapters, eos_token_ids=self._eos_token_ids, window=self.window)

    def _may_choose(self, *, beside_load: bool) -> bool:
        """True if an adapter or a parked sequence may change what the next iteration is. `beside_load`: those that
        load do not."""
        still = self.adapters.still_beside_load if beside_load else self.adapters.still
        return bool(self._memory.copies or not still or (not self._commands.supervised and self._sequences.parked()))

    def chunk_round(self) -> ChunkRound | None:
        """The same, beside chunks of one prompt. As much as keeps a token of it for later may be leapt, too. None
        with a cap: it may change, and then other sequences compute their prompts."""
        if self.cap is not None or self._launched:
            return None
        decoding, latest = self._round_now(beside_chunk=True, beside_load=True), self._latest
        if decoding is None or latest is None or latest.chunk is None:
            return None
        return ChunkRound(decoding, latest.chunk.sequence, latest.prompts, self.chunk.size)

    def leap(self, count: int, tokens: Series[int], pieces: Series[int] = ()) -> None:
        """Take `count` plain iterations of the round at once, as if each had been planned and its result were `tokens`:
        for a simulator, which knows the tokens beforehand. `pieces`: of the prompt, one in each. Only page numbers may
        differ."""
        chunks = self.chunk_round() if pieces else None
        decoding = chunks.decoding if chunks is not None else self.plain_round()
        assert decoding is not None
        decoding.leap(count, tokens, self._memory)
        if chunks is not None:
            start = chunks.prompt.scheduled
            chunks.leap(sum(pieces), self._memory)
            for piece in pieces:
                self.next_iteration.charge(chunks.prompt, start, piece)
                start += piece
        self.steps += count
        self.chunk.fitted(count)
        self._memory.ledger.sequences_changed()

    # -- collect -----------------------------------------------------------------------------------------------------

    def collect(self, result: StepResult) -> None:
        """Take the result of the oldest launched iteration."""
        self._memory.ledger.sequences_changed()
        launched = self._launched.popleft()
        decoding = launched.round
        if decoding is not None and result.only_tokens and self._is_as_planned(decoding):
            decoded, sampled = self._lives.add_decoded, self._results.sampled
            if decoding.take(result.sampled, self._memory, decoded=decoded, sampled=sampled):
                self.chunk.fitted(result.model_calls)
                return
        self._write_back()
        self._lives.expand_decoded()
        self._results.take(launched, result)
        if result.late:
            self.next_iteration.sat_out()
        if decoding is not None:
            decoding.collected_otherwise()

    def take_decoded(self) -> DecodedTokens | None:
        """The tokens of one iteration since the last call as columns, if the others of its results come after them.
        `take_outputs` then does not have them."""
        decoded, self._lives.decoded = self._lives.decoded, None
        return decoded

    def take_outputs(self) -> tuple[list[SequenceOutput], list[Event]]:
        """Tokens and events since the last call."""
        self._lives.expand_decoded()
        outputs, self._lives.outputs = self._lives.outputs, []
        events, self._sequences.events = self._sequences.events, []
        return outputs, events

    # -- the round ---------------------------------------------------------------------------------------------------

    def _is_as_planned(self, decoding: DecodeRound) -> bool:
        """True if no sequence has come, gone or changed its state since the newest iteration of this round."""
        latest = self._latest
        return decoding is self._round and latest is not None and latest.runnable is self._sequences.runnable()

    def _write_back(self) -> None:
        """Updates all sequences."""
        if self._round is not None:
            self._round.write_back()

    def _end_round(self) -> None:
        self._write_back()
        self._latest = self._round = None

    def _may_act(self, sequence: Sequence) -> bool:
        if sequence.state is State.LOADING:  # its own pages may be in the way of its adapter
            return bool(sequence.pages) and self.adapters.is_known(sequence.adapter)
        return sequence.state is not State.PARKED or not self._commands.supervised


class _Latest(NamedTuple):
    """The latest iteration, if it only decoded, or did so beside a chunk that does not end its prompt."""

    runnable: list[Sequence]
    """The sequences that were runnable when it was planned"""
    decodes: list[Work]
    """Of which its round is made; not needed once there is one"""
    adapters: dict[Digest, int]
    chunk: Work | None
    prompts: int
    """How many sequences were in their prompt phase"""
    masked: bool
    """True if a mask must see the tokens of this iteration before the next one."""

    @property
    def may_go_on(self) -> bool:
        """True if the next iteration is alike, while the runnable sequences are the same."""
        if self.chunk is None:
            return may_go_on(self.decodes, self.runnable)
        return may_go_on_beside(self.decodes, self.chunk.sequence, self.runnable)
