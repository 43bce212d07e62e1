"""`benchmarks.engine` counts what it says, and compares answers before it compares speed."""

import argparse
import random
from collections.abc import Sequence
from contextlib import nullcontext

import pytest

from benchmarks.engine_cases.against_transformers import NEAR, Transformers
from benchmarks.engine_cases.bench import Bench
from benchmarks.engine_cases.transformers_child import Batch, Choice, How, transformers_child
from benchmarks.engine_run import Ask, random_prompt
from benchmarks.random_llama import LlamaShape, random_adapter, random_llama

SHAPE = LlamaShape(
    vocabulary=128, width=64, feed_forward=128, layers=1, heads=2, kv_heads=1, dtype="float32", context=256
)
GIVEN = argparse.Namespace(
    prompt=8, output=6, vocabulary=128, dtype="float32", cache=None, kv_mib=8, adapters=2, threads=1, requests=[2]
)
HOW = How("float32", 1)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("engine-cases")
    adapters = [random_adapter(SHAPE, folder / str(number), rank=8, seed=number) for number in range(2)]
    return Bench(GIVEN, random_llama(SHAPE, folder), adapters, ["torch"])


def test_answers_of_transformers_and_peft_are_ours(bench: Bench) -> None:
    """And their rows keep their own adapters when prompts have several lengths."""
    run = bench.run("torch")
    drawn = random.Random(1)
    prompts = [random_prompt(drawn, length, 128) for length in (5, 9, 7)]
    with transformers_child(bench.model, bench.folders) as child:
        for owners in (None, [1, 0, 1]):
            of_each = [{}, {}, {}] if owners is None else [{"adapter": bench.adapters[owner]} for owner in owners]
            ours = run.serve([Ask(prompt, 6, **adapter) for prompt, adapter in zip(prompts, of_each, strict=True)])
            assert child.generate(HOW, Batch(prompts, 6, owners))[1] == ours.tokens
        first = run.serve([Ask(prompts[0], 1)]).tokens[0][0]
        assert child.distance(Choice(prompts[0], (first, first), None)) == 0
        assert child.distance(Choice(prompts[0], (first, (first + 1) % 128), None)) > 0


class Child:
    """In the place of transformers: answers as given, and every two tokens so far apart."""

    def __init__(self, answers: Sequence[list[int]], distance: float) -> None:
        self._answers = answers
        self._distance = distance
        self.choices: list[Choice] = []

    def generate(self, _how: How, _batch: Batch) -> tuple[float, Sequence[list[int]]]:
        return 1.0, self._answers

    def distance(self, choice: Choice) -> float:
        self.choices.append(choice)
        return self._distance


@pytest.mark.parametrize(("distance", "ends"), [(NEAR / 2, False), (NEAR * 2, True)])
def test_answers_may_part_only_where_two_tokens_are_almost_equal(bench: Bench, distance: float, ends: bool) -> None:
    run = bench.run("torch")
    asks = Transformers(bench, None).asks(2, with_adapters=True)
    ours = run.serve(asks).tokens
    other = [ours[0], [*ours[1][:2], (ours[1][2] + 1) % 128, *ours[1][3:]]]
    child = Child(other, distance)
    with pytest.raises(SystemExit, match="the answers differ") if ends else nullcontext():
        Transformers(bench, child).check_same(run, HOW, asks)
    before = (*asks[1].prompt, *ours[1][:2])
    assert child.choices == [Choice(before, (ours[1][2], other[1][2]), adapter=1)]
