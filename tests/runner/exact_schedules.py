"""Random schedules in exact mode: each gives the same requests to engines in another way, and every row of logits must
have the bits that the request gets alone.

A schedule decides who arrives when and beside whom, in which chunks prompts are computed, who is parked and how, who
moves from one engine to the other, which adapters come and go. The engines differ in their memory, with and without a
prefix cache, one plan ahead or not.

    python -m tests.runner.exact_schedules --schedules 200
"""

import argparse
import hashlib
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import transformers

from motet.domain import BASE, PAGE_TOKENS, Digest, ParkMethod, RequestId, pages_for
from motet.errors import Declined
from motet_runner.engine import Engine
from motet_runner.interface import EngineConfig, Finish, Logprobs, NewSequence, Sampling, State
from motet_runner.plan import StepPlan
from tests.runner.engines import load
from tests.runner.judged_once import started
from tests.runner.random_models import ENDS, VOCABULARY, RandomAdapter, configs, save_adapter, save_base

SHAPES = 18
ENGINES = 6
RUNS = (2, 3)
"""The engines where the pages of a sequence are contiguous"""
LARGER = 8
"""How many times as large promises are there, so that they fill the pages"""
MOST_LIVE = 20
DRAIN_STEPS = 5_000

_SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, **ENDS,
}  # fmt: skip
FAMILIES = configs() | {
    "mistral": transformers.MistralConfig(**_SMALL, sliding_window=24),
    "gemma2": transformers.Gemma2Config(**_SMALL, sliding_window=24, query_pre_attn_scalar=16),
}
"""With windows and soft caps, too"""

ADAPTERS = (
    RandomAdapter(3, 7),
    RandomAdapter(8, 16),
    RandomAdapter(32, 16, rslora=True),
    RandomAdapter(16, 16, targets=("q_proj", "down_proj")),
)
SITES = {"gpt2": ("c_attn", "c_fc"), "gpt_neox": ("query_key_value", "dense_4h_to_h")}


@dataclass
class Expected:
    """What a request gets alone."""

    rows: list[bytes] = field(default_factory=list)
    """Hashes of its logits"""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    scores: list[Logprobs] = field(default_factory=list)
    """Of its prompt"""


@dataclass
class Live:
    """A choice on its way."""

    shape: int
    choice: int
    epoch: int
    engine: int
    row: int = 0
    """The next of its rows"""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    scores: list[Logprobs] = field(default_factory=list)


@dataclass
class Schedules:
    family: str
    folder: Path
    seed: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.base = save_base(self.family, self.folder / "base", config=FAMILIES[self.family])
        self.adapters = {
            Digest(f"sha256:{i}"): save_adapter(self.base, self._like, spec, self.folder / f"adapter{i}", seed=i)
            for i, spec in enumerate(map(self._of_family, ADAPTERS))
        }
        self.shapes = [self._shape(number) for number in range(SHAPES)]
        self.live: dict[RequestId, Live] = {}
        self.expected = self._alone()
        self.random = random.Random(self.seed)
        self.engines = [self._engine(number) for number in range(ENGINES)]
        self.number = 0

    @property
    def _like(self) -> str:
        return self.family if self.family in configs() else "llama"

    def _of_family(self, spec: RandomAdapter) -> RandomAdapter:
        return replace(spec, targets=SITES.get(self.family, spec.targets)) if spec.targets else spec

    def _shape(self, number: int) -> NewSequence:
        """Every three share the beginning of their prompts, and two of them an adapter."""
        shared, own = random.Random(number // 3), random.Random(1000 + number)
        beginning = [shared.randrange(2, 500) for _ in range(shared.choice([0, 20, 50]))]
        prompt = (*beginning, *(own.randrange(2, 500) for _ in range(own.randrange(1, 40))))
        adapter = (own if number % 3 == 2 else shared).choice([BASE, *self.adapters])
        how = [
            {},
            {"temperature": 0.9, "top_p": 0.9},
            {"temperature": 1.3, "repetition_penalty": 1.2, "presence_penalty": 0.5},
            {"logprobs": True, "top_logprobs": 3, "temperature": 0.7, "prompt_logprobs": 2},
        ][number % 4]
        sampling = Sampling(max_tokens=own.randrange(2, 30), ignore_eos=True, **how)  # type: ignore[arg-type]
        return NewSequence(
            request=RequestId(""),
            epoch=1,
            prompt=prompt,
            adapter=adapter,
            promise=pages_for(len(prompt) + sampling.max_tokens, PAGE_TOKENS),
            sampling=sampling,
            seed=number,
            prefix_salt=f"{adapter} tenant {number // 3 % 2}".encode(),
        )

    def _engine(self, number: int) -> Engine:
        """Each with settings of its own. In two of them the pages of a sequence are contiguous."""
        contiguous = number in RUNS

        def tap(requests: list[RequestId], logits: torch.Tensor) -> None:
            for request, row in zip(requests, logits, strict=True):
                self._see(request, row)

        config = EngineConfig(
            model=self.base,
            preset="paged-promises" if contiguous else "paged-chunk",
            contiguous=contiguous,
            kernels="exact",
            kv_cache_mib=1 if contiguous else [1, 2, 4][number % 3],
            host_kv_mib=1,
            plan_ahead=number % 2,
            prefix_cache=number % 4 < 2,
            prefill_chunk_tokens=[16, 21, 40, 64, 512, 27][number % 6],
            max_concurrent_sequences=[24, 5][number % 2],
            max_resident_adapters=[4, 2][number // 2 % 2],
        )
        engine = started(config, on_logits=tap)
        if contiguous:
            self._count_moves(engine)
        for digest, folder in self.adapters.items():
            load(engine, digest, folder)
        return engine

    def _count_moves(self, engine: Engine) -> None:
        plan = engine.planner.plan

        def counted() -> StepPlan | None:
            made = plan()
            for moved in made.moves if made is not None else ():
                self.happened["pages of runs moved"] += len(moved)
            return made

        engine.planner.plan = counted  # type: ignore[method-assign]

    def _see(self, request: RequestId, row: torch.Tensor) -> None:
        """One row of logits. One that a sequence lost when it was parked comes once more."""
        one, digest = self.live.get(request), _hash(row)
        if one is None:
            return  # it ended, and its last iteration had begun
        expected = self.expected[one.shape, one.choice].rows
        if one.row < len(expected) and digest == expected[one.row]:
            one.row += 1
        elif not (one.row > 0 and digest == expected[one.row - 1]) and one.row < len(expected):
            self.wrong.append(f"row {one.row} of choice {one.choice} of shape {one.shape}, as {request}")
            one.row += 1

    def _alone(self) -> dict[tuple[int, int], Expected]:
        """Each choice alone, its prompt at once, on an engine without a prefix cache."""
        found: dict[tuple[int, int], Expected] = {}
        now = Expected()
        config = EngineConfig(model=self.base, kernels="exact", kv_cache_mib=4, prefix_cache=False)
        engine = started(config, on_logits=lambda _, logits: now.rows.append(_hash(logits[0])))
        for digest, folder in self.adapters.items():
            load(engine, digest, folder)
        for number, shape in enumerate(self.shapes):
            for choice in range(2):
                now = found[number, choice] = Expected()
                engine.add(replace(shape, request=RequestId("alone"), choice=choice))
                while engine.has_work():
                    for output in engine.step().sequences:
                        now.tokens += output.tokens
                        now.logprobs += output.logprobs
                        now.scores += output.prompt_logprobs
                assert len(now.rows) == len(now.tokens) == shape.sampling.max_tokens
        return found

    def run(self, schedules: int) -> None:
        for _ in range(schedules):
            self._run_one()
            if self.wrong:
                return

    def _run_one(self) -> None:
        chance = self.random.random
        here, there = self.random.sample(range(ENGINES), 2)
        supervised = chance() < 0.7
        for number in (here, there):
            self.engines[number].set_supervised(supervised)
            self.engines[number].set_overcommit(1.0 if supervised else 1.5)
        arrivals = list(self._arrivals(here, there, whole=supervised))
        self.random.shuffle(arrivals)
        rate = self.random.choice([0.1, 0.5, 2, 20])
        steps = 0
        while arrivals or self.live:
            arriving = int(rate) + (chance() < rate % 1)
            while arrivals and arriving > 0 and len(self.live) < MOST_LIVE:
                self._add(*arrivals.pop())
                arriving -= 1
            for number in (here, there):
                self._disturb(number, there if number == here else here, busy=bool(arrivals), supervised=supervised)
                if self.engines[number].has_work():
                    self._step(number)
            steps += 1
            assert steps < DRAIN_STEPS, f"these never end: {self.live}"
        self.happened["schedules"] += 1
        for number in (here, there):
            self.engines[number].check()

    def _arrivals(self, *engines: int, whole: bool) -> Iterator[tuple[NewSequence, int, int]]:
        """`whole`: no promise is too short."""
        for shape in self.random.sample(range(SHAPES), self.random.randrange(1, SHAPES)):
            first, engine = RequestId(f"r{self.number}"), self.random.choice(engines)
            for choice in range(self.random.choice([1, 1, 2])):
                new = replace(self.shapes[shape], request=RequestId(f"r{self.number}"), choice=choice)
                promise = new.promise if whole else self.random.randint(1, new.promise)
                yield replace(new, parent=first if choice else None, promise=promise), shape, engine
                self.number += 1

    def _add(self, new: NewSequence, shape: int, engine: int) -> None:
        self.live[new.request] = Live(shape, new.choice, new.epoch, engine)
        self._give(new, engine)

    def _give(self, new: NewSequence, number: int) -> None:
        engine = self.engines[number]
        planner, promise = engine.planner, new.promise * (LARGER if number in RUNS else 1)
        while True:
            most = planner.memory.ledger.limit_beside(planner.adapters.pages_of(new.adapter))  # once it is known
            try:
                engine.add(replace(new, promise=min(promise, most)))
            except Declined:
                self.happened["declined"] += 1
                self._step(number)
                self._resume_all(number)
                self._load_all(number)
            else:
                return

    def _step(self, number: int) -> None:
        for output in self.engines[number].step().sequences:
            one = self.live[output.request]
            assert output.index == len(one.tokens)
            one.tokens += output.tokens
            one.logprobs += output.logprobs
            one.scores += output.prompt_logprobs
            if output.finish is None:
                continue
            del self.live[output.request]
            self.happened[str(output.finish)] += 1
            expected = self.expected[one.shape, one.choice]
            if output.finish is Finish.FAILED:
                self.wrong.append(f"{output.request} failed: {output.error}")
            elif one.scores != expected.scores:
                self.wrong.append(f"{output.request} of shape {one.shape}: other scores of its prompt than alone")
            elif one.tokens != expected.tokens or one.logprobs != expected.logprobs:
                self.wrong.append(f"{output.request} of shape {one.shape}: {one.tokens}, and alone {expected.tokens}")

    def _disturb(self, number: int, other: int, *, busy: bool, supervised: bool) -> None:
        engine, chance = self.engines[number], self.random.random
        entries = engine.report().sequences
        if supervised and entries and chance() < 0.2:
            entry, method = self.random.choice(entries), self.random.choice(list(ParkMethod))
            if engine.park(entry.request, entry.epoch, entry.promise, entry.promise, method):
                self.happened[f"parked, {method}"] += 1
        if supervised and (not busy or chance() < 0.3):
            self._resume_all(number)
        if entries and chance() < 0.05:
            self._move(self.random.choice(entries).request, number, other)
        self._load_all(number)
        for digest in self.adapters:
            if chance() < 0.01 and not any(entry.adapter == digest for entry in engine.report().sequences):
                engine.drop_adapter(digest)
                self.happened["adapter dropped"] += 1

    def _load_all(self, number: int) -> None:
        """What was dropped, and is waited for: no request gets room while others wait for ever."""
        for digest in sorted(
            {one.adapter for one in self.engines[number].report().sequences if one.state is State.LOADING}
        ):
            load(self.engines[number], digest, self.adapters[digest])

    def _resume_all(self, number: int) -> None:
        for entry in self.engines[number].report().sequences:
            if entry.state is State.PARKED:
                self.happened["resumed"] += self.engines[number].resume(entry.request, entry.epoch, entry.promise)

    def _move(self, request: RequestId, number: int, other: int) -> None:
        """The other engine goes on after the tokens that have come."""
        one = self.live[request]
        assert self.engines[number].cancel(request, one.epoch)
        one.epoch, one.engine, one.row = one.epoch + 1, other, len(one.tokens)
        shape = self.shapes[one.shape]
        delivered, scored = tuple(one.tokens), len(one.scores) + 1  # the first token has no score
        moved = replace(shape, request=request, choice=one.choice, epoch=one.epoch, delivered=delivered, scored=scored)
        self.happened["moved"] += 1
        self._give(moved, other)


def _hash(row: torch.Tensor) -> bytes:
    return hashlib.blake2b(row.numpy().tobytes(), digest_size=16).digest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="llama")
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        schedules = Schedules(options.family, Path(folder), options.seed)
        schedules.run(options.schedules)
        print(json.dumps({"family": options.family, "happened": schedules.happened, "wrong": schedules.wrong}))


if __name__ == "__main__":
    main()
