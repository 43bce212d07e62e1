"""What the gateway knows of each request: of those that run, and of the last of each tenant that ended. In memory only.

A request has an id of its own, and the ids by which a client knows it: of its HTTP request, and of the completion.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from motet.api.v1 import common_pb2
from motet.clock import Clock
from motet.last_of_each import LastOfEach
from motet.timeline import Timeline
from motet_gateway.answers.timings import RequestTimings
from motet_gateway.choice_record import ChoiceRecord
from motet_gateway.identity.caller import Caller
from motet_gateway.noted import Noted

MAX_CHOICES = 16
"""Of one request, after its end: each further one is as the others are."""

_ID = re.compile(r"(?:chatcmpl-|cmpl-|msg_|resp_)?(?P<answer>[0-9a-f]{24})(?:-\d+)?(?:\.(?P<choice>\d{1,6}))?")


@dataclass(slots=True)
class ChoiceHistory:
    """What is asked about a choice later. Its prompt is not kept."""

    request: str
    prompt_tokens: int
    max_tokens: int
    estimate: common_pb2.Estimate
    record: ChoiceRecord
    tokens: int = 0
    """Of its answer. Until its end: 0."""

    @property
    def number(self) -> int:
        return int(self.request.partition(".")[2] or 0)


@dataclass(slots=True)
class History:
    """Of one request: what happened before and after its choices, which have timelines of their own."""

    id: str
    http_id: str
    tenant: str
    tenant_uid: str
    model: str
    timings: RequestTimings
    trace: str = ""
    """Of its client"""
    timeline: Timeline = field(default_factory=Timeline)
    choices: list[ChoiceHistory] = field(default_factory=list)

    ended_at: float = 0.0
    status: str = ""

    @property
    def received_at(self) -> float:
        return self.timings.arrived

    @property
    def first_token_at(self) -> float:
        """0: there is none yet."""
        return self.timings.first_token


class Histories:
    def __init__(self, most_ended: int, clock: Clock) -> None:
        self._clock = clock
        self._by_id: dict[str, History] = {}
        self._by_http_id: dict[tuple[str, str], str] = {}
        """Clients choose these ids, so that each tenant has its own."""
        self._ended: LastOfEach[str, History] = LastOfEach(most_ended)

    def __len__(self) -> int:
        return len(self._by_id)

    def begin(
        self, id_: str, http_id: str, caller: Caller, model: str, timings: RequestTimings, *, trace: str = ""
    ) -> History:
        tenant = caller.tenant
        history = History(id_, http_id, tenant, caller.tenant_uid, model, timings, trace)
        history.timeline.note(history.received_at, Noted.RECEIVED, model)
        self._by_id[id_] = history
        if http_id:
            self._by_http_id[tenant, http_id] = id_
        return history

    def end(self, history: History, status: str) -> None:
        history.status, history.ended_at = status, self._clock()
        history.timeline.note(history.ended_at, Noted.ANSWERED, status)
        history.choices[:] = choices_of(history, None)
        for choice in history.choices:
            choice.record.accounts = ()  # they keep the whole message of the scheduler that they came with
        oldest = self._ended.add(history.tenant, history.id, history)
        if oldest is not None:
            del self._by_id[oldest.id]
            if self._by_http_id.get((oldest.tenant, oldest.http_id)) == oldest.id:
                del self._by_http_id[oldest.tenant, oldest.http_id]

    def find(self, name: str, caller: Caller) -> tuple[History, int | None] | None:
        """By any of its ids; with the choice that the id names, if it does. Another tenant's is not found, also if that
        had the same name before."""
        id_, choice = self._by_http_id.get((caller.tenant, name)), None
        if id_ is None and (parts := _ID.fullmatch(name)) is not None:
            id_, choice = parts["answer"], parts["choice"]
        history = self._by_id.get(id_) if id_ is not None else None
        if history is None or history.tenant != caller.tenant:
            return None
        if history.tenant_uid and caller.tenant_uid and history.tenant_uid != caller.tenant_uid:
            return None
        return history, int(choice) if choice is not None else None


def scheduler_id(name: str) -> str:
    """By which a scheduler may know a request that this gateway does not know; empty: it is no such id."""
    return name[found.start("answer") :] if (found := _ID.fullmatch(name)) is not None else ""


def choices_of(history: History, number: int | None) -> Sequence[ChoiceHistory]:
    """This one, or the first ones. If the model was replaced meanwhile, those of the last attempt."""
    last = {choice.number: choice for choice in history.choices}
    chosen = list(last.values()) if number is None else [last[number]] if number in last else []
    return chosen[:MAX_CHOICES]
