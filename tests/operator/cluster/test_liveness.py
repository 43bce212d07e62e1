"""When the operator is taken for dead, and when for not ready."""

import pytest

from motet_operator.cluster.cluster_operator import ANSWERED_SECONDS, SILENT_SECONDS, STALLED_SECONDS, OperatorLiveness

WATCH = "/apis/motet.dev/v1alpha1/loraadapters"
PODS = "/api/v1/namespaces/pools/pods"


def pulse(*, round: float = 1, answer: float = 1, watches: dict[str, float] | None = None) -> OperatorLiveness:  # noqa: A002
    return OperatorLiveness(round=round, answer=answer, watches={WATCH: 1} if watches is None else watches)


def test_a_working_operator_is_alive_and_ready() -> None:
    assert pulse().dead_reason() == pulse().unready_reason(300) == ""
    assert pulse(watches={}).dead_reason() == ""  # nothing is watched before everything is listed


@pytest.mark.parametrize("answer", [1, 10 * ANSWERED_SECONDS])
def test_a_hanging_work_loop_counts_as_dead(answer: float) -> None:
    stalled = pulse(round=STALLED_SECONDS + 1, answer=answer)
    assert stalled.dead_reason() == "the work loop has not ticked for 61 s"
    assert pulse(round=STALLED_SECONDS - 1, answer=answer).dead_reason() == ""


def test_one_silent_watch_makes_the_operator_dead() -> None:
    watches = {WATCH: 30.0, PODS: SILENT_SECONDS + 1}
    assert pulse(watches=watches).dead_reason() == f"the watch of {PODS} has sent nothing for 151 s"
    assert pulse(watches=watches | {PODS: SILENT_SECONDS - 1}).dead_reason() == ""


def test_an_outage_of_the_api_server_does_not_restart_the_operator() -> None:
    """Every watch is silent while the API server is away, and another process would hear as little."""
    outage = pulse(answer=ANSWERED_SECONDS + 1, watches={WATCH: 3600.0})
    assert outage.dead_reason() == ""


def test_the_operator_is_ready_only_after_an_answer_of_the_api_server() -> None:
    assert pulse(answer=300 + ANSWERED_SECONDS - 1).unready_reason(300) == ""
    late = pulse(answer=300 + ANSWERED_SECONDS + 1)
    assert late.unready_reason(300) == "the API server has sent nothing for 331 s"
