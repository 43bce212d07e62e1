"""From logits to tokens."""

import hashlib
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from motet.domain import BASE, RequestId
from motet_runner.execute.batch.row_table import RowTable, TableRow
from motet_runner.execute.sample import draw
from motet_runner.execute.sample import host_adjustments as adjusted_logits
from motet_runner.execute.sample.adjustment import Adjustment
from motet_runner.execute.sample.device_sampler import NOT_FINITE, DeviceSampler
from motet_runner.execute.sample.host_sampler import CPU_GROUP, Sampler, Samples
from motet_runner.execute.sample.sampling_kind import uniform
from motet_runner.interface import Sampling
from motet_runner.memory.link import link_to
from motet_runner.memory.parcel import Parcel
from motet_runner.plan import RowJoin
from testbed import reference_sampler
from tests.support.device import DEVICE

VOCABULARY = 40


class BothSamplers:
    """That of a CPU and that of a device, which must give the same tokens and log probabilities."""

    def __init__(self, eos: frozenset[int]) -> None:
        self._eos = eos
        self._of_host = Sampler(eos)
        self._link = link_to(DEVICE, perf_counter)
        self._of_device: DeviceSampler | None = None

    def leave(self, row: int) -> None:
        if self._of_device is not None:
            self._of_device.leave(row)

    def sample(self, rows: torch.Tensor, sequences: list[TableRow]) -> Samples:
        if self._of_device is None:
            self._of_device = DeviceSampler(self._link, self._eos, rows.shape[1])
        parcel = Parcel()
        sampling = self._of_device.prepare(sequences, parcel)
        samples = sampling.sample(rows, parcel.send(self._link))
        sampling.count(sampling.counted(samples))
        found = self._of_host.sample(rows, sequences)
        assert [None if token == NOT_FINITE else token for token in samples.tokens.tolist()] == found.tokens
        told = sampling.logprobs([one for best in samples.logprobs for one in best])
        assert told.keys() == found.logprobs.keys()
        assert all(told[place] == found.logprobs[place] for place in told if found.tokens[place] is not None)
        return found


def sample(rows: torch.Tensor, sequences: list[TableRow], eos: frozenset[int]) -> Samples:
    """By samplers that see these sequences for the first time."""
    for number, one in enumerate(sequences):
        one.number = number
    return BothSamplers(eos).sample(rows.to(DEVICE), sequences)


def by_host(rows: torch.Tensor, sequences: list[TableRow]) -> Samples:
    """With the short cuts of a CPU"""
    return Sampler(frozenset()).sample(rows, sequences)


def sequence(*, prompt=(1, 2), output=(), seed: int = 0, choice: int = 0, **sampling) -> TableRow:
    return TableRow(
        number=0,
        request=RequestId("r"),
        tokens=[*prompt, *output],
        prompt_tokens=len(prompt),
        adapter=BASE,
        sampling=Sampling(**({"max_tokens": 100} | sampling)),
        seed=seed,
        choice=choice,
    )


def logits(rows: int = 1, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)).to(DEVICE) * 2


def tokens(row: torch.Tensor, *, draws: int = 1, eos=frozenset(), **wanted) -> list[int]:
    """Draws from one row, as different seeds see it."""
    many = [sequence(seed=seed, **wanted) for seed in range(draws)]
    return sample(row.expand(draws, -1), many, eos).tokens


def test_greedy_sampling_takes_the_most_likely_token() -> None:
    row = logits()
    assert tokens(row) == [int(row.argmax())]


def test_sampling_follows_the_distribution() -> None:
    row = logits()
    counted = Counter(tokens(row, draws=4000, temperature=0.7))
    expected = (row[0] / 0.7).softmax(-1)
    for token in range(VOCABULARY):
        p = float(expected[token])
        assert abs(counted[token] / 4000 - p) < 5 * math.sqrt(p * (1 - p) / 4000) + 1e-3


def test_top_k_top_p_and_min_p_remove_unlikely_tokens() -> None:
    row = logits()
    probabilities, order = row[0].softmax(-1).sort(descending=True)
    assert set(tokens(row, draws=300, temperature=1.0, top_k=3)) == set(order[:3].tolist())
    nucleus = int((probabilities.cumsum(-1) < 0.5).sum()) + 1
    assert set(tokens(row, draws=500, temperature=1.0, top_p=0.5)) == set(order[:nucleus].tolist())
    strong = order[probabilities >= 0.3 * probabilities[0]].tolist()
    assert set(tokens(row, draws=500, temperature=1.0, min_p=0.3)) == set(strong)


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-9}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_the_strictest_filter_equals_greedy_sampling(cut: dict[str, float]) -> None:
    row = logits()
    assert set(tokens(row, draws=50, temperature=1.5, **cut)) == {int(row.argmax())}


@given(
    others=st.integers(0, 5), seed=st.integers(0, 2**63), temperature=st.floats(0.1, 2), top_k=st.integers(0, 50),
    top_p=st.floats(0.05, 1), min_p=st.floats(0, 0.5),
)  # fmt: skip
def test_sampling_does_not_depend_on_other_rows(others: int, seed: int, **wanted: float) -> None:
    row = logits(seed=3)
    one = sequence(seed=seed, **wanted)
    crowd = [sequence(seed=i, temperature=1.0, top_k=i, presence_penalty=i / 7) for i in range(others)]
    alone = sample(row, [one], frozenset()).tokens[0]
    beside = sample(torch.cat([logits(others, seed=9), row]), [*crowd, one], frozenset()).tokens[-1]
    assert alone == beside


def test_sampling_depends_only_on_seed_choice_and_position() -> None:
    drawn = {
        uniform(seed, choice, position)
        for seed in (0, 1, 2**64, -1)
        for choice in range(5)
        for position in range(50)
    }  # fmt: skip
    assert len(drawn) == 4 * 5 * 50
    assert all(0 <= number < 1 for number in drawn)
    assert uniform(7, 1, 3) == 0.1362622159212642, "a stream that moves must go on with the same numbers"
    numbers = [uniform(1, 0, position) for position in range(4000)]
    assert abs(sum(numbers) / 4000 - 0.5) < 0.03


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    row = torch.zeros(1, VOCABULARY)
    row[0, 5], row[0, 6], row[0, 1] = 2.0, 1.5, 1.0
    seen = sequence(prompt=(1, 1, 1), output=(5, 5), frequency_penalty=0.4, presence_penalty=0.2, logprobs=True)
    assert sample(row, [seen], frozenset()).tokens[0] == 6
    milder = sequence(prompt=(1, 1, 1), output=(5, 5), frequency_penalty=0.1, presence_penalty=0.2)
    assert sample(row, [milder], frozenset()).tokens[0] == 5


def test_the_repetition_penalty_counts_prompt_and_output() -> None:
    row = torch.full((1, VOCABULARY), -1.0)
    row[0, 1], row[0, 5], row[0, 6] = 2.0, 1.9, 1.2
    assert sample(row, [sequence(prompt=(1,), output=(5,), repetition_penalty=2.0)], frozenset()).tokens[0] == 6
    negative = torch.full((1, VOCABULARY), -2.0)
    negative[0, 1], negative[0, 7] = -1.0, -1.5
    assert sample(negative, [sequence(prompt=(1,), repetition_penalty=2.0)], frozenset()).tokens[0] == 7


def test_logit_bias_favours_and_forbids_tokens_and_ignores_unknown_ids() -> None:
    row = logits()
    assert tokens(row, logit_bias={3: 100.0, VOCABULARY + 5: 100.0}) == [3]
    best = int(row.argmax())
    assert tokens(row, logit_bias={best: -100.0}) != [best]


def test_end_tokens_are_forbidden_until_min_tokens() -> None:
    row = torch.zeros(1, VOCABULARY)
    row[0, 4], row[0, 9], row[0, 11] = 9.0, 8.0, 7.0
    wanted = {"min_tokens": 3, "stop_token_ids": frozenset({9})}
    early, late = sequence(output=(1, 1), **wanted), sequence(output=(1, 1, 1), **wanted)
    assert sample(row.expand(2, -1), [early, late], frozenset({4})).tokens == [11, 4]


def test_logprobs_are_the_models_own() -> None:
    row = logits()
    asked = sequence(temperature=1.7, top_k=2, logit_bias={3: 5.0}, logprobs=True, top_logprobs=3)
    sampled = sample(row, [asked], frozenset())
    (token,), found = sampled.tokens, sampled.logprobs[0]
    logs = row[0].log_softmax(-1)
    assert found.logprob == pytest.approx(float(logs[token]))
    values, ids = logs.topk(3)
    assert [i for i, _ in found.top] == ids.tolist()
    assert [v for _, v in found.top] == pytest.approx(values.tolist())


def test_logprobs_are_there_only_for_those_who_asked() -> None:
    row = logits(3)
    asked = [sequence(), sequence(logprobs=True), sequence(logprobs=True, top_logprobs=2)]
    found = sample(row, asked, frozenset()).logprobs
    assert {place: len(one.top) for place, one in found.items()} == {1: 0, 2: 2}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("wanted", [{}, {"temperature": 1.0}, {"logit_bias": {2: 1.0}, "temperature": 1.0}])
def test_a_row_that_is_not_finite_gives_no_token_and_affects_no_other(bad: float, wanted: dict) -> None:
    rows = logits(3)
    rows[1, 7] = bad
    sampled = sample(rows, [sequence(**wanted) for _ in range(3)], frozenset()).tokens
    assert sampled[1] is None
    assert sampled[0] is not None
    assert sampled[2] is not None


# ---------------------------------------------------------------------------------------------- the same, by definition


def test_no_number_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hashlib, "blake2b", lambda *_, digest_size: SimpleNamespace(digest=lambda: b"\xff" * digest_size)
    )
    assert 0.999 < uniform(1, 0, 0) < 1


def literally_drawn(likely: list[float], number: float, *, top_k: int, top_p: float, min_p: float) -> int:
    """The definition at the top of `cuts.py`, in fractions."""
    order = sorted(range(len(likely)), key=lambda token: (-likely[token], token))
    kept = order[: top_k or None]
    whole = sum((Fraction(likely[token]) for token in kept), Fraction(0)) if top_k < len(likely) and top_k else 1
    enough = Fraction(top_p * float(whole)) if top_p < 1 else math.inf
    staying = [
        token
        for place, token in enumerate(kept)
        if place == 0
        or (
            sum((Fraction(likely[before]) for before in kept[:place]), Fraction(0)) < enough
            and likely[token] >= float(torch.tensor(min_p) * likely[order[0]])
        )
    ]
    upto, total = Fraction(0), sum((Fraction(likely[token]) for token in staying), Fraction(0))
    for token in sorted(staying):
        upto += Fraction(likely[token])
        if upto > Fraction(number * float(total)):
            return token
    raise AssertionError("a number below one lies in what is kept")


# Few different logits, so that many are equal, also at the border of a cut.
some_logits = st.lists(
    st.sampled_from([-math.inf, -9.0, -1.0, -0.5, 0.0, 0.125, 0.25, 1.0, 2.0, 20.0]), min_size=2, max_size=24
).filter(lambda row: max(row) > -math.inf)
numbers = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, 1 - 2.0**-53]))
top_ps = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1e-9, 0.25, 0.5, 0.75, 1.0]))
min_ps = st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, 0.5, 1.0]))


@given(
    row=some_logits, number=numbers, top_k=st.integers(0, 30), top_p=top_ps, min_p=min_ps,
    candidates=st.integers(2, 24), block=st.integers(1, 9), temperature=st.sampled_from([0.01, 0.5, 1.0, 3.0]),
)  # fmt: skip
def test_the_short_cut_and_the_whole_row_give_the_token_of_the_definition(
    *,
    row: list[float],
    number: float,
    top_k: int,
    top_p: float,
    min_p: float,
    candidates: int,
    block: int,
    temperature: float,
) -> None:
    given = torch.tensor([row])
    likely = draw.probabilities(given, given.amax(-1, keepdim=True), torch.tensor([[temperature]]))
    expected = literally_drawn(likely[0].tolist(), number, top_k=top_k, top_p=top_p, min_p=min_p)
    cuts = draw.Cuts(
        torch.tensor([[top_k if 0 < top_k < len(row) else draw.ALL]]),
        torch.tensor([[top_p if top_p < 1 else math.inf]], dtype=torch.float64),
        torch.tensor([[min_p]]) if min_p else None,
    )
    place = torch.tensor([[number]], dtype=torch.float64)
    assert draw.draw(likely, place, cuts).tolist() == [expected]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw, "CANDIDATES", min(candidates, len(row)))
        patch.setattr(draw, "BLOCK", block)
        assert draw.draw(likely, place, cuts).tolist() == [expected], "by the first of all sorted tokens"
        patch.setattr(draw, "SHORT_CUT_FROM", 0)
        assert draw.draw(likely, place, cuts).tolist() == [expected], "by the candidates"


def test_if_the_cuts_keep_few_tokens_of_each_row_only_the_first_ones_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[int] = []
    cut = draw.cut

    def recorded(likely: torch.Tensor, negated: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        looked_at.append(negated.shape[1])
        return cut(likely, negated, *more)

    monkeypatch.setattr(draw, "cut", recorded)
    monkeypatch.setattr(draw, "CANDIDATES", 8)
    steep, flat = torch.arange(VOCABULARY) * -1.0, torch.arange(VOCABULARY) * -0.01
    for rows, asked, expected in (
        ([steep, steep], {"top_p": 0.9}, 8),
        ([steep, flat], {"top_p": 0.9}, VOCABULARY),
        ([steep, flat], {"top_k": 7}, 8),
        ([steep, flat], {"top_k": 8}, VOCABULARY),
        ([steep, steep], {"top_k": 20, "top_p": 0.5}, VOCABULARY),
        ([steep, steep], {"min_p": 0.1}, 8),
        ([steep, flat], {"min_p": 0.1}, VOCABULARY),
        ([steep, steep], {"min_p": 0.1, "top_k": 20}, 8),
        ([steep, steep], {"min_p": 0.1, "top_k": 20, "top_p": 0.999}, VOCABULARY),
    ):
        looked_at.clear()
        sampled = by_host(torch.stack(rows), [sequence(temperature=1.0, **asked) for _ in rows])
        assert looked_at == [expected], asked
        assert None not in sampled.tokens


def test_of_equally_likely_tokens_the_first_ones_stay_also_if_the_cut_is_at_the_last_one_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draw, "CANDIDATES", 8)
    likely = torch.full((32, 32), 1 / 32)
    numbers = torch.arange(32, dtype=torch.float64)[:, None] / 32
    for kept in (7, 8, 9):
        cuts = draw.Cuts(torch.full((32, 1), draw.ALL), torch.full((32, 1), kept / 32, dtype=torch.float64), None)
        assert set(draw.draw(likely, numbers, cuts).tolist()) == set(range(kept))


def test_the_short_cut_is_taken_and_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[tuple[int, int]] = []
    cut = draw.cut

    def recorded(likely: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        looked_at.append(tuple(likely.shape))
        return cut(likely, *more)

    monkeypatch.setattr(draw, "cut", recorded)
    monkeypatch.setattr(draw, "SHORT_CUT_FROM", 0)
    monkeypatch.setattr(draw, "CANDIDATES", 8)
    steep, flat = torch.arange(VOCABULARY) * -1.0, torch.arange(VOCABULARY) * -0.01
    nucleus = [sequence(temperature=1.0, top_p=0.9) for _ in range(5)]
    by_host(steep.repeat(5, 1), nucleus)
    assert looked_at == [(5, 8)], "the candidates suffice"
    looked_at.clear()
    by_host(torch.stack([steep, flat, steep, flat, steep]), nucleus)
    assert looked_at == [(5, 8), (2, VOCABULARY)], "only the rows that need it are sorted"
    looked_at.clear()
    by_host(flat.repeat(5, 1), nucleus)
    assert looked_at == [(5, VOCABULARY)], "eight candidates cannot have nine tenths, so none are looked for"
    looked_at.clear()
    by_host(flat.repeat(5, 1), [sequence(temperature=1.0, top_k=7) for _ in range(5)])
    assert looked_at == [(5, 8)]
    looked_at.clear()
    # Of the most likely 20 tokens: more than of the 8 candidates.
    by_host(steep.repeat(5, 1), [sequence(temperature=9.0, top_k=20, top_p=0.5) for _ in range(5)])
    assert looked_at == [(5, 8), (5, VOCABULARY)]


def test_probabilities_have_the_same_sum_in_any_order() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2, 100_000, generator=generator) * torch.tensor([[0.5], [9.0]])
    likely = draw.probabilities(rows, rows.amax(-1, keepdim=True), torch.ones(2, 1)).double()
    other = torch.randperm(100_000, generator=generator)
    assert torch.equal(likely.cumsum(-1)[:, -1], likely[:, other].cumsum(-1)[:, -1])
    assert torch.equal(likely.cumsum(-1)[:, -1], likely.sum(-1))
    assert torch.allclose(likely.sum(-1), torch.ones(2, dtype=torch.float64), atol=1e-5)


def admissible(row: torch.Tensor, one: TableRow, eos: frozenset[int]) -> set[int]:
    """What the reference draws, also if the number or a cut lies by a rounding error elsewhere."""
    found = set()
    number = uniform(one.seed, one.choice, len(one.tokens))
    asked = one.sampling
    for shift in (-1e-5, 0.0, 1e-5):
        for cut in (1 - 1e-5, 1.0, 1 + 1e-5):
            top_p = asked.top_p * cut if asked.top_p < 1 else 1.0
            varied = replace(one, sampling=replace(asked, top_p=top_p, min_p=min(1.0, asked.min_p * cut)))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(reference_sampler, "uniform", lambda *_, s=shift: min(max(number + s, 0.0), 1 - 1e-12))
                found.add(reference_sampler.sample(row, [varied], eos).tokens[0])
    return found


options = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.3, 1.0, 2.5]),
        "top_k": st.integers(0, VOCABULARY + 5),
        "top_p": top_ps,
        "min_p": min_ps,
        "presence_penalty": st.sampled_from([-1.0, 0.5]),
        "frequency_penalty": st.sampled_from([-0.25, 0.5]),
        "repetition_penalty": st.sampled_from([0.8, 1.0, 1.3]),
        "logit_bias": st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, -1.0, 2.0]), max_size=3),
        "min_tokens": st.integers(0, 8),
        "stop_token_ids": st.frozensets(st.integers(0, VOCABULARY - 1), max_size=2),
        "logprobs": st.booleans(),
    },
)


class SampledRows(RuleBasedStateMachine):
    """Rows come, are sampled some at a time and in any order, fail, leave and join again. One sampler keeps what it
    knows of each row, and chooses what the reference chooses, which counts everything anew."""

    EOS = frozenset({3})

    def __init__(self) -> None:
        super().__init__()
        self.sampler = BothSamplers(self.EOS)
        self.table = RowTable()
        self.rows: dict[int, TableRow] = {}
        self.parked: list[TableRow] = []
        self.steps = 0

    def join(self, number: int, tokens: tuple[int, ...], prompt: int, asked: Sampling, seed: int) -> None:
        request = RequestId(f"r{seed}")
        self.table.join(
            RowJoin(
                row=number, request=request, tokens=tokens, prompt_tokens=prompt, adapter=BASE, sampling=asked,
                seed=seed, choice=0,
            )
        )  # fmt: skip
        self.rows[number] = self.table[number]

    @rule(
        number=st.integers(0, 40),
        prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5),
        asked=options,
    )
    def a_row_joins(self, number: int, prompt: list[int], asked: dict) -> None:
        if number not in self.rows:
            self.steps += 1
            self.join(number, tuple(prompt), len(prompt), Sampling(max_tokens=100, **asked), self.steps)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def a_row_is_parked(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.rows)))
        self.table.leave(number)
        self.sampler.leave(number)
        self.parked.append(self.rows.pop(number))

    @precondition(lambda self: self.parked)
    @rule(number=st.integers(0, 40))
    def a_row_resumes(self, number: int) -> None:
        if number not in self.rows:
            old = self.parked.pop()
            self.join(number, tuple(old.tokens), old.prompt_tokens, old.sampling, old.seed)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), failing=st.booleans())
    def some_rows_are_sampled(self, data: st.DataObject, failing: bool) -> None:
        batch = data.draw(st.lists(st.sampled_from(sorted(self.rows)), min_size=1, unique=True))
        rows = [self.rows[number] for number in batch]
        self.steps += 1
        # Multiples of an eighth, so that many are equal.
        given = (logits(len(rows), seed=self.steps) * 8).round() / 8
        if failing:
            given[0, 5] = math.nan
        sampled = self.sampler.sample(given, rows)
        for place, (row, token) in enumerate(zip(rows, sampled.tokens, strict=True)):
            if failing and place == 0:
                assert token is None
                row.tokens.append(0)
                continue
            wanted = reference_sampler.sample(given[place : place + 1], [row], self.EOS)
            if row.sampling.temperature:
                assert token in admissible(given[place : place + 1], row, self.EOS)
            else:
                assert token == wanted.tokens[0]
            assert (place in sampled.logprobs) == (0 in wanted.logprobs)
            row.tokens.append(token)


TestSampledRows = SampledRows.TestCase
TestSampledRows.settings = settings(max_examples=40, stateful_step_count=30)


def test_what_a_step_counts_does_not_grow_with_the_answer() -> None:
    looked_at: list[int] = []

    class Tokens(list):
        def __getitem__(self, where: slice) -> list[int]:
            found = super().__getitem__(where)
            looked_at.append(len(found))
            return found

    wanted = Sampling(max_tokens=1000, presence_penalty=1.0, repetition_penalty=2.0, min_tokens=5)
    kept, tokens = Adjustment(wanted, 100, frozenset({9})), Tokens(range(100))
    for token in range(500):
        kept.follow(tokens)
        tokens.append(token)
    assert max(looked_at[2:]) == 1


def test_rows_begin_anew_after_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    row = torch.zeros(1, VOCABULARY)
    row[0, 5], row[0, 6] = 2.0, 1.5
    sampler, seen = Sampler(frozenset()), sequence(output=(5,), frequency_penalty=1.0)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(adjusted_logits, "_write", full)
        sampler.sample(row, [seen])
    assert sampler.sample(row, [seen]).tokens[0] == 6


def test_a_row_is_computed_alike_in_groups_of_any_size() -> None:
    vocabulary = CPU_GROUP // 3 - 5
    rows = torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(5))
    largest = rows.amax(-1, keepdim=True)
    together = draw.probabilities(rows, largest, torch.full((7, 1), 0.7))
    for first in range(7):
        alone = slice(first, first + 1)
        assert torch.equal(draw.probabilities(rows[alone], largest[alone], torch.full((1, 1), 0.7)), together[alone])
    wanted = [{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.3, "top_k": 5}, {}]
    many = [sequence(seed=i, output=(i,), frequency_penalty=i % 2, **wanted[i % 4]) for i in range(7)]
    expected = [sample(rows[i : i + 1], [one], frozenset()).tokens[0] for i, one in enumerate(many)]
    again = [replace(one, adjustment=None) for one in many]
    assert sample(rows, again, frozenset()).tokens == expected


def test_extreme_logits_and_options_give_tokens() -> None:
    only = torch.full((1, VOCABULARY), -math.inf)
    only[0, 12] = -3e38
    masked = torch.full((1, VOCABULARY), torch.finfo(torch.float32).min)
    masked[0, 13] = 1e38
    for row, expected in ((only, 12), (masked, 13)):
        for wanted in (
            {},
            {"temperature": 1e-30},
            {"temperature": 1.0, "top_p": 1e-30},
            {"temperature": 10.0, "top_k": 3},
        ):
            assert tokens(row, draws=5, **wanted) == [expected] * 5


BITS = [0x0000, 0x8000, 0x3F80, 0xBF80, 0x4020, 0xC020, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F7F, 0x8080]
"""Of bfloats: both zeros, 1, -1, 2.5, -2.5, both infinities, two that are no numbers, a huge and a tiny one"""


@given(st.lists(st.lists(st.sampled_from(BITS), min_size=5, max_size=5), min_size=1, max_size=4))
def test_greedy_rows_of_bfloats_give_what_their_floats_give(rows: list[list[int]]) -> None:
    given = torch.tensor(rows, dtype=torch.uint16).view(torch.bfloat16)
    several = [sequence() for _ in rows]
    assert sample(given, several, frozenset()).tokens == sample(given.float(), several, frozenset()).tokens


def test_options_apply_to_bfloats_as_to_floats() -> None:
    given = logits(3).bfloat16()
    of_bfloats, of_floats = (
        sample(
            rows,
            [sequence(temperature=1.0, seed=5), sequence(logprobs=True), sequence(logit_bias={3: 50.0})],
            frozenset(),
        )
        for rows in (given, given.float())
    )
    assert of_bfloats == of_floats
    assert of_bfloats.tokens[2] == 3
