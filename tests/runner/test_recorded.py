"""The forward pass that is recorded from a model's modules, against those modules, for each family."""

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from structlog.testing import capture_logs

from motet.domain import BASE, Digest
from motet_kernels.cpp import PagedAttention
from motet_kernels.cpp.linear import PackedWeights
from motet_kernels.cpp.program import CompiledProgram
from motet_kernels.cpp.steps import OPERATIONS, Value
from motet_runner.execute.batch.flat_batch import FlatBatch
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.program import SWITCHED_ON, RecordedForward, RecordedModel
from motet_runner.execute.forward.record.row_handlers import HANDLERS
from motet_runner.execute.forward.record.row_trace import RowTrace
from motet_runner.execute.forward.record.row_views import CannotRecord, rows_for
from motet_runner.execute.forward.record.tracing import Tracing
from motet_runner.execute.forward.record.unpacked_steps import LinearOf
from motet_runner.execute.forward.trial import recorded_iteration
from motet_runner.execute.gate.gate import Gate
from motet_runner.execute.kernels.packed_model import PackedModel
from motet_runner.execute.kernels.roles import Kernels
from motet_runner.execute.load.load_model import load
from motet_runner.execute.pack.linear_packing import Packed
from testbed.compiled_kernels import CACHE, compiled_library
from tests.runner.engines import ask, kernels_named, make_engine, run
from tests.runner.engines import load as load_adapter
from tests.runner.families import BY_NAME, GROUPED, save_adapters, save_model
from tests.runner.test_fused import Tap
from tests.runner.trials import pack, probe_logits

OTHERS: dict[str, Any] = {
    "Llama with another activation": transformers.LlamaConfig(**GROUPED | {"hidden_act": "relu"}),
    "Cohere": transformers.CohereConfig(**GROUPED),
    "Granite": transformers.GraniteConfig(**GROUPED, residual_multiplier=0.5, embedding_multiplier=3.0),
    "OLMo 2": transformers.Olmo2Config(**GROUPED),
    "StableLM": transformers.StableLmConfig(**GROUPED),
    "Starcoder 2": transformers.Starcoder2Config(**GROUPED),
}
RECORDED = (
    "Gemma", "Gemma 2, soft caps and every other layer sliding", "Gemma 3, some layers sliding", "Phi", "Phi 3",
    "GPT-NeoX", "GPT-J", "GPT-2", "OPT", *OTHERS,
)  # fmt: skip
NEAR_TIE = 1e-4


def save(name: str, folder: Path) -> Path:
    return save_model(OTHERS[name] if name in OTHERS else BY_NAME[name].config, folder)


def recorded_logits(loaded: LoadedModel) -> torch.Tensor:
    library = compiled_library()
    pack(loaded, kernels_named("cpp"))
    assert isinstance(loaded.fused, RecordedForward)
    with torch.inference_mode():
        return probe_logits(loaded, lambda pages: PagedAttention(library, pages))


@pytest.mark.parametrize("name", RECORDED)
def test_logits_are_those_of_the_modules(name: str, tmp_path: Path) -> None:
    loaded = load(save(name, tmp_path), "float32", "cpu")
    with torch.inference_mode():
        expected = probe_logits(loaded)
    assert float((recorded_logits(loaded) - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))
    loaded.fused = None  # the modules compute with the packed weights
    with torch.inference_mode():
        assert float((probe_logits(loaded) - expected).abs().max()) <= 1e-4


@pytest.mark.parametrize("name", RECORDED)
def test_bfloats_are_as_near_to_the_truth_as_those_of_the_modules(name: str, tmp_path: Path) -> None:
    base = save(name, tmp_path)
    with torch.inference_mode():
        truth = probe_logits(load(base, "float32", "cpu"))
        model = load(base, "bfloat16", "cpu")
        theirs = probe_logits(model)
    error, allowed = (float((logits - truth).abs().max()) for logits in (recorded_logits(model), theirs))
    assert error <= 1.5 * allowed


def engine_with_adapters(base: Path, adapters: list[Path], **settings: Any) -> tuple[Any, Tap]:
    engine = make_engine(base, kernel_cache=CACHE, prefill_chunk_tokens=32, **settings)
    for number, adapter in enumerate(adapters):
        load_adapter(engine, Digest(f"sha256:{number}"), adapter)
    owners = [BASE, *(Digest(f"sha256:{number}") for number in range(len(adapters)))] * 2
    for time in ("first", "second"):  # then the adapters are there, so each engine has the same batches
        engine.diagnostics.worker.on_logits = tap = Tap()
        asked = [ask(f"{time}{n}", prompt=3 + 17 * n, max_tokens=20, adapter=who) for n, who in enumerate(owners)]
        run(engine, *asked)
    return engine, tap


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", ["Gemma", "GPT-NeoX"])
def test_neither_threads_nor_what_is_brought_together_change_a_bit(name: str, tmp_path: Path) -> None:
    """Whoever computes what: prompts beside decodes, rows of adapters and of the base."""
    compiled_library()
    base = save(name, tmp_path / "base")
    adapters = list(save_adapters(base, BY_NAME[name], tmp_path / "adapters"))
    before, results = torch.get_num_threads(), []
    try:
        for threads, switched_on in ((1, SWITCHED_ON), (2, frozenset[str]())):
            how = {"kernels": "cpp", "dtype": "bfloat16", "threads": threads, "switched_on": switched_on}
            engine, tap = engine_with_adapters(base, adapters, **how)
            assert isinstance(engine.diagnostics.loaded.fused, RecordedForward)
            results.append(tap.logits)
    finally:
        torch.set_num_threads(before)
    one, other = results
    assert other.keys() == one.keys()
    assert all(torch.equal(torch.stack(other[request]), torch.stack(one[request])) for request in one)


def test_memory_holds_one_copy_of_an_embedding_that_scales(tmp_path: Path) -> None:
    loaded = load(save("Gemma", tmp_path), "float32", "cpu")
    embedding = loaded.model.get_input_embeddings()
    tokens = torch.tensor([[1, 5, 9], [7, 0, 2]])
    with torch.inference_mode():
        expected = embedding(tokens)
        pack(loaded, kernels_named("cpp"))
        assert not embedding.weight.numel()
        assert not loaded.model.get_output_embeddings().weight.numel()
        assert torch.equal(embedding(tokens), expected)


class Unlike(torch.nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + tokens.unsqueeze(-1)


def test_an_embedding_that_computes_with_the_numbers_of_tokens_keeps_its_weights(tmp_path: Path) -> None:
    loaded = load(save("Gemma", tmp_path), "float32", "cpu")
    embedding = loaded.model.get_input_embeddings()
    embedding.__class__ = Unlike
    pack(loaded, kernels_named("cpp"))
    assert embedding.weight.numel()
    assert loaded.model.get_output_embeddings().weight.numel()
    assert loaded.fused is None


def packed_with_logs(loaded: LoadedModel, kernels: Kernels) -> tuple[PackedModel, Any]:
    packed = PackedModel(loaded, kernels, Gate(loaded))
    with capture_logs() as logs, torch.inference_mode():
        deque(packed.parts(), maxlen=0)
    return packed, logs


NOT_FUSED = "the model's modules serve, and not the forward pass of these kernels"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (lambda x: x * (2.0 if float(x[0, 0, 0]) > 1e9 else 1.0), "it looks at numbers of rows"),
        (lambda x: x.mul_(1.0), "it changes numbers in place"),
        (lambda x: x.flip(0).flip(0), "it computes flip"),
        (lambda x: x + torch.zeros(x.shape[1], 1), "it has numbers for each place in an iteration"),
        (lambda x: x[:, torch.arange(x.shape[1])], "it selects rows"),
    ],
)
def test_what_a_program_cannot_do_is_left_to_the_modules(changed: Any, why: str, tmp_path: Path) -> None:
    loaded = load(save("Gemma", tmp_path), "float32", "cpu")
    norm = loaded.model.model.norm
    forward = norm.forward
    norm.forward = lambda x: forward(changed(x))
    with torch.inference_mode():
        expected = probe_logits(loaded)
        packed, logs = packed_with_logs(loaded, kernels_named("cpp"))
        assert packed.fused is None
        (told,) = logs
        assert told["event"] == "forward_not_recorded"
        assert why in told["reason"]
        assert packed.note == f"{NOT_FUSED}: {told['reason']}", "people read this in the status"
        assert float((probe_logits(loaded) - expected).abs().max()) <= 1e-4


def first_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    half = torch.nn.functional.linear(x, weight[: len(weight) // 2])
    return torch.cat((half, half), -1)


def first_columns(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    width = x.shape[-1] // 2
    return torch.nn.functional.linear(x[..., :width], weight[:, :width])


def transposed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight.t())


@pytest.mark.parametrize("part", [first_rows, first_columns, transposed])
def test_a_view_of_a_weight_is_not_taken_for_the_weight(part: Any, tmp_path: Path) -> None:
    """The library would write as many numbers as the weight has outputs, beyond those that the row has room for."""
    loaded = load(save_model(transformers.LlamaConfig(**GROUPED), tmp_path), "float32", "cpu")
    linear = loaded.model.model.layers[0].self_attn.q_proj
    linear.forward = lambda x: part(x, linear.weight)
    with torch.inference_mode():
        recorded = RecordedModel(loaded)
    assert recorded.fault == "it multiplies with weights that are not packed"


def test_a_linear_has_room_for_all_that_its_weights_give() -> None:
    packed = Packed(PackedWeights(compiled_library(), [torch.zeros(8, 4, dtype=torch.float32)]), 0)
    linear = LinearOf(Value(4, torch.float32), 0, Value(7, torch.float32), "q", has_bias=False)
    with pytest.raises(CannotRecord, match="other numbers than those of its weights"):
        linear.with_weights({"q": packed}, {"q": None})


@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen3Config(**GROUPED, head_dim=34),
        transformers.LlamaConfig(**GROUPED | {"intermediate_size": 17 * 23, "vocab_size": 29 * 31}),
        transformers.LlamaConfig(**GROUPED | {"intermediate_size": 23}),
    ],
    ids=["half a head has 17 numbers", "four primes", "as many as rows"],
)
def test_no_dimension_of_a_model_is_taken_for_its_rows(config: Any, tmp_path: Path) -> None:
    loaded = load(save_model(config, tmp_path), "float32", "cpu")
    with torch.inference_mode():
        expected = probe_logits(loaded)
    assert float((recorded_logits(loaded) - expected).abs().max()) <= 1e-4 * max(1.0, float(expected.abs().max()))


def test_a_model_with_dimensions_of_all_sizes_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(save_model(transformers.LlamaConfig(**GROUPED), tmp_path), "float32", "cpu")
    monkeypatch.setattr("motet_runner.execute.forward.record.row_views.NUMBERS_OF_ROWS", (2, 17))
    assert RecordedModel(loaded).fault == "it has dimensions of too many sizes"


@pytest.mark.parametrize("broken", [(Tracing, "attend"), (Tracing, "program"), (CompiledProgram, "_assemble")])
def test_an_unexpected_error_costs_the_recording_and_nothing_else(
    broken: tuple[type, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(save("Gemma", tmp_path), "float32", "cpu")
    kernels = kernels_named("cpp")  # their own test makes a program
    with torch.inference_mode():
        expected = probe_logits(loaded)

    def fails(*_: object, **__: object) -> None:
        raise KeyError("nobody knows")

    monkeypatch.setattr(*broken, fails)
    packed, logs = packed_with_logs(loaded, kernels)
    assert packed.fused is None
    (told,) = logs
    assert (told["event"], told["reason"]) == ("forward_not_recorded", "KeyError: 'nobody knows'")
    assert packed.note.startswith("the model's modules serve, ")
    assert packed.note.endswith(": KeyError: 'nobody knows'")
    assert not any(linear.weight.numel() for linear in loaded.linears.values()), "they are packed"
    with torch.inference_mode():
        assert float((probe_logits(loaded) - expected).abs().max()) <= 1e-4


def look_up_in_rows(loaded: LoadedModel, batch: FlatBatch) -> torch.Tensor:
    """The first rows of this iteration, as if they were those of all iterations"""
    embedded = loaded.model.get_input_embeddings()(batch.input_ids)[0]
    return embedded.index_select(0, batch.positions[0])[batch.keep]


def look_up_in_a_table_of_this_iteration(_: LoadedModel, batch: FlatBatch) -> torch.Tensor:
    """As long as the iteration: in a longer one there are more positions"""
    table = torch.arange(batch.input_ids.shape[1], dtype=torch.float32)[:, None] * torch.ones(64)
    return torch.nn.functional.embedding(batch.positions[0], table)[batch.keep]


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (look_up_in_rows, "it looks up in numbers of rows"),
        (look_up_in_a_table_of_this_iteration, "it looks up in a table of 23 rows, where there may be 256"),
    ],
)
def test_a_table_is_recorded_only_if_every_iteration_has_the_same(forward: Any, why: str, tmp_path: Path) -> None:
    loaded = load(save("Gemma", tmp_path), "float32", "cpu")
    rows = rows_for(loaded.model)
    tracing = Tracing(RowTrace({}, loaded.dtype, rows, vocabulary=loaded.vocabulary, positions=loaded.max_positions))
    with torch.inference_mode(), pytest.raises(CannotRecord, match=why):
        tracing.run(recorded_iteration(loaded, *rows), lambda batch: forward(loaded, batch))


def test_a_recording_that_gives_other_logits_does_not_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(save("Gemma", tmp_path), "float32", "cpu")
    monkeypatch.setitem(HANDLERS, "mean", HANDLERS["sum"])
    with capture_logs() as logs:
        pack(loaded, kernels_named("cpp"))
    assert loaded.fused is None
    assert [line["event"] for line in logs] == ["steps_brought_together", "fused_forward_differs"]


def test_tokens_and_positions_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    loaded = load(save("GPT-2", tmp_path), "float32", "cpu")
    recorded_logits(loaded)
    program = loaded.fused.program
    looks_up = [one for one in program._instructions if one.operation == OPERATIONS.index("look_up")]  # noqa: SLF001
    assert looks_up
    for one in looks_up:
        before, one.number = one.number, 3  # the probe has more
        with pytest.raises(IndexError, match="a token or a position"), torch.inference_mode():
            probe_logits(loaded, lambda pages: PagedAttention(compiled_library(), pages))
        one.number = before


def test_experts_are_left_to_the_modules(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**GROUPED, num_local_experts=4)
    save_model(config, tmp_path)
    loaded = load(tmp_path, "float32", "cpu")
    pack(loaded, kernels_named("cpp"))
    assert loaded.fused is None
