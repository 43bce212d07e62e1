"""Torch's fused forward, and the recorded one, against the modules that they stand for: the same logits, with adapters,
for each family that both serve."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from structlog.testing import capture_logs

from motet.domain import BASE, Digest, RequestId
from motet_kernels import torch_linear
from motet_kernels.cpp.linear import PackedWeights
from motet_kernels.decoder_weights import PACKED_TYPES
from motet_kernels.positions import FIRST_POSITIONS
from motet_kernels.torch_linear import TorchWeights
from motet_runner.engine import Engine
from motet_runner.execute.forward.fused import TorchForward
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.program import RecordedForward
from motet_runner.execute.forward.protocol import Forward
from motet_runner.execute.gate.gate import Gate
from motet_runner.execute.kernels import packed_model
from motet_runner.execute.kernels.packed_model import PackedModel
from motet_runner.execute.kernels.roles import Kernels
from motet_runner.execute.load.load_model import load
from testbed.compiled_kernels import CACHE, compiled_library
from tests.runner.engines import ask, kernels_named, make_engine, make_engine_of_modules, run
from tests.runner.engines import load as load_adapter
from tests.runner.random_models import EIGHT, ENDS, VOCABULARY, llama, save_adapter, save_base
from tests.runner.trials import pack, probe_logits

SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
} | ENDS  # fmt: skip
CONFIGS: dict[str, Any] = {
    "Llama": llama(),
    "Llama with biases and odd sizes": transformers.LlamaConfig(
        **SMALL | {"hidden_size": 72, "intermediate_size": 101, "vocab_size": 509},
        head_dim=20, attention_bias=True, mlp_bias=True,
    ),
    "Llama 3 rope": transformers.LlamaConfig(
        **SMALL,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    ),
    "Qwen2": transformers.Qwen2Config(**SMALL),
    "Qwen3, head and embedding in one": transformers.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "Mistral, sliding window": transformers.MistralConfig(**SMALL, sliding_window=24),
}  # fmt: skip
NEAR_TIE = 1e-4
"""Two tokens whose logits are nearer may change places."""


KERNELS = ["cpp", "torch"]


def needs(kernels: str) -> None:
    if kernels == "cpp":
        compiled_library()


class Tap:
    """The logits of each request, in the order of its tokens."""

    def __init__(self) -> None:
        self.logits: dict[RequestId, list[torch.Tensor]] = {}

    def __call__(self, requests: list[RequestId], logits: torch.Tensor) -> None:
        for request, row in zip(requests, logits, strict=True):
            self.logits.setdefault(request, []).append(row.float().clone())


def save(name: str, folder: Path) -> Path:
    """A base whose norms and biases are not those of an untrained model."""
    base = save_base("llama", folder, config=CONFIGS[name])
    torch.manual_seed(1)  # a model that was made before leaves the generator as it was
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1 if "norm" in path else 0, 0.2)
    model.save_pretrained(base)
    return base


def served(base: Path, adapters: dict[Digest, Path], *, make: Any = make_engine, **settings: Any) -> tuple[Engine, Tap]:
    engine = make(base, **settings)
    engine.diagnostics.worker.on_logits = tap = Tap()
    for digest, folder in adapters.items():
        load_adapter(engine, digest, folder)
    owners = [BASE, *adapters, BASE, *adapters]
    asked = [
        ask(f"r{number}", prompt=5 + 13 * number, max_tokens=20, adapter=owner) for number, owner in enumerate(owners)
    ]
    run(engine, *asked)
    return engine, tap


OF_TORCH = ("Llama with biases and odd sizes", "Qwen3, head and embedding in one", "Mistral, sliding window")
"""What the others have, too"""


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        pytest.param(name, kernels, marks=() if kernels == "cpp" or name in OF_TORCH else pytest.mark.soak)
        for name in CONFIGS
        for kernels in KERNELS
    ],
)
def test_logits_are_those_of_the_modules(name: str, kernels: str, tmp_path: Path) -> None:
    """Prompts in chunks beside decodes, rows of four adapters and of the base, past the window."""
    needs(kernels)
    base = save(name, tmp_path / "base")
    adapters = {
        Digest(f"sha256:{index}"): save_adapter(base, "llama", spec, tmp_path / str(index), seed=index)
        for index, spec in enumerate(EIGHT[:4])
    }
    how = {"dtype": "float32", "kernel_cache": CACHE, "prefill_chunk_tokens": 32}
    modules, expected = served(base, adapters, make=make_engine_of_modules, **how)
    engine, ours = served(base, adapters, kernels=kernels, **how)
    assert isinstance(engine.diagnostics.loaded.fused, TorchForward if kernels == "torch" else RecordedForward)
    assert modules.diagnostics.loaded.fused is None
    assert ours.logits.keys() == expected.logits.keys()
    for request, rows in expected.logits.items():
        compared = 0
        for theirs, row in zip(rows, ours.logits[request], strict=True):
            assert float((row - theirs).abs().max()) <= NEAR_TIE
            compared += 1
            if int(theirs.argmax()) != int(row.argmax()):
                best = theirs.topk(2).values
                assert float(best[0] - best[1]) <= NEAR_TIE
                break  # from here on the two have other tokens
        assert compared


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", CONFIGS)
def test_bfloats_are_as_near_to_the_truth_as_those_of_the_modules(name: str, kernels: str, tmp_path: Path) -> None:
    base = save(name, tmp_path / "base")
    with torch.inference_mode():
        truth = probe_logits(load(base, "float32", "cpu"))
        model = load(base, "bfloat16", "cpu")
        theirs = probe_logits(model)
    ours = fused_logits(model, kernels_named(kernels))
    error, allowed = float((ours - truth).abs().max()), float((theirs - truth).abs().max())
    assert error <= 1.5 * allowed


def fused_logits(loaded: LoadedModel, kernels: Kernels) -> torch.Tensor:
    pack(loaded, kernels)
    assert loaded.fused is not None
    with torch.inference_mode():
        return probe_logits(loaded, kernels.attention)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["Llama", "Qwen3, head and embedding in one"])
def test_memory_holds_one_copy_of_the_weights(name: str, kernels: str, tmp_path: Path) -> None:
    loaded = load(save(name, tmp_path / "base"), "float32", "cpu")
    before = sum(parameter.nbytes for parameter in loaded.model.parameters())
    with torch.inference_mode():
        expected = probe_logits(loaded)
    pack(loaded, kernels_named(kernels))
    left = sum(parameter.nbytes for parameter in loaded.model.parameters())
    packed = {id(forward.func.__self__): forward.func.__self__ for forward in packed_forwards(loaded)}
    sizes = [weights.columns[-1] * weights.inputs * weights.dtype.itemsize for weights in packed.values()]
    assert before <= left + sum(sizes) <= 1.05 * before
    loaded.fused = None  # the modules compute with the packed weights
    with torch.inference_mode():
        assert float((probe_logits(loaded) - expected).abs().max()) <= 1e-4


def test_while_weights_are_packed_memory_holds_those_of_one_group_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(save("Llama", tmp_path / "base"), "float32", "cpu")
    alive: weakref.WeakSet[PackedWeights] = weakref.WeakSet()

    class Counted(PackedWeights):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            alive.add(self)

    monkeypatch.setattr("motet_runner.execute.pack.linear_packing.PackedWeights", Counted)

    originals = [weakref.ref(parameter) for parameter in loaded.model.parameters()]

    def held() -> int:
        ours = sum(parameter.nbytes for one in originals if (parameter := one()) is not None)
        return ours + sum(weights._packed.nbytes for weights in alive)  # noqa: SLF001

    before = held()
    model = PackedModel(loaded, kernels_named("cpp"), Gate(loaded))
    with torch.inference_mode():
        most = max(held() for _ in model.parts())
    assert model.fused is not None
    assert most <= 1.05 * before + max(weights._packed.nbytes for weights in alive)  # noqa: SLF001


def packed_forwards(loaded: LoadedModel) -> list[Any]:
    linears = [*loaded.linears.values(), loaded.model.get_output_embeddings()]
    return [linear.__dict__["forward"] for linear in linears]


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_other_families_compute_with_packed_linears_of_torch(family: str, tmp_path: Path) -> None:
    loaded = load(save_base(family, tmp_path / "base"), "float32", "cpu")
    with torch.inference_mode():
        expected = probe_logits(loaded)
        pack(loaded, kernels_named("torch"))
        assert loaded.fused is None
        assert packed_forwards(loaded)
        assert float((probe_logits(loaded) - expected).abs().max()) <= 1e-4


def test_a_model_that_its_fused_forward_does_not_equal_keeps_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(save("Llama", tmp_path / "base"), "float32", "cpu")
    with torch.inference_mode():
        expected = probe_logits(loaded)
    make = packed_model.fused_forward

    def of_another_model(*given: Any) -> Forward | None:
        fused = make(*given)
        assert isinstance(fused, TorchForward)
        weights = fused._decoder._weights  # noqa: SLF001
        fused._decoder._weights = replace(weights, final_norm=weights.final_norm * 1.01)  # noqa: SLF001
        return fused

    monkeypatch.setattr(packed_model, "fused_forward", of_another_model)
    with capture_logs() as logs:
        pack(loaded, kernels_named("torch"))
    assert loaded.fused is None
    assert [line["event"] for line in logs] == ["fused_forward_differs"]
    with torch.inference_mode():
        assert float((probe_logits(loaded) - expected).abs().max()) <= 1e-4


def test_what_torchs_fused_forward_does_not_compute_is_left_to_the_modules(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SMALL | {"hidden_act": "gelu"})
    loaded = load(save_base("llama", tmp_path / "base", config=config), "float32", "cpu")
    pack(loaded, kernels_named("torch"))
    assert loaded.fused is None


@pytest.mark.parametrize("kernels", KERNELS)
def test_halfs_stay_as_they_are(kernels: str, tmp_path: Path) -> None:
    loaded = load(save_base("llama", tmp_path / "base"), "float16", "cpu")
    pack(loaded, kernels_named(kernels))
    assert loaded.fused is None
    assert all("forward" not in linear.__dict__ for linear in loaded.linears.values())


@pytest.mark.parametrize("kernels", KERNELS)
def test_positions_beyond_the_first_table_are_rotated(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet_kernels.positions.FIRST_POSITIONS", 8)
    assert FIRST_POSITIONS > 8
    loaded = load(save("Llama", tmp_path / "base"), "float32", "cpu")
    with torch.inference_mode():
        expected = probe_logits(loaded)
    assert float((fused_logits(loaded, kernels_named(kernels)) - expected).abs().max()) <= 1e-4


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_that_is_not_finite_fails_alone(kernels: str, tmp_path: Path) -> None:
    needs(kernels)
    base = save("Llama", tmp_path / "base")
    _, expected = served(base, {}, make=make_engine_of_modules, dtype="float32", kernel_cache=CACHE)
    engine = make_engine(base, kernels=kernels, dtype="float32", kernel_cache=CACHE)
    engine.diagnostics.worker.on_logits = ours = Tap()
    engine.diagnostics.loaded.model.get_input_embeddings().weight[7] = float("nan")
    asked = [ask(f"r{number}", prompt=5 + 13 * number, max_tokens=20) for number in range(2)]
    run(engine, *asked, ask("broken", prompt=(3, 7, 5), max_tokens=20))
    for number in range(2):
        request = RequestId(f"r{number}")
        for theirs, row in zip(expected.logits[request], ours.logits[request], strict=True):
            assert float((row - theirs).abs().max()) <= NEAR_TIE


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_threads_change_no_bit(tmp_path: Path) -> None:
    """Whoever computes what: prompts beside decodes, rows of adapters and of the base."""
    compiled_library()
    base = save("Llama", tmp_path / "base")
    adapters = {
        Digest(f"sha256:{index}"): save_adapter(base, "llama", spec, tmp_path / str(index), seed=index)
        for index, spec in enumerate(EIGHT[:2])
    }
    before, results = torch.get_num_threads(), []
    how = {"kernels": "cpp", "dtype": "bfloat16", "kernel_cache": CACHE, "prefill_chunk_tokens": 32}
    try:
        for threads in (1, 2, 5):
            engine, tap = served(base, adapters, threads=threads, **how)
            assert isinstance(engine.diagnostics.loaded.fused, RecordedForward)
            tap.logits.clear()  # from now on the adapters are there, so each engine has the same batches
            owners = [BASE, *adapters, *adapters]
            asked = [ask(f"s{n}", prompt=3 + 17 * n, max_tokens=20, adapter=owner) for n, owner in enumerate(owners)]
            run(engine, *asked)
            results.append(tap.logits)
    finally:
        torch.set_num_threads(before)
    one, *several = results
    for other in several:
        assert other.keys() == one.keys()
        assert all(torch.equal(torch.stack(other[request]), torch.stack(one[request])) for request in one)


@pytest.mark.parametrize("without", ["the operators", "the same numbers", "mkldnn"])
def test_without_torchs_own_packing_the_numbers_are_the_same(
    without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(save("Llama with biases and odd sizes", tmp_path / "base"), "float32", "cpu")
    with torch.inference_mode():
        expected = probe_logits(loaded)
    torch_linear.reorders.cache_clear()
    if without == "mkldnn":
        monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    elif without == "the operators":
        monkeypatch.setattr(TorchWeights, "parts", raises(AttributeError("no attribute _reorder_linear_weight")))
    else:
        right = TorchWeights.added_to
        monkeypatch.setattr(TorchWeights, "added_to", lambda self, y, x, bias=None: right(self, y, x, bias) * 1.01)
    assert not torch_linear.reorders(torch.float32)
    monkeypatch.undo()
    ours = fused_logits(loaded, kernels_named("torch"))
    torch_linear.reorders.cache_clear()
    assert float((ours - expected).abs().max()) <= 1e-4
    assert not any(forward.func.__self__._reordered for forward in packed_forwards(loaded))  # noqa: SLF001


def raises(error: Exception) -> Any:
    def raising(*_: object) -> None:
        raise error

    return raising


def test_few_numbers_of_rows_are_multiplied() -> None:
    """oneDNN keeps a program for each of them."""
    sizes = [torch_linear.padded(rows) for rows in range(1, 1025)]
    assert all(rows <= size <= max(8 + rows, 1.5 * rows) for rows, size in enumerate(sizes, 1))
    assert all(torch_linear.padded(size) == size for size in sizes)
    assert len(set(sizes)) < 25


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 70, 300])
def test_rows_of_padding_change_no_other(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x, y = (
        torch.randn(shape, generator=generator, dtype=torch.float32) for shape in ((24, 40), (rows, 40), (rows, 24))
    )
    weights = TorchWeights([weight], reordered=True)
    for _ in weights.parts([weight]):
        pass
    product = torch.nn.functional.linear(x, weight)
    assert torch.allclose(weights.all_of(x), product, atol=1e-4)
    assert torch.allclose(weights.all_of(x[None]), product[None], atol=1e-4)
    assert torch.allclose(weights.added_to(y, x), y + product, atol=1e-4)


@pytest.mark.parametrize("dtype", PACKED_TYPES)
def test_torch_packs_here(dtype: torch.dtype) -> None:
    """This version of torch has the operators: what is tried is also used."""
    assert torch_linear.reorders(dtype)
    weights = TorchWeights([torch.zeros(4, 8, dtype=dtype)], reordered=True)
    for _ in weights.parts([torch.zeros(4, 8, dtype=dtype)]):
        pass
    assert weights.all_of(torch.zeros(0, 8, dtype=dtype)).shape == (0, 4), "an iteration may keep no row"
    with pytest.raises(ValueError, match="another order"):
        weights.rows(torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("reordered", [False, True])
@pytest.mark.parametrize("dtype", PACKED_TYPES)
def test_the_squares_of_weights_that_torch_has_packed_are_those_of_their_rows(
    dtype: torch.dtype, reordered: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    pair = [torch.randn(rows, 40, generator=generator, dtype=torch.float32).to(dtype) for rows in (300, 24)]
    weights = TorchWeights(pair, reordered=reordered)
    for _ in weights.parts(pair):
        pass
    for index, weight in enumerate(pair):
        torch.testing.assert_close(weights.squares(index), weight.double().square().sum(1).float())
