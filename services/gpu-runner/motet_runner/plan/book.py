"""The state of every sequence in the engine, its promises and its pages.

Commands and iterations come in; copies of pages between device and host go out, to be made in order before the next
model call: that is why a page is never reused before its copy has ended.

    LOADING → WAITING → PREFILL → DECODE → gone
       ↑         ↑          ↓        ↓
       └─────────┴────── PARKED ←────┘
"""

from collections import Counter
from collections.abc import Callable, Iterator

from motet.domain import BASE, PAGE_TOKENS, Digest, ParkMethod, RequestId, pages_for
from motet.errors import Declined, MotetError, Overloaded
from motet.ledger import Ledger
from motet_runner.interface import Event, Finish, NewSequence, OverflowAhead, ParkedNow, ResumedNow, State, StateChanged
from motet_runner.plan.admission import refuse_what_cannot_be
from motet_runner.plan.composer import Iteration, Work, compose
from motet_runner.plan.copies import Copy, Tier
from motet_runner.plan.pages import PageAllocator
from motet_runner.plan.presets import Preset
from motet_runner.plan.sequence import Sequence
from motet_runner.plan.suspects import Turns

PARKED_AT_MOST = 2
"""Nobody is chosen as a victim who was parked this often. The last parking asks for the whole remaining life, so that
whoever comes back from it can never stand at a promise again: the rule cannot lock."""

PAUSED_AT_MOST = 4
"""How often one sequence may be paused in all, whoever asks for it."""


class Book:
    def __init__(
        self,
        *,
        pages: int,
        preset: Preset,
        places: int,
        chunk_tokens: int,
        max_length: int,
        vocabulary: int,
        eos_token_ids: frozenset[int] = frozenset(),
        host_pages: int = 0,
        protect_after_steps: int = 0,
        on_device: Callable[[Digest], bool] = lambda _: True,
        cheaper: Callable[[Sequence], ParkMethod] = lambda _: ParkMethod.RECOMPUTE,
    ) -> None:
        self.pages = PageAllocator(pages)
        self.ledger: Ledger[RequestId] = Ledger(pages)
        self.preset = preset
        self.places = places
        self.chunk_tokens = chunk_tokens
        self.max_length = min(max_length, pages * PAGE_TOKENS)
        self.vocabulary = vocabulary
        self.eos_token_ids = eos_token_ids
        self.host = PageAllocator(host_pages)
        self.protect_after_steps = protect_after_steps
        self.supervised = False
        self.copies: list[Copy] = []
        self.events: list[Event] = []
        self._on_device = on_device
        self._cheaper = cheaper
        self._sequences: dict[RequestId, Sequence] = {}
        self._users: Counter[Digest] = Counter()
        self._parked: Counter[Digest] = Counter()
        self._arrivals = 0
        self._turns = Turns()

    # -- what there is -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __len__(self) -> int:
        return len(self._sequences)

    def get(self, request: RequestId) -> Sequence | None:
        return self._sequences.get(request)

    def live_on(self, adapter: Digest) -> int:
        """Sequences that need the adapter on the device. A parked one does not: it loads again when it comes back."""
        return self._users[adapter] - self._parked[adapter]

    def users_of(self, adapter: Digest) -> int:
        """Sequences that need the adapter now or, once they come back, later."""
        return self._users[adapter]

    def count(self, *states: State) -> int:
        return sum(sequence.state in states for sequence in self)

    def has_work(self) -> bool:
        return any(self._may_act(sequence) for sequence in self)

    def check(self) -> None:
        """Recount both books; raises AssertionError with the numbers."""
        self.ledger.check()
        self.pages.check(sequence.pages for sequence in self)
        for sequence in self:
            assert (sequence.request in self.ledger) == (sequence.state is not State.PARKED), sequence.request
            assert len(sequence.pages) <= max(sequence.promise, 0), (sequence.request, len(sequence.pages))
            assert sequence.computed <= max(len(sequence.pages), len(sequence.host_pages)) * PAGE_TOKENS
        assert self._users == Counter(sequence.adapter for sequence in self), self._users
        assert self._parked == Counter(s.adapter for s in self if s.state is State.PARKED), self._parked
        self.host.check(sequence.host_pages for sequence in self)

    # -- commands ----------------------------------------------------------------------------------------------------

    def add(self, new: NewSequence) -> Sequence:
        """Take a sequence in; raises Declined when it does not fit now, InvalidRequest when it never will."""
        refuse_what_cannot_be(new, max_length=self.max_length, vocabulary=self.vocabulary, pages=self.ledger.limit)
        known = self._sequences.get(new.request)
        if known is not None:
            if known.new.epoch >= new.epoch:
                raise Declined(f"Request {new.request} is here already, under epoch {known.new.epoch}.")
            self._remove(known)
        reserved = 0 if self.supervised else sum(s.wanted for s in self if s.state is State.PARKED)
        if new.promise > self.ledger.free - reserved:
            free = max(0, self.ledger.free - reserved)
            raise Declined(f"{new.promise} pages were promised and {free} can be given; try another runner or wait.")
        self.ledger.promise(new.request, new.promise)
        self._arrivals += 1
        sequence = Sequence(
            new=new,
            arrival=self._arrivals,
            promise=new.promise,
            tokens=[*new.prompt, *new.delivered],
            state=State.WAITING,
        )
        self._sequences[new.request] = sequence
        self._users[sequence.adapter] += 1
        if not self._adapter_is_here(sequence):
            self._enter(sequence, State.LOADING)
        self._announce(sequence)
        return sequence

    def cancel(self, request: RequestId, epoch: int | None = None) -> Sequence | None:
        """Forget a sequence and free its pages at once; None when there is none of that epoch."""
        sequence = self._sequences.get(request)
        if sequence is None or epoch not in (None, sequence.new.epoch):
            return None
        self._remove(sequence)
        return sequence

    def extend(self, request: RequestId, epoch: int, promise: int, extended: int) -> bool:
        sequence = self._named(request, epoch, promise)
        if sequence is None or sequence.state is State.PARKED or extended <= promise:
            return False
        if self.ledger.promise(request, min(extended, max(promise, sequence.most_pages))) is not None:
            return False
        self._promised(sequence, self.ledger.promise_of(request))
        return True

    def park(self, request: RequestId, epoch: int, promise: int, wanted: int, method: ParkMethod) -> bool:
        sequence = self._named(request, epoch, promise)
        if sequence is None or sequence.state is State.PARKED or sequence.parked_times >= PAUSED_AT_MOST:
            return False
        self._park(sequence, wanted, method, by_itself=False)
        return True

    def resume(self, request: RequestId, epoch: int, promise: int) -> bool:
        """Bring a parked sequence back under a new promise, if the ledger and the store have room for it."""
        sequence = self._sequences.get(request)
        if sequence is None or sequence.new.epoch != epoch or sequence.state is not State.PARKED:
            return False
        return self._resume(sequence, min(promise, max(sequence.most_pages, 1)))

    def adapter_arrived(self, adapter: Digest) -> None:
        for sequence in self:
            if sequence.state is State.LOADING and sequence.adapter == adapter:
                self._enter(sequence, State.WAITING)

    def fail_waiting_for(self, adapter: Digest) -> list[Sequence]:
        """A failed load fails only the sequences that wait for it (PU-07)."""
        waiting = [s for s in self if s.state is State.LOADING and s.adapter == adapter]
        for sequence in waiting:
            self._remove(sequence)
        return waiting

    def set_overcommit(self, factor: float) -> None:
        self.ledger.overcommit = factor

    # -- iterations --------------------------------------------------------------------------------------------------

    def next_iteration(self) -> tuple[Iteration, list[tuple[Sequence, MotetError]]]:
        """The next iteration with its pages taken, and the sequences that had to be given up (normally none).

        An iteration for one suspect is announced first: an empty one with the event comes before it.
        """
        given_up = self._protect()
        if not self.supervised:
            self._resume_by_itself()
        suspects_first = self._turns.suspects_first
        iteration, short = self._with_pages(self._compose(suspects_first=suspects_first))
        if not iteration and short:
            # Without pages for the one whose turn it is, the others may still have theirs.
            iteration, short = self._with_pages(self._compose(suspects_first=not suspects_first))
        if not iteration and short:
            given_up += self._make_way([sequence for sequence in self if sequence.pages])
        if news := self._turns.announce(iteration):
            self.events += news
            return Iteration(), given_up
        for work in iteration.work:
            work.sequence.started = True
            if work.sequence.state is State.WAITING:
                self._enter(work.sequence, State.PREFILL)
        return iteration, given_up

    def computed(self, work: Work) -> None:
        """The rows of `work` are in the store."""
        sequence = work.sequence
        sequence.computed += work.count
        if not work.samples or sequence.suspect:
            percent = 100 * sequence.computed // len(sequence.tokens)
            self.events.append(StateChanged(sequence.request, sequence.new.epoch, sequence.state, percent))

    def sampled(self, sequence: Sequence, token: int) -> Finish | None:
        """Write the next token; if it is the last, the sequence leaves and its pages are free (S3-07, PU-11)."""
        sequence.tokens.append(token)
        sampling = sequence.new.sampling
        finish = None
        if token in sampling.stop_token_ids or (token in self.eos_token_ids and not sampling.ignore_eos):
            finish = Finish.STOP
        elif sequence.output_tokens >= sampling.max_tokens:
            finish = Finish.LENGTH
        if finish is not None:
            self._remove(sequence)
            return finish
        if sequence.state is State.PREFILL:
            self._enter(sequence, State.DECODE)
        self._announce(sequence)
        return None

    def failed(self, sequence: Sequence) -> None:
        """Its numbers are not finite: it leaves."""
        self._remove(sequence)

    # -- who runs ----------------------------------------------------------------------------------------------------

    def _compose(self, *, suspects_first: bool) -> Iteration:
        return compose(
            self._runnable(),
            self.preset,
            chunk_tokens=self.chunk_tokens,
            places=self.places,
            suspects_first=suspects_first,
        )

    def _runnable(self) -> list[Sequence]:
        return [s for s in self if s.state in (State.WAITING, State.PREFILL, State.DECODE)]

    def _may_act(self, sequence: Sequence) -> bool:
        if sequence.state is State.LOADING:
            return False
        return sequence.state is not State.PARKED or not self.supervised

    def _adapter_is_here(self, sequence: Sequence) -> bool:
        return sequence.adapter == BASE or self._on_device(sequence.adapter)

    def _enter(self, sequence: Sequence, state: State) -> None:
        if sequence.state is State.PARKED:
            _one_less(self._parked, sequence.adapter)
        if state is State.PARKED:
            self._parked[sequence.adapter] += 1
        sequence.state = state
        self.events.append(StateChanged(sequence.request, sequence.new.epoch, state))

    def _named(self, request: RequestId, epoch: int, promise: int) -> Sequence | None:
        sequence = self._sequences.get(request)
        if sequence is None or sequence.new.epoch != epoch or sequence.promise != promise:
            return None
        return sequence

    # -- memory ------------------------------------------------------------------------------------------------------

    def _with_pages(self, iteration: Iteration) -> tuple[Iteration, bool]:
        """Take the pages of an iteration; whether they were short. They only are when promises were overcommitted; then
        the newest of those who hold pages is parked (PU-15), or the one in need waits when it is the newest itself."""
        short = False
        for work in iteration.work:
            sequence = work.sequence
            while sequence.state is not State.PARKED and not self._grow(sequence, work.start + work.count):
                short = True
                victim = self._victim(holding_pages=True)
                if victim is None or _newest_of_the_lowest_class(victim) < _newest_of_the_lowest_class(sequence):
                    iteration = iteration.without(sequence)
                    break
                self._park(victim, victim.promise, self._cheaper(victim), by_itself=True)
                iteration = iteration.without(victim)
        return iteration, short

    def _make_way(self, candidates: list[Sequence]) -> list[tuple[Sequence, MotetError]]:
        """Nobody can run and nobody may be chosen: the newest is parked beyond the rule, or goes, so the rest live."""
        newest = max(candidates, key=_newest_of_the_lowest_class)
        if newest.parked_times < PAUSED_AT_MOST:
            self._park(newest, newest.most_pages, self._cheaper(newest), by_itself=True)
            return []
        self._remove(newest)
        return [(newest, Overloaded("The runner's memory is full and this request was paused often; try again."))]

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        taken = self.pages.take(max(0, pages_for(tokens) - len(sequence.pages)))
        if taken is None:
            return False
        sequence.pages += taken
        return True

    def _promised(self, sequence: Sequence, promise: int) -> None:
        sequence.promise = promise
        sequence.announced = False
        sequence.waited = 0
        self._announce(sequence)

    def _announce(self, sequence: Sequence) -> None:
        if sequence.nears_promise and not sequence.announced:
            sequence.announced = True
            self.events.append(OverflowAhead(sequence.request, sequence.new.epoch, sequence.promise))

    def _release(self, sequence: Sequence) -> None:
        self.pages.give(sequence.pages)
        sequence.pages = []
        self.ledger.release(sequence.request)

    def _remove(self, sequence: Sequence) -> None:
        self._release(sequence)
        self._free_host_pages(sequence)
        if sequence.state is State.PARKED:
            _one_less(self._parked, sequence.adapter)
        _one_less(self._users, sequence.adapter)
        del self._sequences[sequence.request]

    def _free_host_pages(self, sequence: Sequence) -> None:
        self.host.give(sequence.host_pages)
        sequence.host_pages = []

    # -- park and resume (S3-11, S3-13, S3-14) -------------------------------------------------------------------------

    def _park(self, sequence: Sequence, wanted: int, method: ParkMethod, *, by_itself: bool) -> None:
        sequence.parked_times += 1
        if sequence.parked_times >= PARKED_AT_MOST:
            wanted = sequence.most_pages
        needed = pages_for(sequence.computed)
        on_host = self.host.take(needed) if method is ParkMethod.SWAP else None
        if on_host:
            self.copies.append(Copy(Tier.DEVICE, tuple(sequence.pages[:needed]), Tier.HOST, tuple(on_host)))
            sequence.host_pages = on_host
        else:
            method = ParkMethod.RECOMPUTE
            sequence.computed = 0
        self._release(sequence)
        sequence.parked_by = method
        sequence.wanted = max(1, min(wanted, sequence.most_pages), pages_for(sequence.computed))
        sequence.waited = 0
        self.events.append(ParkedNow(sequence.request, sequence.new.epoch, sequence.wanted, method, by_itself))
        self._enter(sequence, State.PARKED)

    def _resume(self, sequence: Sequence, promise: int) -> bool:
        needed = pages_for(sequence.computed)
        if promise < max(1, needed) or promise > self.ledger.free:
            return False
        pages = self.pages.take(needed)
        if pages is None:
            return False
        self.ledger.promise(sequence.request, promise)
        sequence.pages = pages
        method = sequence.parked_by or ParkMethod.RECOMPUTE
        if method is ParkMethod.SWAP:
            self.copies.append(Copy(Tier.HOST, tuple(sequence.host_pages), Tier.DEVICE, tuple(pages)))
            self._free_host_pages(sequence)
        sequence.parked_by, sequence.wanted = None, 0
        self.events.append(ResumedNow(sequence.request, sequence.new.epoch, promise, method))
        if not self._adapter_is_here(sequence):
            self._enter(sequence, State.LOADING)
        elif sequence.decodes:
            self._enter(sequence, State.DECODE)
        else:
            self._enter(sequence, State.PREFILL if sequence.started else State.WAITING)
        self._promised(sequence, promise)
        return True

    # -- self-protection -----------------------------------------------------------------------------------------------

    def _protect(self) -> list[tuple[Sequence, MotetError]]:
        """Extend or park for those who stand at their promise and got no answer. Returns those given up."""
        given_up: list[tuple[Sequence, MotetError]] = []
        runnable = self._runnable()
        others_run = any(not sequence.at_promise for sequence in runnable)
        for sequence in runnable:
            if sequence.state is State.PARKED or not sequence.at_promise:
                continue
            if self.supervised and others_run and sequence.waited < self.protect_after_steps:
                sequence.waited += 1
                continue
            if self._extend_by_itself(sequence):
                continue
            victim = self._victim()
            if victim is not None:
                self._park(victim, victim.doubled, self._cheaper(victim), by_itself=True)
                if victim is not sequence:
                    self._extend_by_itself(sequence)
            elif not any(not other.at_promise for other in self._runnable()):
                given_up += self._make_way(self._runnable())
                break
        return given_up

    def _extend_by_itself(self, sequence: Sequence) -> bool:
        extended = min(sequence.doubled, sequence.promise + self.ledger.free)
        return self.extend(sequence.request, sequence.new.epoch, sequence.promise, extended)

    def _resume_by_itself(self) -> None:
        parked = sorted((s for s in self if s.state is State.PARKED), key=lambda sequence: sequence.arrival)
        for sequence in parked:
            # The pages must be there, not only promised: an overcommitted ledger would park it again at once.
            room = self.pages.free >= sequence.wanted and not any(other.at_promise for other in self._runnable())
            if not room or not self._resume(sequence, sequence.wanted):
                return

    def _victim(self, *, holding_pages: bool = False) -> Sequence | None:
        """The newest of the lowest class, never one that was parked too often already."""
        candidates = [
            sequence
            for sequence in self
            if sequence.state is not State.PARKED
            and sequence.parked_times < PARKED_AT_MOST
            and (sequence.pages or not holding_pages)
        ]
        return max(candidates, key=_newest_of_the_lowest_class, default=None)


def _one_less(counter: Counter[Digest], adapter: Digest) -> None:
    """Also forgets an adapter that nobody uses any more: adapters come and go without end."""
    counter[adapter] -= 1
    if not counter[adapter]:
        del counter[adapter]


def _newest_of_the_lowest_class(sequence: Sequence) -> tuple[int, int]:
    return sequence.new.priority, sequence.arrival
