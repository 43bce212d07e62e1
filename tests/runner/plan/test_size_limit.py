"""How large a model call may be after one did not fit into memory."""

from hypothesis import given
from hypothesis import strategies as st

from motet_runner.plan import StepResult
from motet_runner.plan.size_limit import CALLS_UNTIL_LARGER, SizeLimit
from tests.runner.plan.fake_device import make_planner, new


def test_it_halves_and_doubles_up_to_what_is_wanted() -> None:
    limit = SizeLimit(512, least=16)
    sizes = [limit.size]
    for _ in range(7):
        limit.did_not_fit(limit.size)
        sizes.append(limit.size)
    assert sizes == [512, 256, 128, 64, 32, 16, 16, 16]
    for _ in range(7):
        limit.fitted(CALLS_UNTIL_LARGER - 1)
        sizes.append(limit.size)
        limit.fitted(1)
    assert sizes[8:] == [16, 32, 64, 128, 256, 512, 512]


def test_it_is_never_more_than_half_of_what_did_not_fit() -> None:
    limit = SizeLimit(1 << 30)
    limit.did_not_fit(65)
    assert limit.size == 32


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 64)), max_size=200), st.integers(1, 100))
def test_attempts_in_vain_are_a_small_share_of_all_calls(iterations: list[tuple[int, int]], fits: int) -> None:
    limit, in_vain, calls = SizeLimit(1 << 30), 0, 0
    for rows, times in iterations:
        for _ in range(times):
            attempts = 0
            while min(rows, limit.size) > fits:
                limit.did_not_fit(min(rows, limit.size))
                attempts += 1
            parts = -(-rows // min(rows, limit.size))
            calls += parts
            in_vain += attempts
            if not attempts:
                limit.fitted(parts)
    assert in_vain <= 7 + 7 * calls / CALLS_UNTIL_LARGER


def test_only_an_iteration_with_prompts_makes_chunks_smaller() -> None:
    planner = make_planner(chunk_tokens=64)
    planner.commands.add(new("a", prompt=40, max_tokens=300))
    sizes = []
    for retries in (1, 1, *[0] * CALLS_UNTIL_LARGER):
        plan = planner.plan()
        assert plan is not None
        tokens = [1 for step in plan.rows if step.samples]
        planner.collect(StepResult(number=plan.number, sampled=tokens, model_calls=1 + retries, retries=retries))
        sizes.append(planner.chunk.size)
    assert sizes == [32, 32, *[32] * (CALLS_UNTIL_LARGER - 1), 64]
