"""Many tenants, a new one among them, and one that lies."""

import copy

import numpy as np

from benchmarks.harness import Result
from benchmarks.length_cases.judged import SPACE, Judged, folded, judge, mixed, taught
from benchmarks.length_cases.rows import Row
from motet_predictor.fitting import Sample, fit_weights, statistics_of
from motet_predictor.prompt_model import PromptModel

OF_EACH, TESTED, DRAWS = 1500, 400, 5
AFTER = (5, 50)
MAX_R, MAX_U, MIN_COVERAGE = 1.75, 0.07, 0.82
MAX_R2, MAX_U_NEW = 1.85, 0.11
FALSE, KEPT = 20_000, 5_000
"""Outcomes of the tenant that lies, and how many of a tenant the database keeps."""
MAX_MOVED, MAX_R_MOVED = 0.01, 1.05


def known(rows: list[Row]) -> list[Result]:
    judged = folded(rows, OF_EACH)
    of_tenants = {name: judged.where(name) for name in sorted({row.sample.tenant for row in rows})}
    coverage = {name: 1 - one.short() for name, one in of_tenants.items()}
    worst = min(coverage, key=lambda name: coverage[name])
    ratio, short = judged.reserved(), judged.short()
    print(f"{len(of_tenants)} tenants: q90 R {ratio:.3f} at U {short:.2%}; a constant R {judged.constant():.3f}")
    print(f"worst coverage: {coverage[worst]:.3f} of {len(of_tenants[worst].rows)} answers of {worst}")
    held = ratio <= MAX_R and short <= MAX_U
    return [
        Result("tenants_r", ratio, "x", f"<= {MAX_R} at U <= {MAX_U:.0%}", held, "a constant"),
        Result("tenants_u", short, "", f"<= {MAX_U}", short <= MAX_U),
        Result("tenants_worst_coverage", coverage[worst], "", f">= {MIN_COVERAGE}", coverage[worst] >= MIN_COVERAGE),
    ]


def new(rows: list[Row]) -> list[Result]:
    """Each tenant once as the new one, beside weights and statistics of the others."""
    pooled = {count: Judged() for count in AFTER}
    for at, name in enumerate(sorted({row.sample.tenant for row in rows})):
        others = mixed((row for row in rows if row.sample.tenant != name), at, OF_EACH)
        statistics = statistics_of(others, 1000)
        weights = fit_weights(others, statistics, SPACE)
        own = [row for row in rows if row.sample.tenant == name]
        for draw in range(DRAWS):
            order = np.random.default_rng(draw).permutation(len(own))
            for count, judged in pooled.items():
                model = PromptModel(copy.deepcopy(statistics), weights)
                for one in (own[n].sample for n in order[:count]):
                    model.observe(one.tenant, one.adapter, one.tokens, features=one.features)
                judge(model, (own[n] for n in order[count : count + TESTED]), judged, draw)
    results = []
    for count, judged in pooled.items():
        ratio, short = judged.reserved_after_doubling(), judged.short()
        print(f"a new tenant after {count} answers: R2 {ratio:.3f} at U {short:.2%}; q90 R {judged.reserved():.3f}")
        held = ratio <= MAX_R2 and short <= MAX_U_NEW
        results.append(Result(f"new_tenant_r2_{count}", ratio, "x", f"<= {MAX_R2} at U <= {MAX_U_NEW:.0%}", held))
    return results


def poisoned(rows: list[Row]) -> list[Result]:
    """One fold with and without a tenant whose answers have nothing to do with its prompts, which are others'."""
    samples = mixed((row for row in rows if row.fold), 0, OF_EACH)
    tested = [row for row in rows if not row.fold]
    chance = np.random.default_rng(1)
    lies = [
        Sample("liar", "a", int(chance.choice((1, 2048))), False, samples[int(chance.integers(len(samples)))].features)
        for _ in range(FALSE)
    ]
    before = judge(taught(samples), tested, Judged())
    both = [*samples, *lies[-KEPT:]]
    when = np.concatenate((np.arange(len(samples)), chance.uniform(0, len(samples), KEPT)))
    model = taught([both[at] for at in np.argsort(when)])  # the others' answers come in the same order as without lies
    for one in lies[:-KEPT]:
        model.observe(one.tenant, one.adapter, one.tokens, features=one.features)
    after = judge(model, tested, Judged())
    moved, ratio, whose = 0.0, 0.0, ""
    for name in {row.sample.tenant for row in tested}:
        mine, then = before.where(name), after.where(name)
        if len(mine.rows) < TESTED:
            continue  # one answer of few would move its coverage by more than the bound
        if abs(mine.short() - then.short()) > moved:
            moved, whose = abs(mine.short() - then.short()), name
        ratio = max(ratio, then.reserved() / mine.reserved())
    print(f"beside {FALSE} false outcomes of another tenant: coverage moves by {moved:.2%} ({whose}), R by {ratio:.3f}")
    return [
        Result("poison_coverage", moved, "", f"<= {MAX_MOVED}", moved <= MAX_MOVED),
        Result("poison_r", ratio, "x", f"<= {MAX_R_MOVED}", ratio <= MAX_R_MOVED),
    ]
