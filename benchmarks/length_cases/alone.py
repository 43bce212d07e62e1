"""One tenant with one set of prompts: how much is reserved, and whether quantiles cover what they say."""

import numpy as np

from benchmarks.harness import Result
from benchmarks.length_cases.judged import Judged, folded
from benchmarks.length_cases.rows import SETS, TASKS, Row

ALPACA, ROLEPLAY = "alpaca_random9k", "roleplay"
MOST_R = {"q90": (1.84, 0.10), "q95": (2.30, 0.05)}
MAX_GAP, MAX_GAP_ROLEPLAY = 0.015, 0.025
"""Two standard errors of the smaller sets; roleplay has 1,553 rows."""


def results(rows: list[Row]) -> list[Result]:
    found, gaps = [], {}
    for name in SETS:
        if name == TASKS:
            continue
        judged = folded([row for row in rows if row.set == name])
        if name == ALPACA:
            found += _alpaca(judged)
        at90, at95 = judged.gaps()
        gaps[name] = max(abs(at90), abs(at95))
        print(
            f"{name} alone: coverage {at90:+.2%} and {at95:+.2%} off; q90 R {judged.reserved():.3f} at U"
            f" {judged.short():.2%}, a constant {judged.constant():.3f}"
        )
    roleplay = gaps.pop(ROLEPLAY)
    worst = max(gaps.values())
    return [
        *found,
        Result("worst_coverage_gap", worst, "", f"<= {MAX_GAP}", worst <= MAX_GAP),
        Result("roleplay_coverage_gap", roleplay, "", f"<= {MAX_GAP_ROLEPLAY}", roleplay <= MAX_GAP_ROLEPLAY),
    ]


def ranks(values: np.ndarray) -> np.ndarray:
    """Ties share the mean of their ranks."""
    inverse: np.ndarray
    counts: np.ndarray
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: np.ndarray = np.cumsum(counts) - (counts - 1) / 2
    return means[inverse]


def _alpaca(judged: Judged) -> list[Result]:
    found = []
    for of, (most, bound) in MOST_R.items():
        ratio, short = judged.reserved(of), judged.short(of)
        print(f"{of}: R {ratio:.3f}, U {short:.2%}; a constant of the same U: R {judged.constant(of):.3f}")
        name, held = f"alpaca_r_u{bound * 100:.0f}", ratio <= most and short <= bound
        found.append(Result(name, ratio, "x", f"<= {most} at U <= {bound:.0%}", held, "a constant"))
    lengths = judged.lengths
    error = float(np.abs(judged.of("q50") - lengths).mean())
    rank = float(np.corrcoef(ranks(judged.of("expected")), ranks(lengths))[0, 1])
    print(
        f"q50: mean absolute error {error:.1f} tokens, of the median {np.abs(np.median(lengths) - lengths).mean():.1f}"
    )
    found.append(Result("alpaca_mae", error, "tokens", "<= 31", error <= 31, "the median"))
    found.append(Result("alpaca_spearman", rank, "", ">= 0.74", rank >= 0.74, "0"))
    return found
