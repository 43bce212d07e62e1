"""The usage of the last two minutes that a hello to a scheduler reports."""

from motet.clock import FakeClock
from motet_gateway.usage import WINDOW_SECONDS, RecentUsage


def test_ended_and_running_requests_are_summed_per_tenant() -> None:
    usage = RecentUsage(FakeClock())
    usage.add("a", 5, 7)
    usage.add("b", 1, 1)
    sums = {u.tenant: (u.prompt_tokens, u.output_tokens) for u in usage.report([("a", 10, 20)])}
    assert sums == {"a": (15, 27), "b": (1, 1)}


def test_old_tokens_are_forgotten() -> None:
    clock = FakeClock()
    usage = RecentUsage(clock)
    usage.add("a", 5, 7)
    clock.advance(WINDOW_SECONDS / 2)
    usage.add("a", 1, 2)
    assert usage.report([])[0].prompt_tokens == 6
    clock.advance(WINDOW_SECONDS / 2 + 1)
    assert usage.report([])[0].prompt_tokens == 1
