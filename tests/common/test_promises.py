"""The rule for promises, and a check that scheduler, supervisor and runner compute the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet import promises
from motet.domain import BASE, PAGE_TOKENS, RequestId, Tenant, pages_for
from motet.promises import PromiseRule
from motet.runner_info import Capacity, RequestClass, RunnerIdentity, RunnerRequest, SequenceState
from motet_runner.interface import OverflowAhead, State
from motet_runner.plan.sequence import Sequence
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.values import Estimate, GroupName, SchedulerConfig
from motet_supervisor.policy.runners import WatchedRunner
from tests.runner.plan.fake_device import FakeDevice, make_planner, new

CONTEXT = 2048
CAPACITY = Capacity(pages=1000, max_model_length=CONTEXT)

lengths = st.integers(1, CONTEXT // 2)


def scheduled(prompt, max_tokens, **how):
    return Request(
        id=RequestId("a"),
        gateway="g0",
        tenant=Tenant("acme"),
        group=GroupName("default/demo"),
        digest=BASE,
        request_class=RequestClass.STANDARD,
        prompt_tokens=prompt,
        max_tokens=max_tokens,
        asked_at=0.0,
        sequence=0,
        **how,
    )


def running(prompt, max_tokens, promise, made):
    return Sequence(
        new=new("a", prompt=prompt, max_tokens=max_tokens, promise=promise),
        arrival=1,
        promise=promise,
        tokens=[0] * (prompt + made),
        state=State.DECODE,
        page_tokens=PAGE_TOKENS,
    )


def watched(prompt, max_tokens, promise, made):
    return RunnerRequest(
        request=RequestId("a"),
        epoch=1,
        pages=promise,
        prompt_tokens=prompt,
        max_tokens=max_tokens,
        output_tokens=made,
        state=SequenceState.DECODE,
    )


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "pages"),
    [(16, 16, 2), (16, 17, 2), (16, 18, 3), (1, 1, 1), (32, 1, 2), (33, 1, 3)],
)
def test_the_last_token_of_an_answer_needs_no_memory(prompt, max_tokens, pages):
    assert promises.max_pages(prompt, max_tokens, page_tokens=PAGE_TOKENS) == pages


def test_without_max_tokens_the_context_limits_an_answer():
    assert promises.max_kv_tokens(5, 0, context_tokens=96) == 95
    assert promises.max_kv_tokens(90, 50, context_tokens=96) == 95


def test_a_promise_doubles_up_to_the_longest_answer_and_never_shrinks():
    assert [promises.doubled_pages(pages, most=7) for pages in (1, 2, 4, 7, 9)] == [2, 4, 7, 7, 9]


@given(prompt=lengths, max_tokens=lengths)
def test_an_engine_uses_at_most_the_pages_of_the_longest_answer(prompt, max_tokens):
    prompt, max_tokens = min(prompt, 80), min(max_tokens, 80)
    most = promises.max_pages(prompt, max_tokens, page_tokens=PAGE_TOKENS)
    planner = make_planner(pages=most + 1)  # a context ends with the pages, last token included
    planner.commands.add(new("a", prompt=prompt, max_tokens=max_tokens, promise=most, ignore_eos=True))
    device = FakeDevice(planner)
    used = 0
    while planner.has_work():
        device.step()
        used = max(used, len(device.memory))
    assert used == promises.max_kv_tokens(prompt, max_tokens)
    assert pages_for(used, PAGE_TOKENS) == most
    assert not [event for event in device.events if isinstance(event, OverflowAhead)]


@given(prompt=lengths, max_tokens=lengths, promise=st.integers(1, 200), made=lengths)
def test_scheduler_supervisor_and_runner_agree(prompt, max_tokens, promise, made):
    made = min(made, max_tokens - 1)
    most = promises.max_pages(prompt, max_tokens, page_tokens=PAGE_TOKENS)
    engine = running(prompt, max_tokens, promise, made)
    entry = watched(prompt, max_tokens, promise, made)
    supervisor = WatchedRunner(RunnerIdentity(instance="r0"), CAPACITY, 0.0, overcommit=1.0)
    request = scheduled(prompt, max_tokens)
    assert engine.most_pages == supervisor.max_pages(entry) == most
    assert request.promise_on(CAPACITY, SchedulerConfig(force_promise_pages=10_000)).pages == most
    assert engine.doubled == supervisor.doubled(entry)
    assert engine.nears_promise == supervisor.is_near_promise(entry)


@given(prompt=lengths, max_tokens=lengths, delivered=st.integers(0, CONTEXT), q80=st.integers(0, CONTEXT))
def test_a_first_promise_covers_the_prompt_and_never_more_than_can_be_used(prompt, max_tokens, delivered, q80):
    delivered = min(delivered, max_tokens - 1)
    request = scheduled(prompt, max_tokens, delivered=delivered, estimate=Estimate(q80=q80))
    promise = request.promise_on(CAPACITY, SchedulerConfig())
    assert (
        pages_for(prompt + delivered, PAGE_TOKENS)
        <= promise.pages
        <= promises.max_pages(prompt, max_tokens, page_tokens=PAGE_TOKENS)
    )
    assert promise.tokens <= min(promise.pages * PAGE_TOKENS, promises.max_kv_tokens(prompt, max_tokens))


@pytest.mark.parametrize(
    ("rule", "tokens"),
    [
        (PromiseRule.CONTEXT, CONTEXT - 1),
        (PromiseRule.MAX_TOKENS, 100 + 999),
        (PromiseRule.BUCKET, 100 + 410),  # the second of ten buckets, each of 205 tokens
        (PromiseRule.EXPECTED, 100 + 300),
        (PromiseRule.NEXT_PAGE, 100 + PAGE_TOKENS),
    ],
)
def test_a_rule_says_what_the_first_promise_covers(rule, tokens):
    pages = promises.pages_by_rule(rule, 100, 1000, expected=300, context_tokens=CONTEXT, page_tokens=PAGE_TOKENS)
    assert pages == pages_for(tokens, PAGE_TOKENS)


@given(rule=st.sampled_from(PromiseRule), prompt=lengths, max_tokens=lengths, expected=st.integers(0, CONTEXT // 2))
def test_each_rule_promises_the_prompt_and_at_most_the_context(rule, prompt, max_tokens, expected):
    pages = promises.pages_by_rule(
        rule, prompt, max_tokens, expected=expected, context_tokens=CONTEXT, page_tokens=PAGE_TOKENS
    )
    assert pages_for(prompt, PAGE_TOKENS) <= pages <= pages_for(CONTEXT, PAGE_TOKENS)


@pytest.mark.parametrize("rule", PromiseRule)
def test_a_rule_does_without_a_context_that_nobody_knows(rule):
    assert promises.pages_by_rule(rule, 100, 50, expected=30, context_tokens=0, page_tokens=PAGE_TOKENS) >= pages_for(
        100, PAGE_TOKENS
    )


@given(tokens=st.integers(1, CONTEXT), buckets=st.integers(1, 50))
def test_the_edge_of_a_bucket_is_the_longest_answer_in_it(tokens, buckets):
    edge = promises.bucket_edge(tokens, context_tokens=CONTEXT, buckets=buckets)
    assert edge >= tokens
    assert promises.bucket_edge(edge, context_tokens=CONTEXT, buckets=buckets) == edge
    assert promises.bucket_edge(edge + 1, context_tokens=CONTEXT, buckets=buckets) > edge
