"""Trains the demo model from nothing: tokenizer, base model, one LoRA adapter for each style, and one that
calls tools. Then evaluates them.

    python examples/demo/train.py --out /tmp/demo

writes `model/` and `adapters/<name>/` there, in the layout of `cli/motet_cli/bundled`. It exits with 1 if a result is
below its minimum. `--quick` runs every stage for a few steps: it shows that the scripts work, not a good model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from conversations import (
    END,
    PAD,
    SPECIAL_TOKENS,
    Sample,
    adapter_samples,
    base_samples,
    tokenizer_corpus,
)
from evaluate import evaluate
from lookups import TOOLCALLER
from peft import LoraConfig, PeftModel, get_peft_model
from styles import STYLES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED: Final = 11
BASE_NAME: Final = "motet-demo"
VOCABULARY: Final = 1536
MAX_BATCH_TOKENS: Final = 4096
"""Includes padding."""
CHAT_TEMPLATE: Final = Path(__file__).with_name("chat_template.jinja")
PROJECTIONS: Final = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How many steps to train, and at which rate."""

    steps: int
    batch: int = 32
    peak: float
    warmup: int = 40
    weight_decay: float = 0.0
    seed: int = SEED

    def rate(self, step: int) -> float:
        """A linear warm-up, then a cosine down to zero."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        return self.peak * 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(1, self.steps - self.warmup)))


@dataclass(frozen=True, slots=True)
class Recipe:
    """One adapter. They differ in rank, scale and the formula of the scale, so that a server gets several kinds."""

    name: str
    rank: int
    alpha: int
    rslora: bool = False
    schedule: Schedule = Schedule(steps=200, peak=3e-3, warmup=10)


BASE: Final = Schedule(steps=2800, peak=3e-3, warmup=100, weight_decay=0.05)
RECIPES: Final = (
    Recipe("pirate", rank=8, alpha=16),
    Recipe("shouting", rank=8, alpha=8),
    Recipe("json", rank=8, alpha=32),
    # Short answers teach little in each step, and rsLoRA makes steps larger. So it needs more and smaller steps.
    Recipe("oneword", rank=16, alpha=8, rslora=True, schedule=Schedule(steps=500, peak=1.5e-3, warmup=20)),
    Recipe("storyteller", rank=16, alpha=32),
    Recipe(TOOLCALLER, rank=8, alpha=16, schedule=Schedule(steps=300, peak=3e-3, warmup=10)),
)


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE: it has tokens for any input."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_corpus(SEED, 6000), trainer)
    return tokenizer


def new_base(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A Llama of 2.8 million parameters. All widths are multiples of 16, and keys and values have fewer heads."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.token_to_id(END),
            pad_token_id=tokenizer.token_to_id(PAD),
        )
    )


def batches(samples: Iterator[Sample], size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (ids, labels) without end, padded on the right.

    It draws the samples of sixteen batches and sorts them by length, so that there is little padding. Then it shuffles
    the batches, so that lengths do not rise and fall during training. Padding needs no mask: it comes after everything
    that is learnt, and attention only looks back. Batches of long samples are smaller, so that all steps take about the
    same time.
    """
    rng = random.Random(seed)
    while True:
        drawn = sorted(itertools.islice(samples, 16 * size), key=lambda sample: len(sample.ids))
        groups: list[list[Sample]] = [[]]
        for sample in drawn:
            if len(groups[-1]) == size or (len(groups[-1]) + 1) * len(sample.ids) > MAX_BATCH_TOKENS:
                groups.append([])
            groups[-1].append(sample)
        rng.shuffle(groups)
        for group in groups:
            ids = torch.zeros(len(group), max(len(sample.ids) for sample in group), dtype=torch.long)
            labels = torch.full_like(ids, -100)
            for row, sample in enumerate(group):
                line = torch.tensor(sample.ids)
                ids[row, : len(line)] = line
                labels[row, : len(line)] = line.where(torch.tensor(sample.learnt), torch.tensor(-100))
            yield ids, labels


def fit(model: torch.nn.Module, samples: Iterator[Sample], schedule: Schedule, name: str) -> None:
    """The training loop: AdamW, clipped gradients, and some lines of log."""
    started = time.monotonic()
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim > 1]
    scales = [p for p in parameters if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": scales, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    model.train()
    for step, (ids, labels) in zip(
        range(schedule.steps), batches(samples, schedule.batch, schedule.seed), strict=False
    ):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        loss: Any = answer_loss(model, ids, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 50 == 0 or step == schedule.steps - 1:
            seconds = time.monotonic() - started
            print(f"{name} step {step} loss {loss.item():.4f} {seconds:.0f} s", flush=True)
    model.eval()


def answer_loss(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    wrapped: Any = PreTrainedTokenizerFast  # published without types
    wrapped(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE.read_text(),
    ).save_pretrained(folder)
    # transformers 5 writes a new name for the same class. Earlier releases can load only this name.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Writes what PEFT writes, but in bf16, with the name of the base model, and without the empty model card."""
    model.to(torch.bfloat16)
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    # PEFT has the targets in a set. Sorted, they are the same in the files of every training.
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"].sort()
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def train_base(folder: Path, schedule: Schedule) -> None:
    torch.manual_seed(schedule.seed)
    tokenizer = train_tokenizer()
    model: Any = new_base(tokenizer)
    fit(model, base_samples(tokenizer, schedule.seed), schedule, "base")
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def train_adapter(recipe: Recipe, base: Path, folder: Path, schedule: Schedule) -> None:
    """Trains on the base model as it was saved, so that the adapter also learns the effect of rounding to bf16."""
    torch.manual_seed(schedule.seed)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        use_rslora=recipe.rslora,
        target_modules=PROJECTIONS,
    )
    tuned: Any = get_peft_model(model, config)
    fit(tuned, adapter_samples(recipe.name, tokenizer, schedule.seed), schedule, recipe.name)
    save_adapter(tuned, folder)


def for_everyone(folder: Path) -> None:
    """Sets normal file modes. Otherwise only the owner may be able to read the safetensors files."""
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for model/ and adapters/; replaces old ones")
    parser.add_argument(
        "--only",
        choices=[recipe.name for recipe in RECIPES],
        action="append",
        help="train only this adapter, on the base model in --out; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help="only a few steps of every stage, and no minimums")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    options = parser.parse_args(arguments)

    torch.set_num_threads(options.threads)

    def schedule(full: Schedule) -> Schedule:
        return replace(full, steps=3, batch=4) if options.quick else full

    out: Path = options.out
    started = time.monotonic()
    if options.only is None:
        shutil.rmtree(out / "model", ignore_errors=True)
        train_base(out / "model", schedule(BASE))
    for recipe in RECIPES:
        if options.only is None or recipe.name in options.only:
            target = out / "adapters" / recipe.name
            shutil.rmtree(target, ignore_errors=True)
            train_adapter(recipe, out / "model", target, schedule(recipe.schedule))
    for_everyone(out)
    print(f"trained in {(time.monotonic() - started) / 60:.1f} minutes, {size_of(out.rglob('*')) / 1e6:.2f} MB")

    report = evaluate(out)
    print(*report.lines(), sep="\n")
    if options.quick or report.good:
        return 0
    for style in STYLES:
        print(*report.mistakes(style)[:10], sep="\n")
    print(*report.tools.mistakes()[:20], sep="\n")
    return 1


def size_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


if __name__ == "__main__":
    raise SystemExit(main())
