"""Decodes that were captured once, on the GPU's kernels: right with whatever rows, pages and adapters follow."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from motet.domain import BASE, Digest
from motet_runner.engine import Engine
from motet_runner.execute.worker.decode_graphs import CapturedGraph, captured_sizes
from motet_runner.execute.worker.device_worker import DeviceWorker
from motet_runner.plan import StepPlan
from tests.gpu.devices import DEVICE, LAYERS
from tests.runner.engines import ask, load, make_engine, run
from tests.runner.random_models import EIGHT, RandomAdapter, llama, save_adapter, save_base

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

ROWS = 4
DIGESTS = [Digest(f"sha256:{number}") for number in range(3)]


def make_recorded_engine(base: Path, rows: int = ROWS) -> Engine:
    with patch("motet_runner.engine.computes_by_itself", lambda _: True):
        return make_engine(
            base,
            kernels="triton",
            device=DEVICE.type,
            dtype="float32",
            max_concurrent_sequences=rows,
            plan_ahead=1,
            max_model_length=64,
        )


def test_recorded_decodes_equal_those_of_torch(tmp_path: Path) -> None:
    """The base and adapters of different ranks beside each other; then others, in the same graphs."""
    base = save_base("llama", tmp_path / "base", config=llama(layers=LAYERS))
    folders = [save_adapter(base, "llama", spec, tmp_path / str(i), seed=i) for i, spec in enumerate(EIGHT[:3])]
    recorded, reference = make_recorded_engine(base), make_engine(base, kernels="torch", plan_ahead=0)
    assert isinstance(recorded.diagnostics.worker, DeviceWorker)
    for engine in (recorded, reference):
        for digest, folder in zip(DIGESTS, folders, strict=True):
            load(engine, digest, folder)
        run(engine)  # until all are there: so the rows decode together
    graphs, sizes = recorded.diagnostics.worker.graphs, []
    assert graphs is not None
    replay = graphs.replay

    def counted(graph: CapturedGraph) -> torch.Tensor:
        sizes.append(len(graph.rows))
        return replay(graph)

    graphs.replay = counted  # type: ignore[method-assign]
    rounds = (
        [("a", DIGESTS[0]), ("b", DIGESTS[1]), ("c", BASE)],
        [("d", DIGESTS[2]), ("e", DIGESTS[2])],
    )
    for asked in rounds:
        sequences = [
            ask(name, prompt=13 + 2 * place, max_tokens=2 + place, adapter=digest, temperature=0.4 * place, seed=7)
            for place, (name, digest) in enumerate(asked)
        ]
        assert run(recorded, *sequences).tokens == run(reference, *sequences).tokens
    assert {2, 4} <= set(sizes)
    assert recorded.diagnostics.worker.captures == len(captured_sizes(ROWS)), "[recaptures = 0]"


def test_adapters_that_scale_have_recorded_decodes_of_their_own(tmp_path: Path) -> None:
    """Recorded when they are first needed, and once; the others stay as they are."""
    base = save_base("llama", tmp_path / "base", config=llama(layers=LAYERS))
    specs = RandomAdapter(16, 16, dora=True), RandomAdapter(5, 8, lora_bias=True), EIGHT[0]
    folders = [save_adapter(base, "llama", spec, tmp_path / str(i), seed=i) for i, spec in enumerate(specs)]
    recorded, reference = make_recorded_engine(base, 2), make_engine(base, kernels="torch", plan_ahead=0)
    for engine in (recorded, reference):
        for digest, folder in zip(DIGESTS, folders, strict=True):
            load(engine, digest, folder)
        run(engine)
    worker, plain = recorded.diagnostics.worker, len(captured_sizes(2))
    for owners, captures in (([2, 2], plain), ([2, 0], 2 * plain), ([1, 0], 2 * plain)):
        asked = [
            ask(f"{owners} {place}", prompt=13 + 2 * place, max_tokens=2 + place, adapter=DIGESTS[owner])
            for place, owner in enumerate(owners)
        ]
        assert run(recorded, *asked).tokens == run(reference, *asked).tokens
        assert worker.captures == captures


@pytest.mark.gpu
def test_no_decode_step_waits_for_the_gpu(tmp_path: Path) -> None:
    """[syncs = 0], as CUDA sees it"""
    base = save_base("llama", tmp_path / "base")
    engine = make_recorded_engine(base)
    load(engine, DIGESTS[0], save_adapter(base, "llama", EIGHT[0], tmp_path / "adapter", seed=0))
    run(engine)
    worker, watched = engine.diagnostics.worker, []
    launch = worker.launch

    def launched(plan: StepPlan) -> None:
        only_decodes = not plan.prefills and not plan.joins
        torch.cuda.set_sync_debug_mode("error" if only_decodes else "default")
        try:
            launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        watched.append(only_decodes)

    worker.launch = launched  # type: ignore[method-assign]
    ran = run(
        engine,
        ask("greedy", adapter=DIGESTS[0]),
        ask("drawn", temperature=1.0, top_p=0.9, top_k=50, seed=1),
        ask("penalised", presence_penalty=0.5, min_tokens=8, logit_bias={5: 1.0}),
        ask("told", logprobs=True, top_logprobs=2),
    )
    assert {len(tokens) for tokens in ran.tokens.values()} == {40}
    assert sum(watched) > 35
