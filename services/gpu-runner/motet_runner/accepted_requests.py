"""Which requests this runner has accepted, under which placement. Reports and hellos are made from this record.

Pure. The engine knows the pages and states of its sequences. This record knows which gateway and tenant a request
belongs to. An entry begins before the engine has the request, and ends after the engine has reported the request's end.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from motet.api.v1 import common_pb2, runner_pb2
from motet.domain import Digest, RequestId
from motet.errors import Declined
from motet.runner_info import MAX_LISTED
from motet.terms import check_epoch, check_leaders_term, check_term
from motet_runner.engine_loop import STATES
from motet_runner.interface import EngineReport, EngineSequenceReport, State

MAX_EPOCHS_REMEMBERED = 8192
"""The number of requests whose last epoch is remembered. A late submit of an earlier epoch is declined."""

MAX_CANCELLED_REMEMBERED = 4
"""Of each request."""

MAX_ACCEPTED = MAX_LISTED // 2
"""Requests at once: as many as the largest engine has places for. Reports list them all, beside those whose ends are
not known everywhere, and nobody reads a report that lists too many."""

_IDLE = (State.LOADING, State.WAITING, State.PARKED)
"""States in which a request gets no tokens."""


class Latest(NamedTuple):
    """What is known of a request's last placement, also before it comes and after it has ended."""

    epoch: int = 0
    gateway: str = ""
    """Whose request it is, as the scheduler has announced. Empty: it has not, or is of an earlier version."""
    cancelled: tuple[int, ...] = ()
    """The last epochs that the scheduler has cancelled."""

    def first_from(self, epoch: int) -> int:
        """The first epoch that counts, of this one and later ones."""
        first = max(epoch, self.epoch)
        while first in self.cancelled:
            first += 1
        return first


@dataclass(slots=True)
class AcceptedRequest:
    request: RequestId
    epoch: int
    promise: common_pb2.Promise
    prompt_tokens: int
    delivered_tokens: int
    tenant: str
    adapter: Digest
    request_class: "common_pb2.RequestClass.ValueType"
    gateway: str
    stream: int
    max_tokens: int = 0
    term: int = 0
    """The term of the scheduler that placed the request"""
    received: float = 0.0
    """When the Submit came"""
    traceparent: str = ""
    """Of its client's trace"""
    in_engine: bool = False


class AcceptedRequests:
    def __init__(self) -> None:
        self.highest_term = 0
        self._placements: dict[RequestId, AcceptedRequest] = {}
        self._users: Counter[Digest] = Counter()
        self._latest: OrderedDict[RequestId, Latest] = OrderedDict()
        self._report: EngineReport | None = None
        self._in_engine: dict[tuple[RequestId, int], EngineSequenceReport] = {}
        """What this report says."""

    def __len__(self) -> int:
        return len(self._placements)

    def __iter__(self) -> Iterator[AcceptedRequest]:
        return iter(list(self._placements.values()))

    def holds(self, request: str, epoch: int) -> bool:
        placement = self.get(request)
        return placement is not None and placement.epoch == epoch

    def get(self, request: str) -> AcceptedRequest | None:
        return self._placements.get(RequestId(request))

    # ------------------------------------------------------------------------------------------------ terms and epochs

    def accepts_term(self, term: int, *, greeting: bool = False) -> bool:
        """False for an order of a scheduler that no longer leads. A higher term is remembered. Only for what schedulers
        send themselves: with a false term, a gateway would make this runner ignore all of them.

        Raises InvalidRequest for a term that can't be right.
        """
        if term < self.highest_term:
            return False
        (check_leaders_term if greeting else check_term)(term, self.highest_term, "an order")
        self.highest_term = term
        return True

    def is_stale_term(self, term: int) -> bool:
        """True if an order of this term comes from a scheduler that no longer leads. No scheduler has the term 0."""
        return 0 < term < self.highest_term

    def expect(self, request: str, epoch: int, gateway: str = "") -> None:
        """A placement was announced: the request's earlier placements are out of date. The scheduler says whose request
        it is. What another gateway has submitted under its id does not count then."""
        before = self._latest.get(RequestId(request), Latest())
        if gateway and gateway != before.gateway:
            before = Latest()
        epoch, gateway = max(epoch, before.epoch), gateway or before.gateway
        self._remember(request, before._replace(epoch=epoch, gateway=gateway))

    def cancel(self, request: str, epoch: int) -> None:
        """A placement is void, also if it comes later: over another stream, which a runner that was stopped for a while
        may read last. Earlier and later ones are not: the order may answer a report that was wrong."""
        before = self._latest.get(RequestId(request), Latest())
        self._remember(request, before._replace(cancelled=(*before.cancelled, epoch)[-MAX_CANCELLED_REMEMBERED:]))

    def _remember(self, request: str, latest: Latest) -> None:
        self._latest.pop(RequestId(request), None)
        self._latest[RequestId(request)] = latest
        while len(self._latest) > MAX_EPOCHS_REMEMBERED:
            self._latest.popitem(last=False)

    def is_anothers(self, request: str, gateway: str) -> bool:
        """Whether another gateway has this request: the scheduler has announced so, or that one's is here.

        A gateway that has lost a stream may speak of its requests on its next one.
        """
        latest, placement = self._latest.get(RequestId(request), Latest()), self.get(request)
        owner = latest.gateway or (placement.gateway if placement is not None else "")
        return owner not in ("", gateway)

    def check_owner(self, request: str, gateway: str) -> None:
        """Raises Declined if another gateway has this request."""
        if self.is_anothers(request, gateway):
            raise Declined(f"The request {request} belongs to another gateway.")

    def check(self, submit: runner_pb2.Submit) -> None:
        """Raises Declined for a placement that a later term or epoch has replaced, and if too many are here. Raises
        InvalidRequest for impossible numbers: with these, no scheduler or supervisor would read a report.

        A higher term is no reason to wait: a gateway may hear from a new leader before this runner does.
        """
        check_epoch(submit.epoch, submit.request)
        check_leaders_term(submit.term, self.highest_term, "a gateway")
        if submit.term < self.highest_term:
            raise Declined(f"The term {submit.term} is over. A scheduler leads in term {self.highest_term}.")
        latest = self._latest.get(RequestId(submit.request), Latest())
        if submit.epoch < (first := latest.first_from(submit.epoch)):
            raise Declined(
                f"The request {submit.request} left this runner or was placed again. The epoch {submit.epoch} is over, "
                f"and {first} is the first that counts."
            )
        if len(self) >= MAX_ACCEPTED and self.get(submit.request) is None:
            raise Declined(f"This runner has {MAX_ACCEPTED} requests, the most that it accepts.")

    # ---------------------------------------------------------------------------------------------------------- entries

    def add(self, placement: AcceptedRequest) -> None:
        """Record a placement, in place of the request's earlier one."""
        self.expect(placement.request, placement.epoch)
        before = self._placements.get(placement.request)
        self._placements[placement.request] = placement
        self._users[placement.adapter] += 1
        if before is not None:
            self._forget_user(before)

    def remove(self, request: str, epoch: int, stream: int) -> AcceptedRequest | None:
        """Remove a placement. None if the record does not have the placement, or it came over another stream."""
        placement = self._placements.get(RequestId(request))
        if placement is None or (placement.epoch, placement.stream) != (epoch, stream):
            return None
        self._forget_user(placement)
        return self._placements.pop(placement.request)

    def _forget_user(self, placement: AcceptedRequest) -> None:
        self._users[placement.adapter] -= 1
        if not self._users[placement.adapter]:
            del self._users[placement.adapter]

    def users_of(self, adapter: Digest) -> int:
        """Counted as they come and go: for each listing of the disk cache, it is asked of every cached adapter."""
        return self._users[adapter]

    def idle(self, report: EngineReport | None) -> Iterator[AcceptedRequest]:
        """Requests that wait, for their adapters also, or are parked: they get no tokens here now."""
        entries = report.sequences if report is not None else []
        idle = {(one.request, one.epoch) for one in entries if one.state in _IDLE}
        return (one for one in self if not one.in_engine or (one.request, one.epoch) in idle)

    def runner_requests(self, report: EngineReport | None) -> list[common_pb2.RunnerRequest]:
        """All accepted requests, as reports list them."""
        reported = self.in_engine(report)
        return [entry_of(one, reported.get((one.request, one.epoch))) for one in self._placements.values()]

    def runner_request(self, now: EngineSequenceReport) -> common_pb2.RunnerRequest | None:
        """The same of one request, as the engine has just told it; None if the runner has it no more. A list of all
        would cost as much for each event as there are requests."""
        one = self.get(now.request)
        return entry_of(one, now) if one is not None and one.epoch == now.epoch else None

    def in_engine(self, report: EngineReport | None) -> Mapping[tuple[RequestId, int], EngineSequenceReport]:
        """What a report says, by request and epoch. Many ask about the newest one."""
        if report is not self._report:
            entries = report.sequences if report is not None else ()
            self._report, self._in_engine = report, {(one.request, one.epoch): one for one in entries}
        return self._in_engine


def entry_of(one: AcceptedRequest, reported: EngineSequenceReport | None) -> common_pb2.RunnerRequest:
    """A request that the engine has not reported has its first promise."""
    entry = common_pb2.RunnerRequest(
        request=one.request,
        epoch=one.epoch,
        promise=one.promise,
        state=common_pb2.SEQUENCE_STATE_WAITING if one.in_engine else common_pb2.SEQUENCE_STATE_LOADING,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.delivered_tokens,
        tenant=one.tenant,
        adapter_digest=one.adapter,
        request_class=one.request_class,
        gateway=one.gateway,
        max_tokens=one.max_tokens,
    )
    if reported is not None:
        entry.promise.pages = reported.promise
        entry.promise.number = reported.promise_number
        entry.pages_used = reported.pages_used
        entry.state = STATES[reported.state]
        entry.output_tokens = reported.output_tokens
        entry.parked_times = reported.parked_times
        if reported.charged_pages is not None:
            entry.charged_pages = max(1, reported.charged_pages)  # 0 would mean the whole promise
    return entry


def has_work(report: EngineReport, accepted: AcceptedRequests) -> bool:
    """True if the engine should complete steps. Parked sequences are no work. Requests that wait for their adapter's
    files are still unknown to the engine."""
    if report.running + report.waiting > 0:
        return True
    reported = accepted.in_engine(report)
    return any(one.in_engine and (one.request, one.epoch) not in reported for one in accepted)
