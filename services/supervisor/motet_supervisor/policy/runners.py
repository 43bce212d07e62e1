"""One runner as the supervisor knows it: the pages of its requests, which are parked, and whether its engine takes
steps."""

from dataclasses import dataclass
from itertools import count

from motet import promises
from motet.domain import InstanceName, ParkMethod, RequestId
from motet.runner_info import Capacity, RunnerIdentity, RunnerRequest, SequenceState
from motet.shared_pages import ReportedLedger


@dataclass(slots=True)
class TrackedRequest:
    """One request on its runner. A larger `arrival` is newer; runners do not report ages."""

    entry: RunnerRequest
    arrival: int
    parked_at: float
    """Since when it is parked, if it is."""
    method: ParkMethod = ParkMethod.RECOMPUTE
    overflowing_since: float | None = None
    """Since when it needs more than its promise soon, without an order that helped."""
    ordered_at: float | None = None
    """When the pending order was sent."""
    reports: int = 0
    """Engine's reports since that order. The first may have been made before the order arrived, the second was not."""
    order_refused: bool = False
    """Whether the runner has refused it."""
    freeing: int = 0
    """Pages that will be free when the ordered park is done."""

    @property
    def parked(self) -> bool:
        return self.entry.parked

    def is_past(self, number: int) -> bool:
        """Whether its promise has a later number. An engine's report may come before events that came to be earlier."""
        return 0 < number < self.entry.promise_number

    def order_pending(self, now: float, order_timeout: float) -> bool:
        """Whether to wait for the last order before sending another."""
        return self.ordered_at is not None and self.reports < 2 and now - self.ordered_at < order_timeout

    def order(self, now: float, *, freeing: int = 0) -> None:
        self.ordered_at, self.reports, self.freeing, self.order_refused = now, 0, freeing, False

    def order_done(self) -> None:
        """The order was carried out, or never will be."""
        self.ordered_at, self.freeing, self.order_refused = None, 0, False


@dataclass(slots=True)
class EngineProgress:
    """Whether the engine takes steps, or reads adapters. A slow engine is not hung."""

    steps: int
    moved_at: float
    stepped_at: float
    """Since when it has worked on the next step"""
    slowest_step: float = 0.0
    """Seconds per step; the slowest recent one. Decays by a tenth with each report that shows steps."""
    was_hung: bool = False
    """Whether it counted as hung before its last step"""
    load_parts: int = 0

    def see(self, steps: int, load_parts: int, *, pending: bool, now: float, hung: bool, slowest: float) -> bool:
        """Whether it took a step since the last report, or read more of an adapter, or has no work. `hung`: whether it
        counts as hung; `slowest`: what a step counts for at the most."""
        taken, loaded = steps - self.steps, load_parts != self.load_parts
        if taken > 0:
            # The end of one hang does not show that steps are slow. Two in a row do.
            step = 0.0 if hung and not self.was_hung else min(slowest, (now - self.stepped_at) / taken)
            self.slowest_step = max(step, 0.9 * self.slowest_step)
            self.was_hung = hung
        self.steps, self.load_parts = steps, load_parts
        if taken or not pending:
            self.stepped_at = now
        elif not loaded:
            return False
        self.moved_at = now
        return True

    def skip(self, seconds: float, now: float) -> None:
        """Nothing was heard for this long: that time says nothing about steps."""
        self.moved_at = min(now, self.moved_at + seconds)
        self.stepped_at = min(now, self.stepped_at + seconds)


class WatchedRunner:
    def __init__(self, identity: RunnerIdentity, capacity: Capacity, now: float, *, overcommit: float) -> None:
        self.identity = identity
        self.capacity = capacity
        self.ledger: ReportedLedger[RequestId] = ReportedLedger(
            capacity.pages, overcommit=overcommit, by_forecast=capacity.by_forecast
        )
        """Of the requests that are not parked. Its capacity is what KV can have now, as last reported. Extensions that
        were ordered are in it."""
        self.connected = True
        self.heartbeats = True
        """Whether it sends more than its reports."""
        self.last_message_at = now
        self.last_sequence = 0
        """Of its last report"""
        self.no_scheduler_since: float | None = None
        """Since when its reports say that it has none."""
        self.pages_free: int | None = None
        """By its last report on this stream, less what requests have taken that came back since. None: none came."""
        self.sequences: dict[RequestId, TrackedRequest] = {}
        self.host_bytes_free = capacity.host_bytes
        self.prefill_seconds_per_token = 0.0
        self.swap_seconds_per_page = 0.0
        self.progress = EngineProgress(0, now, now)
        self.silent = False
        """Unhealthy until it sends a message."""
        self.hung_reason = ""
        """Unhealthy until its engine takes a step: reports alone do not show that it works."""
        self.unhealthy_reported_at = 0.0
        """When it was last reported as unhealthy."""
        self._arrivals = count()

    @property
    def instance(self) -> InstanceName:
        return InstanceName(self.identity.instance)

    @property
    def unhealthy(self) -> bool:
        return self.silent or bool(self.hung_reason)

    def note_message(self, now: float, *, again: bool = False) -> None:
        """The runner sent a message; `again`: on a new stream."""
        if self.silent or again:
            self.progress.skip(now - self.last_message_at, now)
        self.silent = False
        self.last_message_at = now

    def excuse(self, seconds: float, now: float) -> None:
        """Nobody listened for this long, so that nothing was heard says nothing. Messages that came meanwhile may still
        wait to be read."""
        self.last_message_at = min(now, self.last_message_at + seconds)
        self.progress.skip(seconds, now)

    @property
    def parked_requests(self) -> int:
        """The ledger has all others."""
        return len(self.sequences) - len(self.ledger)

    @property
    def pages_being_freed(self) -> int:
        return sum(one.freeing for one in self.sequences.values())

    def growth(self, entry: RunnerRequest) -> int:
        """By how many pages the promise of a request may grow now, at most to twice its size. A runner that admits by
        forecast keeps no pages for promises, and parks by itself when pages are short."""
        wanted = self.doubled(entry) - entry.pages
        return wanted if self.capacity.by_forecast else min(wanted, self.ledger.free)

    def pages_of_kv(self, entry: RunnerRequest) -> int:
        """How many pages of a request have tokens, at the most: where its pages are one run, it also has those that it
        was promised (S3-08)."""
        return min(entry.pages_used, self.capacity.pages_for(entry.prompt_tokens + entry.output_tokens))

    @property
    def pages_unused(self) -> int:
        """Pages that can be had now; fewer than the ledger has free where more is promised than there is.

        The larger of two numbers: the last report does not know what has been freed since, and here a page that
        requests share counts once for each of them. Neither knows what running requests have taken since that report:
        where more is promised than there is, a resume may be ordered that the runner refuses."""
        unused = self.ledger.capacity - sum(one.entry.pages_used for one in self.sequences.values())
        return unused if self.pages_free is None else max(unused, self.pages_free)

    def apply_report(
        self, live: tuple[RunnerRequest, ...], now: float, order_timeout: float, *, again: bool = False
    ) -> list[TrackedRequest]:
        """Apply the runner's report. `again`: it is the one before, of a busy engine. Returns requests that it shows as
        parked for the first time, or again because the runner has refused to resume them, or because they want other
        pages than was said when they were parked."""
        newly_parked: list[TrackedRequest] = []
        listed = {entry.request for entry in live}
        for name in self.sequences.keys() - listed:
            self.remove(name)
        for entry in live:
            if entry.parked:
                self.ledger.release(entry.request)  # first: who pays for its pages is in the same report
        for entry in live:
            known = self.sequences.get(entry.request)
            if known is None or known.entry.epoch != entry.epoch:
                known = self.add(entry, now)
                if entry.parked:
                    newly_parked.append(known)
                continue
            known.reports += not again
            answered = 0 < known.entry.promise_number < entry.promise_number
            refused = known.order_refused
            if known.order_pending(now, order_timeout) and not answered and not refused:
                # The report may have been sent before our order arrived: keep what was ordered, take the counters.
                ordered = known.entry
                kept = entry._replace(pages=ordered.pages, state=ordered.state, parked_times=ordered.parked_times)
                # A part of a forecast does not grow with the promise, shared pages stay as they are.
                shared = ordered.pages - entry.pages_to_charge if self.capacity.by_forecast else entry.shared_pages
                self.change(known, kept, shared=shared)
                continue
            known.order_done()
            if entry.parked and known.parked and entry.promise_number == known.entry.promise_number:
                # With another number it was parked again meanwhile. Without one, the report may be of an earlier park.
                pages, wanted = known.entry.pages, entry.pages if entry.promise_number else known.entry.pages
                self.change(known, entry._replace(pages=wanted))
                if refused or pages != wanted:  # the scheduler believes that it comes back, or waits for other pages
                    newly_parked.append(known)
                continue
            self.change(known, entry, shared=entry.shared_pages)
            if entry.parked:
                known.parked_at = now
                newly_parked.append(known)
        return newly_parked

    def add(self, entry: RunnerRequest, now: float) -> TrackedRequest:
        """A request that was not known, under this epoch, as the newest."""
        added = self.sequences[entry.request] = TrackedRequest(entry, next(self._arrivals), now)
        self.change(added, entry, shared=entry.shared_pages)
        return added

    def change(self, one: TrackedRequest, entry: RunnerRequest, *, shared: int | None = None) -> None:
        """Another promise or state. By the runner's report, `shared` pages of the promise are not charged."""
        one.entry = entry
        if entry.parked:
            self.ledger.release(entry.request)
        else:
            self.ledger.record(entry.request, entry.pages, shared=shared)

    def remove(self, name: RequestId) -> None:
        del self.sequences[name]
        self.ledger.release(name)

    def max_pages(self, entry: RunnerRequest) -> int:
        """The most that a request can ever use here (S3-13)."""
        capacity = self.capacity
        most = promises.max_pages(
            entry.prompt_tokens,
            entry.max_tokens,
            context_tokens=capacity.max_model_length,
            page_tokens=capacity.page_tokens,
        )
        return min(most, capacity.pages)

    def doubled(self, entry: RunnerRequest) -> int:
        return promises.doubled_pages(entry.pages, self.max_pages(entry))

    def is_near_promise(self, entry: RunnerRequest) -> bool:
        """Whether a request is within a page of its promise and could need more."""
        tokens = entry.prompt_tokens + entry.output_tokens
        if not promises.is_near_promise(tokens, entry.pages, page_tokens=self.capacity.page_tokens):
            return False  # mostly: each report asks for each request
        stands = entry.state in (SequenceState.PARKED, SequenceState.LOADING)
        return not stands and entry.pages < self.max_pages(entry)
