"""Which requests this runner has accepted, under which placement. Reports and hellos are made from this record.

Pure. The engine knows the pages and states of its sequences. This record knows which gateway and tenant a request
belongs to. An entry begins before the engine has the request, and ends after the engine has reported the request's end.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from motet.api.v1 import common_pb2, runner_pb2
from motet.domain import Digest, RequestId
from motet.errors import Declined
from motet.terms import check_epoch, check_leaders_term, check_term
from motet_runner.engine_loop import STATES
from motet_runner.interface import EngineReport, State

MAX_EPOCHS_REMEMBERED = 8192
"""The number of requests whose last epoch is remembered. A late submit of an earlier epoch is declined."""


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
    in_engine: bool = False


class AcceptedRequests:
    def __init__(self) -> None:
        self.highest_term = 0
        self._placements: dict[RequestId, AcceptedRequest] = {}
        self._epochs: OrderedDict[RequestId, int] = OrderedDict()

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
        """False for an order of a scheduler that no longer leads. A higher term is remembered.

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

    def expect(self, request: str, epoch: int) -> None:
        """A placement was announced: the request's earlier placements are out of date."""
        key = RequestId(request)
        self._epochs[key] = max(epoch, self._epochs.get(key, 0))
        self._epochs.move_to_end(key)
        while len(self._epochs) > MAX_EPOCHS_REMEMBERED:
            self._epochs.popitem(last=False)

    def check(self, submit: runner_pb2.Submit) -> None:
        """Raises Declined for a placement that a later term or epoch has replaced. Raises InvalidRequest for impossible
        numbers: with these, no scheduler or supervisor would read a report."""
        check_epoch(submit.epoch, submit.request)
        if not self.accepts_term(submit.term):
            raise Declined(f"The term {submit.term} is over. A scheduler leads in term {self.highest_term}.")
        latest = self._epochs.get(RequestId(submit.request), 0)
        if submit.epoch < latest:
            raise Declined(
                f"The request {submit.request} was placed again as epoch {latest}. This is epoch {submit.epoch}."
            )

    # ---------------------------------------------------------------------------------------------------------- entries

    def add(self, placement: AcceptedRequest) -> None:
        """Record a placement, in place of the request's earlier one."""
        self.expect(placement.request, placement.epoch)
        self._placements[placement.request] = placement

    def remove(self, request: str, epoch: int, stream: int) -> AcceptedRequest | None:
        """Remove a placement. None if the record does not have the placement, or it came over another stream."""
        placement = self._placements.get(RequestId(request))
        if placement is None or (placement.epoch, placement.stream) != (epoch, stream):
            return None
        return self._placements.pop(placement.request)

    def users_of(self, adapter: Digest) -> int:
        return sum(placement.adapter == adapter for placement in self._placements.values())

    def idle(self, report: EngineReport | None) -> Iterator[AcceptedRequest]:
        """Waiting or parked requests: they get no tokens here now."""
        entries = report.sequences if report is not None else []
        idle = {(one.request, one.epoch) for one in entries if one.state in (State.WAITING, State.PARKED)}
        return (one for one in self if not one.in_engine or (one.request, one.epoch) in idle)

    def runner_requests(self, report: EngineReport | None) -> list[common_pb2.RunnerRequest]:
        """All accepted requests, as reports list them. A request that the engine has not reported has its first
        promise."""
        reported = {(each.request, each.epoch): each for each in report.sequences} if report is not None else {}
        entries = []
        for one in self._placements.values():
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
            known = reported.get((one.request, one.epoch))
            if known is not None:
                entry.promise.pages = known.promise
                entry.promise.number = known.promise_number
                entry.pages_used = known.pages_used
                entry.state = STATES[known.state]
                entry.output_tokens = known.output_tokens
                entry.parked_times = known.parked_times
                if known.charged_pages is not None:
                    entry.charged_pages = max(1, known.charged_pages)  # 0 would mean the whole promise
            entries.append(entry)
        return entries


def has_work(report: EngineReport, accepted: AcceptedRequests) -> bool:
    """True if the engine should complete steps. Parked sequences are no work. Requests that wait for their adapter's
    files are still unknown to the engine."""
    if report.running + report.waiting > 0:
        return True
    reported = {(one.request, one.epoch) for one in report.sequences}
    return any(one.in_engine and (one.request, one.epoch) not in reported for one in accepted)
