"""`python -m motet_simulator.trials 0 200`: runs the trials of these seeds, and makes the plans of failed ones smaller.

With `--messages` it prints a digest of all messages of each trial instead.
"""

import argparse
import gc
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

from motet_simulator.trials.draw import draw_plan
from motet_simulator.trials.run import Outcome, messages_of, run_trial
from motet_simulator.trials.shrink import smaller_alike

MANY_REQUESTS, MANY_FAULTS = 60, 8
"""What a trial should have at least."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m motet_simulator.trials")
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int, nargs="?", help="the first seed that does not run; without it, only one runs")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--whole-plans", action="store_true", help="do not make the plans of failed trials smaller")
    parser.add_argument("--messages", action="store_true", help="print a digest of the messages of each trial")
    wanted = parser.parse_args()
    seeds = range(wanted.first, wanted.end if wanted.end is not None else wanted.first + 1)
    if wanted.messages:
        for seed in seeds:
            print(seed, messages_of(seed))  # noqa: T201
        return 0
    began, failed, few = time.monotonic(), 0, 0
    gc.freeze()  # what was imported stays: to look through it again and again takes 3 % of the time
    with ProcessPoolExecutor(wanted.processes) as processes:
        for outcome, said in processes.map(trial, seeds, repeat(wanted.whole_plans)):
            few += outcome.asked < MANY_REQUESTS or outcome.effective_faults < MANY_FAULTS
            if said:
                failed += 1
                print(f"seed {outcome.plan.seed} failed: {said}", flush=True)  # noqa: T201
    print(  # noqa: T201
        f"{len(seeds)} trials, {failed} failed, {len(seeds) / (time.monotonic() - began):.2f} a second; "
        f"{few} with less than {MANY_REQUESTS} requests and {MANY_FAULTS} faults that did something"
    )
    return 1 if failed else 0


def trial(seed: int, whole: bool) -> tuple[Outcome, str]:
    """And what was wrong, with the plan; empty if nothing was."""
    outcome = run_trial(draw_plan(seed))
    if not outcome.problem:
        return outcome, ""
    if whole:
        return outcome, described(outcome)
    smallest = run_trial(smaller_alike(outcome))
    return outcome, f"{outcome.problem}, at {outcome.at:.3f} s, and with a smaller plan: {described(smallest)}"


def described(outcome: Outcome) -> str:
    return f"{outcome.problem}, at {outcome.at:.3f} s\n{outcome.plan}"


if __name__ == "__main__":
    sys.exit(main())
