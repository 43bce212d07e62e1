"""Measures how well lengths are estimated, on real prompts and answers. Only features are timed.

The data are of other projects: the folder that `--data` or TEST_DATA names has them, otherwise this is skipped. Prompts
are tokenised with GPT-2's vocabulary; answers are counted with their end token, at most 2,048. Five folds by the hash
of the prompt, pooled: no row is estimated by weights, statistics or a calibration that have seen its prompt. Features,
fitting and estimates are the product's own. R is what is reserved for each token used, U the share of answers that are
longer than what is reserved. Beside each figure of R stands the one of a constant guess of the same coverage.

    python -m benchmarks.prediction [--data FOLDER] [--json]
"""

import gzip
import hashlib
import json
import os
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.harness import Result, arguments, report
from motet_gateway.prompt_features import PromptFeatures
from motet_predictor.fitting import Sample, fit, statistics_of
from motet_predictor.length_model import LengthEstimate
from motet_predictor.prompt_model import PromptModel

FOLDS, LONGEST = 5, 2048
KEY = bytes(32)


class Row:
    def __init__(self, prompt: str, tokens: int, ids: list[int], made: PromptFeatures) -> None:
        self.fold = int(hashlib.sha256(prompt.encode()).hexdigest(), 16) % FOLDS
        self.sample = Sample("alpaca", "a", min(tokens + 1, LONGEST), False, made.of(ids))


def tokenizer(data: Path) -> Tokenizer:
    with gzip.open(data / "tokenizers/gpt2/encoder.json.gz", "rt") as file:
        vocabulary = json.load(file)
    with gzip.open(data / "tokenizers/gpt2/vocab.bpe.gz", "rt") as file:
        pairs = [line.split() for line in file.read().split("\n")[1:] if line.strip()]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[(left, right) for left, right in pairs]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def alpaca(data: Path) -> list[Row]:
    with gzip.open(data / "prompts/alpaca_random9k.jsonl.gz", "rt") as file:
        read = [json.loads(line) for line in file]
    prompts = ["\n\n".join(part for part in (row["instruction"], row["input"]) if part) for row in read]
    encoded, made = tokenizer(data).encode_batch(prompts), PromptFeatures(KEY)
    return [
        Row(prompt, row["n_out_llama2"], one.ids, made) for prompt, row, one in zip(prompts, read, encoded, strict=True)
    ]


def estimated(rows: list[Row]) -> list[tuple[int, LengthEstimate]]:
    """Of each row the length and its estimate, by what the other folds teach."""
    pairs = []
    for fold in range(FOLDS):
        order = np.random.default_rng(fold)
        samples = [row.sample for row in rows if row.fold != fold]
        samples = [samples[at] for at in order.permutation(len(samples))]
        model = PromptModel(statistics_of(samples, 1000))
        model.install(fit(samples, 1))
        for row in rows:
            if row.fold == fold:
                one = row.sample
                pairs.append((one.tokens, model.estimate(one.tenant, one.adapter, LONGEST, one.features)))
    return pairs


def ranks(values: np.ndarray) -> np.ndarray:
    """Ties share the mean of their ranks."""
    inverse: np.ndarray
    counts: np.ndarray
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: np.ndarray = np.cumsum(counts) - (counts - 1) / 2
    return means[inverse]


def figures(pairs: list[tuple[int, LengthEstimate]]) -> list[Result]:
    lengths = np.array([tokens for tokens, _ in pairs])
    results = []
    for name, most, of in (("r_u10", 1.84, "q90"), ("r_u5", 2.30, "q95")):
        reserved = np.array([getattr(estimate, of) for _, estimate in pairs])
        ratio, short = reserved.sum() / lengths.sum(), float((reserved < lengths).mean())
        constant = np.quantile(lengths, 1 - short) / lengths.mean()
        print(f"{of}: R {ratio:.3f}, U {short:.2%}; a constant of the same U: R {constant:.3f}")
        bound = 0.10 if of == "q90" else 0.05
        held = bool(ratio <= most and short <= bound)
        results.append(Result(f"alpaca_{name}", float(ratio), "x", f"<= {most} at U <= {bound:.0%}", held, "constant"))
    q50 = np.array([estimate.q50 for _, estimate in pairs])
    error, constant = float(np.abs(q50 - lengths).mean()), float(np.abs(np.median(lengths) - lengths).mean())
    rank = float(np.corrcoef(ranks(np.array([one.expected for _, one in pairs])), ranks(lengths))[0, 1])
    print(f"q50: mean absolute error {error:.1f} tokens; of the median {constant:.1f}. Spearman {rank:.3f}")
    results.append(Result("alpaca_mae", error, "tokens", "<= 31", error <= 31, "the median"))
    results.append(Result("alpaca_spearman", rank, "", ">= 0.74", rank >= 0.74, "0"))
    return results


def features_us() -> Result:
    ids, made, times = list(range(1000, 2000)), PromptFeatures(KEY), []
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
        "--data", type=Path, default=os.environ.get("TEST_DATA"), help="a folder with prompts/alpaca_random9k.jsonl.gz"
    )
    given = parser.parse_args()
    results = [features_us()]
    if given.data is not None and (Path(given.data) / "prompts/alpaca_random9k.jsonl.gz").exists():
        results += figures(estimated(alpaca(Path(given.data))))
    else:
        print("estimates: left out; --data or TEST_DATA names no folder with prompts/alpaca_random9k.jsonl.gz")
    report("prediction", results, as_json=given.json)


if __name__ == "__main__":
    main()
