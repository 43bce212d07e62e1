"""The fused forward on the GPU's kernels: the logits of the modules, one copy of the weights, and nothing from the host
that changes from step to step."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from motet.errors import SetupError
from motet_kernels import LinearGroup, PlacedAdapter, Segment
from motet_kernels.gpu import attention as gpu_attention
from motet_kernels.gpu import launches, layer_kernels
from motet_kernels.gpu.attention import GpuAttention
from motet_kernels.gpu.lora_backend import GpuBackend
from motet_runner.execute.batch.flat_batch import PagedRows
from motet_runner.execute.forward.gpu import GpuForward
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.wide_modules import wide
from motet_runner.execute.gate.allowed_error import allowed, rms, wider
from motet_runner.execute.gate.gate import Gate
from motet_runner.execute.kernels.gpu_kernels_test import fault_of
from motet_runner.execute.kernels.roles import by_role
from motet_runner.execute.kernels.triton import triton_back_end
from motet_runner.execute.load.load_model import load
from motet_runner.memory.paged import PagedStore
from tests.gpu.devices import DEVICE, in_types
from tests.runner.families import GROUPED, save_model
from tests.runner.trials import pack, probe_logits

KERNELS = by_role(triton_back_end(DEVICE))
ONE_LAYER = GROUPED | {"num_hidden_layers": 1}
MODELS = {
    "Qwen 2, biases": transformers.Qwen2Config(**ONE_LAYER),
    "Llama, biases everywhere, tied, odd sizes": transformers.LlamaConfig(
        **ONE_LAYER | {"hidden_size": 40, "intermediate_size": 52},
        attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=10,
    ),
    "Qwen 3, tied": transformers.Qwen3Config(**ONE_LAYER, head_dim=16, tie_word_embeddings=True),
}  # fmt: skip

LORA_DIFFERS = "motet_runner.execute.kernels.gpu_kernels_test._lora_differs"
"""The first half of `fault_of`"""


def loaded_model(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load(save_model(MODELS[name], folder), str(dtype).removeprefix("torch."), DEVICE.type)


@pytest.mark.parametrize(("name", "dtype"), in_types(*MODELS, both=False), ids=str)
def test_logits_are_those_of_the_modules(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    loaded = loaded_model(name, tmp_path, dtype)
    with torch.inference_mode():
        with wide(loaded, wider(dtype)) as exact:
            truth = probe_logits(exact)
        limit = allowed(rms(probe_logits(loaded) - truth), truth, dtype)
        pack(loaded, KERNELS)
        assert isinstance(loaded.fused, GpuForward)
        assert rms(probe_logits(loaded, KERNELS.attention) - truth) <= limit
        modules = probe_logits(replace(loaded, fused=None), KERNELS.attention)
        assert rms(modules - truth) <= limit, "they compute with what was packed"


def test_memory_holds_one_copy_of_the_weights(tmp_path: Path) -> None:
    loaded = loaded_model("Qwen 3, tied", tmp_path)
    embedding = loaded.model.get_input_embeddings().weight.data_ptr()
    pack(loaded, KERNELS)
    assert all(not linear.weight.numel() for linear in loaded.linears.values())
    assert isinstance(loaded.fused, GpuForward)
    weights = loaded.fused._decoder._weights  # noqa: SLF001
    assert weights.head._weight.data_ptr() == embedding, "it is looked up in the head's"  # noqa: SLF001
    assert weights.embedding is weights.head


def test_a_model_of_another_family_stays_as_it_was_loaded(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    loaded = load(save_model(config, tmp_path), "float32", DEVICE.type)
    pack(loaded, KERNELS)
    assert loaded.fused is None
    assert all(linear.weight.numel() for linear in loaded.linears.values())


def test_kernels_that_compute_something_else_do_not_pass_their_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = loaded_model("Qwen 2, biases", tmp_path)
    gate = Gate(loaded)  # it finds the truth once
    assert fault_of(loaded, KERNELS, gate) == ""

    def twice(self: GpuBackend, y: torch.Tensor, x: torch.Tensor, linear: str, batch: Any) -> None:
        for _ in range(2):
            together(self, y, x, (linear,), batch)

    def last_forgotten(self: GpuBackend, y: torch.Tensor, x: torch.Tensor, linears: Sequence[str], batch: Any) -> None:
        if len(linears) == 1:
            together(self, y, x, linears, batch)

    def results_left(self: GpuBackend, y: torch.Tensor, x: torch.Tensor, linears: Sequence[str], batch: Any) -> None:
        together(self, y, x, linears, replace(batch, scales=False))

    def unscaled(self: GpuAttention, *rows: Any, scale: float, **how: Any) -> torch.Tensor:
        return attend(self, *rows, scale=scale / 2, **how)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no C compiler\nmore about it")

    def passed(*_: Any) -> float:
        return 0.0

    def lost(*_: Any, **__: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    together, attend = GpuBackend.add_lora_together, GpuAttention.attend
    for owner, name, instead, says in (
        (GpuBackend, "add_lora", twice, "add_lora gives other numbers (off by "),
        (GpuBackend, "add_lora_together", last_forgotten, "add_lora gives other numbers (off by "),
        (GpuBackend, "add_lora_together", results_left, "add_lora gives other numbers (off by "),
        (GpuAttention, "attend", unscaled, "its logits are off by "),
        (GpuAttention, "attend", broken, "not judged: RuntimeError: no C compiler"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, instead)
            if owner is GpuAttention:
                patch.setattr(LORA_DIFFERS, passed)  # it takes the interpreter seconds, and has passed above
            said = fault_of(loaded, KERNELS, gate)
        assert said.startswith(says), said
        assert "\n" not in said
    monkeypatch.setattr(GpuAttention, "attend", lost)
    monkeypatch.setattr(LORA_DIFFERS, passed)
    with pytest.raises(SetupError, match=r"illegal memory access .* nothing more .* engine\.kernels to torch"):
        fault_of(loaded, KERNELS, gate)


@contextmanager
def given_to_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The name, the grid and the arguments of every launch: of a tensor its address and shape."""
    given: list[Any] = []
    launch = layer_kernels.launch

    def of(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return argument.data_ptr(), argument.shape, argument.stride()
        return argument

    def watched(kernel: Any, grid: Any, *arguments: Any, **options: Any) -> None:
        given.append((kernel.__name__, tuple(grid), *map(of, arguments), options))
        launch(kernel, grid, *arguments, **options)

    with monkeypatch.context() as patch:
        for module in (layer_kernels, gpu_attention, launches):
            patch.setattr(module, "launch", watched)
        yield given


def as_batch(tokens: torch.Tensor, keep: torch.Tensor, store: PagedStore, paged: PagedRows, lora: Any) -> Any:
    """What a forward pass reads of an iteration"""
    return SimpleNamespace(input_ids=tokens[None], keep=keep, store=store, paged=paged, lora=lora, longest=64, calls=0)


def test_a_captured_decode_step_serves_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other tokens, lengths, pages and adapters in the same tensors, the same launches compute what a new batch
    gives. Rows without a sequence write nothing."""
    loaded = loaded_model("Qwen 3, tied", tmp_path)
    pack(loaded, KERNELS)
    forward = loaded.fused
    assert isinstance(forward, GpuForward)
    store = PagedStore(8, loaded.shape, loaded.dtype, loaded.device)
    store.data.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    attention = GpuAttention(store.data)
    backend, adapters = two_adapters(loaded)
    forward.use_lora(backend)

    rows = 3
    tokens = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    keep = torch.arange(rows, device=DEVICE)
    lengths = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(rows, 4, dtype=torch.int32, device=DEVICE)
    fixed, of_lora = attention.fixed_batch(rows, table=table), backend.fixed_batch(rows)
    steps = (
        ([5, 6, 0], [20, 3, 0], [[1, 2], [4], []], [Segment(0, 1, adapters[0])]),
        ([7, 8, 9], [33, 1, 16], [[5, 0, 3], [6], [2]], [Segment(0, 2, adapters[1]), Segment(2, 3, adapters[0])]),
    )

    def step(lora: Any) -> torch.Tensor:
        attention.refill(fixed, lengths, table_rows=keep.int())
        return forward(as_batch(tokens, keep, store, PagedRows(attention, fixed), lora))

    traced = []
    for of_tokens, of_lengths, of_pages, segments in steps:
        tokens.copy_(torch.tensor(of_tokens))
        lengths.copy_(torch.tensor(of_lengths, dtype=torch.int32))
        for row, pages in enumerate(of_pages):
            table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        backend.fill(of_lora, segments)
        live = [row for row, length in enumerate(of_lengths) if length]
        before = store.data.clone()
        with torch.inference_mode(), given_to_kernels(monkeypatch) as given:
            found = step(of_lora)[live]
        written = (store.data != before).nonzero()
        places = [(of_pages[row][-1], (of_lengths[row] - 1) % 16) for row in live]
        assert {(page, offset) for page, _, _, _, offset, _ in written.tolist()} == set(places)

        store.data.copy_(before)
        described = [[place, 1, of_lengths[row] - 1, row] for place, row in enumerate(live)]
        anew = attention.make_batch(table.cpu().numpy(), torch.tensor(described).numpy())
        with torch.inference_mode():
            now = tokens[live], keep[: len(live)], store, PagedRows(attention, anew)
            expected = forward(as_batch(*now, backend.make_batch(segments)))
            base = forward(as_batch(*now, None))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert float((found - base).abs().max()) > 0.01, "adapters count"
        traced.append([(name, grid, options) for name, grid, *_, options in given])
        numbers = [[one for one in arguments if not isinstance(one, tuple)] for _, _, *arguments, _ in given]
        traced[-1] += numbers
    assert traced[0] == traced[1]


class Operators(TorchDispatchMode):
    """Counts what torch computes: all but views and new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.__name__:
            self.counts[func.__name__] += 1
        return func(*args, **kwargs or {})


PRODUCTS = ("linear.default", "mm.default", "addmm.default")


def note_launch(launched: list[str], kernel: Any, *_: Any, **__: Any) -> None:
    launched.append(kernel.__name__)


def test_a_layer_of_a_decode_step_has_few_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch the four products and nothing else: no copy, and nothing that waits for the device."""
    counts = []
    for layers in (1, 3):
        config = transformers.LlamaConfig(**ONE_LAYER | {"num_hidden_layers": layers})
        loaded = load(save_model(config, tmp_path / str(layers)), "float32", DEVICE.type)
        pack(loaded, KERNELS)
        forward = loaded.fused
        assert isinstance(forward, GpuForward)
        store = PagedStore(4, loaded.shape, loaded.dtype, loaded.device)
        attention = GpuAttention(store.data)
        backend, _ = two_adapters(loaded)
        forward.use_lora(backend)
        table = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
        fixed, of_lora = attention.fixed_batch(2, table=table), backend.fixed_batch(2)
        zeros = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        launched: list[str] = []
        with monkeypatch.context() as patch, torch.inference_mode():
            note = partial(note_launch, launched)
            for module in (layer_kernels, gpu_attention, launches):
                patch.setattr(module, "launch", note)
            with Operators() as operators:
                forward(as_batch(zeros, zeros, store, PagedRows(attention, fixed), of_lora))
        counts.append(operators.counts + Counter(launched))
    of_a_layer = {name: (counts[1][name] - counts[0][name]) / 2 for name in counts[1]}
    print(f"launches of a layer: {of_a_layer}, in all {sum(of_a_layer.values()):.0f}")
    assert sum(of_a_layer.pop(name, 0) for name in PRODUCTS) == 4
    assert {name: count for name, count in of_a_layer.items() if count} == {
        "_add_norm_kernel": 2,
        "_rotate_and_write_kernel": 1,
        "attend_pieces": 1,
        "add_pieces": 1,
        "_silu_multiply_kernel": 1,
        "lora_shrink": 4,
        "lora_expand": 4,
    }


def two_adapters(loaded: LoadedModel) -> tuple[GpuBackend, list[PlacedAdapter]]:
    groups = [
        LinearGroup(loaded.linears[group[0]].in_features, {path: loaded.linears[path].out_features for path in group})
        for group in loaded.linear_groups
    ]
    generator = torch.Generator().manual_seed(1)
    layouts = [GpuBackend(groups, torch.empty(0, dtype=torch.uint8), loaded.dtype).layout(rank) for rank in (16, 32)]
    memory = torch.zeros(sum(layout.bytes for layout in layouts), dtype=torch.uint8, device=DEVICE)
    placed, offset = [], 0
    for number, layout in enumerate(layouts):
        run = memory[offset : offset + layout.bytes]
        for group in groups:
            for path, width in group.outputs.items():
                a, b = torch.randn(8, group.inputs, generator=generator), torch.randn(width, 8, generator=generator)
                layout.write(run, path, a.to(DEVICE), b.to(DEVICE), 0.2)
        placed.append(PlacedAdapter(str(number), offset, layout.rank, frozenset(loaded.linears)))
        offset += layout.bytes
    return GpuBackend(groups, memory, loaded.dtype), placed
