"""Measures what grammars cost the other rows of a batch.

32 sequences decode greedily on a random Llama of 30 M parameters (bfloat16, 4,096 tokens, the bundled model's
tokenizer), with the product's kernels. 16 of them follow a JSON schema. `masks_*` compares with 32 without a grammar:
the median time of a step, which each row waits for, and all tokens a second, counted: a row whose mask is late gets
none, and makes a step shorter. A random model's choices say nothing, so each check really runs, and then its result is
set: every choice is allowed, or every one is refused, its mask made, and the row chooses again. `masks_late_itl_p99`:
each mask takes 20 ms, and the others' slowest steps are compared.

`check_us_*` and `mask_us_*` are for a vocabulary of 128,000 tokens, bytes and words made of them.

    python -m benchmarks.masks [--steps 60] [--pairs 5] [--scratch FOLDER] [--json]
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from benchmarks.engine_cases.setup import start_as_the_product_does
from benchmarks.harness import Measure, Result, alternate, arguments, percentile, report
from benchmarks.random_llama import SCRATCH, TOKENIZER, LlamaShape, random_llama, with_tokenizer
from motet.domain import PAGE_TOKENS, RequestId, pages_for
from motet.grammars.compiler import Grammars
from motet.grammars.grammar import Grammar, GrammarForm
from motet_runner.engine import Engine
from motet_runner.interface import EngineConfig, NewSequence, Sampling
from motet_runner.row_mask import RowMask, TokenRules
from motet_runner.settings import KERNEL_CACHE

ROWS, CONSTRAINED = 32, 16
PROMPT = 64
WARM_UP = 5
PREFILL = 12
LATE_SECONDS = 0.02
LARGE = 128_000
MIN_CHECKED, WALKED = 2000, 200
SHAPE = LlamaShape(
    vocabulary=4096, width=512, feed_forward=1376, layers=8, heads=8, kv_heads=4, dtype="bfloat16", shard_mib=64
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["lighthouse", "harbour", "market"]},
        "age": {"type": "integer", "minimum": 0},
        "notes": {"type": "array", "items": {"type": "string"}, "maxItems": 20},
    },
    "required": ["name", "kind", "age", "notes"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(GrammarForm.JSON_SCHEMA, json.dumps(SCHEMA))


class Allows:
    """Checks as a real mask, and allows every choice."""

    failure = None

    def __init__(self, rules: TokenRules) -> None:
        self._rules = rules

    def back_to(self, place: int) -> None:
        self._rules.back_to(place)

    def take(self, token: int, place: int) -> bool:
        self._rules.take(token, place)
        return True

    def allowed(self) -> bytes:
        return self._rules.allowed()


class Refuses(Allows):
    """Refuses every first choice, and allows the second one."""

    _first = True

    def take(self, token: int, place: int) -> bool:
        super().take(token, place)
        self._first, first = not self._first, self._first
        return not first


class Late(Refuses):
    """A thread without work stands for one that works for this time: the cores are not measured."""

    def allowed(self) -> bytes:
        time.sleep(LATE_SECONDS)
        return super().allowed()


class SlowMask(RowMask):
    """Slow ones are known by their CPU time, and a thread that sleeps takes none."""

    def make(self, limit: float) -> None:  # noqa: ARG002
        super().make(-1.0)


@dataclass(frozen=True, slots=True)
class Step:
    seconds: float
    tokens: int


@dataclass(slots=True)
class Measured:
    """One of each per measurement."""

    tokens_a_second: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    """The share of tokens that rows did not get in time"""

    def add(self, steps: Sequence[Step]) -> None:
        tokens = sum(step.tokens for step in steps)
        self.tokens_a_second.append(tokens / sum(step.seconds for step in steps))
        self.late.append(1 - tokens / (ROWS * len(steps)))


class Decoding:
    def __init__(self, model: Path, steps: int) -> None:
        self._steps = steps
        self._tokens = PROMPT + PREFILL + WARM_UP + steps
        self._numbers = count()
        self._engine = Engine(
            EngineConfig(model=model, device="cpu", kv_cache_mib=256, kernel_cache=KERNEL_CACHE.expanduser())
        )
        info = self._engine.info
        self._grammars = Grammars(model / "tokenizer.json", info.vocabulary, info.eos_token_ids)
        while (wait := self._engine.idle()) is not None:
            time.sleep(wait)

    def steps(self, kind: type[Allows] | None) -> list[Step]:
        names = [RequestId(f"r{next(self._numbers)}") for _ in range(ROWS)]
        for row, name in enumerate(names):
            masked = kind is not None and row % (ROWS // CONSTRAINED) == 0
            self._engine.add(
                NewSequence(
                    request=name,
                    epoch=1,
                    prompt=tuple(2 + (7 * i + 131 * row) % (SHAPE.vocabulary - 2) for i in range(PROMPT)),
                    promise=pages_for(self._tokens, PAGE_TOKENS),
                    sampling=Sampling(max_tokens=self._tokens - PROMPT, ignore_eos=True),
                    mask=self._mask(kind) if masked and kind is not None else None,
                )
            )
        while self._engine.report().pending_prefill_tokens:
            self._engine.step()
        for _ in range(WARM_UP):
            self._engine.step()
        steps = [self._step() for _ in range(self._steps)]
        for name in names:
            self._engine.cancel(name)
        self._engine.step()
        return steps

    def _mask(self, kind: type[Allows]) -> RowMask:
        rules = kind(self._grammars.mask(GRAMMAR, ()))
        return SlowMask(rules) if issubclass(kind, Late) else RowMask(rules)

    def _step(self) -> Step:
        began = time.perf_counter()
        output = self._engine.step()
        seconds = time.perf_counter() - began
        return Step(seconds, len(output.sequences))

    def of(self, kind: type[Allows] | None, share: float = 0.5, *, measured: Measured | None = None) -> Measure:
        """This quantile of a step. `measured` gets the other figures."""

        async def measure() -> float:
            steps = self.steps(kind)
            fewest = ROWS - CONSTRAINED if kind is not None and issubclass(kind, Refuses) else ROWS
            assert all(fewest <= step.tokens <= ROWS for step in steps)
            if measured is not None:
                measured.add(steps)
            return percentile([step.seconds for step in steps], share)

        return measure


def large_tokenizer(folder: Path) -> Path:
    """The bundled one, with words of letters up to 128,000 tokens."""
    content = json.loads(TOKENIZER.read_text())
    vocabulary, chance = content["model"]["vocab"], random.Random(0)
    while len(vocabulary) < LARGE:
        word = "".join(chance.choices("etaoinshrdlucmfwypvbgkq", k=chance.randint(3, 12)))
        vocabulary.setdefault(chance.choice(("", "\u0120")) + word, len(vocabulary))
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(content))
    return file


def check_and_mask(file: Path) -> list[Result]:
    grammars = Grammars(file, LARGE, [0])
    chance, checks, masks = random.Random(1), list[float](), list[float]()
    while len(masks) < MIN_CHECKED:
        mask = grammars.mask(GRAMMAR, ())
        for place in range(WALKED):
            began = time.thread_time()
            bits = int.from_bytes(mask.allowed(), "little")
            masks.append(time.thread_time() - began)
            allowed = [token for token in range(LARGE) if bits >> token & 1] if bits.bit_count() < 64 else None
            token = chance.choice(allowed) if allowed is not None else chance.randrange(LARGE)
            while allowed is None and not bits >> token & 1:
                token = chance.randrange(LARGE)
            if token == 0:
                break
            began = time.thread_time()
            assert mask.take(token, place)
            checks.append(time.thread_time() - began)
    limits = [
        ("check_us_p50", checks, 0.5, 5),
        ("check_us_p99", checks, 0.99, 60),
        ("mask_us_p50", masks, 0.5, 40),
        ("mask_us_p99", masks, 0.99, 2000),
    ]
    return [
        Result(name, value := percentile(times, share) * 1e6, "us", f"<= {limit}", value <= limit)
        for name, times, share, limit in limits
    ]


async def measure(given: argparse.Namespace) -> list[Result]:
    given.scratch.mkdir(parents=True, exist_ok=True)
    decoding = Decoding(with_tokenizer(random_llama(SHAPE, given.scratch), given.scratch), given.steps)
    results = []
    goals: tuple[tuple[str, type[Allows], float, str, float], ...] = (
        ("masks_neighbours_itl", Allows, 1.03, "masks_throughput", 0.95),
        ("masks_refused_itl", Refuses, 1.25, "masks_refused_throughput", 0.8),
    )
    for itl, kind, most, throughput, least in goals:
        await decoding.of(kind)()
        held, free = Measured(), Measured()
        pairs = await alternate(decoding.of(kind, measured=held), decoding.of(None, measured=free), pairs=given.pairs)
        print(
            f"{kind.__name__}: a step takes {percentile(pairs.a, 0.5) * 1e3:.2f} ms, at most {max(held.late):.1%} of "
            f"the tokens are late; against none: {pairs}"
        )
        results.append(Result(itl, pairs.ratio, "x", f"<= {most}", pairs.ratio <= most, "no grammar", pairs))
        tokens = pairs.beside(held.tokens_a_second, free.tokens_a_second)
        results.append(
            Result(throughput, tokens.ratio, "x", f">= {least}", tokens.ratio >= least, "no grammar", tokens)
        )
    late, plain = decoding.of(Late, 0.99), decoding.of(None, 0.99)
    pairs = await alternate(late, plain, pairs=given.pairs)
    results.append(Result("masks_late_itl_p99", pairs.ratio, "x", "<= 1.15", pairs.ratio <= 1.15, "no grammar", pairs))
    with tempfile.TemporaryDirectory() as folder:
        results += check_and_mask(large_tokenizer(Path(folder)))
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=60, help="steps per figure")
    parser.add_argument("--pairs", type=int, default=5, help="quiet pairs to measure")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="where the model is kept")
    given = parser.parse_args()
    start_as_the_product_does("benchmarks.masks")
    report("masks", asyncio.run(measure(given)), as_json=given.json)


if __name__ == "__main__":
    main()
