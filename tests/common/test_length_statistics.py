"""Running quantiles of lengths: right within a bucket, correct about cut answers, and small."""

import math
import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.length_statistics import EDGES, HALF_LIFE, LengthStatistics, bucket_of, quantiles_of

lengths = st.integers(min_value=0, max_value=200_000)
outcomes = st.lists(st.tuples(lengths, st.booleans()), max_size=60)


def statistics_of(*tokens: int, censored: tuple[int, ...] = ()) -> LengthStatistics:
    statistics = LengthStatistics()
    for one in tokens:
        statistics.observe(one)
    for one in censored:
        statistics.observe(one, censored=True)
    return statistics


def exact_quantile(tokens: list[int], q: float) -> int:
    return sorted(tokens)[max(math.ceil(q * len(tokens) - 1e-9) - 1, 0)]


def test_buckets_hold_every_length_and_grow_by_at_most_five_percent() -> None:
    assert [bucket_of(n) for n in (0, 1, 2, 3)] == [0, 0, 1, 2]
    assert all(later > earlier for earlier, later in pairwise(EDGES))
    assert all(later <= max(earlier + 1, earlier * 1.05) for earlier, later in pairwise(EDGES))
    assert len(EDGES) < 400


@given(lengths)
def test_a_bucket_never_answers_less_than_what_it_holds(tokens: int) -> None:
    edge = EDGES[bucket_of(tokens)]
    assert max(tokens, 1) <= edge <= max(tokens * 1.05, tokens + 1)


def test_without_samples_there_is_no_quantile() -> None:
    assert LengthStatistics().quantile(0.5) is None
    assert LengthStatistics().count == 0


@given(st.lists(lengths, min_size=1, max_size=40), st.sampled_from([0.1, 0.5, 0.8, 0.9, 0.95, 1.0]))
def test_a_few_answers_give_nearly_the_exact_quantile(tokens: list[int], q: float) -> None:
    estimate = statistics_of(*tokens).quantile(q)
    assert estimate is not None
    # Forgetting shifts the shares by a little; a neighbouring rank is as good.
    neighbours = [exact_quantile(tokens, min(max(q + shift, 0.0), 1.0)) for shift in (-0.03, 0.03)]
    assert EDGES[bucket_of(neighbours[0])] <= estimate <= EDGES[bucket_of(neighbours[1])]


@given(outcomes)
def test_quantiles_rise_with_their_share(seen: list[tuple[int, bool]]) -> None:
    statistics = LengthStatistics()
    for tokens, censored in seen:
        statistics.observe(tokens, censored=censored)
    shares = (0.0, 0.5, 0.8, 0.9, 0.95, 1.0)
    answers = [statistics.quantile(q) for q in shares]
    assert answers == (statistics.quantiles(shares) or [None] * len(shares))
    if statistics.count == 0:
        assert answers == [None] * 6
    else:
        known = [answer for answer in answers if answer is not None]
        assert known == sorted(known)
        assert len(known) == 6


@given(outcomes, st.sampled_from([0.0, 0.5, 8.0]))
def test_shares_add_up_to_one(seen: list[tuple[int, bool]], strength: float) -> None:
    statistics = LengthStatistics()
    for tokens, censored in seen:
        statistics.observe(tokens, censored=censored)
    masses = statistics.bucket_shares(statistics_of(10, 100, 1000).bucket_shares(), strength)
    if masses is not None:
        assert sum(masses) == pytest.approx(1.0)
        assert min(masses) >= 0


def test_a_cut_answer_is_only_a_lower_bound() -> None:
    honest = statistics_of(50, 60, 400, censored=(64, 64, 64))
    naive = statistics_of(50, 60, 400, 64, 64, 64)
    median, believed = honest.quantile(0.8), naive.quantile(0.8)
    assert median is not None
    assert believed is not None
    assert median >= 400
    assert believed < 70


def test_answers_that_were_all_cut_point_beyond_the_cut() -> None:
    assert statistics_of(censored=(64,) * 5).quantile(0.5) == EDGES[bucket_of(EDGES[bucket_of(64)] * 2)]


def test_a_cut_before_the_first_token_is_ignored() -> None:
    assert statistics_of(censored=(0, 0)).count == 0


@given(outcomes.filter(lambda seen: any(tokens for tokens, _ in seen)))
def test_more_censoring_never_shortens_an_estimate(seen: list[tuple[int, bool]]) -> None:
    plain, cut = LengthStatistics(), LengthStatistics()
    for tokens, censored in seen:
        plain.observe(max(tokens, 1))
        cut.observe(max(tokens, 1), censored=censored)
    for q in (0.5, 0.9):
        short, long = plain.quantile(q), cut.quantile(q)
        assert short is not None
        assert long is not None
        assert long >= short


def test_a_prior_decides_first_and_samples_soon_outweigh_it() -> None:
    everybody = statistics_of(*[1000] * 20).bucket_shares()
    assert everybody is not None
    medians = []
    for answers in (0, 1, 5):
        masses = statistics_of(*[40] * answers).bucket_shares(everybody, 2.0)
        assert masses is not None
        medians.append(quantiles_of(masses, [0.5])[0])
    assert medians[0] >= 1000
    assert medians[-1] <= 42


def test_a_prior_extends_cut_answers() -> None:
    everybody = statistics_of(*[300] * 20).bucket_shares()
    masses = statistics_of(censored=(64,) * 20).bucket_shares(everybody, 2.0)
    assert masses is not None
    assert quantiles_of(masses, [0.5]) == [EDGES[bucket_of(300)]]


def test_old_answers_lose_weight() -> None:
    statistics = statistics_of(*[1000] * 2000, *[20] * (4 * HALF_LIFE))
    assert statistics.quantile(0.9) == 20
    assert statistics.count == 2000 + 4 * HALF_LIFE
    assert statistics.weight < 2 * HALF_LIFE


def test_a_million_answers_overflow_nothing() -> None:
    statistics = LengthStatistics()
    for n in range(100_000):
        statistics.observe(1 + n % 100)
    median = statistics.quantile(0.5)
    assert median is not None
    assert 45 <= median <= 55


@given(outcomes)
def test_statistics_survive_writing_and_reading(seen: list[tuple[int, bool]]) -> None:
    statistics = LengthStatistics()
    for tokens, censored in seen:
        statistics.observe(tokens, censored=censored)
    data = statistics.to_bytes()
    again = LengthStatistics.from_bytes(data)
    assert again.count == statistics.count
    for mine, other in zip(again.weights(), statistics.weights(), strict=True):
        assert mine == pytest.approx(other)
    assert again.to_bytes() == data
    assert len(data) < 8192


@pytest.mark.parametrize("data", [b"", b"\x07" + b"\0" * 18, b"\x01" + b"\0" * 40, b"junk" * 30])
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="length statistics"):
        LengthStatistics.from_bytes(data)


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("place", [9, 21, 29], ids=["the unit", "a weight", "a weight of cut answers"])
def test_numbers_that_are_no_weights_are_refused(place: int, number: float) -> None:
    data = bytearray(statistics_of(5).to_bytes())
    data[place : place + 8] = struct.pack("<d", number)
    with pytest.raises(ValueError, match="damaged length statistics"):
        LengthStatistics.from_bytes(bytes(data))


@given(outcomes, outcomes)
def test_merged_statistics_count_both(first: list[tuple[int, bool]], second: list[tuple[int, bool]]) -> None:
    one, other, both = LengthStatistics(), LengthStatistics(), LengthStatistics()
    for statistics, seen in ((one, first), (other, second), (both, first + second)):
        for tokens, censored in seen:
            statistics.observe(tokens, censored=censored)
    weight = one.weight + other.weight
    one.merge(other)
    assert one.count == both.count
    assert one.weight == pytest.approx(weight)


@pytest.mark.parametrize("q", [-0.1, 1.1])
def test_a_share_outside_zero_and_one_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        LengthStatistics().quantile(q)


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        LengthStatistics().observe(-1)
