"""The sums of the benchmark are what the real plan does."""

from math import isinf

from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.presets import has_sums, held_by
from benchmarks.virtual_plan import COMPARED, Request, Runner, Step, Workload

CONTEXT = 320
workloads = st.lists(st.builds(Request, st.integers(1, 150), st.integers(1, 150)), min_size=1, max_size=8).map(
    lambda requests: Workload("small", CONTEXT, requests)
)


def steps(workload: Workload, name: str, *, pages: int, places: int) -> list[Step]:
    runner = Runner(workload, name, pages=pages, places=places)
    done = []
    while runner.busy:
        done.append(runner.step())
    return done


@example(workload=Workload("doubles", CONTEXT, [Request(20, 10)] * 5 + [Request(20, 150)]), name="paged-promises")
@given(workload=workloads, name=st.sampled_from([name for name in COMPARED if has_sums(name)]))
def test_the_sums_are_those_of_the_real_plan(workload: Workload, name: str) -> None:
    """One request after the other, so that no prompt waits for another one's iteration."""
    held = held_by(workload, name, workload.requests)
    done = steps(workload, name, pages=40, places=1)
    held_in_plan = sum(step.pages if isinf(COMPARED[name].overcommit) else step.promised for step in done)
    assert (len(done), sum(step.tokens for step in done), held_in_plan) == (held.steps, held.tokens, held.pages)


@given(workload=workloads, name=st.sampled_from(["ft-max", "orca", "s3", "oracle"]))
def test_the_sums_hold_for_requests_that_share_the_memory(workload: Workload, name: str) -> None:
    held = held_by(workload, name, workload.requests)
    done = steps(workload, name, pages=40, places=8)
    assert (sum(step.tokens for step in done), sum(step.promised for step in done)) == (held.tokens, held.pages)
    assert all(step.promised <= 40 for step in done)
