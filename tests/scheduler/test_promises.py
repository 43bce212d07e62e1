"""How many pages a request is promised."""

from dataclasses import replace

import pytest

from motet.api.v1 import common_pb2
from motet.domain import BASE, RequestId, Tenant
from motet.promises import PROMISE_QUANTILES, PromiseRule
from motet.runner_info import Capacity, RequestClass
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.values import Estimate, SchedulerConfig
from tests.scheduler.builders import GROUP

CAPACITY = Capacity(pages=100, max_model_length=256)


def pages(*, prompt=16, max_tokens=64, q80=0, delivered=0, config=None, capacity=CAPACITY, sequence=0, **more):
    request = Request(
        id=RequestId("a"),
        gateway="g0",
        tenant=Tenant("acme"),
        group=GROUP,
        digest=BASE,
        request_class=RequestClass.STANDARD,
        prompt_tokens=prompt,
        max_tokens=max_tokens,
        delivered=delivered,
        estimate=Estimate(q80=q80, **more),
        asked_at=0.0,
        sequence=sequence,
    )
    return request.promise_on(capacity, config or SchedulerConfig()).pages


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({"prompt": 16, "q80": 16}, 2),
        ({"prompt": 16, "q80": 17}, 3),
        ({"prompt": 16, "max_tokens": 64}, 5),  # without an estimate: max_tokens
        ({"prompt": 16, "max_tokens": 8, "q80": 500}, 2),  # at most what the request can use
        ({"prompt": 250, "max_tokens": 500}, 16),  # at most the context of the model
        ({"prompt": 1, "max_tokens": 1}, 1),
        ({"prompt": 16, "q80": 32, "delivered": 16}, 3),  # delivered tokens are part of the estimate
        ({"prompt": 16, "q80": 16, "delivered": 40}, 5),  # longer than its estimate: one more page
    ],
)
def test_a_promise_covers_prompt_delivered_and_expected_tokens(case, expected):
    assert pages(**case) == expected


def test_a_forced_promise_is_a_number_of_pages_or_what_the_prompt_needs():
    assert pages(prompt=6, max_tokens=200, q80=200, config=SchedulerConfig(force_promise_pages=1)) == 1
    assert pages(prompt=20, max_tokens=200, q80=200, config=SchedulerConfig(force_promise_pages=1)) == 2
    assert pages(prompt=20, max_tokens=200, q80=200, config=SchedulerConfig(force_promise_pages=3)) == 3


def test_one_in_a_number_of_requests_gets_the_forced_promise():
    config = SchedulerConfig(force_promise_pages=1, force_promise_each=3)
    asked = [pages(prompt=6, max_tokens=200, q80=200, config=config, sequence=each) for each in range(6)]
    assert asked == [1, 13, 13, 1, 13, 13]


def test_even_a_forced_promise_is_limited_by_the_longest_answer():
    assert pages(prompt=20, max_tokens=4, config=SchedulerConfig(force_promise_pages=9)) == 2


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (PromiseRule.CONTEXT, 16),
        (PromiseRule.MAX_TOKENS, 5),
        (PromiseRule.BUCKET, 3),  # 26 tokens are a tenth of the context
        (PromiseRule.EXPECTED, 2),
        (PromiseRule.NEXT_PAGE, 2),
    ],
)
def test_the_preset_of_a_runner_says_what_a_request_is_promised_there(rule, expected):
    capacity = replace(CAPACITY, promise_rule=rule)
    assert pages(prompt=16, max_tokens=64, q80=5, capacity=capacity) == expected
    assert Capacity.from_proto(capacity.to_proto()) == capacity


@pytest.mark.parametrize(("quantile", "expected"), [*zip(PROMISE_QUANTILES, (2, 3, 4, 5), strict=True)])
def test_a_promise_covers_the_quantile_of_the_runner(quantile, expected):
    capacity = replace(CAPACITY, promise_quantile=quantile)
    assert pages(prompt=16, max_tokens=500, q50=16, q80=32, q90=48, q95=64, capacity=capacity) == expected
    assert Capacity.from_proto(capacity.to_proto()) == capacity


def test_a_runner_that_names_no_known_quantile_is_promised_the_usual_one():
    for percent in (0, 85):
        assert Capacity.from_proto(common_pb2.Capacity(promise_quantile=percent)).promise_quantile == 80


def test_no_promise_is_larger_than_the_runner():
    capacity = replace(CAPACITY, pages=10, promise_rule=PromiseRule.CONTEXT)
    assert pages(capacity=capacity) == 10


def test_a_runner_that_does_not_say_its_rule_is_promised_the_expected_length():
    assert Capacity.from_proto(common_pb2.Capacity(promise_rule="of a newer version")).promise_rule == "expected"
    assert Capacity.from_proto(common_pb2.Capacity()).promise_rule == PromiseRule.EXPECTED
