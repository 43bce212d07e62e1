"""Chooses the sequences of the next iteration, and takes its pages."""

from itertools import islice

from motet_runner.interface import State
from motet_runner.plan.batch_cap import SloCap
from motet_runner.plan.composer import Iteration, PromptTokensBeside, compose
from motet_runner.plan.presets import UNBOUNDED, Preset
from motet_runner.plan.prompt_shares import PromptShares
from motet_runner.plan.self_protection import SelfProtection
from motet_runner.plan.sequence import Sequence
from motet_runner.plan.sequence_memory import SequenceMemory
from motet_runner.plan.sequence_table import SequenceTable
from motet_runner.plan.size_limit import SizeLimit
from motet_runner.plan.suspect_turns import SuspectTurns


class NextIteration:
    def __init__(
        self,
        sequences: SequenceTable,
        memory: SequenceMemory,
        protection: SelfProtection,
        chunk: SizeLimit,
        *,
        preset: Preset,
        places: int,
        beside: PromptTokensBeside | None,
        cap: SloCap | None,
    ) -> None:
        self._sequences = sequences
        self._memory = memory
        self._protection = protection
        self._chunk = chunk
        self._preset = preset
        self._places = places
        self._beside = beside
        self._cap = cap
        self._turns = SuspectTurns()
        self.shares = PromptShares()
        self._was_suspect = False
        """True if the newest iteration is a suspect's"""

    def choose(self, *, supervised: bool, idle: bool) -> Iteration:
        """`idle`: no iteration is launched. A suspect's iteration waits until `idle`: if an engine dies with two
        launched iterations, nobody knows in which one. The call before it returns an empty iteration, and adds the
        event that announces it."""
        if (self._was_suspect and not idle) or self._sequences.late_suspect is not None:
            return Iteration()
        protection = self._protection
        protection.answer_overflows(supervised=supervised, idle=idle)
        if not supervised:
            protection.resume_parked()
        self.share_cached()
        protection.load_before_others_run()
        iteration = self._with_pages(idle=idle)
        anyone = self._sequences.runnable() or self._sequences.late_with_places
        protection.load_beside(nobody_runs=not iteration and idle and not anyone)
        if iteration.suspect is not None and not idle:
            return Iteration()
        news = self._turns.announce(iteration)
        if news:
            self._sequences.events += news
            return Iteration()
        self._was_suspect = iteration.suspect is not None
        return iteration

    def sat_out(self) -> None:
        """Rows of the oldest iteration are late. A suspect stays announced while its mask is made."""
        suspect = self._sequences.late_suspect
        if self._was_suspect and suspect is not None:
            self._sequences.events += self._turns.go_on(suspect)

    def begin(self, iteration: Iteration) -> None:
        """It is computed."""
        iteration.begin()
        for work in iteration.prefills:
            self.charge(work.sequence, work.start, work.count)

    def charge(self, sequence: Sequence, start: int, count: int) -> None:
        """Charge its tenant for these tokens of its prompt, once: it costs nothing that runners park and move."""
        end = min(start + count, sequence.prompt_tokens)
        tokens = end - max(start, sequence.charged_tokens)
        if tokens > 0:
            sequence.charged_tokens = end
            self.shares.charge(sequence, tokens)

    def of_all_decodes(self) -> list[Sequence] | None:
        """All that can run, if `choose` would return a decode of each; None if one of them needs a choice. To be asked
        while no adapter is to load, and unless parked sequences may resume."""
        sequences = self._sequences.runnable()
        if self._preset.pauses or len(sequences) > self._places or not self._turns.settled:
            return None
        for one in reversed(sequences):  # mostly the newest one is the one that does not
            if one.state is not State.DECODE or not one.decodes or one.at_promise:
                return None
            if one.row is None or not one.may_be_scheduled or (one.new.engines_lost and one.suspect):
                return None  # one that comes back after a park has no row yet
        self._protection.load_beside(nobody_runs=False)
        return sequences

    def share_cached(self) -> None:
        """Sequences that will start soon look again: others may have computed their pages meanwhile."""
        fresh = (sequence for sequence in self._sequences.runnable() if sequence.row is None)
        for sequence in islice(fresh, self._places):
            if sequence.chain is not None:
                self._memory.share_cached(sequence, sequence.promise)

    def _with_pages(self, *, idle: bool) -> Iteration:
        suspects_first = self._turns.suspects_first
        iteration, short = self._protection.take_pages(self._compose(suspects_first=suspects_first))
        if not iteration and short:
            # Suspects or the others, whoever comes first now, lack pages. There may be enough for the other group.
            iteration, short = self._protection.take_pages(self._compose(suspects_first=not suspects_first))
        if not iteration and short and idle and not self._sequences.late_with_places:
            self._protection.make_way()
        return iteration

    def _compose(self, *, suspects_first: bool) -> Iteration:
        late = self._sequences.late_with_places
        able = [
            sequence
            for sequence in self._sequences.runnable()
            if sequence.may_be_scheduled
            and (sequence.started or sequence.new.parent is None or not self.waits_for_parent(sequence))
        ]
        if self._sequences.masks_to_come and any(sequence.suspect for sequence in able):
            # A mask may kill the engine: suspects wait for it, and no other one begins, so that their turn comes.
            late += sum(one.started for one in able if one.suspect or one.new.mask is not None)
            able = [one for one in able if not one.suspect and one.new.mask is None]
        return compose(
            able,
            self._preset,
            chunk_tokens=self._chunk.size,
            places=self._places - late,
            suspects_first=suspects_first,
            free_pages=self._memory.free if self._preset.pauses else None,
            beside=self._beside,
            cap=UNBOUNDED if self._cap is None else self._cap.sequences - late,
            late=late > 0,
            shares=self.shares,
        )

    def waits_for_parent(self, sequence: Sequence) -> bool:
        """True if the parent of a sequence that has not started is about to compute pages that both need. A sequence
        waits only for an earlier one that can go on, so there are no cycles."""
        if sequence.new.parent is None or self._preset.request_level:
            return False
        parent = self._sequences.get(sequence.new.parent)
        if parent is None or parent.arrival >= sequence.arrival or parent.stands_at_promise:
            return False
        mine, other = sequence.chain, parent.chain
        if parent.state not in (State.WAITING, State.PREFILL) or mine is None or other is None:
            return False
        size = self._memory.page_tokens
        mine.extend(sequence.tokens, (len(sequence.tokens) - 1) // size)
        other.extend(parent.tokens, len(parent.tokens) // size)
        return min(mine.pages_in_common(other), sequence.promise) > mine.cached
