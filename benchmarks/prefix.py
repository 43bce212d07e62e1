"""Measures what the prefix cache gains where prompts begin alike, and what it costs where none do.

`prefix_ttft`: an engine has computed a prompt. Requests follow whose first 2,048 tokens are the same (hits), in turn
with requests whose first tokens are new (misses). Each has 32 tokens of its own at the end. The figure is how much
longer a miss takes from its arrival to its first token.

`prefix_idle_cost`: requests with nothing in common, which fill the engine and generate tokens. The figure is the CPU
time of hashing, looking up and adding pages over the CPU time of the steps and arrivals that it is a part of. The
clock's own time counts as the cache's.

The model is a Llama of random weights on the CPU, with 27 million parameters by default.

    python -m benchmarks.prefix [--shared 2048] [--pairs 3] [--sequences 32] [--tokens 64] [--json]
"""

import argparse
import asyncio
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.harness import Pairs, Result, alternate, arguments, report
from motet.domain import BASE, PAGE_TOKENS, Digest, RequestId, pages_for
from motet.prefix_hints import prefix_salt
from motet_runner.engine import Engine
from motet_runner.interface import EngineConfig, NewSequence, Sampling
from motet_runner.plan import Planner

MIN_TTFT_RATIO = 5.0
MAX_IDLE_SHARE = 0.01
VOCABULARY = 4096
OWN_TOKENS = 32
"""The tokens of a prompt that no other one has."""
SALT = prefix_salt(Digest("sha256:benchmark"), BASE, "benchmark")


def save_random_llama(folder: Path, *, width: int, layers: int, context: int) -> int:
    """Returns the number of its parameters."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 128),
        max_position_embeddings=context,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


class Requests:
    """Makes sequences whose tokens depend only on their order."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._numbers = count()

    def tokens(self, how_many: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(2, VOCABULARY) for _ in range(how_many))

    def make(self, prompt: tuple[int, ...], *, max_tokens: int) -> NewSequence:
        return NewSequence(
            request=RequestId(f"r{next(self._numbers)}"),
            epoch=1,
            prompt=prompt,
            promise=pages_for(len(prompt) + max_tokens, PAGE_TOKENS),
            sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
            prefix_salt=SALT,
        )


def seconds_to_first_token(engine: Engine, sequence: NewSequence) -> float:
    began = time.perf_counter()
    engine.add(sequence)
    while not engine.step().sequences:
        pass
    return time.perf_counter() - began


async def compare_first_tokens(engine: Engine, shared: int, pairs: int) -> Pairs:
    """Misses against hits."""
    requests = Requests()
    prefix = requests.tokens(shared)

    async def miss() -> float:
        prompt = requests.tokens(shared + OWN_TOKENS)
        return seconds_to_first_token(engine, requests.make(prompt, max_tokens=1))

    async def hit() -> float:
        prompt = prefix + requests.tokens(OWN_TOKENS)
        return seconds_to_first_token(engine, requests.make(prompt, max_tokens=1))

    await hit()
    before = engine.report()
    measured = await alternate(miss, hit, pairs=pairs)
    after = engine.report()
    found = after.prefix_hit_tokens - before.prefix_hit_tokens
    tried = len(measured.a) + measured.discarded
    if found != tried * shared:
        raise AssertionError(f"{tried} hits found {found} tokens instead of {shared} each")
    return measured


class CpuTime:
    """CPU seconds of this thread in some methods. A call within another one counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def measured(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if self._depth:
                return method(*given, **named)
            began = time.thread_time()
            self._depth = 1
            try:
                return method(*given, **named)
            finally:
                self._depth = 0
                self.seconds += time.thread_time() - began

        return call


@contextmanager
def cache_time(planner: Planner) -> Iterator[CpuTime]:
    """Measures all that a planner calls for the prefix cache."""
    measured = CpuTime()
    calls = [
        *((planner.next_iteration, name) for name in ("share_cached", "waits_for_parent")),
        *((planner.memory, name) for name in ("chain_of", "share_cached", "count_cached", "add_to_cache")),
    ]
    for owner, name in calls:
        setattr(owner, name, measured.measured(getattr(owner, name)))
    try:
        yield measured
    finally:
        for owner, name in calls:
            delattr(owner, name)


def idle_share(engine: Engine, sequences: int, tokens: int) -> float:
    """The share of the prefix cache in the CPU time of an engine whose sequences share nothing."""
    requests = Requests()
    asked = [requests.make(requests.tokens(16 + 7 * number), max_tokens=tokens) for number in range(sequences)]
    hits = engine.report().prefix_hit_tokens
    with cache_time(engine.diagnostics.planner) as of_cache:
        began = time.thread_time()
        for sequence in asked:
            engine.add(sequence)
        while engine.has_work():
            engine.step()
        of_all = time.thread_time() - began
    if engine.report().prefix_hit_tokens != hits:
        raise AssertionError("sequences that have nothing in common shared pages")
    return of_cache.seconds / of_all


async def measure(given: argparse.Namespace) -> list[Result]:
    length = max(given.shared + OWN_TOKENS + 1, 16 + 7 * given.sequences + given.tokens)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        parameters = save_random_llama(model, width=given.width, layers=given.layers, context=length)

        def engine(kv_mib: int) -> Engine:
            return Engine(EngineConfig(model=model, device="cpu", kv_cache_mib=kv_mib))

        print(f"a Llama of {parameters / 1e6:.1f} M parameters")
        first = await compare_first_tokens(engine(512), given.shared, given.pairs)
        print(f"first token without a cached prefix of {given.shared} tokens against with one: {first}")
        share = idle_share(engine(512), given.sequences, given.tokens)
    return [
        Result("hit_ttft_ms", sorted(first.b)[len(first.b) // 2] * 1000, "ms"),
        Result(
            "prefix_ttft",
            first.ratio,
            "x",
            f">= {MIN_TTFT_RATIO:g}",
            first.ratio >= MIN_TTFT_RATIO,
            baseline="a prompt whose first tokens are new",
            pairs=first,
        ),
        Result("prefix_idle_cost", share, "share", f"<= {MAX_IDLE_SHARE:g}", share <= MAX_IDLE_SHARE),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shared", type=int, default=2048, help="tokens that the prompts of hits begin with")
    parser.add_argument("--pairs", type=int, default=3, help="quiet pairs to measure")
    parser.add_argument("--sequences", type=int, default=32, help="sequences that share nothing")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that each of them generates")
    parser.add_argument("--width", type=int, default=512, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model")
    given = parser.parse_args()
    results = asyncio.run(measure(given))
    report("prefix", results, as_json=given.json)


if __name__ == "__main__":
    main()
