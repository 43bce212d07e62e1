"""What clients hear of their quotas."""

import asyncio

import pytest

from motet.api.v1.scheduler_pb2 import AccountLevel, AccountName, Claim, Placed, Refused
from motet.clock import FakeClock
from motet.errors import RateLimited
from motet.quotas import CLAIM_SECONDS, MAX_CLAIMS_IN_MESSAGE
from motet_gateway import account_levels, rate_limits
from motet_gateway.account_levels import AccountLevels
from tests.gateway.conftest import Served, eventually

LEVELS = [
    AccountLevel(
        holder="tenant", name="default", requests_per_minute=600, requests=50, tokens_per_minute=6000, tokens=-1
    ),
    AccountLevel(holder="adapter", name="default/chat", requests_per_minute=60, requests=2.5),
]
HEADERS = {
    "x-ratelimit-limit-requests": "60",
    "x-ratelimit-remaining-requests": "2",
    "x-ratelimit-reset-requests": "8s",
    "x-ratelimit-limit-tokens": "6000",
    "x-ratelimit-remaining-tokens": "0",
    "x-ratelimit-reset-tokens": "11s",
}
BODY = {"model": "tiny", "prompt": "Hi there", "max_tokens": 2}


def test_the_account_with_least_left_is_told() -> None:
    assert rate_limits.headers(LEVELS) == HEADERS
    assert rate_limits.headers([]) == {}


def test_durations_are_as_clients_read_them() -> None:
    assert [rate_limits.duration(one) for one in (-1, 0.1201, 0.9999, 1.2, 60, 61.5)] == [
        "0ms",
        "121ms",
        "1000ms",
        "2s",
        "1m0s",
        "1m2s",
    ]


async def test_a_refusal_has_the_time_to_wait_and_what_is_left(served: Served) -> None:
    served.cluster.scheduler.refuses = RateLimited("Tenant default is over its limit.", retry_after=3.2).to_proto()
    served.cluster.scheduler.accounts = LEVELS
    answer = await served.http.post("/v1/completions", json=BODY)
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert HEADERS.items() <= answer.headers.items()
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("4", "3200")
    assert answer.headers["x-should-retry"] == "true"


async def test_an_answer_says_what_is_left_with_and_without_a_stream(served: Served) -> None:
    served.cluster.scheduler.accounts = LEVELS
    for stream in (False, True):
        answer = await served.http.post("/v1/completions", json=BODY | {"stream": stream})
        assert answer.status_code == 200
        assert HEADERS.items() <= answer.headers.items()
    served.cluster.scheduler.accounts = []
    answer = await served.http.post("/v1/completions", json=BODY)
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


async def test_what_was_let_in_says_so_to_the_next_scheduler(served: Served) -> None:
    scheduler = served.cluster.scheduler
    scheduler.holds = scheduler.admits = True
    answer = asyncio.create_task(served.http.post("/v1/completions", json=BODY))
    await eventually(lambda: any(live.admitted for live in served.gateway.dispatcher.choices.values()))
    await scheduler.restart()
    await eventually(lambda: len(scheduler.enqueued) == 2)
    assert [one.admitted for one in scheduler.enqueued] == [False, True]
    scheduler.release()
    assert (await answer).status_code == 200


async def test_a_new_scheduler_hears_what_is_left_of_the_accounts(served: Served) -> None:
    scheduler = served.cluster.scheduler
    scheduler.accounts = LEVELS
    assert (await served.http.post("/v1/completions", json=BODY)).status_code == 200
    await scheduler.restart()
    await eventually(lambda: scheduler.levels)
    assert [one.name for one in scheduler.levels] == ["default", "default/chat"]
    assert all(0 < one.age_seconds < 60 for one in scheduler.levels)


async def test_a_new_scheduler_hears_who_was_told_to_come_again_and_who_has_come_in(served: Served) -> None:
    scheduler = served.cluster.scheduler
    scheduler.refuses = RateLimited("Tenant default is over its limit.", retry_after=30.0).to_proto()
    scheduler.claim = claim(7, seconds=30.0)
    assert (await served.http.post("/v1/completions", json=BODY)).status_code == 429
    scheduler.refuses, scheduler.used_up = None, [8]
    assert (await served.http.post("/v1/completions", json=BODY)).status_code == 200
    await scheduler.restart()
    await eventually(lambda: len(scheduler.claims) == 2)
    assert [(one.number, len(one.accounts)) for one in scheduler.claims] == [(7, 1), (8, 0)]
    assert 0 < scheduler.claims[0].seconds < 30


def claim(number: int, seconds: float = 5.0) -> Claim:
    account = AccountName(holder="tenant", name="default")
    return Claim(number=number, content=1, seconds=seconds, requests=1, accounts=[account])


def test_claims_that_all_are_too_late_for_and_more_than_a_bound_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    levels = AccountLevels(clock)
    levels.note_refused(Refused(claim=claim(1)))
    levels.note_refused(Refused(claim=claim(2, seconds=8.0)))
    levels.note_refused(Refused(claim=claim(2, seconds=8.0)))
    clock.advance(5.0 + CLAIM_SECONDS + 0.1)
    (message,) = levels.messages()
    (left,) = message.levels.claims
    assert (left.number, left.seconds) == (2, pytest.approx(0.9))
    levels.note_placed(Placed(claims=[2]))  # its client has come in: other gateways may not know
    (message,) = levels.messages()
    assert [(one.number, len(one.accounts)) for one in message.levels.claims] == [(2, 0)]
    monkeypatch.setattr(account_levels, "MAX_CLAIMS", 70)
    for number in range(100):
        levels.note_refused(Refused(claim=claim(number)))
    told = [len(message.levels.claims) for message in levels.messages()]
    assert told == [MAX_CLAIMS_IN_MESSAGE, 70 - MAX_CLAIMS_IN_MESSAGE]
    clock.advance(70.0)
    assert not list(levels.messages())
    assert len(levels) == 0


def test_accounts_that_are_full_again_and_more_than_a_bound_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    levels = AccountLevels(clock)
    levels.note(LEVELS)
    clock.advance(8.0)  # 60 a minute with 2.5 of 10 left: full in 7.5 s
    (message,) = levels.messages()
    assert [one.name for one in message.levels.accounts] == ["default"]
    monkeypatch.setattr(account_levels, "MAX_ACCOUNTS", 700)
    levels.note(AccountLevel(holder="tenant", name=str(n), tokens_per_minute=60, tokens=-60) for n in range(1000))
    assert [len(message.levels.accounts) for message in levels.messages()] == [500, 200]
    clock.advance(70.0)
    assert not list(levels.messages())
    assert len(levels) == 0
