"""Promises and pages of the sequences of an engine, and how sequences are parked and resumed (S3-11, S3-13, S3-14).

It keeps two books: the ledger has the promises, the page allocators have the pages in use. The prefix cache holds pages
that were in use, until they are needed. Adapters have pages of the same pool, and yield pages that no live sequence
uses, after the prefix cache.
"""

import math
from collections.abc import Callable, Iterable, Mapping

from motet.domain import Digest, ParkMethod, RequestId, pages_for
from motet_runner.interface import NewSequence, OverflowAhead, ParkedNow, ResumedNow, State
from motet_runner.plan.adapter_proofs import AdapterProofs
from motet_runner.plan.forecast_ledger import ForecastLedger
from motet_runner.plan.host_adapters import HostAdapters
from motet_runner.plan.page_copies import Copy, Tier
from motet_runner.plan.page_ledger import PageLedger
from motet_runner.plan.pages import PageAllocator
from motet_runner.plan.prefix_cache import PageChain, PrefixCache
from motet_runner.plan.prompt_scores import pages_before
from motet_runner.plan.resident_adapters import MAX_LOADS, ResidentAdapters
from motet_runner.plan.row_assignment import RowAssignment
from motet_runner.plan.sequence import Sequence
from motet_runner.plan.sequence_table import SequenceTable

MAX_PARKED = 4
"""How often one sequence may be parked in total, for any reason."""


class SequenceMemory:
    def __init__(
        self,
        table: SequenceTable,
        *,
        page_tokens: int,
        pages: int,
        host_pages: int,
        max_adapters: int,
        pages_of_rank: Callable[[int], int],
        prefix_cache: bool = True,
        by_forecast: bool = False,
        contiguous: bool = False,
        proofs: AdapterProofs | None = None,
        max_loads: int = MAX_LOADS,
        max_pages_beside: float = math.inf,
        host_adapters: HostAdapters | None = None,
        bytes_of_rank: Callable[[int], int] = lambda _: 0,
    ) -> None:
        """`contiguous`: a sequence that begins takes pages for its whole promise, as one run (S3-08). The prefix cache
        must be off: the pages of a run belong to one sequence."""
        self.page_tokens = page_tokens
        self.pages = PageAllocator(pages)
        self.adapters = ResidentAdapters(
            self.pages,
            table,
            max_adapters=max_adapters,
            pages_of_rank=pages_of_rank,
            contiguous=contiguous,
            proofs=proofs,
            max_loads=max_loads,
            max_pages_beside=max_pages_beside,
            host=host_adapters,
            bytes_of_rank=bytes_of_rank,
        )
        self.ledger: PageLedger
        if by_forecast:
            self.ledger = ForecastLedger(self.pages, self.adapters.pages_in_use, table, page_tokens)
        else:
            self.ledger = PageLedger(self.pages, self.adapters.pages_in_use)
            self.adapters.promises_fit = lambda: self.ledger.promised <= self.ledger.limit
        self.cache = PrefixCache(self.pages, page_tokens)
        self._cache_on = prefix_cache
        self._contiguous = contiguous
        self.host = PageAllocator(host_pages)
        self.rows = RowAssignment()
        self.copies: list[Copy] = []
        """Copies that the next iteration makes first."""
        self.moves: list[Mapping[int, int]] = []
        """The moves of pages that these copies make."""
        self._table = table

    @property
    def free_share(self) -> float:
        """How much of the pages that KV can get now is free, as a share."""
        return min(1.0, self.free / max(1, self.ledger.kv_pages))

    @property
    def free(self) -> int:
        """How many pages KV can take now, including those that the prefix cache and idle adapters yield."""
        return self.pages.free + self.adapters.reclaimable()

    # -- promises ----------------------------------------------------------------------------------------------------

    def extend(self, sequence: Sequence, extended: int) -> bool:
        """Raise the promise of a sequence that is not parked, if the ledger allows it, at most to its longest life."""
        extended = min(extended, sequence.most_pages)
        if extended <= sequence.promise or self.ledger.promise(sequence.request, extended) is not None:
            return False
        if self._contiguous and sequence.pages and not self._lengthen(sequence, extended):
            self.ledger.promise(sequence.request, sequence.promise)
            return False
        self._set_promise(sequence, extended)
        return True

    def announce_overflow(self, sequence: Sequence) -> None:
        """Report once per promise that its end is near (S3-10)."""
        if not sequence.announced and sequence.nears_promise:
            sequence.announced = True
            self._table.events.append(OverflowAhead(sequence.entry()))

    def _set_promise(self, sequence: Sequence, promise: int) -> None:
        sequence.promise = promise
        sequence.promise_number += 1
        sequence.announced = False
        sequence.waited = 0
        self.announce_overflow(sequence)

    # -- pages -------------------------------------------------------------------------------------------------------

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Take the pages that `tokens` tokens need. False, without any change, if there are too few."""
        missing = pages_for(tokens, self.page_tokens) - sequence.left_pages - len(sequence.pages)
        if missing <= 0:
            return True
        if self._contiguous:
            return self._lengthen(sequence, sequence.promise)
        taken = self._take(missing)
        if taken is None:
            return False
        sequence.pages += taken
        return True

    def _take(self, count: int, *, spare: Digest | None = None) -> list[int] | None:
        """Pages for KV. The prefix cache yields first, then idle adapters, but not `spare`."""
        if count > self.pages.free and not self.adapters.reclaim(count, spare=spare):
            return None
        return self.pages.take(count)

    def _lengthen(self, sequence: Sequence, promise: int, *, spare: Digest | None = None) -> bool:
        """Take the pages of a promise that are missing, so that all of them are one run. False, without any change, if
        there are too few. Other runs may be moved together first (S3-12)."""
        grant = self.adapters.lengthen(sequence.pages, _length_of_run(sequence, promise), spare=spare)
        if grant is None:
            return False
        self.move_pages(grant.moved, grant.copies)
        sequence.pages = list(grant.run.pages)
        return True

    def begin_load(self) -> None:
        """Begin to load the next adapters that can get their pages."""
        self.adapters.forget_dropped()
        while (grant := self.adapters.begin_load()) is not None:
            self.move_pages(grant.moved, grant.copies)

    def charges(self) -> dict[RequestId, int]:
        """How many pages of its promise the ledger charges to each sequence."""
        return self.ledger.charges(sorted(self._table, key=lambda sequence: sequence.arrival))

    def move_pages(self, moves: Mapping[int, int], copies: Iterable[Copy]) -> None:
        """The allocator has moved pages for all holders, and these copies carry the bytes. Iterations launched before
        still use the old pages, and end before the copies begin."""
        self.copies += copies
        if moves:
            self.moves.append(moves)
            self.ledger.sequences_changed()
            self.cache.relocate(moves)
            for sequence in self._table:
                sequence.pages = [moves.get(page, page) for page in sequence.pages]

    # -- shared pages ------------------------------------------------------------------------------------------------

    def chain_of(self, new: NewSequence, salt: bytes) -> PageChain | None:
        """The digests by which a sequence's pages are found; None if it shares none. `salt`: its keys' salt, added to
        the request's `prefix_salt`."""
        if not self._cache_on or not new.prefix_salt:
            return None
        return PageChain(new.adapter, new.prefix_salt + salt, self.page_tokens)

    def share_cached(self, sequence: Sequence, promise: int) -> None:
        """Let a sequence begin with the cached pages of its tokens, at most `promise` pages. A sequence that has
        computed something itself is not changed."""
        chain = sequence.chain
        if chain is None or sequence.scheduled > chain.cached * self.page_tokens or len(sequence.pages) > chain.cached:
            return
        self._attach(chain, sequence, promise)
        sequence.scheduled = sequence.computed = chain.cached * self.page_tokens

    def _attach(self, chain: PageChain, sequence: Sequence, promise: int) -> None:
        last = promise if sequence.scored else min(promise, pages_before(sequence.to_score, self.page_tokens))
        self.cache.attach(chain, sequence.tokens, sequence.pages, last=last)

    def cached_hints(self, count: int) -> list[int]:
        """The hints of at most `count` cached pages, the most valuable first."""
        return self.cache.hints((sequence.chain for sequence in self._table if sequence.chain is not None), count)

    def count_cached(self, sequence: Sequence) -> None:
        """Count a sequence that begins to be computed."""
        sequence.cached_tokens = min(sequence.scheduled, sequence.prompt_tokens)
        if sequence.chain is not None:
            self.cache.queried_tokens += len(sequence.tokens)
            self.cache.hit_tokens += sequence.scheduled

    def add_to_cache(self, sequence: Sequence) -> None:
        """Add the full pages that it has computed, but only after a token was sampled from them: then they are
        finite."""
        chain, full = sequence.chain, sequence.computed // self.page_tokens
        if chain is not None and sequence.state is not State.PARKED and full > chain.cached:
            self.cache.insert(chain, sequence.tokens, sequence.pages, full)

    def release_left(self, sequence: Sequence, window: int) -> None:
        """Give back the pages that no later token attends to. Launched iterations read them before they are
        overwritten."""
        earliest = max(0, sequence.scheduled - window + 1)
        count = earliest // self.page_tokens - sequence.left_pages
        if count > 0:
            self.pages.give(sequence.pages[:count])
            del sequence.pages[:count]
            sequence.left_pages += count

    def restart(self, sequence: Sequence) -> None:
        """Drop all its keys, to be computed again under its present promise. No launched iteration may compute it."""
        assert not sequence.pending, sequence.request
        sequence.scheduled = sequence.computed = sequence.left_pages = 0
        sequence.restarts += 1
        self.ledger.sequences_changed()
        self.rows.release(sequence)
        self._give_pages(sequence)
        self._release_host(sequence)
        if sequence.state is State.PARKED:
            sequence.parked_by = ParkMethod.RECOMPUTE
        else:
            self._table.enter(sequence, State.PREFILL)

    def release(self, sequence: Sequence) -> None:
        """Free all that a leaving sequence has on the device and the host."""
        self._release_device(sequence)
        self._release_host(sequence)

    def _release_device(self, sequence: Sequence) -> None:
        self.rows.release(sequence)
        self._give_pages(sequence)
        self.ledger.release(sequence.request)

    def _give_pages(self, sequence: Sequence) -> None:
        self.pages.give(sequence.pages)
        sequence.pages = []
        if sequence.chain is not None:
            sequence.chain.cached = 0

    def _release_host(self, sequence: Sequence) -> None:
        self.host.give(sequence.host_pages)
        sequence.host_pages = []

    # -- park and resume ---------------------------------------------------------------------------------------------

    def free_beside(self, adapter: Digest) -> int:
        """How many pages the KV of an adapter's sequences can take now, beside the adapter itself."""
        idle = self.adapters.reclaimable(spare=adapter)
        return self.pages.free + idle - self.adapters.pages_to_take(adapter)

    def park(self, sequence: Sequence, wanted: int, method: ParkMethod, *, by_itself: bool) -> None:
        """Take a sequence's pages. Their bytes are copied to the host, or computed again later.

        An iteration that still computes it ends before the copy begins.
        """
        sequence.parked_times += 1
        if sequence.is_spared:
            wanted = sequence.most_pages
        elif by_itself and self.ledger.by_forecast:
            # Its promise may grow at any time, and the forecast has room for that. So it waits only for what it needs
            # at once.
            wanted = pages_for(sequence.length + 1, self.page_tokens)
        needed = sequence.pages_of_kv
        on_host = self.host.take(needed) if method is ParkMethod.SWAP else None
        if on_host:
            self.copies.append(Copy(Tier.DEVICE, tuple(sequence.pages[:needed]), Tier.HOST, tuple(on_host)))
            sequence.host_pages = on_host
        else:
            method = ParkMethod.RECOMPUTE
            sequence.scheduled = sequence.computed = sequence.left_pages = 0
            sequence.restarts += 1
        self._release_device(sequence)
        sequence.parked_by = method
        sequence.wanted = max(1, min(wanted, sequence.most_pages), pages_for(sequence.scheduled, self.page_tokens))
        sequence.promise_number += 1
        sequence.waited = 0
        number = sequence.promise_number
        parked = ParkedNow(sequence.request, sequence.new.epoch, sequence.wanted, method, by_itself, number)
        self._table.events.append(parked)
        self._table.enter(sequence, State.PARKED)

    def resume(self, sequence: Sequence, promise: int, *, ordered: bool = False) -> bool:
        """Bring a parked sequence back under a new promise, if ledger and pages have room for it. Pages that are still
        in the prefix cache are neither copied nor computed again. Its adapter loads again if it was evicted.

        `ordered`: the scheduler has found room in its copy of the ledger. That sums parts of a forecast, and the
        forecast with one more may exceed the sum; the scheduler would not learn why its order has no effect."""
        needed = sequence.pages_of_kv
        if promise < max(1, pages_for(sequence.scheduled, self.page_tokens)):
            return False
        method = sequence.parked_by or ParkMethod.RECOMPUTE
        if sequence.chain is not None:
            self._attach(sequence.chain, sequence, promise)
        shared, adapter = len(sequence.pages), sequence.adapter
        missing = max(0, needed - shared)
        if self._contiguous and missing:
            missing = _length_of_run(sequence, promise)
        free, in_use = self.free_beside(adapter), self.adapters.pages_in_use(adapter)
        at_hand = free + shared if ordered else 0
        why_not = self.ledger.why_not(sequence, promise, at_hand, pages_of_adapters=in_use)
        if why_not or missing > free or not self._take_to_resume(sequence, missing, promise):
            self._give_pages(sequence)
            return False
        self.ledger.promise(sequence.request, promise)
        if missing:
            to = tuple(sequence.pages[shared:needed])
            self.copies.append(Copy(Tier.HOST, tuple(sequence.host_pages[shared:]), Tier.DEVICE, to))
        self._release_host(sequence)
        if shared * self.page_tokens > sequence.scheduled:
            sequence.scheduled = sequence.computed = shared * self.page_tokens
        sequence.parked_by, sequence.wanted = None, 0
        number = sequence.promise_number + 1  # which `_set_promise` makes
        self._table.events.append(ResumedNow(sequence.request, sequence.new.epoch, promise, method, number))
        here = self.adapters.is_here(adapter)
        self._table.enter(sequence, _state_after_resume(sequence, adapter_is_here=here))
        self._set_promise(sequence, promise)
        if not here:
            self.adapters.want(adapter)
        return True

    def _take_to_resume(self, sequence: Sequence, missing: int, promise: int) -> bool:
        if not missing:
            return True
        if self._contiguous:
            return self._lengthen(sequence, promise, spare=sequence.adapter)
        pages = self._take(missing, spare=sequence.adapter)
        sequence.pages += pages or []
        return pages is not None

    def check(self) -> None:
        """Recount both books; raises AssertionError with the numbers."""
        self.ledger.check()
        self.adapters.check([sequence.pages for sequence in self._table], self.cache.held)
        self.cache.check()
        if not self.ledger.by_forecast:  # whose sum they are
            assert sum(self.charges().values()) == self.ledger.promised, (self.charges(), self.ledger.promised)
        self.host.check(sequence.host_pages for sequence in self._table)
        for sequence in self._table:
            assert (sequence.request in self.ledger) == (sequence.state is not State.PARKED), sequence.request
            assert len(sequence.pages) <= max(sequence.promise, 0), (sequence.request, len(sequence.pages))
            held = (sequence.left_pages + max(len(sequence.pages), len(sequence.host_pages))) * self.page_tokens
            if self._contiguous and sequence.pages:
                first, count = sequence.pages[0], _length_of_run(sequence, sequence.promise)
                assert sequence.pages == [*range(first, first + count)], (sequence.request, sequence.pages, count)
            assert sequence.computed <= sequence.scheduled <= held, (sequence.request, sequence.scheduled, held)


def _length_of_run(sequence: Sequence, promise: int) -> int:
    """No longer than its longest life, which is sure to fit beside its adapter: a promise may be larger."""
    return min(promise, sequence.most_pages) - sequence.left_pages


def _state_after_resume(sequence: Sequence, *, adapter_is_here: bool) -> State:
    if not adapter_is_here:
        return State.LOADING
    if sequence.decodes:
        return State.DECODE
    return State.PREFILL if sequence.started else State.WAITING
