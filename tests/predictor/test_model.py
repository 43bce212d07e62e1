"""The length model: pure, without a clock or a socket."""

import csv
import gzip
import json
import os
import random
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_predictor.length_model import PRIOR, QUANTILES, VERSION, LengthEstimate, LengthModel, Scope
from motet_predictor.mean_over_tenants import MAX_OUTDATED, MeanOverTenants
from testbed.machine import out_of_reach

DATA = Path(os.environ.get("TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")
"""Of other projects: we may use it and not publish it."""

tokens = st.integers(min_value=0, max_value=5000)
answers = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), tokens, st.booleans()), max_size=40)


def learned(*lengths: int, tenant: str = "acme", adapter: str = "acme/pirate", censored: bool = False) -> LengthModel:
    model = LengthModel()
    teach(model, *lengths, tenant=tenant, adapter=adapter, censored=censored)
    return model


def teach(model: LengthModel, *lengths: int, tenant: str, adapter: str, censored: bool = False) -> None:
    for length in lengths:
        model.observe(tenant, adapter, length, censored=censored)


def quantiles(lengths: LengthEstimate) -> list[int]:
    return [lengths.q50, lengths.q80, lengths.q90, lengths.q95]


def test_before_the_first_answer_the_estimate_is_the_bound() -> None:
    lengths = LengthModel().estimate("acme", "acme/pirate", 512)
    assert quantiles(lengths)[1:] == [512, 512, 512]
    assert lengths.q50 <= 512


@given(answers, st.integers(min_value=1, max_value=4000))
def test_quantiles_rise_and_none_exceeds_the_bound(seen: list[tuple[str, str, int, bool]], bound: int) -> None:
    model = LengthModel()
    for tenant, adapter, length, censored in seen:
        model.observe(tenant, adapter, length, censored=censored)
    for tenant in "abc":
        lengths = model.estimate(tenant, "x", bound)
        assert all(1 <= earlier <= later for earlier, later in pairwise(quantiles(lengths)))
        assert lengths.q95 <= bound
        assert 0 < lengths.expected <= bound + 1e-6


def test_five_answers_already_help() -> None:
    model = learned(40, 42, 38, 41, 45)
    assert model.estimate("acme", "acme/pirate", 1000).q80 <= 50
    # Somebody else's first estimate has moved as well, less surely.
    assert model.estimate("other", "other/new", 1000).q50 < LengthModel().estimate("other", "other/new", 1000).q50


def test_twenty_answers_decide() -> None:
    model = learned(*[1000] * 200, tenant="other", adapter="other/long")
    teach(model, *[30] * 20, tenant="acme", adapter="acme/short")
    assert model.estimate("acme", "acme/short", 2000).q90 <= 32
    assert model.estimate("other", "other/long", 2000).q50 >= 1000


def test_a_new_adapter_starts_from_its_own_tenants_lengths() -> None:
    model = learned(*[1000] * 100, tenant="other", adapter="other/long")
    teach(model, *[30] * 100, tenant="acme", adapter="acme/short")
    assert model.estimate("acme", "acme/new", 2000).q80 <= 32
    assert model.estimate("other", "other/new", 2000).q50 >= 1000


def test_a_new_adapter_of_a_busy_tenant_starts_from_lengths_of_today() -> None:
    model = LengthModel()
    for other in range(200):  # so that the mean over tenants, which also makes this level new, hardly moves
        teach(model, 100, tenant=str(other), adapter="a")
    for turn in range(20_000):
        model.observe("busy", f"busy/{turn % 5}", 1000)
    assert model.estimate("busy", "busy/new", 0).q50 > 900
    for turn in range(1000):
        model.observe("busy", f"busy/{turn % 5}", 20)
        model.shares("busy", "busy/0")
    kept = LengthModel()
    assert not [*kept.restore(model.changes())]
    served, restarted = model.estimate("busy", "busy/new", 0), kept.estimate("busy", "busy/new", 0)
    assert served.q50 < 30
    assert quantiles(served) == pytest.approx(quantiles(restarted), rel=0.25)


def test_what_a_new_tenant_starts_from_is_not_decided_by_who_answers_most() -> None:
    model = LengthModel()
    for tenant in "abcd":
        teach(model, *range(100, 1100, 50), tenant=tenant, adapter="a")
    teach(model, *[1] * 3000, tenant="flood", adapter="flood/a")
    assert model.estimate("new", "new/a", 8000).q50 > 250
    assert model.estimate("new", "new/a", 8000).q95 > 1000
    assert model.estimate("flood", "flood/a", 8000).q95 == 1


def test_one_tenant_alone_does_not_decide_what_the_second_one_starts_from() -> None:
    assert learned(*[1] * 3000).estimate("other", "other/a", 8000).q95 > 1000


def test_the_prior_counts_as_one_answer_of_each_tenant_and_as_one_tenant() -> None:
    """Three tenants have one answer of one token each. Half of what each adds is that answer, so the mean over them and
    the prior has it for 3/8; the median of the rest is where the prior has a fifth: two octaves above 8."""
    model = LengthModel()
    for tenant in "abc":
        teach(model, 1, tenant=tenant, adapter="a")
    assert 29 <= model.estimate("new", "new/a", 8000).q50 <= 36


def test_new_tenants_move_what_others_start_from_although_one_has_most_answers() -> None:
    model = learned(*[10] * 5000, tenant="heavy", adapter="a")
    assert model.estimate("new", "new/a", 8000).q50 < 1000
    for number in range(150):
        teach(model, 3000, 3000, tenant=f"t{number}", adapter="a")
    assert model.estimate("new", "new/a", 8000).q50 > 2500
    for number in range(150):
        teach(model, *[20] * 20, tenant=f"t{number}", adapter="a")
    assert model.estimate("new", "new/a", 8000).q50 < 100


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.booleans()), max_size=2 * MAX_OUTDATED))
def test_the_mean_over_tenants_is_that_of_all_distributions(steps: list[tuple[int, int, bool]]) -> None:
    """Each step gives a tenant one of three distributions, or forgets it, and perhaps asks for the mean."""
    present: dict[str, list[float]] = {}
    mean = MeanOverTenants(PRIOR, lambda tenant: present[tenant])
    for number, kind, asks in steps:
        tenant = f"{number}"
        if kind:
            present[tenant] = [1.0 if bucket % 4 == kind else 0.0 for bucket in range(len(PRIOR))]
            mean.changed(tenant)
        else:
            present.pop(tenant, None)
            mean.forget(tenant)
        if asks:
            mean.shares()
    everybody = [PRIOR, *present.values()]
    expected = [sum(shares) / len(everybody) for shares in zip(*everybody, strict=True)]
    assert mean.shares() == pytest.approx(expected)


def test_the_same_adapter_may_answer_two_tenants_differently() -> None:
    model = learned(*[20] * 30, tenant="brief", adapter="shared/assistant")
    teach(model, *[900] * 30, tenant="wordy", adapter="shared/assistant")
    assert model.estimate("brief", "shared/assistant", 2000).q80 <= 21
    assert model.estimate("wordy", "shared/assistant", 2000).q50 >= 900


def test_cut_answers_are_taken_for_longer_ones() -> None:
    model = learned(*[300] * 30, tenant="other", adapter="other/a")
    teach(model, *[64] * 30, tenant="acme", adapter="acme/a", censored=True)
    assert model.estimate("acme", "acme/a", 2000).q50 >= 300


def test_the_rank_orders_short_answers_before_long_ones() -> None:
    model = learned(*[20] * 10, tenant="acme", adapter="acme/short")
    teach(model, *[600] * 10, tenant="acme", adapter="acme/long")
    ranks = [model.estimate("acme", adapter, 1000).expected for adapter in ("acme/short", "acme/long")]
    assert ranks == sorted(ranks)
    # What the client allows counts too: a long-winded adapter under a tight bound is short.
    assert model.estimate("acme", "acme/long", 16).expected <= 16


def test_an_answer_changes_the_next_estimate_of_its_adapter_at_once() -> None:
    model = learned(*[20] * 50)
    before = model.estimate("acme", "acme/pirate", 4000)
    teach(model, *[3000] * 30, tenant="acme", adapter="acme/pirate")
    assert model.estimate("acme", "acme/pirate", 4000).q80 > before.q80


def test_without_a_bound_the_estimate_has_no_limit() -> None:
    assert learned(*[9000] * 50).estimate("acme", "acme/pirate", 0).q50 >= 9000


@given(answers)
def test_saved_statistics_are_restored(seen: list[tuple[str, str, int, bool]]) -> None:
    model, again = LengthModel(), LengthModel()
    for tenant, adapter, length, censored in seen:
        model.observe(tenant, adapter, length, censored=censored)
    assert list(again.restore(model.changes())) == []
    assert model.changes() == []
    for tenant in "abc":  # c answered nothing: all it has comes from everybody
        for adapter in "xy":
            ours, theirs = model.estimate(tenant, adapter, 1000), again.estimate(tenant, adapter, 1000)
            assert quantiles(ours) == quantiles(theirs)
            assert ours.expected == pytest.approx(theirs.expected)


def test_only_changed_statistics_are_saved_again() -> None:
    model = learned(10)
    model.changes()
    teach(model, 10, tenant="acme", adapter="acme/json")
    assert {scope for scope, _ in model.changes()} == {
        Scope("tenant", "acme"),
        Scope("adapter", "acme", "acme/json"),
    }


def test_statistics_that_could_not_be_saved_are_offered_again() -> None:
    model = learned(10)
    changes = model.changes()
    model.mark_unsaved(scope for scope, _ in changes)
    assert model.changes() == changes


def test_a_late_restore_adds_to_what_was_learned_meanwhile() -> None:
    kept = learned(*[100] * 20).changes()
    model = learned(*[50] * 5)
    model.changes()
    assert list(model.restore(kept)) == []
    assert model.count(Scope("tenant", "acme")) == 25
    assert {scope for scope, _ in model.changes()} == {scope for scope, _ in kept}


def test_a_late_restore_drops_nothing_that_was_learned_meanwhile() -> None:
    earlier = LengthModel()
    for name in "abc":
        teach(earlier, *[100] * 20, tenant=name, adapter="x")
    kept = earlier.changes()[::-1]
    model = LengthModel(max_scopes=6)
    teach(model, *[4000] * 20, tenant="new", adapter="x")
    teach(model, *[100] * 20, tenant="a", adapter="x")
    for part in kept[:3], kept[3:]:
        assert list(model.restore(part)) == []
    assert {name: model.count(Scope("adapter", name, "x")) for name in ("new", "a", "b", "c")} == {
        "new": 20,
        "a": 40,
        "b": 0,
        "c": 20,
    }


def test_a_late_restore_adds_nothing_to_an_adapter_whose_lengths_have_changed_since() -> None:
    kept = learned(*[60] * 800).changes()
    model = learned(*[60] * 20)
    model.restart("acme", "acme/pirate", [(3000, False)] * 8)
    assert list(model.restore(kept)) == []
    assert model.count(Scope("adapter", "acme", "acme/pirate")) == 8
    assert model.count(Scope("tenant", "acme")) == 820
    assert model.estimate("acme", "acme/pirate", 0).q50 > 2500


def test_an_adapter_whose_lengths_have_changed_stays_so_when_it_is_forgotten_and_learns_again() -> None:
    kept = learned(*[60] * 800).changes()
    model = LengthModel(max_scopes=4)
    model.restart("acme", "acme/pirate", [(3000, False)] * 8)
    teach(model, *[10] * 4, tenant="other", adapter="other/a")
    teach(model, *[10] * 4, tenant="another", adapter="another/a")
    assert model.count(Scope("adapter", "acme", "acme/pirate")) == 0
    model.observe("acme", "acme/pirate", 3000)
    assert list(model.restore(kept)) == []
    assert model.count(Scope("adapter", "acme", "acme/pirate")) == 1


def test_damaged_statistics_are_named_and_the_rest_is_restored() -> None:
    kept = learned(10, 20).changes()
    broken = [(kept[0][0], b"junk"), *kept[1:]]
    model = LengthModel()
    assert [scope for scope, _ in model.restore(broken)] == [kept[0][0]]
    assert model.count(kept[1][0]) == 2


def test_the_number_of_scopes_is_limited_and_a_forgotten_tenant_leaves_the_mean() -> None:
    model = LengthModel(max_scopes=100)
    for n in range(500):
        model.observe(f"tenant-{n}", f"tenant-{n}/a", 1 if n < 400 else 2000)
    assert len(model) <= 100
    assert model.estimate("new", "new/a", 8000).q50 > 1000
    assert model.count(Scope("adapter", "tenant-499", "tenant-499/a")) == 1
    assert model.count(Scope("adapter", "tenant-0", "tenant-0/a")) == 0
    assert len(model.changes()) <= 100


def test_the_version_names_the_way_of_learning() -> None:
    assert LengthModel().version == VERSION


def pinball(quantile: float, actual: int, estimate: int) -> float:
    return max(quantile * (actual - estimate), (quantile - 1) * (actual - estimate))


World = dict[str, list[int]]
"""Answer lengths by adapter, all seen by one model."""


def drawn_by_lot() -> list[World]:
    """40 adapters, each of whose answers are about as long as the one before; some are always cut."""
    chance = random.Random(5)
    middles = [chance.lognormvariate(4.0, 1.2) for _ in range(40)]
    return [{f"{n}": [int(chance.lognormvariate(0, 0.3) * m) + 1 for _ in range(20)] for n, m in enumerate(middles)}]


def published_elsewhere(name: str) -> TextIO:
    if not (DATA / name).exists():
        out_of_reach(f"needs {name}, real lengths that are not ours to publish, in the folder that TEST_DATA names")
    return gzip.open(DATA / name, "rt")


def tenants_with_laws_of_their_own() -> list[World]:
    """39 tasks, each with lengths of its own kind."""
    world: World = defaultdict(list)
    with published_elsewhere("prompts/tenants_t0.jsonl.gz") as lines:
        for line in lines:
            row = json.loads(line)
            world[row["tenant"]].append(row["n_out_llama2"] + 1)
    return [world]


def many_new_services() -> list[World]:
    """A hundred models that have seen nothing before one chat service's first ten answers."""
    with published_elsewhere("lengths/lmsys.csv.gz") as lines:
        rows = [int(row["GeneratedTokens"]) + 1 for row in csv.DictReader(lines)]
    return [{"chat": rows[start : start + 10]} for start in range(0, 1000, 10)]


@pytest.mark.parametrize(
    ("traffic", "share"), [(drawn_by_lot, 0.2), (tenants_with_laws_of_their_own, 0.1), (many_new_services, 0.9)]
)
def test_five_answers_beat_the_bound(traffic: Callable[[], list[World]], share: float) -> None:
    """The pinball loss from the sixth answer to the tenth is below this share of what saying max_tokens costs."""
    bound, chance = 512, random.Random(7)
    ours = bounds = 0.0
    held: dict[float, list[bool]] = defaultdict(list)
    for world in traffic():
        model = LengthModel()
        drawn = {adapter: chance.sample(lengths, 10) for adapter, lengths in world.items() if len(lengths) >= 10}
        for n in range(10):
            for adapter, lengths in drawn.items():
                actual = min(lengths[n], bound)
                if n >= 5:
                    guesses = zip(QUANTILES, quantiles(model.estimate("acme", adapter, bound)), strict=True)
                    for quantile, guess in guesses:
                        ours += pinball(quantile, actual, guess)
                        bounds += pinball(quantile, actual, bound)
                        held[quantile].append(actual <= guess)
                model.observe("acme", adapter, actual, censored=lengths[n] > bound)
    assert ours < share * bounds
    for quantile in (0.9, 0.95):
        assert sum(held[quantile]) / len(held[quantile]) >= quantile - 0.05
