"""Up to where a runner is filled as long as another one takes the request."""

from functools import cmp_to_key
from random import Random

import pytest

from motet.domain import InstanceName, RequestId
from motet.runner_info import BatchCap
from motet_scheduler.policy.fill_limits import MAX_PROMPT_SECONDS, fill_limits
from motet_scheduler.policy.runner_choice import Chosen, beyond_limits, choose
from motet_scheduler.policy.step_profile import NO_PROFILE, StepProfile
from tests.scheduler.builders import SchedulerDriver, entry, ready

CAP = BatchCap(target_seconds=0.05, sequences=16, fixed_seconds=0.02, sequence_seconds=0.001, context_seconds=1e-5)
KNEE = {"fixed_seconds": 0.02, "sequence_seconds": 0.005}
"""After four sequences."""


def two(*, places: int = 16, **reported: object) -> SchedulerDriver:
    """r0 has nothing, and r1 would be the next one to fill: a request runs there."""
    driver = ready(headroom_one_in=0)
    for name in ("r0", "r1"):
        driver.attach(name, pages=10_000, max_sequences=places, max_model_length=100_000)
    driver.enqueue("first")
    assert driver.where("first") == "r1"
    for name in ("r0", "r1"):
        report(driver, name, **reported)
    return driver


def report(driver: SchedulerDriver, name: str, **reported: object) -> None:
    live = []
    for (request, epoch), pages in driver.scheduler.runners[InstanceName(name)].ledger:
        known = driver.scheduler.requests[request]
        live.append(entry(request, pages, epoch=epoch, prompt_tokens=known.prompt_tokens))
    driver.report(name, *live, **reported)


def ask(driver: SchedulerDriver, count: int, **how: object) -> list[str]:
    names = [f"q{len(driver.scheduler.requests)}-{number}" for number in range(count)]
    for name in names:
        driver.enqueue(name, **how)
    return [driver.where(name) for name in names]


def told(driver: SchedulerDriver, request: str) -> str:
    return driver.scheduler.timelines.of(RequestId(request))[-1][2]


def test_what_is_not_measured_is_no_limit():
    assert fill_limits(NO_PROFILE, None, 16) is None
    assert fill_limits(NO_PROFILE, BatchCap(target_seconds=0.05), 16) is None
    assert ask(two(), 15) == ["r1"] * 15


def test_a_runner_that_has_just_come_has_the_knee_of_its_pool():
    """Else it would get all requests until it has measured its own."""
    driver = two(**KNEE)
    assert ask(driver, 7) == ["r1"] * 3 + ["r0"] * 4
    driver.attach("r2", pages=10_000, max_sequences=16, max_model_length=100_000)
    assert sorted(ask(driver, 8)) == ["r0"] + ["r1"] + ["r2"] * 6
    report(driver, "r2", fixed_seconds=0.02, sequence_seconds=0.002)
    assert ask(driver, 4) == ["r2"] * 4, "its own"


def test_a_runner_of_another_pool_says_nothing_of_this_one():
    driver = two(**KNEE)
    assert ask(driver, 7) == ["r1"] * 3 + ["r0"] * 4
    driver.attach("x0", pages=10_000, max_sequences=16, max_model_length=100_000, pool="default/other")
    assert ask(driver, 8) == ["x0"] * 8


def test_a_runner_is_filled_up_to_its_knee_while_another_one_has_room():
    driver = two(**KNEE)
    assert ask(driver, 3) == ["r1"] * 3
    driver.enqueue("next")
    assert driver.where("next") == "r0"
    assert told(driver, "next") == (
        "on runner r0 with 5 pages (placement 1); not on r1: more than 4 requests at once cost it more time than they "
        "save"
    )


def test_beyond_all_knees_the_emptiest_takes_it_and_nobody_waits():
    driver = two(places=6, **KNEE)
    assert ask(driver, 11) == ["r1"] * 3 + ["r0"] * 4 + ["r1", "r0", "r1", "r0"]
    driver.finish("first")
    driver.enqueue("last")
    assert told(driver, "last") == (
        "on runner r1 with 5 pages (placement 1); more than 4 requests at once cost it more time than they save, and "
        "no other one with room is better"
    )


def test_limits_are_made_when_what_was_measured_has_changed():
    driver = two(**KNEE)
    runner = driver.scheduler.runners[InstanceName("r0")]
    before = runner.limits
    assert before is not None
    report(driver, "r0", **KNEE)
    assert runner.limits is before
    report(driver, "r0", **KNEE, prompt_token_seconds=1e-4)
    assert runner.limits is not None
    assert runner.limits != before


@pytest.mark.parametrize(
    ("profile", "places", "expected"),
    [
        (StepProfile(0.02, 0.005), 16, 4.0),
        (StepProfile(0.02, 0.0), 16, float("inf")),
        (StepProfile(0.0, 0.01), 16, 2.0),
    ],
)
def test_the_knee_is_where_sequences_take_as_long_as_the_rest(profile, places, expected):
    """There a further one lengthens all tokens by as large a part as it adds tokens. It counts as an eighth of the
    places at least."""
    limits = fill_limits(profile, None, places)
    assert (limits.sequences if limits is not None else float("inf")) == expected
    if expected == 4.0:

        def tokens(n):
            return n / (profile.fixed + profile.sequence * n)

        def gain(n):
            return tokens(n + 1e-6) / tokens(n) - 1

        def cost(n):
            return 1e-6 * profile.sequence / (profile.fixed + profile.sequence * n)

        assert gain(3.9) > cost(3.9)
        assert gain(4.1) < cost(4.1)


def test_long_contexts_leave_room_for_fewer_requests_than_the_cap_on_the_batch():
    driver = two(batch_cap=CAP)
    assert ask(driver, 1, prompt=1500) == ["r1"], "20 + 2 + 15 ms"
    driver.enqueue("next", prompt=1500)
    assert driver.where("next") == "r0", "20 + 3 + 30 ms"
    assert "not on r1: a token would take 53 ms there, longer than its pool's SLO" in told(driver, "next")
    report(driver, "r1", batch_cap=CAP)
    assert ask(driver, 1, prompt=1500) != ["r1"]
    assert ask(driver, 1, prompt=16) == ["r1"]


def test_a_runner_alone_takes_what_keeps_no_target():
    driver = two(batch_cap=CAP)
    assert ask(driver, 1, prompt=20_000) == ["r0"], "beside nothing it delays nobody"


def test_a_runner_with_prompts_to_compute_gets_no_more_while_another_one_takes_them():
    seconds = 1e-4
    driver = two(prompt_token_seconds=seconds)
    most = int(MAX_PROMPT_SECONDS / seconds)
    assert ask(driver, 2, prompt=most + 1) == ["r1", "r0"], "what is placed counts at once"
    report(driver, "r1", prompt_token_seconds=seconds, pending_prompt_tokens=most // 2)
    assert ask(driver, 1) == ["r1"], "half of it is computed"
    report(driver, "r0", prompt_token_seconds=seconds)
    report(driver, "r1", prompt_token_seconds=seconds, pending_prompt_tokens=most + 1)
    driver.finish("first")
    driver.enqueue("next")
    assert driver.where("next") == "r0"
    assert f"not on r1: it has {most + 1} tokens of prompts to compute" in told(driver, "next")


def test_cached_prompts_and_those_of_requests_that_left_are_not_counted():
    driver = two(prompt_token_seconds=1e-4, cached=(1,))
    runner = driver.scheduler.runners[InstanceName("r1")]
    driver.enqueue("cached", prompt=16 + 8, prefix_hints=(1,))
    assert runner.prompt_tokens_left == 8
    driver.finish("cached")
    assert runner.prompt_tokens_left == 0


def test_choices_of_one_call_stay_together():
    driver = two(**KNEE)
    driver.enqueue("c0", choices=6)
    for number in range(1, 6):
        driver.enqueue(f"c{number}", parent=RequestId("c0"), choices=6)
    assert {driver.where(f"c{number}") for number in range(6)} == {"r1"}


# ------------------------------------------------------------------------------------------------------ the reference


def by_the_rules(request, fits, near):
    """The first of these by what `runner_choice` says, one rule after the other."""

    def before(one, other):
        rules = (
            lambda fit: not fit.runner.emptied,
            lambda fit: fit.runner.instance == near if near else False,
            lambda fit: beyond_limits(request, fit.runner) is None,
            lambda fit: fit.runner.cached_tokens(request.prefix_hints),
        )
        for rule in rules:
            if rule(one) != rule(other):
                return 1 if rule(one) > rule(other) else -1
        fuller = one.runner.sequences - other.runner.sequences
        if fuller:
            return fuller if beyond_limits(request, one.runner) is None else -fuller
        return 1 if one.runner.instance > other.runner.instance else -1

    return max(fits, key=cmp_to_key(before))


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_that_of_all_rules_one_after_the_other(seed):
    chance, driver = Random(seed), ready(headroom_one_in=0)
    for number in range(5):
        driver.attach(f"r{number}", pages=60, max_sequences=6)
    state, decided_by_limits = driver.scheduler.state, 0
    for number in range(120):
        for name in driver.scheduler.runners:
            if chance.random() < 0.3:
                how = chance.choice(({}, KNEE, {"batch_cap": CAP}, {"prompt_token_seconds": 1e-3}))
                report(driver, name, cached=chance.sample((1, 2, 3), 1), **how)
                driver.scheduler.runners[name].emptied = chance.random() < 0.2
        driver.enqueue(f"n{number}", prompt=chance.choice((16, 300, 700)), prefix_hints=(1, 2), max_tokens=16)
        request = driver.scheduler.requests[RequestId(f"n{number}")]
        alone = [choose(request, [one], state.config, state.now) for one in state.runners.values()]
        fits = [one for one in alone if isinstance(one, Chosen)]
        found = choose(request, state.runners.values(), state.config, state.now)
        if fits:
            assert found.runner is by_the_rules(request, fits, "").runner
            decided_by_limits += found.because is not None
        else:
            assert found is None
        for name in [*driver.scheduler.requests]:
            if chance.random() < 0.15:
                known = driver.scheduler.requests[name]
                driver.finish(name, known.epoch) if not known.waiting else driver.cancel(name)
    assert decided_by_limits > 0
