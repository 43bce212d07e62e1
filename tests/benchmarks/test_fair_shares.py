"""The figures of fair shares, over less."""

from benchmarks.fair_shares import measure_noise, measure_shares

CAPACITY = 2.7
"""Requests a second of one runner, nearly."""


def test_the_quiet_tenant_hardly_waits_beside_the_flood_and_weights_share_what_is_computed():
    noisy, without, cost = measure_noise(1, 110.0, CAPACITY)
    assert (noisy.name, without.name, cost.name) == ("noisy_ttft", "noisy_ttft_without_headroom", "headroom_cost")
    assert noisy.value < without.value
    assert cost.value > 0.9
    (error,) = measure_shares(1, 600.0, CAPACITY)
    assert error.name == "share_error"
    assert error.value < 60, "with equal weights it is 167"
