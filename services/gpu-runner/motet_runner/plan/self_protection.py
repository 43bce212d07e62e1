"""Self-protection: an engine extends, parks and resumes sequences by itself, so that the others can go on.

It does so when a sequence stands at its promise and nobody answers (S3-10), when pages are short because promises were
overcommitted (PU-15), and when an adapter has lacked pages for a long time.
"""

from collections.abc import Callable
from dataclasses import dataclass

from motet.domain import Digest, ParkMethod
from motet.errors import MotetError, Overloaded
from motet_runner.interface import State
from motet_runner.plan.composer import Iteration
from motet_runner.plan.joining import PASSED_OVER_AT_MOST, passed_over
from motet_runner.plan.sequence import Sequence
from motet_runner.plan.sequence_memory import MAX_PARKED, SequenceMemory
from motet_runner.plan.sequence_table import SequenceTable
from motet_runner.plan.victims import newest_of_the_lowest_class, victim_among


@dataclass(slots=True)
class SelfProtection:
    _sequences: SequenceTable
    _memory: SequenceMemory
    _protect_after_steps: int
    _cheaper: Callable[[Sequence], ParkMethod]
    _give_up: Callable[[Sequence, MotetError], None]
    _loads_waited: int = 0
    """In how many iterations others ran while sequences waited for adapters that could not get their pages."""

    # -- promises ----------------------------------------------------------------------------------------------------

    def answer_overflows(self, *, supervised: bool, idle: bool) -> None:
        """Extend or park for sequences that stand at their promise without an answer. `idle`: no iteration is
        launched."""
        runnable = self._sequences.runnable()
        # Two comparisons: mostly nobody is at its promise, and each iteration asks for all.
        at_promise = [one for one in runnable if one.scheduled >= one.promise * one.page_tokens]
        standing = sum(sequence.stands_at_promise for sequence in at_promise)
        if not standing:
            return
        late = self._sequences.late_with_places
        others_run = late > 0 or standing < len(runnable)
        for sequence in runnable:
            if sequence.state is State.PARKED or not sequence.stands_at_promise:
                continue
            if supervised and others_run and sequence.waited < self._protect_after_steps:
                sequence.waited += 1
                continue
            if self._extend(sequence):
                continue
            victim = victim_among(self._sequences)
            if victim is not None:
                self._park(victim, victim.doubled)
                if victim is not sequence:
                    self._extend(sequence)
            elif idle and not late and all(other.stands_at_promise for other in self._sequences.runnable()):
                self._make_way(self._sequences.runnable())
                break

    def resume_parked(self) -> None:
        for sequence in self._sequences.parked():
            # The pages must be free, not only promised: an overcommitted ledger would park it again at once.
            room = self._memory.free_beside(sequence.adapter) >= sequence.wanted
            if not room or any(other.stands_at_promise for other in self._sequences.runnable()):
                return
            if not self._memory.resume(sequence, sequence.wanted):
                return

    # -- pages -------------------------------------------------------------------------------------------------------

    def take_pages(self, iteration: Iteration) -> tuple[Iteration, bool]:
        """Take the pages of an iteration → the iteration, and True if pages were short. They are short only if promises
        were overcommitted; then the newest sequence that holds pages is parked (PU-15), or the one in need waits if it
        is the newest itself. If others have started instead too often, none starts while it waits."""
        short, none_starts = False, False
        lacking: list[Sequence] = []
        for work in iteration.work:
            sequence = work.sequence
            if none_starts and not sequence.started:
                iteration = iteration.without(sequence)
                continue
            if work.start + work.count <= (sequence.left_pages + len(sequence.pages)) * sequence.page_tokens:
                continue  # mostly: it has these pages
            while sequence.state is not State.PARKED and not self._memory.grow(sequence, work.start + work.count):
                short = True
                victim = victim_among(self._sequences, holding_pages=True)
                if victim is None or newest_of_the_lowest_class(victim) < newest_of_the_lowest_class(sequence):
                    iteration = iteration.without(sequence)
                    lacking.append(sequence)
                    none_starts |= sequence.passed_over >= PASSED_OVER_AT_MOST
                    break
                self._park(victim, victim.promise)
                iteration = iteration.without(victim)
        if lacking:
            starting = (work.sequence for work in iteration.work if not work.sequence.started)
            iteration.passed_over += passed_over(lacking, starting)
        return iteration, short

    def make_way(self) -> None:
        """Frees pages when no sequence can run for lack of pages, and no load can begin. If none holds pages, they are
        those of adapters whose sequences wait for a place: one of the sequences in these places gives it up."""
        candidates = [one for one in self._sequences if one.pages] or self._sequences.runnable()
        if candidates:
            self._make_way(candidates)

    # -- adapters ----------------------------------------------------------------------------------------------------

    def load_before_others_run(self) -> None:
        """Begin a load that other sequences have kept from its pages in too many iterations.

        Without this they could do so for ever: more pages were promised than exist, or the adapter became known only
        after its sequence was admitted, and its pages were promised to others. So the newest are parked, one after the
        other, until the adapter has its pages. The supervisor is not asked: it decides about promises, and here pages
        are short.
        """
        adapters = self._memory.adapters
        if (adapter := adapters.in_the_way_of_a_proof()) is not None:
            self._park_all_of(adapter)
        if self._loads_waited < PASSED_OVER_AT_MOST:
            return
        self._memory.begin_load()
        while adapters.loads_lack_pages and (victim := victim_among(self._sequences, holding_pages=True)) is not None:
            self._park(victim, victim.promise)
            self._memory.begin_load()

    def load_beside(self, *, nobody_runs: bool) -> None:
        """Begin a load with the pages that an iteration leaves: running sequences come before waiting ones."""
        adapters = self._memory.adapters
        self._memory.begin_load()
        self._loads_waited = self._loads_waited + 1 if adapters.loads_lack_pages else 0
        if nobody_runs and adapters.loads_wait:
            self.make_way()  # waiting sequences hold pages that their adapters need

    def _park_all_of(self, adapter: Digest) -> None:
        """All adapters on the device have sequences, and new ones may come for ever: the turn of a proof has come, and
        these sequences give up their adapter's place. Not if one of them was parked too often."""
        theirs = [one for one in self._sequences if one.adapter == adapter and one.state is not State.PARKED]
        if all(one.parked_times < MAX_PARKED for one in theirs):
            for sequence in theirs:
                self._park(sequence, sequence.promise)
            self._memory.begin_load()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _extend(self, sequence: Sequence) -> bool:
        return self._memory.extend(
            sequence, min(sequence.doubled, sequence.promise + self._memory.ledger.free_to_extend)
        )

    def _park(self, sequence: Sequence, wanted: int) -> None:
        self._memory.park(sequence, wanted, self._cheaper(sequence), by_itself=True)

    def _make_way(self, candidates: list[Sequence]) -> None:
        """No sequence can run and none may be a victim: park the newest anyway, or end it, so that the rest can run."""
        newest = max(candidates, key=newest_of_the_lowest_class)
        if newest.parked_times < MAX_PARKED:
            self._park(newest, newest.most_pages)
        else:
            error = Overloaded("The runner's memory is full and this request was paused often; try again.")
            self._give_up(newest, error)
