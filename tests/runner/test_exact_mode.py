"""Exact mode: the logits of a request have the same bits whatever is computed beside it, and however it is computed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from motet.domain import BASE, Digest
from motet.errors import ModelFolderError, SetupError
from motet_kernels import TILE_ROWS
from motet_runner.engine import Engine
from motet_runner.execute.exact import tiles
from motet_runner.interface import EngineConfig
from motet_runner.plan import StepPlan
from tests.runner.engines import ask, load, make_engine, run
from tests.runner.exact_schedules import FAMILIES, Schedules
from tests.runner.random_models import save_base
from tests.runner.test_models import GROUPED


@pytest.mark.parametrize(("family", "count"), [("llama", 2), ("gemma2", 1)])
def test_a_few_random_schedules_give_the_bits_of_each_request_alone(family: str, count: int, tmp_path: Path) -> None:
    schedules = Schedules(family, tmp_path)
    schedules.run(count)
    print(family, dict(schedules.happened))
    assert schedules.wrong == []
    if family == "llama":
        wanted = {"parked, swap", "parked, recompute", "resumed", "moved"}
        assert wanted <= schedules.happened.keys()


def test_sequences_whose_pages_move_together_get_the_bits_of_each_alone(llama: Path) -> None:
    """Every second one ends early, and no hole that it leaves is large enough for the next one (S3-12)."""
    settings = {"kernels": "exact", "kv_cache_mib": 1, "max_concurrent_sequences": 32}
    engine = make_engine(llama, **settings, preset="paged-promises", contiguous=True)
    moved, plan = 0, engine.planner.plan

    def counted() -> StepPlan | None:
        nonlocal moved
        made = plan()
        moved += sum(map(len, made.moves)) if made is not None else 0
        return made

    engine.planner.plan = counted  # type: ignore[method-assign]
    first = [ask(f"r{i}", max_tokens=5 if i % 2 else 40, logprobs=True) for i in range(engine.planner.memory.free // 3)]
    ran = run(engine, *first, steps=20)
    assert moved == 0
    large = ask("large", max_tokens=70, logprobs=True)
    run(engine, large, ran=ran)
    assert moved > 0
    alone = make_engine(llama, **settings)
    for asked in (*first, large):
        mine = [(one.tokens, one.logprobs) for one in ran.outputs if one.request == asked.request]
        assert sum(mine, ()) == sum(((one.tokens, one.logprobs) for one in run(alone, asked).outputs), ())


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_200_random_schedules_give_the_bits_of_each_request_alone(family: str) -> None:
    command = [sys.executable, "-m", "tests.runner.exact_schedules", f"--family={family}", "--schedules=200"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["wrong"] == []
    assert result["happened"]["schedules"] == 200


@pytest.fixture
def two_threads() -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(usual)


@pytest.mark.usefixtures("two_threads")
def test_every_module_sees_16_rows_and_one_thread_whatever_the_batch(llama: Path, adapters: list[Path]) -> None:
    """Some CPUs give the same bits for other numbers of rows, so a comparison of bits would not show it there."""
    engine = make_engine(llama, kernels="exact", threads=None, kv_cache_mib=8)
    for index, folder in enumerate(adapters):
        load(engine, Digest(f"sha256:{index}"), folder)
    seen: set[tuple[int, int]] = set()

    def look(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        seen.add((given[0].shape[:-1].numel(), torch.get_num_threads()))

    for module in engine.diagnostics.loaded.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(look)
    torch.set_num_threads(2)  # as another engine in this process may do
    for count in (1, 3, 20):
        voices = [BASE, *(Digest(f"sha256:{index}") for index in range(len(adapters)))]
        asked = [ask(f"r{i}", prompt=3 + 9 * i, adapter=voices[i % 5], max_tokens=4) for i in range(count)]
        ran = run(engine, *asked)
        assert all(len(tokens) == 4 for tokens in ran.tokens.values())
    assert seen == {(TILE_ROWS, 1), (0, 1)}, "the head computes for all rows of a tile, or for none"
    assert torch.get_num_threads() == 2


def test_a_row_goes_from_tile_to_tile_in_the_order_of_its_tokens() -> None:
    step, plan = tiles.RowStep, tiles.StepPlan
    decodes = tuple(step(row, 40 + row, 1, samples=True) for row in range(6))
    cut = tiles.tiles(
        plan(number=3, decodes=decodes, prefills=(step(7, 5, 30, samples=True), step(8, 0, 2, samples=False)))
    )
    assert [one.rows for one in cut] == [
        (*decodes, step(7, 5, 10, samples=False)),
        (step(7, 15, 16, samples=False),),
        (step(7, 31, 4, samples=True), step(8, 0, 2, samples=False)),
    ]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": "bfloat16"}, "float32"),
        ({"threads": 2}, "one thread"),
        ({"device": "cuda"}, "cuda"),
    ],
)
def test_settings_that_change_bits_are_refused(llama: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SetupError, match=says):
        Engine(EngineConfig(model=llama, kernels="exact", **settings))


REFUSED = {
    "a rope that depends on the length": (
        transformers.LlamaConfig(
            **GROUPED, head_dim=16, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        ),
        "the length of the sequence",
    ),
    "experts": (transformers.MixtralConfig(**GROUPED, head_dim=16, num_local_experts=4), "several tokens together"),
    "a narrow head": (transformers.LlamaConfig(**GROUPED), r"multiple of 16 \(head_dim: 8\)"),
    "an odd width": (
        transformers.LlamaConfig(**GROUPED | {"intermediate_size": 72}, head_dim=16),
        r"multiple of 16 \(model.layers.0.mlp.gate_proj, outputs: 72\)",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_keep_the_promise_is_refused_with_the_reason(kind: str, tmp_path: Path) -> None:
    config, says = REFUSED[kind]
    base = save_base(kind, tmp_path / "base", config=config)
    with pytest.raises(ModelFolderError, match=says):
        make_engine(base, kernels="exact")
    assert len(run(make_engine(base, kernels="torch"), ask("a", max_tokens=3)).tokens["a"]) == 3


def test_exact_mode_stays_what_it_began_with(llama: Path) -> None:
    engine = make_engine(llama, kernels="exact")
    assert engine.idle() is None
    state = engine.report().kernels
    assert state is not None
    assert (state.serving, state.note) == ("exact", "")
    assert engine.info.dtype == "float32"


def test_a_prompt_that_fills_a_tile_is_scored_in_its_order(llama: Path) -> None:
    """The row that samples comes first among those that are kept, and there are as many as in the tile."""
    asked = ask("a", prompt=TILE_ROWS, prompt_logprobs=1, max_tokens=3)
    ours, theirs = (run(make_engine(llama, kernels=kernels), asked) for kernels in ("exact", "torch"))
    assert ours.tokens == theirs.tokens
    scores = [[one.logprob for one in ran.scores["a"]] for ran in (ours, theirs)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
