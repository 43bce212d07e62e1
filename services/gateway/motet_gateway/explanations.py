"""Explains one request: what this gateway and the scheduler know of it, on one clock.

The gateway's half outlives schedulers. The scheduler's half says what a request waits for, and which runners do not get
it; a request of another gateway has this half only.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motet.api.v1 import scheduler_pb2
from motet.clock import Clock
from motet.errors import NotFound
from motet.transport import CallFailed, Network, StatusCode
from motet.transport.methods import EXPLAIN
from motet_gateway.histories import MAX_CHOICES, ChoiceHistory, Histories, History, choices_of, scheduler_id
from motet_gateway.identity.caller import Caller

Json = dict[str, Any]
Story = scheduler_pb2.ExplainResponse

MAX_AT_ONCE = 4
"""Questions to the scheduler."""
SECONDS = 2.0
"""For a question's turn and all its answers. Without them the gateway's half comes alone: a scheduler that hangs for
one tenant's many questions delays nobody's longer."""

GATEWAY, SCHEDULER = "gateway", "scheduler"
ELSEWHERE = "this gateway has not served it, or no longer knows it"
FORGOTTEN = "it does not know the request, or no longer knows it"


@dataclass(frozen=True, slots=True)
class _Line:
    at: float
    by: str
    event: str
    detail: str


class Explanations:
    def __init__(self, histories: Histories, network: Network, address: Callable[[], str], clock: Clock) -> None:
        """`address`: of the scheduler that leads."""
        self._histories = histories
        self._network = network
        self._address = address
        self._clock = clock
        self._may_ask = asyncio.Semaphore(MAX_AT_ONCE)

    async def of(self, name: str, caller: Caller) -> Json:
        """Of a request of its tenant, by any of its ids. Raises NotFound, also for another tenant's."""
        found = self._histories.find(name, caller)
        if found is None:
            return await self._elsewhere(name, caller.tenant)
        history, number = found
        choices = choices_of(history, number)
        if number is not None and not choices:
            if history.ended_at and len(history.choices) == MAX_CHOICES:
                raise NotFound(f"Request {history.id} has ended. Only its first {MAX_CHOICES} choices are still known.")
            raise NotFound(f"Request {history.id} has no choice {number}, or its choices have not been sent yet.")
        stories, problem = await self._stories([choice.request for choice in choices], caller.tenant)
        return document(history, choices, stories, problem, self._clock())

    async def _elsewhere(self, name: str, tenant: str) -> Json:
        if request := scheduler_id(name):
            stories, problem = await self._stories([request], tenant)
            if (story := stories.get(request)) is not None:
                return _half_document(story, self._clock())
            if problem not in ("", FORGOTTEN):
                raise NotFound(
                    f"This gateway does not know request {name}, and the scheduler does not answer: {problem}."
                )
        raise NotFound(
            f"There is no request {name} of yours among those that wait, run or ended last. Its ids are in the headers "
            "x-request-id (known to the gateway that answered) and x-motet-request, and in the id of the completion."
        )

    async def _stories(self, requests: Sequence[str], tenant: str) -> tuple[Mapping[str, Story], str]:
        """By request, and why some are missing."""
        stories: dict[str, Story] = {}
        problem = ""
        try:
            async with (
                asyncio.timeout(SECONDS),
                self._may_ask,
                self._network.channel(self._address(), "scheduler") as channel,
            ):
                for request in requests:
                    asked = scheduler_pb2.ExplainRequest(request=request, tenant=tenant)
                    try:
                        story = await channel.call(EXPLAIN, asked, seconds=SECONDS)
                    except CallFailed as error:
                        problem = FORGOTTEN if error.code is StatusCode.NOT_FOUND else error.details
                        if error.code is not StatusCode.NOT_FOUND:
                            break
                        continue
                    if story.tenant == tenant:
                        stories[request] = story
                    else:  # a scheduler of an earlier version tells everybody everything
                        problem = FORGOTTEN
        except TimeoutError:
            problem = f"it has not answered this question, or those before it, within {SECONDS:g} s"
        except CallFailed as error:
            problem = error.details
        return stories, problem


def document(
    history: History, choices: Iterable[ChoiceHistory], stories: Mapping[str, Story], problem: str, now: float
) -> Json:
    until = history.ended_at or now
    return {
        "id": history.id,
        "http_id": history.http_id or None,
        "trace": history.trace or None,
        "tenant": history.tenant,
        "model": history.model,
        "status": history.status or None,
        "ended": bool(history.ended_at),
        "seconds": _rounded(until - history.received_at),
        "first_token_seconds": _rounded(history.first_token_at - history.received_at)
        if history.first_token_at
        else None,
        "scheduler": problem or None,
        "gateway": None,
        "timeline": _timeline(_own_lines(history), history.received_at, until),
        "choices": [_choice(history, choice, stories.get(choice.request), now) for choice in choices],
    }


def _half_document(story: Story, now: float) -> Json:
    began = now - story.now_seconds
    lines = _scheduler_lines(story, now)
    until = lines[-1].at if story.ended and lines else now
    return {
        "id": story.request,
        "http_id": None,
        "trace": None,
        "tenant": story.tenant,
        "model": None,
        "status": None,
        "ended": story.ended,
        "seconds": _rounded(until - began),
        "first_token_seconds": None,
        "scheduler": None,
        "gateway": ELSEWHERE,
        "timeline": [],
        "choices": [
            {
                "request": story.request,
                "prompt_tokens": None,
                "max_tokens": None,
                "tokens": None,
                "predicted": None,
                "split": None,
                "timeline": _timeline(lines, began, until),
                "left_out": story.left_out,
                "position": story.position or None,
                "runners": _runners(story),
            }
        ],
    }


def _choice(history: History, choice: ChoiceHistory, story: Story | None, now: float) -> Json:
    estimate, split = choice.estimate, choice.record.split.until(now)
    lines = [_Line(entry.at, GATEWAY, entry.event, entry.detail) for entry in choice.record.timeline]
    left_out = choice.record.timeline.left_out
    if story is not None:
        sent = lines[0].at if lines else history.received_at
        lines += _scheduler_lines(story, now, earliest=sent)
        left_out += story.left_out
    return {
        "request": choice.request,
        "prompt_tokens": choice.prompt_tokens,
        "max_tokens": choice.max_tokens,
        "tokens": choice.tokens if history.ended_at else None,
        "predicted": {
            "by": estimate.source,
            "q50": estimate.q50,
            "q80": estimate.q80,
            "q90": estimate.q90,
            "q95": estimate.q95,
        },
        "split": {part: _rounded(seconds) for part, seconds in split._asdict().items()},
        "timeline": _timeline(lines, history.received_at, history.ended_at or now),
        "left_out": left_out,
        "position": story.position or None if story is not None else None,
        "runners": _runners(story) if story is not None else [],
    }


def _own_lines(history: History) -> list[_Line]:
    lines = [_Line(entry.at, GATEWAY, entry.event, entry.detail) for entry in history.timeline]
    if history.first_token_at:
        lines.append(_Line(history.first_token_at, GATEWAY, "first token", ""))
    return lines


def _scheduler_lines(story: Story, now: float, *, earliest: float = 0.0) -> list[_Line]:
    """Its clock counts from its own first entry. What its answer took on its way makes entries a little late."""
    began = now - story.now_seconds
    return [
        _Line(max(began + entry.seconds, earliest), SCHEDULER, entry.event, entry.detail) for entry in story.entries
    ]


def _timeline(lines: Iterable[_Line], began: float, until: float) -> list[Json]:
    """In order, each with the time until its author's next entry."""
    found: list[Json] = []
    following: dict[str, float] = {}
    for line in sorted(lines, key=lambda line: line.at)[::-1]:
        lasted = following.get(line.by, until) - line.at
        following[line.by] = line.at
        found.append(
            {
                "seconds": _rounded(line.at - began),
                "lasted": _rounded(lasted),
                "by": line.by,
                "event": line.event,
                "detail": line.detail,
            }
        )
    return found[::-1]


def _runners(story: Story) -> list[Json]:
    return [{"runner": one.instance, "why": one.why} for one in story.runners]


def _rounded(seconds: float) -> float:
    return round(max(0.0, seconds), 4)
