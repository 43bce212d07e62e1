"""The pages of a GPU get what is left beside everything else, and everything else is known, item by item."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from structlog.testing import capture_logs

from motet.domain import PAGE_TOKENS, pages_for
from motet.errors import SetupError
from motet_kernels import LinearGroup
from motet_kernels.gpu.attention import GpuAttention
from motet_kernels.gpu.lora_backend import GpuBackend
from motet_kernels.positions import more_positions
from motet_runner.engine import Engine
from motet_runner.execute.forward.rotation_table import rotation_bytes, rotations
from motet_runner.execute.gate.memory_needs import room_bytes
from motet_runner.execute.gate.texts import CROWD_TOKENS
from motet_runner.execute.memory_budget import activations, page_budget
from motet_runner.execute.memory_budget.activations import activation_bytes
from motet_runner.execute.memory_budget.page_budget import MIB, whole_pages
from motet_runner.execute.sample.device_adjustments import adjustment_bytes
from motet_runner.execute.worker.device_rows import DeviceRows
from motet_runner.memory.gpu_memory import CONTEXT_BYTES, GpuMemory
from tests.runner.engines import ask, make_device_engine, make_engine, run

TOTAL, FREE = 1000 * MIB + CONTEXT_BYTES, 900 * MIB
ITERATION = 200 * MIB


@pytest.fixture
def engine(llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Its model is as if it were on a GPU."""
    made = make_engine(llama)
    memory = GpuMemory(total=TOTAL, free=FREE, held=0)
    monkeypatch.setattr(GpuMemory, "of", lambda _: memory)
    monkeypatch.setattr(page_budget, "activation_bytes", lambda *_: ITERATION)
    made.diagnostics.loaded.device = SimpleNamespace(type="cuda")
    return made


def pages_of(
    engine: Engine, *, room: int = 0, packing: object = None, forward: object = None, **changed: object
) -> int:
    config = replace(engine.diagnostics.config, **{"kv_cache_mib": None} | changed)
    kernels = SimpleNamespace(
        add_lora=SimpleNamespace(copies=False), room_bytes=lambda _: room, packing=packing, makes_forward=forward
    )
    return whole_pages(engine.diagnostics.loaded, kernels, engine.diagnostics.linears, config)


def test_on_a_gpu_pages_leave_memory_to_compute_with(engine: Engine) -> None:
    page = engine.diagnostics.loaded.shape.bytes_per_page()
    with capture_logs() as logs:
        pages = pages_of(engine)
    (line,) = [line for line in logs if line["event"] == "memory_set_aside"]
    items = {name: float(size.split()[0]) for name, size in line.items() if str(size).endswith(" MiB")}
    assert items["largest_iteration"] == 200
    assert 200 < items["recorded_decodes"] < 201
    left = GpuMemory.of(engine.diagnostics.loaded.device).left(90) / MIB - sum(items.values())
    assert pages * page / MIB == pytest.approx(left, abs=1)
    assert pages_of(engine, room=100 * MIB) == pytest.approx(pages - 100 * MIB / page, abs=1)


def test_a_cache_that_the_gpu_has_no_room_for_is_refused(engine: Engine) -> None:
    """Iterations need not have room beside it: where they have none, they are computed in parts."""
    unset = pages_of(engine) * engine.diagnostics.loaded.shape.bytes_per_page() // MIB
    kept = page_budget.kept_bytes(
        engine.diagnostics.loaded,
        SimpleNamespace(room_bytes=lambda _: 0, makes_forward=None),
        engine.diagnostics.linears,
        engine.diagnostics.config,
    )
    most = (GpuMemory.of(engine.diagnostics.loaded.device).left(90) - sum(kept.values())) // MIB
    assert most > unset + 2 * ITERATION // MIB
    assert pages_of(engine, kv_cache_mib=most)
    with pytest.raises(SetupError, match=rf"engine\.kvCacheMiB is {most + 2}, .* Set it to at most {most}\b"):
        pages_of(engine, kv_cache_mib=most + 2)


def test_weights_have_room_to_be_packed(engine: Engine) -> None:
    """They are packed when the pages have their memory already."""
    page = engine.diagnostics.loaded.shape.bytes_per_page()
    little, much = (SimpleNamespace(bytes_beside=lambda _, size=size: size) for size in (ITERATION, 3 * ITERATION))
    assert pages_of(engine, packing=little) == pages_of(engine)
    fewer = (pages_of(engine) - pages_of(engine, packing=much)) * page
    assert 0.5 * ITERATION < fewer < ITERATION


def test_a_forward_pass_has_room_to_be_judged(engine: Engine) -> None:
    """Of as many rows as a usual chunk has, and on pages of its own, before any request comes."""
    beside = SimpleNamespace(bytes_beside=lambda _: 0)
    page = engine.diagnostics.loaded.shape.bytes_per_page()
    assert pages_of(engine, packing=beside) == pages_of(engine)
    few = {"prefill_chunk_tokens": 152, "max_concurrent_sequences": 8}
    fewer = (pages_of(engine, **few) - pages_of(engine, packing=beside, **few)) * page
    judged = ITERATION * CROWD_TOKENS / 160 + room_bytes(engine.diagnostics.loaded)
    assert fewer == pytest.approx(judged - 2 * ITERATION, abs=2 * MIB)


@pytest.mark.parametrize("longest", [100, 5000])
def test_tables_of_rotations_have_room(longest: int, engine: Engine) -> None:
    """As long as they may become, beside the one that each takes the place of: where sequences grow one by one."""
    loaded = engine.diagnostics.loaded
    rotary, head_dim = loaded.model.model.rotary_emb, loaded.shape.head_dim
    before, most = torch.empty(0), 0
    for tokens in range(1, longest + 1):
        if tokens > len(before):
            table = rotations(rotary, more_positions(len(before), tokens), head_dim // 2)
            before, most = table, table.nbytes + before.nbytes
    assert most <= rotation_bytes(longest, head_dim) <= 2.5 * most
    fewer = pages_of(engine, max_model_length=longest) - pages_of(engine, forward=object(), max_model_length=longest)
    room = rotation_bytes(longest, head_dim) / loaded.shape.bytes_per_page()
    assert fewer == pytest.approx(room, abs=1)


def test_without_swap_nothing_is_set_aside_for_it(engine: Engine) -> None:
    assert pages_of(engine, host_kv_mib=0) > pages_of(engine)


def test_without_room_for_a_page_the_settings_are_named(engine: Engine) -> None:
    says = (
        r"lower engine\.maxResidentAdapters, .* engine\.maxConcurrentSequences, whose largest iteration takes 1\d\d\d"
    )
    with pytest.raises(SetupError, match=says):
        pages_of(engine, room=900 * MIB)


def test_a_largest_iteration_that_does_not_fit_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(llama)
    for name in ("memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    failed = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory."))
    monkeypatch.setattr(activations, "compute_largest_iteration", failed)
    with pytest.raises(SetupError, match=r"512 prompt tokens and 64 decodes\. Lower engine\.prefillChunkTokens"):
        activation_bytes(engine.diagnostics.loaded, 512, 64)


def test_what_rows_and_penalties_take_is_what_was_set_aside(llama: Path) -> None:
    sequences = 20
    engine = make_device_engine(llama, max_concurrent_sequences=sequences)
    run(engine, *(ask(f"{number}", prompt=5, presence_penalty=1.0) for number in range(sequences)), steps=8)
    worker = engine.diagnostics.worker
    rows = worker.rows
    taken = sum(buffer.nbytes for buffer in (rows.newest, rows.before, rows.pages))
    assert taken == DeviceRows.room_bytes(2 * sequences, pages_for(engine.info.max_model_length, PAGE_TOKENS))
    adjustments = worker.sampler._adjustments  # noqa: SLF001
    buffers = [buffer for buffer in vars(adjustments).values() if isinstance(buffer, torch.Tensor)]
    taken = sum(buffer.nbytes for buffer in buffers)
    slots = len(adjustments._ends)  # noqa: SLF001
    assert slots == 32
    assert taken <= 1.1 * adjustment_bytes(slots, engine.diagnostics.loaded.vocabulary) / 1.5
    assert adjustment_bytes(slots, engine.diagnostics.loaded.vocabulary) <= adjustment_bytes(2 * sequences, 512)


def test_what_the_kernels_of_a_gpu_keep_is_what_was_set_aside() -> None:
    groups = [LinearGroup(4096, {"q": 4096, "k": 1024, "v": 1024}), LinearGroup(14336, {"down": 4096})]
    batch = GpuBackend(groups, torch.empty(64, dtype=torch.uint8), torch.bfloat16).fixed_batch(24)
    assert GpuBackend.room_bytes(groups, 24) == batch.work.nbytes + batch.products.nbytes
    attention = GpuAttention(torch.empty(1, 1, 2, 8, 16, 128, dtype=torch.bfloat16))
    assert GpuAttention.room_bytes(32, 128) == sum(part.nbytes for part in attention._room(32))  # noqa: SLF001
