"""What a plan says: one sentence, a table, and the same as an object."""

import math
from typing import Any

from motet_simulator.plan.search import Answered
from motet_simulator.plan.slo import Slo, shown
from motet_simulator.plan.trial import Trial

NAMES = {"ttft": "time to the first token", "tpot": "time per token"}


def sentence(answered: Answered, slo: Slo, *, asked: int | None = None) -> str:
    """`asked`: how many runners the question was about; None: it was how many are needed."""
    promise = " and ".join(f"{name} {shown(limit)}" for name, limit in slo.limits().items())
    whom = f"{slo.share * 100:g} % of the requests"
    seeds = len(answered.fewest)
    of_seeds = "in the one simulation" if seeds == 1 else f"in all {seeds} simulations"
    numbers = [number for number in answered.fewest.values() if number is not None]
    if asked is not None:
        if len(numbers) == seeds:
            return f"{_runners(asked)} {_keep(asked)} {promise} for {whom}, {of_seeds}; {_seen(answered, asked, slo)}."
        missed = f"in {seeds - len(numbers)} of {seeds} simulations"
        return f"{_runners(asked)} {_keep(asked, keeps=False)} {promise} for {whom}, {missed}: {_why(answered, slo)}."
    if not numbers:
        return f"No number of runners that was tried keeps {promise} for {whom}: {_why(answered, slo)}."
    most = max(numbers)
    if len(numbers) < seeds:
        return (
            f"{_runners(most)} {_keep(most)} {promise} for {whom} in {len(numbers)} of {seeds} simulations; in the "
            f"others none of those that were tried does: {_why(answered, slo)}."
        )
    spread = "" if min(numbers) == most else f" ({min(numbers)} to {most}, by the simulation)"
    return f"{_runners(most)} {_keep(most)} {promise} for {whom}, {of_seeds}{spread}; {_seen(answered, most, slo)}."


def as_table(answered: Answered, slo: Slo) -> tuple[list[str], list[list[str]]]:
    """Columns and rows, one for each number of runners of which a simulation came to its end."""
    percent = f"p{slo.share * 100:g}"
    columns = ["runners", "keep it", f"ttft p50, {percent}", f"tpot p50, {percent}", "tokens/s", "busy", "refused"]
    rows = []
    for runners in sorted({number for number, _ in answered.trials}):
        tried = [trial for (number, _), trial in answered.trials.items() if number == runners]
        whole = [trial for trial in tried if trial.complete]
        keep = sum(not slo.misses(trial.outcome) for trial in whole)
        row = [str(runners), f"{keep} of {len(tried)}"]
        if not whole:
            rows.append([*row, "ended early", "", "", "", ""])
            continue
        both = Slo(ttft=1.0, tpot=1.0, share=0.5), Slo(ttft=1.0, tpot=1.0, share=slo.share)
        row += [
            ", ".join(_range([kind.seen(trial.outcome)[name] for trial in whole]) for kind in both) for name in NAMES
        ]
        row.append(_numbers([trial.outcome.output_tokens / trial.outcome.seconds for trial in whole], ".0f"))
        row.append(_numbers([100 * busy_share(trial) for trial in whole], ".0f") + " %")
        row.append(_numbers([100 * refused_share(trial) for trial in whole], ".2g") + " %")
        rows.append(row)
    return columns, rows


def as_object(answered: Answered, slo: Slo, text: str) -> dict[str, Any]:
    numbers = list(answered.fewest.values())
    known = [number for number in numbers if number is not None]
    kinds = {"p50": 0.5, f"p{slo.share * 100:g}": slo.share}
    return {
        "sentence": text,
        "runners": max(known) if known and len(known) == len(numbers) else None,
        "by_seed": {str(seed): number for seed, number in answered.fewest.items()},
        "slo": {**slo.limits(), "share": slo.share},
        "trials": [
            {
                "runners": runners,
                "seed": seed,
                "complete": trial.complete,
                "keeps": trial.complete and not slo.misses(trial.outcome),
                **{
                    f"{name}_{kind}": _finite(Slo(ttft=1.0, tpot=1.0, share=share).seen(trial.outcome)[name])
                    for name in NAMES
                    for kind, share in kinds.items()
                },
                "seconds": trial.outcome.seconds,
                "output_tokens": trial.outcome.output_tokens,
                "refused": trial.outcome.refusals.total(),
            }
            for (runners, seed), trial in sorted(answered.trials.items())
        ],
    }


def busy_share(trial: Trial) -> float:
    return sum(trial.outcome.busy_seconds) / (trial.runners * trial.outcome.seconds) if trial.outcome.seconds else 0.0


def refused_share(trial: Trial) -> float:
    return trial.outcome.refusals.total() / max(1, trial.outcome.requests)


def _why(answered: Answered, slo: Slo) -> str:
    """Which promise is missed by how much, where that is least."""
    failed = [trial for trial in answered.trials.values() if trial.complete and slo.misses(trial.outcome)]
    best = min(failed, key=lambda trial: max(slo.misses(trial.outcome).values()))
    seen, limits = slo.seen(best.outcome), slo.limits()
    missed = [
        f"the {NAMES[name]} is {shown(seen[name])}, {100 * (factor - 1):.0f} % above {shown(limits[name])}"
        for name, factor in slo.misses(best.outcome).items()
        if not math.isinf(factor)
    ] or [f"more than {(1 - slo.share) * 100:g} % get no answer"]
    why = f"with {_runners(best.runners)} {' and '.join(missed)}"
    if best.idle_runners:
        why += f", and {best.idle_runners} of them had nothing to do, so more would not help"
    if best.outcome.refusals:
        code, count = best.outcome.refusals.most_common(1)[0]
        verb = "was" if count == 1 else "were"
        why += f"; {count} of {best.outcome.requests} requests {verb} refused ({code})"
    return why


def _seen(answered: Answered, runners: int, slo: Slo) -> str:
    trials = answered.complete_trials(runners)
    percent = f"{slo.share * 100:g} %"
    parts = [
        f"{percent} have their {NAMES[name]} within {_range([slo.seen(trial.outcome)[name] for trial in trials])}"
        for name in slo.limits()
    ]
    return " and ".join(parts)


def _range(seconds: list[float]) -> str:
    low, high = shown(min(seconds)), shown(max(seconds))
    return low if low == high else f"{low} to {high}"


def _numbers(numbers: list[float], form: str) -> str:
    low, high = format(min(numbers), form), format(max(numbers), form)
    return low if low == high else f"{low} to {high}"


def _runners(number: int) -> str:
    return f"{number} runner" if number == 1 else f"{number} runners"


def _keep(number: int, *, keeps: bool = True) -> str:
    if keeps:
        return "keeps" if number == 1 else "keep"
    return "does not keep" if number == 1 else "do not keep"


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds
