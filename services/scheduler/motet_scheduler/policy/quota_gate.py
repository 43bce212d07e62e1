"""Lets requests into the queues as far as their quotas go.

| over                     | class Batch                              | other classes                          |
|--------------------------|------------------------------------------|----------------------------------------|
| a rate                   | waits                                    | is refused, and told when to come again |
| `concurrency`            | waits                                    | waits                                  |

Those that wait are in no queue, so nothing that is placed has to look at them. Each waits for one account at a time.
An account has a line of those that lack only a place, and one of those that rates keep out: of Batch, and nobody of
Batch draws before an older one there. The order is that of classes, and then that of the queue. When the account lets
somebody in, the first of a line that its other accounts let in, too, is next. One that the others have turned away
often keeps its place.

When a scheduler starts, gateways tell it who was told to come again. From the first that does so, the others have a
moment to follow: meanwhile nobody is refused for a rate, but waits as those of Batch do. Its gateway may be another one
than the one that told it when to come.
"""

from itertools import islice
from math import inf

from motet.errors import RateLimited
from motet.runner_info import Failure, RequestClass
from motet_scheduler.policy.happenings import Happening
from motet_scheduler.policy.placement import Positions
from motet_scheduler.policy.quotas.accounts import Account
from motet_scheduler.policy.quotas.draws import Draw
from motet_scheduler.policy.request_lifecycle import RequestLifecycle
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.state import SchedulerState

LET_IN_AT_ONCE = 16
"""Tried in one event: when limits are raised, thousands may come in at once. `TryMore` goes on."""

DECIDED_AT_ONCE = 100
"""Of those that a new scheduler has not refused at first."""

MIN_WAIT = 0.001
"""Of one whose deadline is now."""

MAX_WAITING = 1_000
"""For one account. More are refused, so that nobody fills the scheduler with requests that may not run."""


class QuotaGate:
    def __init__(self, state: SchedulerState, lifecycle: RequestLifecycle, positions: Positions) -> None:
        self._state = state
        self._quotas = state.quotas
        self._lifecycle = lifecycle
        self._positions = positions

    def refusal(self, request: Request) -> RateLimited | None:
        """Why a new request is refused, for its quota. None: it may come in, now or later."""
        draw, now = request.draw, self._state.now
        if draw is None:
            return None
        answer = draw.tokens if request.parent is not None else draw.tokens - request.prompt_tokens
        call = request.prompt_tokens + request.choices * answer
        for account in draw.accounts:
            most = account.limits.tokens_per_minute
            if not most or call <= most:
                continue
            if request.prompt_tokens > most:
                what, less = f"prompt has {request.prompt_tokens} tokens", "Shorten the prompt"
            elif request.choices > 1:
                # Further choices come in with the first, and what they use beyond a minute's grant would be free.
                what = f"{request.choices} answers may have {call} tokens with their prompt"
                less = "Lower n or max_tokens"
            else:
                continue  # its answer may be shorter, and else it is a debt
            return RateLimited(
                f"The {what}, and {account.id} may use {most} in a minute (tokensPerMinute). {less}.", retry_after=0.0
            )
        blocked = self._owing(request, draw)
        listens = self._quotas.listens(now) and blocked is not None and len(blocked.waiting) < MAX_WAITING
        if blocked is not None and request.request_class is not RequestClass.BATCH and not listens:
            return self._over(draw, blocked)
        blocked = blocked or draw.crowded()
        if blocked is not None and len(blocked.waiting) >= MAX_WAITING and self._first_choice(request) is None:
            return RateLimited(f"{_begin(blocked)} has {MAX_WAITING} requests that wait for its quota. Send it later.")
        return None

    def _over(self, draw: Draw, blocked: Account) -> RateLimited:
        now = self._state.now
        over = draw.over(blocked, now, patient=False)
        text = f"{_begin(blocked)} is over its {over}. Send the request again later."
        return RateLimited(text, retry_after=self._quotas.claim(draw, blocked, now))

    def enter(self, request: Request, timeout: float, *, charged: bool) -> bool:
        """Whether a request may join its queue. If not, it waits, `timeout` seconds at most; 0: for ever. `charged`: it
        was let in before, so no rate keeps it out again."""
        draw = request.draw
        if draw is None:
            return True
        if charged:
            self._quotas.charge(draw, self._state.now)
        blocked = self._advance(request, draw)
        if blocked is None:
            return True
        request.deadline_at = self._state.now + timeout if timeout > 0 else None
        self._lifecycle.deadlines.add(request.deadline_at, request)
        self._hold(request, draw, blocked)
        self._positions.report(request, blocked.position(draw.waiting_key))
        return False

    def _owing(self, request: Request, draw: Draw) -> Account | None:
        """The account whose rates keep it out. Choices of a call that came in come in, too."""
        first = self._first_choice(request)
        if first is not None and first.draw is not None and first.draw.charged:
            return None
        patient = request.request_class is RequestClass.BATCH
        if (owing := draw.owing(self._state.now, patient=patient)) is not None or not patient:
            return owing
        number = request.sequence or inf  # a new one has none yet
        key = (True, int(request.request_class), request.turn_at, number)
        return next((account for account in draw.accounts if account.owes_before(key)), None)

    def _first_choice(self, request: Request) -> Request | None:
        """Of the call of a further choice, if that is here: a full line breaks no call between its choices."""
        first = self._state.requests.get(request.parent) if request.parent is not None else None
        return first if first is not None and first.tenant == request.tenant else None

    def _advance(self, request: Request, draw: Draw) -> Account | None:
        """Draw what can be drawn now. Returns the account that the request has to wait for."""
        if not draw.charged:
            if (blocked := self._owing(request, draw)) is not None:
                return blocked
            self._quotas.charge(draw, self._state.now)
        if (blocked := draw.crowded()) is not None:
            return blocked
        draw.take_places()
        return None

    def _hold(self, request: Request, draw: Draw, account: Account) -> None:
        now = self._state.now
        over = f"concurrency {account.limits.concurrency}" if draw.charged else draw.over(account, now, patient=True)
        request.why = (account.id, " is over its ", over)
        self._state.note_event(request, Happening.HELD, account.id, over)
        self._quotas.wait(request, draw, account, now)

    def let_in(self) -> None:
        """Try those that wait for an account that may let them in."""
        left, ready = LET_IN_AT_ONCE, self._quotas.ready
        while ready and left:
            account = next(iter(ready))
            left -= 1
            if not any(self._try(request, account) for request in account.heads()):
                del ready[account]

    def _try(self, request: Request, account: Account) -> bool:
        """Whether the first of a line of this account has left it."""
        draw = request.draw
        assert draw is not None
        if request.forgotten:
            self._lifecycle.end(request)
            return True
        had_charge = draw.charged
        blocked = self._advance(request, draw)
        if blocked is account and draw.charged == had_charge:
            self._quotas.look_again(account, draw, self._state.now)
            return False
        self._quotas.leave(request)
        if blocked is None:
            self._come_in(request)
            return True
        if draw.charged and blocked is not account:
            draw.turned_away(blocked)
        self._hold(request, draw, blocked)
        return True

    def _come_in(self, request: Request) -> None:
        request.why, request.may_run_from = None, self._state.now
        self._state.note_event(request, Happening.LET_IN)
        left = 0.0  # no limit
        if request.deadline_at is not None:
            left = max(request.deadline_at - self._state.now, MIN_WAIT)
        self._lifecycle.enqueue(request, timeout=left)

    @property
    def more_to_let_in(self) -> bool:
        return bool(self._quotas.ready)

    def tick(self) -> None:
        self._quotas.tick(self._state.now)
        if self._quotas.undecided and not self._quotas.listens(self._state.now):
            for request in list(islice(self._quotas.undecided, DECIDED_AT_ONCE)):
                self._decide(request)

    def _decide(self, request: Request) -> None:
        draw = request.draw
        assert draw is not None
        assert draw.waits_for is not None
        if request.forgotten or (blocked := self._owing(request, draw)) is None:
            self._try(request, draw.waits_for)
        else:
            over = self._over(draw, blocked)
            self._lifecycle.refuse(request, Failure.of(over), self._quotas.told(request, self._state.now))

    def next_due(self) -> float:
        return min(self._quotas.next_due(), self._quotas.listens_until if self._quotas.undecided else inf)


def _begin(account: Account) -> str:
    text = str(account.id)
    return text[0].upper() + text[1:]
