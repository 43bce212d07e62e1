"""The whole engine on a GPU: with and without LoRA (G8), against PEFT (G14), and how long the GPU waits (G16)."""

import gc
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu_goals.bench import Bench
from benchmarks.gpu_goals.figures import Beside, Figure
from benchmarks.gpu_goals.models import LLAMA_7B, LLAMA_8B, TINY_SHAPE, Adapters, Model, Shape
from benchmarks.harness import Pairs
from benchmarks.random_llama import SCRATCH, LlamaShape, random_adapter, random_llama
from benchmarks.traffic import ZIPF_ADAPTERS, ZIPF_EXPONENT, distinct
from motet_runner.adapters.certification import certify
from motet_runner.offline import OfflineEngine, Request, Sampling

LLAMA_SMALL = Shape("0.6b", 1024, 3072, 28, 16, 8, 151936, head_dim=64)
"""So small that the host limits it"""

CONTEXT = 4096
ROUNDS = 2
KV_MIB = 24 << 10
TINY_KV_MIB = 4
SMALL_KV_MIB = 4 << 10
"""Two engines of a small model share the card."""
PEFT_TOKENS = 32
SHORT_GAP_US = 3.0
"""Between two kernels of one graph, which the host cannot shorten"""


def _on_disk(bench: Bench, shape: Shape) -> LlamaShape:
    return LlamaShape(
        vocabulary=shape.vocabulary,
        width=shape.width,
        feed_forward=shape.feed_forward,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        context=CONTEXT,
        dtype="float32" if bench.rehearsal else "bfloat16",
    )


def _adapter(shape: LlamaShape, rank: int, scratch: Path) -> Path:
    folder = scratch / f"{shape.name}-adapter-{rank}"
    return folder if folder.is_dir() else random_adapter(shape, folder, rank=rank, seed=0)


class Served:
    """An engine with adapters that have the same bytes, each in memory of its own."""

    def __init__(
        self, bench: Bench, shape: Shape, adapters: int, rows: int, *, plan_ahead: int = 1, kv_mib: int = KV_MIB
    ) -> None:
        """`rows`: sequences at a time"""
        on_disk, rank = _on_disk(bench, shape), bench.sizes.rank
        self.offline = OfflineEngine(
            random_llama(on_disk, SCRATCH, repeated=True),
            device=bench.device.type,
            dtype=on_disk.dtype,
            kernels="triton",
            kv_cache_mib=TINY_KV_MIB if bench.rehearsal else kv_mib,
            max_model_length=CONTEXT if not bench.rehearsal else 64,
            max_concurrent_sequences=rows,
            max_resident_adapters=max(1, adapters),
            max_lora_rank=rank,
            prefix_cache=False,
            plan_ahead=plan_ahead,
        )
        if adapters:
            layout = certify(_adapter(on_disk, rank, SCRATCH), self.offline.info).layout
            for number in range(adapters):
                self.offline.add_certified(str(number), layout)

    def tokens_per_second(self, lengths: Sequence[tuple[int, int]], owners: Sequence[int] | None) -> float:
        """`lengths`: of each request's prompt and answer; `owners`: their adapters; None: the base alone"""
        requests = [
            Request(
                prompt=[2 + (7 * place + 31 * number) % 50 for place in range(prompt)],
                adapter="" if owners is None else str(owners[number]),
                sampling=Sampling(max_tokens=output, ignore_eos=True),
            )
            for number, (prompt, output) in enumerate(lengths)
        ]
        began = time.perf_counter()
        tokens = 0
        for answer in self.offline.run(requests, progress=False):
            if answer.error is not None:
                raise answer.error
            tokens += len(answer.tokens)
        return tokens / (time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class _Key:
    shape: Shape
    adapters: int
    rows: int


_LAST: dict[_Key, Served] = {}


def _served(bench: Bench, shape: Shape, adapters: int, rows: int) -> Served:
    """The engine that the goal before used may serve the next one, too. Two do not fit on a card."""
    key = _Key(shape, adapters, rows)
    if key not in _LAST:
        _forget(bench)
        _LAST[key] = Served(bench, shape, adapters, rows)
    return _LAST[key]


def _forget(bench: Bench) -> None:
    _LAST.clear()
    gc.collect()
    bench.freed()


def lengths_of(bench: Bench, requests: int) -> list[tuple[int, int]]:
    """Prompts and answers as long as those of chats: most are short, few are long."""
    if bench.rehearsal:
        return [(3 + number, 2) for number in range(requests)]
    drawn = random.Random(0)

    def length(median: float, spread: float, most: int) -> int:
        return max(8, min(most, round(drawn.lognormvariate(0, spread) * median)))

    return [(length(150, 1.0, 1024), length(130, 0.9, 512)) for _ in range(requests)]


def _popular(requests: int, adapters: int) -> list[int]:
    weights = [rank**-ZIPF_EXPONENT for rank in range(1, adapters + 1)]
    return random.Random(0).choices(range(adapters), weights, k=requests)


def _kept(served: Served, lengths: Sequence[tuple[int, int]], owners: Sequence[int], rounds: int) -> Pairs:
    """Tokens a second with LoRA and without, alternately"""
    with_lora, without = list[float](), list[float]()
    for number in range(rounds):
        order = [(with_lora, owners), (without, None)]
        for into, who in order[:: -1 if number % 2 else 1]:
            into.append(served.tokens_per_second(lengths, who))
    return Pairs(with_lora, without)


def g8(bench: Bench) -> Iterator[Figure]:
    rows = 2 * bench.sizes.sequences
    adapters = 2 if bench.rehearsal else ZIPF_ADAPTERS
    cases = ((TINY_SHAPE, 0.0),) if bench.rehearsal else ((LLAMA_7B, 0.94), (LLAMA_8B, 0.90))
    for shape, at_least in cases:
        served = _served(bench, shape, adapters, rows)
        requests = rows if bench.rehearsal else 4 * rows
        kept = _kept(
            served,
            lengths_of(bench, requests),
            _popular(requests, adapters),
            1 if bench.rehearsal else ROUNDS,
        )
        yield Figure(
            name=f"throughput_kept_{shape.name}_zipf_{rows}",
            value=kept.ratio,
            unit="of the base",
            at_least=at_least or None,
            spread=kept.spread,
            note="" if bench.rehearsal else f"{statistics.median(kept.a):.5g} tokens/s",
        )
        del served


def g14(bench: Bench) -> Iterator[Figure]:
    rows = bench.sizes.sequences
    shape = TINY_SHAPE if bench.rehearsal else LLAMA_7B
    served = _served(bench, shape, rows, rows)
    requests = rows if bench.rehearsal else 1000
    kept = _kept(served, lengths_of(bench, requests), [number % rows for number in range(requests)], 1)
    yield Figure(
        name=f"throughput_kept_{shape.name}_distinct_{rows}",
        value=kept.ratio,
        unit="of the base",
        at_least=None if bench.rehearsal else 0.85,
        spread=kept.spread,
    )
    ours = statistics.median(kept.a)
    peft = Peft(bench, shape, rows)
    against = {}
    for name, of, at_least in (("peft_mixed", peft.mixed, 30.0), ("hf_loop", peft.one_after_the_other, None)):
        try:
            against[name] = Beside(Pairs([ours], [of()]), at_least)
        except Exception as error:
            against[name] = Beside(None, at_least, f"{type(error).__name__}: {error}".splitlines()[0])
    del peft
    bench.freed()
    yield Figure(
        name=f"tokens_per_second_{shape.name}_distinct_{rows}",
        value=ours,
        unit="tokens/s",
        at_least=None if bench.rehearsal else 3600.0,
        against=against,
        note="ratios are our tokens a second over theirs",
    )


class Peft:
    """What people use today: PEFT with an adapter for each row of a batch, or with one adapter after the other."""

    def __init__(self, bench: Bench, shape: Shape, adapters: int) -> None:
        from peft import LoraConfig, get_peft_model

        on_disk = _on_disk(bench, shape)
        with bench.device:
            model: Any = transformers.AutoModelForCausalLM.from_config(on_disk.config())
        model = model.to(getattr(torch, on_disk.dtype)).eval()
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        rank = bench.sizes.rank
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, init_lora_weights=False)
        self._model: Any = get_peft_model(model, config, adapter_name="0", autocast_adapter_dtype=False)
        for number in range(1, adapters):
            self._model.add_adapter(str(number), config)
        self._model.eval()
        self._adapters, self._bench = adapters, bench
        self._tokens = 2 if bench.rehearsal else PEFT_TOKENS
        prompt = 4 if bench.rehearsal else 150
        self._prompts = torch.randint(
            2, shape.vocabulary, (adapters, prompt), generator=bench.generator, device=bench.device
        )

    def mixed(self) -> float:
        """Tokens a second"""
        names = [str(number) for number in range(self._adapters)]
        self._generate(self._prompts, tokens=1, adapter_names=names)
        began = time.perf_counter()
        self._generate(self._prompts, adapter_names=names)
        return self._adapters * self._tokens / (time.perf_counter() - began)

    def one_after_the_other(self) -> float:
        some = min(self._adapters, 4)
        began = time.perf_counter()
        for number in range(some):
            self._model.set_adapter(str(number))
            self._generate(self._prompts[number : number + 1])
        return some * self._tokens / (time.perf_counter() - began)

    def _generate(self, prompts: torch.Tensor, *, tokens: int = 0, **more: Any) -> None:
        tokens = tokens or self._tokens
        self._model.generate(
            input_ids=prompts, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, **more
        )
        if self._bench.device.type == "cuda":
            torch.cuda.synchronize()


def g16(bench: Bench) -> Iterator[Figure]:
    rows = 2 * bench.sizes.sequences
    yield _metadata(bench, rows)
    adapters = 2 if bench.rehearsal else ZIPF_ADAPTERS
    cases = ((TINY_SHAPE, 0),) if bench.rehearsal else ((LLAMA_8B, 1), (LLAMA_SMALL, 10))
    # More than compute at a time: those that wait take the places of those that end.
    requests = (2 if bench.rehearsal else 4) * rows
    lengths, owners = [(4, 3 if bench.rehearsal else 64)] * requests, _popular(requests, adapters)
    for shape, most in cases:
        served = _served(bench, shape, adapters, rows)
        served.tokens_per_second(lengths, owners)
        busy = _busy_share(bench, served, lengths, owners)
        yield Figure(
            name=f"idle_share_{shape.name}_{rows}",
            value=100 * (1 - busy),
            unit="%",
            at_most=most or None,
            note=f"of the time, in gaps longer than {SHORT_GAP_US:g} us; {requests} requests, {adapters} adapters",
        )
        del served
    _forget(bench)
    yield _plan_ahead(bench, cases[-1][0], rows)


def _plan_ahead(bench: Bench, shape: Shape, rows: int) -> Figure:
    """Alternately, in two engines"""
    ahead, behind = (Served(bench, shape, 0, rows, plan_ahead=plans, kv_mib=SMALL_KV_MIB) for plans in (1, 0))
    lengths = [(4, 3 if bench.rehearsal else 64)] * rows
    took: dict[int, list[float]] = {0: [], 1: []}
    for number in range(2 if bench.rehearsal else 1 + 2 * ROUNDS):
        for place, served in ((0, ahead), (1, behind))[:: -1 if number % 2 else 1]:
            tokens = served.tokens_per_second(lengths, None)
            if number:  # the first round warms up
                took[place].append(tokens)
    pairs = Pairs(took[0], took[1])
    return Figure(
        name=f"plan_ahead_{shape.name}_{rows}",
        value=pairs.ratio,
        unit="x",
        at_least=None if bench.rehearsal else 1.3,
        spread=pairs.spread,
        note="tokens a second, against planning only when the step before has ended",
    )


def _metadata(bench: Bench, rows: int) -> Figure:
    """What the host takes to tell the GPU of other adapters for all rows"""
    model = Model(bench, TINY_SHAPE)
    owners = distinct(rows)
    adapters = Adapters(model, rows, bench.sizes.rank)
    batch = adapters.batch(owners)
    orders = [adapters.segments(owners), adapters.segments(owners[::-1])]
    took = []
    for number in range(4 if bench.rehearsal else 200):
        began = time.perf_counter()
        adapters.backend.fill(batch, orders[number % 2])
        took.append((time.perf_counter() - began) * 1e6)
    return Figure(name=f"lora_metadata_{rows}", value=statistics.median(took), unit="us", at_most=10.0)


def _busy_share(bench: Bench, served: Served, lengths: Sequence[tuple[int, int]], owners: Sequence[int]) -> float:
    """The share of the time from the first kernel to the last in which the GPU does not wait for the host"""
    if bench.rehearsal:
        served.tokens_per_second(lengths, owners)
        return 1.0
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        served.tokens_per_second(lengths, owners)
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
    if not events:
        raise LookupError("the profiler has seen no kernel")
    return covered([(event.time_range.start, event.time_range.end) for event in events], SHORT_GAP_US)


def covered(spans: Sequence[tuple[float, float]], short_gap: float = 0.0) -> float:
    """The share of the time from the first begin to the last end that is in a span, or in a gap that is no longer than
    `short_gap`"""
    waited, until = 0.0, min(begin for begin, _ in spans)
    first = until
    for begin, end in sorted(spans):
        if begin - until > short_gap:
            waited += begin - until
        until = max(until, end)
    return 1 - waited / (until - first) if until > first else 0.0
