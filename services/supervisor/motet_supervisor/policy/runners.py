"""One runner as the supervisor knows it: who holds how many pages, who is parked, and whether its engine moves."""

from dataclasses import dataclass, replace

from motet import promises
from motet.domain import InstanceName, ParkMethod, RequestId
from motet.runner_info import Capacity, RunnerIdentity, RunnerRequest, SequenceState


@dataclass(slots=True)
class TrackedRequest:
    """One request on its runner. `born` says which is newer; runners do not tell ages."""

    entry: RunnerRequest
    arrival: int
    parked_at: float = 0.0
    method: ParkMethod = ParkMethod.RECOMPUTE
    overflowing_since: float | None = None
    """It is about to need more than it is promised, and has had no answer that worked."""
    ordered_at: float | None = None
    """An order about it is on its way."""
    reports: int = 0
    """Heard since that order: the first may have left before the order arrived, the second has not."""
    freeing: int = 0
    """Pages that come free once the ordered park is done."""

    @property
    def parked(self) -> bool:
        return self.entry.parked

    def order_pending(self, now: float, answer: float) -> bool:
        """Whether to wait for what was ordered before ordering anything else."""
        return self.ordered_at is not None and self.reports < 2 and now - self.ordered_at < answer

    def order(self, now: float, *, freeing: int = 0) -> None:
        self.ordered_at, self.reports, self.freeing = now, 0, freeing

    def order_done(self) -> None:
        """What was ordered has happened, or will not."""
        self.ordered_at, self.freeing = None, 0


@dataclass(slots=True)
class EngineProgress:
    """Whether the engine moves: hung is not slow."""

    steps: int
    moved_at: float
    slowest_step: float = 0.0
    """Seconds; the worst of late, forgotten by a tenth with each report that shows movement."""

    def see(self, steps: int, pending: bool, now: float) -> bool:
        """Whether it moved since the last report, or has no reason to."""
        taken = steps - self.steps
        if taken > 0:
            self.slowest_step = max((now - self.moved_at) / taken, 0.9 * self.slowest_step)
        self.steps = steps
        if taken == 0 and pending:
            return False
        self.moved_at = now
        return True

    def skip_silence(self, silence: float) -> None:
        """Nothing was heard for so long: that shows neither movement nor standing still."""
        self.moved_at += silence


class WatchedRunner:
    def __init__(self, identity: RunnerIdentity, capacity: Capacity, now: float, *, overcommit: float = 1.0) -> None:
        self.identity = identity
        self.capacity = capacity
        self.overcommit = overcommit
        self.connected = True
        self.heard_at = now
        self.sequences: dict[RequestId, TrackedRequest] = {}
        self.host_bytes_free = capacity.host_bytes
        self.prefill_seconds_per_token = 0.0
        self.swap_seconds_per_page = 0.0
        self.progress = EngineProgress(0, now)
        self.silent = False
        """Taken for dead until it says something."""
        self.hung_because = ""
        """Taken for dead until its engine takes a step, whatever it says: only that shows that it does not hang."""
        self.condemned_at = 0.0
        """When it was last said."""
        self._orders = 0

    @property
    def instance(self) -> InstanceName:
        return InstanceName(self.identity.instance)

    @property
    def unhealthy(self) -> bool:
        return self.silent or bool(self.hung_because)

    def note_message(self, now: float, *, again: bool = False) -> None:
        """It said something; `again`: on a new stream."""
        if self.silent or again:
            self.progress.skip_silence(now - self.heard_at)
        self.silent = False
        self.heard_at = now

    @property
    def promised(self) -> int:
        return sum(one.entry.pages for one in self.sequences.values() if not one.parked)

    @property
    def free(self) -> int:
        """Pages that may still be promised. Extensions on their way are in the book already."""
        return int(self.capacity.pages * self.overcommit) - self.promised

    @property
    def pages_being_freed(self) -> int:
        return sum(one.freeing for one in self.sequences.values())

    def apply_report(self, live: tuple[RunnerRequest, ...], now: float, answer: float) -> list[TrackedRequest]:
        """Take over the runner's book; returns those that were parked without our being told."""
        news: list[TrackedRequest] = []
        listed = {entry.request for entry in live}
        for name in self.sequences.keys() - listed:
            del self.sequences[name]
        for entry in live:
            known = self.sequences.get(entry.request)
            if known is None or known.entry.epoch != entry.epoch:
                known = self.sequences[entry.request] = self.newest(entry)
                known.parked_at = now
                if entry.parked:
                    news.append(known)
                continue
            known.reports += 1
            if known.order_pending(now, answer):
                # The report may have left before our order arrived: keep what was ordered, take what was counted.
                known.entry = replace(
                    entry, pages=known.entry.pages, state=known.entry.state, parked_times=known.entry.parked_times
                )
                continue
            known.order_done()
            if entry.parked and known.parked:
                known.entry = replace(entry, pages=known.entry.pages)  # what it wants was said when it was parked
                continue
            known.entry = entry
            if entry.parked:
                known.parked_at = now
                news.append(known)
        return news

    def newest(self, entry: RunnerRequest) -> TrackedRequest:
        self._orders += 1
        return TrackedRequest(entry, self._orders)

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
        """Whether a sequence stands within a page of its promise and could need more."""
        if entry.state in (SequenceState.PARKED, SequenceState.LOADING):
            return False
        tokens = entry.prompt_tokens + entry.output_tokens
        return promises.is_near_promise(
            tokens, entry.pages, self.max_pages(entry), page_tokens=self.capacity.page_tokens
        )
