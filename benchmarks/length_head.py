"""The length predictor of S3's paper, offline: an encoder of DistilBERT's shape that classifies prompts (S3-03).

The paper adapts the trained DistilBERT. Here its weights are random, as nothing is downloaded, and it is narrower, so
that half an hour of CPU time trains it; so nothing is a target. A class is a bucket of lengths: 5, 10 or 20, of equal
width up to 2,048 tokens as in the paper, or of equal width of the logarithm. One encoder has a head for each of these,
which are trained together. The encoder sees 64 tokens at each end of a prompt.

It is trained on four folds of a set of prompts, by their hash, and tested on the fifth. Beside each accuracy stands
that of the most frequent class. R is what is reserved for each token used, where the upper edge of the bucket is
reserved (S3-04); U the share of answers that are longer; R2 is R after doubling until the answer fits. Beside R stands
a constant guess of the same U. `merged` reserves the next longer bucket: so an error of one bucket is none.

    python -m benchmarks.length_head --data FOLDER [--set alpaca_random9k] [--minutes 30] [--json]
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import process_time

import numpy as np
import torch
from torch import nn

from benchmarks.harness import Result, arguments, report, skip
from benchmarks.length_cases.rows import FOLDS, LONGEST, SETS, Prompt, complete, prompts_of, tokenizer

WIDTH, LAYERS, HEADS = 384, 6, 12
END_TOKENS = 64
PROMPTS_IN_BATCH, RATE, DROPOUT = 32, 3e-4, 0.1
WARM_UP_STEPS = 300
MAX_PASSES = 20


@dataclass(frozen=True, slots=True)
class Buckets:
    name: str
    edges: np.ndarray
    """The longest length of each"""

    def of(self, lengths: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.edges, lengths)


def all_buckets() -> list[Buckets]:
    made = []
    for count in (5, 10, 20):
        steps = np.arange(1, count + 1) / count
        made += [Buckets(f"{count}_equal", LONGEST * steps), Buckets(f"{count}_log", np.rint(LONGEST**steps))]
    return made


class Encoder(nn.Module):
    """DistilBERT's: learned positions, normalisation after each part, the first place stands for the prompt."""

    def __init__(self, vocabulary: int, heads: list[Buckets]) -> None:
        super().__init__()
        # A step sees few of the words, and to change all of them would take most of its time.
        self.words = nn.Embedding(vocabulary, WIDTH, sparse=True)
        self.places = nn.Embedding(2 * END_TOKENS + 1, WIDTH)
        for one in (self.words, self.places):
            nn.init.normal_(one.weight, std=0.02)
        self.before = nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(DROPOUT))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, DROPOUT, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(DROPOUT))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, len(one.edges)) for one in heads)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> list[torch.Tensor]:
        inside = self.before(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        first = self.shared(self.layers(inside, src_key_padding_mask=padding)[:, 0])
        return [head(first) for head in self.heads]


def batches(prompts: list[Prompt], order: np.ndarray, vocabulary: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Prompts of similar length together: ids, where there is only padding, and which prompts they are."""
    for start in range(0, len(order), 32 * PROMPTS_IN_BATCH):
        near = sorted(order[start : start + 32 * PROMPTS_IN_BATCH], key=lambda at: len(prompts[at].ids))
        for first in range(0, len(near), PROMPTS_IN_BATCH):
            chosen = near[first : first + PROMPTS_IN_BATCH]
            ends = [[vocabulary - 1, *_ends(prompts[at].ids)] for at in chosen]
            ids = nn.utils.rnn.pad_sequence([torch.tensor(one) for one in ends], batch_first=True)
            used = torch.tensor([len(one) for one in ends])
            yield ids, torch.arange(ids.shape[1]) >= used[:, None], torch.tensor(np.array(chosen))


def _ends(ids: list[int]) -> list[int]:
    return ids if len(ids) <= 2 * END_TOKENS else ids[:END_TOKENS] + ids[-END_TOKENS:]


def train(prompts: list[Prompt], heads: list[Buckets], vocabulary: int, seconds: float) -> tuple[Encoder, float]:
    """Returns the encoder, and how many times it has seen all prompts."""
    torch.manual_seed(0)
    chance, encoder = np.random.default_rng(0), Encoder(vocabulary, heads).train()
    words = list(encoder.words.parameters())
    others = [one for one in encoder.parameters() if one is not words[0]]
    optimizers = torch.optim.AdamW(others, lr=RATE, weight_decay=0.01), torch.optim.SparseAdam(words, lr=RATE)
    lengths = np.array([prompt.tokens for prompt in prompts])
    truths = [torch.tensor(one.of(lengths)) for one in heads]
    began, seen = process_time(), 0
    for number in range(MAX_PASSES):
        for ids, padding, chosen in batches(prompts, chance.permutation(len(prompts)), vocabulary):
            spent = max((process_time() - began) / seconds, seen / len(prompts) / MAX_PASSES)
            if spent >= 1:
                return encoder, seen / len(prompts)
            step = seen / PROMPTS_IN_BATCH
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - spent)
            losses = [
                nn.functional.cross_entropy(logits, truth[chosen])
                for logits, truth in zip(encoder(ids, padding), truths, strict=True)
            ]
            encoder.zero_grad()
            torch.stack(losses).mean().backward()
            nn.utils.clip_grad_norm_(others, 1.0)
            for optimizer in optimizers:
                optimizer.step()
            seen += len(chosen)
        print(f"pass {number + 1}: loss {torch.stack(losses).mean().item():.3f}", flush=True)
    return encoder, seen / len(prompts)


@torch.inference_mode()
def classes_of(encoder: Encoder, prompts: list[Prompt], vocabulary: int) -> list[np.ndarray]:
    encoder.eval()
    found = [np.zeros(len(prompts), int) for _ in encoder.heads]
    for ids, padding, chosen in batches(prompts, np.arange(len(prompts)), vocabulary):
        for classes, logits in zip(found, encoder(ids, padding), strict=True):
            classes[chosen.numpy()] = logits.argmax(dim=1).numpy()
    return found


def figures(buckets: Buckets, predicted: np.ndarray, lengths: np.ndarray, known: np.ndarray) -> list[Result]:
    """`known`: lengths that it was trained on."""
    truth, edges = buckets.of(lengths), buckets.edges
    usual = np.bincount(buckets.of(known)).argmax()
    right, near = float((predicted == truth).mean()), float((np.abs(predicted - truth) <= 1).mean())
    always = (truth == usual).mean()
    print(f"{buckets.name}: {right:.1%} right, {near:.1%} within one; always the most frequent one {always:.1%}")
    results = [Result(f"head_{buckets.name}_right", right, "", baseline="the most frequent class")]
    for name, classes in (("", predicted), ("_merged", np.minimum(predicted + 1, len(edges) - 1))):
        reserved = edges[classes]
        ratio, short = float(reserved.sum() / lengths.sum()), float((reserved < lengths).mean())
        doubled = reserved * 2.0 ** np.ceil(np.log2(np.maximum(lengths / reserved, 1.0)))
        constant = float(np.quantile(lengths, 1 - short) / lengths.mean())
        print(
            f"{buckets.name}{name}: R {ratio:.3f} at U {short:.2%}, R2 {doubled.sum() / lengths.sum():.3f};"
            f" a constant of the same U: R {constant:.3f}"
        )
        results.append(Result(f"head_{buckets.name}{name}_r", ratio, "x", baseline="a constant"))
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("TEST_DATA"), help="a folder as of prediction.py")
    parser.add_argument("--set", choices=SETS, default=SETS[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="of CPU time, at most, for the training")
    given = parser.parse_args()
    if given.data is None or not complete(Path(given.data)):
        skip("--data or TEST_DATA names no folder with these prompts")
    encoder = tokenizer(Path(given.data))
    prompts = list(prompts_of(Path(given.data), encoder, given.set))
    trained, tested = ([one for one in prompts if (one.fold == 0) == last] for last in (False, True))
    heads, vocabulary = all_buckets(), encoder.get_vocab_size() + 1
    model, passes = train(trained, heads, vocabulary, given.minutes * 60)
    print(f"{given.set}: {len(trained)} prompts {passes:.1f} times, {len(tested)} tested, in one of {FOLDS} folds")
    known, lengths = (np.array([one.tokens for one in of]) for of in (trained, tested))
    results = []
    for buckets, predicted in zip(heads, classes_of(model, tested, vocabulary), strict=True):
        results += figures(buckets, predicted, lengths, known)
    report("length_head", results, as_json=given.json)


if __name__ == "__main__":
    main()
