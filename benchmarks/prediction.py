"""Measures how well lengths are estimated, on real prompts and answers, and how long it takes.

The data are of other projects: the folder that `--data` or TEST_DATA names has them, otherwise only times are measured.
Prompts are tokenised with GPT-2's vocabulary; answers are counted with their end token, at most 2,048. Features,
fitting and estimates are the product's own. R is what is reserved for each token used, U the share of answers that are
longer than what is reserved, both of q90; R2 is R after doubling until the answer fits. Beside each figure stands the
one of a constant guess of the same coverage.

alone    one tenant with one set of prompts; five folds by the hash of the prompt, pooled: no row is estimated by
         weights, statistics or a calibration that have seen its prompt
tenants  47 tenants, at most 1,500 rows of each from the other folds
new      each of them as a new tenant beside the others, after 5 and after 50 answers
shift    3,000 answers to Alpaca's prompts, then 50 to others
poison   20,000 false outcomes of another tenant
times    features of a prompt, and estimates of the predictor's process

    python -m benchmarks.prediction [--data FOLDER] [--only CASE …] [--calls 50] [--pairs 8] [--json]
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.harness import Result, arguments, report
from benchmarks.length_cases import alone, served, shift, tenants
from benchmarks.length_cases.rows import Row, all_rows, complete
from motet_gateway.prompt_features import PromptFeatures

ON_DATA: dict[str, Callable[[list[Row]], list[Result]]] = {
    "alone": alone.results,
    "tenants": tenants.known,
    "new": tenants.new,
    "shift": shift.results,
    "poison": tenants.poisoned,
}
TIMES = "times"


def features_us() -> Result:
    ids, made, times = list(range(1000, 2000)), PromptFeatures(bytes(32)), []
    for _ in range(2000):
        started = time.perf_counter()
        made.of(ids, (1, 2, 3, 4))
        times.append((time.perf_counter() - started) * 1e6)
    median = float(np.median(times))
    print(f"features of 1,000 tokens: {median:.0f} µs")
    return Result("features_us", median, "us", "<= 150", median <= 150, "")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("TEST_DATA"), help="a folder with prompts/ and tokenizers/"
    )
    parser.add_argument("--only", nargs="+", choices=[*ON_DATA, TIMES], default=[*ON_DATA, TIMES])
    parser.add_argument("--calls", type=int, default=50, help="calls per figure")
    parser.add_argument("--pairs", type=int, default=8, help="quiet pairs to measure")
    given = parser.parse_args()
    results = []
    if TIMES in given.only:
        results += [features_us(), *asyncio.run(served.measure(given.calls, given.pairs))]
    wanted = [name for name in ON_DATA if name in given.only]
    if wanted and given.data is not None and complete(Path(given.data)):
        rows = all_rows(Path(given.data))
        for name in wanted:
            results += ON_DATA[name](rows)
    elif wanted:
        print(f"{', '.join(wanted)}: left out; --data or TEST_DATA names no folder with these prompts")
    report("prediction", results, as_json=given.json)


if __name__ == "__main__":
    main()
