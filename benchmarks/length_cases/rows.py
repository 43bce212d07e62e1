"""Real prompts with the lengths of their answers, as samples of the predictor. They are of other projects."""

import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from motet_gateway.prompt_features import PromptFeatures
from motet_predictor.fitting import Sample

FOLDS, LONGEST = 5, 2048
SETS = (
    "alpaca_random9k",
    "dolly15k",
    "gsm8k",
    "codegen",
    "toolformer",
    "nq_open",
    "sharegpt_sample",
    "roleplay",
    "tenants_t0",
)
TASKS = SETS[-1]
"""Each of its tasks is a tenant of its own."""


@dataclass(frozen=True, slots=True)
class Row:
    set: str
    fold: int
    sample: Sample


@dataclass(frozen=True, slots=True)
class Prompt:
    tenant: str
    """The set, or the task"""
    fold: int
    """By the hash of the prompt"""
    ids: list[int]
    tokens: int
    """Of the answer"""


def complete(data: Path) -> bool:
    return all((data / f"prompts/{name}.jsonl.gz").exists() for name in SETS)


def all_rows(data: Path) -> list[Row]:
    encoder, made = tokenizer(data), PromptFeatures(bytes(32))
    rows = []
    for name in SETS:
        rows += [
            Row(name, one.fold, Sample(one.tenant, "a", one.tokens, False, made.of(one.ids)))
            for one in prompts_of(data, encoder, name)
        ]
    return rows


def prompts_of(data: Path, encoder: Tokenizer, name: str) -> Iterator[Prompt]:
    """The prompts of a set."""
    read = list(_lines(data / f"prompts/{name}.jsonl.gz"))
    texts = [_text(row) for row in read]
    for row, text, encoded in zip(read, texts, encoder.encode_batch(texts), strict=True):
        yield Prompt(
            tenant=f"t0 {row['tenant']}" if name == TASKS else name,
            fold=int(hashlib.sha256(text.encode()).hexdigest(), 16) % FOLDS,
            ids=encoded.ids,
            tokens=min(row["n_out_llama2"] + 1, LONGEST),  # with the token that ends it
        )


def tokenizer(data: Path) -> Tokenizer:
    with gzip.open(data / "tokenizers/gpt2/encoder.json.gz", "rt") as file:
        vocabulary = json.load(file)
    with gzip.open(data / "tokenizers/gpt2/vocab.bpe.gz", "rt") as file:
        pairs = [line.split() for line in file.read().split("\n")[1:] if line.strip()]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[(left, right) for left, right in pairs]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        for line in file:
            yield json.loads(line)


def _text(row: dict[str, Any]) -> str:
    for name in ("question", "prompt"):
        if name in row:
            return str(row[name])
    return "\n\n".join(part for part in (row["instruction"], row.get("input") or row.get("context")) if part)
