"""A law from measured iterations: least squares of relative errors, with no cost below zero.

Each iteration is a row (fixed, decodes, context, prefill, attended, adapters); decodes are several columns, so that the
first ones may cost another amount than later ones. A column that never varies gets nothing: its cost is in the fixed
one, and nobody could tell.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import median

from motet.errors import SetupError
from motet_simulator.profiles.bounds import FACTOR
from motet_simulator.profiles.profile import Overheads, Profile, Residuals, StepLaw, Work
from motet_simulator.profiles.step_traces import Iteration, Timed

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Between which the cost of one more decode is the same."""

LEAST_ITERATIONS = 200

MAX_RESIDUALS = 20_000
"""The newest of each kind are kept."""

MIN_RESIDUAL = 1e-3

_ROUNDS = 400
_OUTLIER = 8.0
"""Iterations that take this many times as long as the law says do not bend it. They stay among the residuals."""

Row = tuple[float, ...]


def fit(
    timed: Timed,
    iterations: Sequence[Iteration],
    overheads: Overheads | None = None,
    *,
    least: int = LEAST_ITERATIONS,
) -> Profile:
    """Raises SetupError for fewer iterations than `least`."""
    if len(iterations) < least:
        raise SetupError(f"{len(iterations)} iterations are too few for a profile: it needs {least}.")
    knots = _knots(iterations)
    # The first law is not bent by what took very long, but lies below the middle: it says which iterations are usual,
    # and how much an error of each may weigh.
    first = _law(iterations, knots, [1 / one.seconds for one in iterations])
    common = [one for one in iterations if one.seconds < _OUTLIER * first.seconds(one.work)]
    law = _centred(_law(common, knots, [1 / first.seconds(one.work) for one in common]), common)
    of_decoding, of_prompts = (
        [_around(law, one) for one in iterations if (one.work.prefill > 0) is with_prompts][-MAX_RESIDUALS:]
        for with_prompts in (False, True)
    )
    return Profile(
        machine=timed.machine,
        model=timed.model,
        kernels=timed.kernels,
        engine=timed.engine,
        law=law,
        residuals=Residuals(
            decoding=tuple(factor for factor, _ in of_decoding),
            prompts=tuple(factor for factor, _ in of_prompts),
            decoding_seconds=tuple(seconds for _, seconds in of_decoding),
            prompts_seconds=tuple(seconds for _, seconds in of_prompts),
        ),
        overheads=overheads or Overheads(),
        steps=len(iterations),
    )


def _knots(iterations: Iterable[Iteration]) -> list[int]:
    most = max(one.work.decodes for one in iterations)
    return [knot for number, knot in enumerate(KNOTS) if knot <= most or (number and KNOTS[number - 1] < most)]


def _columns(work: Work, knots: Sequence[int]) -> Row:
    """The decodes between two knots are a column of their own."""
    before = [0, *knots]
    pieces = (max(0, min(work.decodes, knot) - low) for low, knot in zip(before, knots, strict=False))
    return (1.0, float(work.context), float(work.prefill), float(work.attended), float(work.adapters), *pieces)


def _law(iterations: Sequence[Iteration], knots: Sequence[int], weights: Sequence[float]) -> StepLaw:
    rows = [_columns(one.work, knots) for one in iterations]
    costs = nonnegative_least_squares(rows, [one.seconds for one in iterations], weights)
    fixed, context, prefill, attended, adapters, *of_pieces = costs
    lengths = (knot - low for low, knot in zip([0, *knots], knots, strict=False))
    seconds = accumulate(length * cost for length, cost in zip(lengths, of_pieces, strict=True))
    return StepLaw(
        fixed=max(fixed, 1e-7),
        decodes=tuple(zip(knots, seconds, strict=True)),
        context=context,
        prefill=prefill,
        attended=attended,
        adapters=adapters,
    )


def _centred(law: StepLaw, iterations: Sequence[Iteration]) -> StepLaw:
    """So that half of the iterations take less. Least squares lie at the mean, which slow ones raise."""
    factor = median(one.seconds / law.seconds(one.work) for one in iterations)
    return replace(
        law,
        fixed=law.fixed * factor,
        decodes=tuple((count, seconds * factor) for count, seconds in law.decodes),
        context=law.context * factor,
        prefill=law.prefill * factor,
        attended=law.attended * factor,
        adapters=law.adapters * factor,
    )


def _around(law: StepLaw, iteration: Iteration) -> tuple[float, float]:
    """What was measured over what the law says, and that."""
    seconds = law.seconds(iteration.work)
    return min(max(round(iteration.seconds / seconds, 4), MIN_RESIDUAL), FACTOR.most), round(seconds, 7)


def nonnegative_least_squares(rows: Sequence[Row], wanted: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The x ≥ 0 with the least Σ weight² · (row · x - wanted)², by one coordinate after the other."""
    columns = len(rows[0])
    scales = [max(abs(row[column]) for row in rows) or 1.0 for column in range(columns)]
    gram = [[0.0] * columns for _ in range(columns)]
    target = [0.0] * columns
    for row, value, weight in zip(rows, wanted, weights, strict=True):
        scaled = [weight * number / scale for number, scale in zip(row, scales, strict=True)]
        for one, left in enumerate(scaled):
            if left:
                target[one] += left * weight * value
                line = gram[one]
                for other, right in enumerate(scaled):
                    line[other] += left * right
    x = [0.0] * columns
    for _ in range(_ROUNDS):
        for one, line in enumerate(gram):
            if line[one] > 0:
                rest = sum(cost * factor for cost, factor in zip(line, x, strict=True)) - line[one] * x[one]
                x[one] = max(0.0, (target[one] - rest) / line[one])
    return [cost / scale for cost, scale in zip(x, scales, strict=True)]
