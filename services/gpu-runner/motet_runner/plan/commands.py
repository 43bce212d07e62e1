"""Commands: sequences and adapters come and go, and promises change. Each takes effect at once, and the next iteration
is planned with it."""

from motet.domain import Digest, ParkMethod, RequestId
from motet.errors import TOO_FEW_PAGES, Declined, InvalidRequest
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.proof import ProofOrder
from motet_runner.interface import AdapterFailed, NewSequence, State
from motet_runner.plan.admission import admitted, too_long_beside_adapter
from motet_runner.plan.sequence import Sequence
from motet_runner.plan.sequence_lives import SequenceLives
from motet_runner.plan.sequence_memory import MAX_PARKED, SequenceMemory
from motet_runner.plan.sequence_table import SequenceTable


class Commands:
    def __init__(
        self,
        sequences: SequenceTable,
        memory: SequenceMemory,
        lives: SequenceLives,
        *,
        max_length: int,
        vocabulary: int,
        window: int | None,
    ) -> None:
        self._sequences = sequences
        self._memory = memory
        self._adapters = memory.adapters
        self._lives = lives
        self._max_length = max_length
        self._vocabulary = vocabulary
        self._window = window
        self._arrivals = 0
        self.supervised = False
        """True if a supervisor decides about promises"""

    def add(self, new: NewSequence) -> Sequence:
        """Add a sequence. Raises Declined if it does not fit now, InvalidRequest if it never will."""
        ledger, adapter_pages = self._memory.ledger, self._adapters.pages_of(new.adapter)
        error = self._adapters.refusal(new.adapter) or self._too_long(new)
        if error is not None:
            raise error
        promisable = ledger.limit_beside(adapter_pages)
        new = admitted(new, max_length=self._max_length, vocabulary=self._vocabulary, promisable=promisable)
        known = self._sequences.get(new.request)
        if known is not None:
            if known.new.epoch >= new.epoch:
                raise Declined(f"Request {new.request} is here already, under epoch {known.new.epoch}.")
            self._lives.remove(known)
        self._arrivals += 1
        sequence = Sequence(
            new=new,
            arrival=self._arrivals,
            promise=new.promise,
            tokens=[*new.prompt, *new.delivered],
            state=State.WAITING,
            page_tokens=self._memory.page_tokens,
            window=self._window,
        )
        self._lives.begin_keys(sequence)
        try:
            self._promise_pages(sequence)
        except Exception:
            self._memory.release(sequence)
            raise
        self._sequences.add(sequence)
        self._adapters.used(sequence.adapter)
        if not self._adapters.is_here(sequence.adapter):
            self._sequences.enter(sequence, State.LOADING)
            self._adapters.want(sequence.adapter)
        self._memory.announce_overflow(sequence)
        return sequence

    def cancel(self, request: RequestId, epoch: int | None = None) -> Sequence | None:
        """Forget a sequence and free its pages at once; None if no sequence has that epoch."""
        sequence = self._sequences.get(request)
        if sequence is None or epoch not in (None, sequence.new.epoch):
            return None
        self._lives.remove(sequence)
        return sequence

    def extend(self, request: RequestId, epoch: int, promise: int, extended: int, *, number: int = 0) -> bool:
        sequence = self._promised(request, epoch, promise, number)
        return sequence is not None and self._memory.extend(sequence, extended)

    def park(
        self, request: RequestId, epoch: int, promise: int, wanted: int, method: ParkMethod, *, number: int = 0
    ) -> bool:
        sequence = self._promised(request, epoch, promise, number)
        if sequence is None or sequence.parked_times >= MAX_PARKED:
            return False
        self._memory.park(sequence, wanted, method, by_itself=False)
        return True

    def resume(self, request: RequestId, epoch: int, promise: int, *, number: int = 0) -> bool:
        sequence = self._sequences.of_epoch(request, epoch)
        if sequence is None or sequence.state is not State.PARKED or number not in (0, sequence.promise_number):
            return False
        if number:  # whoever orders means what it asks for, whatever pages the order names
            promise = max(promise, sequence.wanted)
        return self._memory.resume(sequence, min(promise, max(sequence.most_pages, 1)), ordered=True)

    def load_adapter(
        self,
        adapter: Digest,
        layout: AdapterLayout,
        *,
        pinned: bool = False,
        proof: ProofOrder | None = None,
    ) -> None:
        """Register where an adapter is on this machine. It loads as soon as it can get its pages. `proof`: it is to be
        proved."""
        new = not self._adapters.is_known(adapter)
        self._adapters.register(adapter, layout, pinned=pinned, proof=proof)
        self._lives.may_serve(adapter)
        if not new:
            return
        too_large = self._adapters.too_large(adapter)
        if too_large is not None:
            self._sequences.events.append(AdapterFailed(adapter, too_large))
        for sequence in [sequence for sequence in self._sequences if sequence.adapter == adapter]:
            error = too_large or self._too_long(sequence.new)
            if error is not None:
                self._lives.give_up(sequence, error)

    def drop_adapter(self, adapter: Digest) -> None:
        """Forget an adapter once no sequence uses it."""
        self._adapters.drop(adapter)

    def set_overcommit(self, factor: float) -> None:
        self._memory.ledger.overcommit = factor

    def _promise_pages(self, sequence: Sequence) -> None:
        """Raises Declined if the promise, minus the pages that it already holds, does not fit beside the adapters in
        use."""
        new = sequence.new
        parked = [] if self.supervised else self._sequences.parked()
        if parked:
            # They come back once enough pages are free. Others could take these again and again.
            why_not = f"{len(parked)} parked requests come back first"
            raise Declined(f"{why_not}; try another runner or wait.", reason=TOO_FEW_PAGES)
        # The sequence holds its shared pages from now on: only then are they charged once.
        self._memory.share_cached(sequence, new.promise)
        ledger, in_use = self._memory.ledger, self._adapters.pages_in_use(new.adapter)
        why_not = ledger.why_not(sequence, new.promise, pages_of_adapters=in_use)
        if why_not:
            raise Declined(f"{why_not}; try another runner or wait.", reason=TOO_FEW_PAGES)
        ledger.promise(new.request, new.promise)

    def _too_long(self, new: NewSequence) -> InvalidRequest | None:
        memory, adapter_pages = self._memory, self._adapters.pages_of(new.adapter)
        pages, page_tokens = memory.pages.capacity, memory.page_tokens
        return too_long_beside_adapter(new, adapter_pages=adapter_pages, pages=pages, page_tokens=page_tokens)

    def _promised(self, request: RequestId, epoch: int, promise: int, number: int) -> Sequence | None:
        """The sequence that a command names, unless it is parked or its promise has changed: also to one of as many
        pages, as after a park and a resume."""
        sequence = self._sequences.of_epoch(request, epoch)
        if sequence is None or sequence.state is State.PARKED:
            return None
        same = sequence.promise_number == number if number else sequence.promise == promise
        return sequence if same else None
