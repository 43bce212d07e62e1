"""Which requests this runner has taken on, under which placement: the truth that reports and hellos are made from.

Pure. The engine's book knows pages and states; this one knows whose request it is, since before the engine has it and
until its end has been told.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from motet.api.v1 import common_pb2, runner_pb2
from motet.domain import Digest, RequestId
from motet.errors import Declined
from motet.terms import check_leaders_term, check_term
from motet_runner.engine_loop import STATES
from motet_runner.interface import EngineReport

EPOCHS_REMEMBERED = 8192
"""Requests whose last epoch is remembered after their end, against submits that were overtaken."""


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
    """Of the scheduler that placed it."""
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
        """False for the order of a scheduler that has been succeeded. A higher term is remembered.

        Raises InvalidRequest for one that is not to be believed.
        """
        if term < self.highest_term:
            return False
        (check_leaders_term if greeting else check_term)(term, self.highest_term, "an order")
        self.highest_term = term
        return True

    def is_stale_term(self, term: int) -> bool:
        """Whether an order in this term is one of a scheduler that has been succeeded. 0 is nobody's term."""
        return 0 < term < self.highest_term

    def expect(self, request: str, epoch: int) -> None:
        """A placement was announced: what was placed before it is out of date."""
        key = RequestId(request)
        self._epochs[key] = max(epoch, self._epochs.get(key, 0))
        self._epochs.move_to_end(key)
        while len(self._epochs) > EPOCHS_REMEMBERED:
            self._epochs.popitem(last=False)

    def check(self, submit: runner_pb2.Submit) -> None:
        """Raise Declined for a placement that a later term or epoch has made void."""
        if not self.accepts_term(submit.term):
            raise Declined(f"term {submit.term} is over: the scheduler leads in term {self.highest_term}")
        latest = self._epochs.get(RequestId(submit.request), 0)
        if submit.epoch < latest:
            raise Declined(f"{submit.request} has been placed again as epoch {latest}, this is epoch {submit.epoch}")

    # ---------------------------------------------------------------------------------------------------------- entries

    def add(self, placement: AcceptedRequest) -> AcceptedRequest | None:
        """Write a placement; returns the one it takes the place of."""
        self.expect(placement.request, placement.epoch)
        old = self._placements.get(placement.request)
        self._placements[placement.request] = placement
        return old

    def remove(self, request: str, epoch: int, stream: int) -> AcceptedRequest | None:
        """Strike a placement; None when it was not (or no longer) this one, as it came over this stream."""
        placement = self._placements.get(RequestId(request))
        if placement is None or (placement.epoch, placement.stream) != (epoch, stream):
            return None
        return self._placements.pop(placement.request)

    def users_of(self, adapter: Digest) -> int:
        return sum(placement.adapter == adapter for placement in self._placements.values())

    def runner_requests(self, report: EngineReport | None) -> list[common_pb2.RunnerRequest]:
        """The whole book, in the words of reports. What the engine has not told of yet waits with its first promise."""
        told = {(entry.request, entry.epoch): entry for entry in report.sequences} if report is not None else {}
        entries = []
        for one in self._placements.values():
            line = common_pb2.RunnerRequest(
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
            known = told.get((one.request, one.epoch))
            if known is not None:
                line.promise.pages = known.promise
                line.pages_used = known.pages_used
                line.state = STATES[known.state]
                line.output_tokens = known.output_tokens
                line.parked_times = known.parked_times
            entries.append(line)
        return entries


def has_work(report: EngineReport, book: AcceptedRequests) -> bool:
    """Parked and loading requests give the engine nothing to do; only what could run shows a hung engine."""
    return report.running + report.waiting > 0 or len(book) > len(report.sequences)
