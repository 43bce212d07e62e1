"""What is brought together in the recordings of families: with it and without it, a forward pass gives the same bits.
What nearly has the shape stays as it was recorded."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from structlog.testing import capture_logs

from motet_kernels.cpp import PagedAttention
from motet_kernels.cpp.peepholes import PEEPHOLES, brought_together
from motet_kernels.cpp.steps import Compute, Place, Step, Value
from motet_runner.execute import packed_model, recorded
from motet_runner.execute.model import LoadedModel, load
from motet_runner.execute.packed_model import pack
from motet_runner.execute.recorded import CHOICE, SWITCHED_ON, RecordedForward
from motet_runner.execute.recording import Recording
from motet_runner.execute.row_views import KEPT, ROWS
from motet_runner.execute.trial import Trial, recorded_iteration, text
from tests.runner.engines import kernels_named
from tests.runner.families import GROUPED, SMALL, save_model
from tests.runner.trials import probe_logits
from tests.support.compiled_kernels import compiled_library

LLAMA = {"modules_norm": 5, "sum_and_norm": 4, "rotate": 4, "silu_times": 2}
MODELS: dict[str, tuple[Any, dict[str, int], dict[str, int]]] = {
    "Llama": (transformers.LlamaConfig(**GROUPED), LLAMA, LLAMA),
    "biases": (transformers.LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True), LLAMA, LLAMA),
    "norms of queries and keys": (
        transformers.Qwen3Config(**GROUPED, head_dim=16),
        LLAMA | {"modules_norm": 9},
        LLAMA | {"modules_norm": 9},
    ),
    "tied embeddings that are scaled, weights of 1 + w after the norm is rounded, a gate with GELU": (
        transformers.GemmaConfig(**GROUPED, head_dim=16),
        {"modules_norm": 5, "sum_and_norm": 4, "rotate": 4},
        {"rotate": 4},
    ),
    "residuals that are multiplied": (
        transformers.GraniteConfig(**GROUPED, residual_multiplier=0.5, embedding_multiplier=3.0),
        LLAMA,
        LLAMA,
    ),
    "rotation of a part of each head, layer norms": (
        transformers.PhiConfig(**SMALL),
        {"rotate": 4},
        {"rotate": 4},
    ),
}
"""Each with what is found in float32 and in bfloat16"""


def saved(config: Any, folder: Path) -> Path:
    """A base whose norms and biases are not those of an untrained model"""
    save_model(config, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def packed(folder: Path, dtype: str, switched_on: Collection[str]) -> tuple[LoadedModel, dict[str, Any]]:
    """As a recorded forward pass, with what the log says"""
    loaded = load(folder, dtype, "cpu")
    with (
        patch.object(packed_model, "fused_forward", lambda *_: None),
        patch.object(recorded, "SWITCHED_ON", switched_on),
        capture_logs() as logs,
    ):
        pack(loaded, kernels_named("cpp"))
    assert isinstance(loaded.fused, RecordedForward), logs
    (told,) = (line for line in logs if line["event"] == "steps_brought_together")
    return loaded, {kind: count for kind, count in told.items() if kind in PEEPHOLES}


def logits_of(loaded: LoadedModel) -> torch.Tensor:
    with torch.inference_mode():
        return probe_logits(loaded, lambda pages: PagedAttention(compiled_library(), pages))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_models_keep_their_bits(name: str, dtype: str, tmp_path: Path) -> None:
    compiled_library()
    config, *expected = MODELS[name]
    folder = saved(config, tmp_path)
    plain, nothing = packed(folder, dtype, ())
    assert nothing == {}
    together, found = packed(folder, dtype, SWITCHED_ON)
    assert found == expected[dtype == "bfloat16"]
    assert torch.equal(logits_of(together), logits_of(plain))


@pytest.mark.parametrize("kind", PEEPHOLES)
def test_each_kind_is_switched_off_alone(kind: str, tmp_path: Path) -> None:
    _, found = packed(save_model(transformers.LlamaConfig(**GROUPED), tmp_path), "float32", SWITCHED_ON - {kind})
    assert found == {other: count for other, count in LLAMA.items() if other != kind and not needs(other, kind)}


def needs(kind: str, other: str) -> bool:
    return (kind, other) == ("sum_and_norm", "modules_norm")


# -- what nearly has the shape ---------------------------------------------------------------------------------------

WIDTH, HEADS = 32, 2
X = torch.Tensor


def norm(x: X, weight: X) -> X:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def weight(dtype: torch.dtype) -> X:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(dtype)


def sums_in_float32(x: X, angles: X) -> X:
    total = x.float() + x.float()
    return norm(total, weight(torch.float32)).to(x.dtype)


def reads_the_sum_before_the_norm(x: X, angles: X) -> X:
    total = x + x
    other = total * total
    return norm(total, weight(x.dtype)) + other


def reads_the_squares_again(x: X, angles: X) -> X:
    wide = x.float()
    squares = wide.pow(2)
    root = torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6)
    return weight(x.dtype) * (wide * root).to(x.dtype) + squares.to(x.dtype)


def another_numbers_mean(x: X, angles: X) -> X:
    wide, other = x.float(), (x * 2).float()
    return weight(x.dtype) * (wide * torch.rsqrt(other.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def heads_of(x: X) -> X:
    return x.view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2)


def turned(x: X, angles: X, partners: Callable[[X], X]) -> X:
    cosines, sines = (of.to(x.dtype).unsqueeze(1) for of in (angles.cos(), angles.sin()))
    heads = heads_of(x)
    return (heads * cosines + partners(heads) * sines).transpose(1, 2).reshape(1, -1, WIDTH)


def halves(x: X) -> tuple[X, X]:
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def the_other_half_is_negative(x: X, angles: X) -> X:
    return turned(x, angles, lambda heads: torch.cat((halves(heads)[1], -halves(heads)[0]), -1))


def halves_stay_where_they_are(x: X, angles: X) -> X:
    return turned(x, angles, lambda heads: torch.cat((-halves(heads)[0], halves(heads)[1]), -1))


def partners_of_other_numbers(x: X, angles: X) -> X:
    other = x * 2
    return turned(x, angles, lambda _: torch.cat((-halves(heads_of(other))[1], halves(heads_of(other))[0]), -1))


def the_gate_is_read_again(x: X, angles: X) -> X:
    gate = torch.nn.functional.silu(x)
    return gate * x + gate


def a_gate_with_gelu(x: X, angles: X) -> X:
    return torch.nn.functional.gelu(x) * x


def a_gate_times_a_constant(x: X, angles: X) -> X:
    return torch.nn.functional.silu(x) * weight(x.dtype)


NEARLY: dict[Callable[[X, X], X], dict[str, int]] = {
    reads_the_sum_before_the_norm: {"modules_norm": 1},
    sums_in_float32: {"modules_norm": 1, "sum_and_norm": 1},
    reads_the_squares_again: {},
    another_numbers_mean: {},
    the_other_half_is_negative: {},
    halves_stay_where_they_are: {},
    partners_of_other_numbers: {},
    the_gate_is_read_again: {},
    a_gate_with_gelu: {},
    a_gate_times_a_constant: {},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    folder = save_model(transformers.LlamaConfig(**GROUPED), tmp_path_factory.mktemp("small"))
    return {dtype: load(folder, dtype, "cpu") for dtype in ("float32", "bfloat16")}


def recorded_steps(loaded: LoadedModel, forward: Callable[[X, X], X]) -> tuple[list[Step], Value]:
    """Of what this makes of embeddings and angles"""
    table = torch.randn(loaded.vocabulary, WIDTH, generator=torch.Generator().manual_seed(0)).to(loaded.dtype)
    frequencies = torch.linspace(0.1, 1.0, WIDTH // HEADS)

    def logits(batch: Any) -> X:
        x = torch.nn.functional.embedding(batch.input_ids, table)
        return forward(x, batch.positions[..., None].float() * frequencies)[0][batch.keep]

    recording = Recording({}, 0, loaded.dtype, vocabulary=loaded.vocabulary, positions=loaded.max_positions)
    with torch.inference_mode():
        result = recording.run(recorded_iteration(loaded, ROWS, KEPT), logits)
    return recording.program({}, {}), result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("forward", NEARLY)
def test_what_nearly_has_the_shape_stays(
    forward: Callable[[X, X], X], dtype: str, small: dict[str, LoadedModel]
) -> None:
    steps, logits = recorded_steps(small[dtype], forward)
    _, found = brought_together(steps, logits)
    assert found == NEARLY[forward]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_right_shapes_are_found(dtype: str, small: dict[str, LoadedModel]) -> None:
    """So that those above are not missed for another reason"""

    def forward(x: X, angles: X) -> X:
        total = x + x
        normed = norm(total, weight(x.dtype))
        partners = turned(normed, angles, lambda heads: torch.cat((-halves(heads)[1], halves(heads)[0]), -1))
        return torch.nn.functional.silu(partners) * total

    steps, logits = recorded_steps(small[dtype], forward)
    left, found = brought_together(steps, logits)
    assert found == dict.fromkeys(PEEPHOLES, 1)
    (turn,) = (step for step in left if isinstance(step, Compute) and step.operation == "rotate")
    assert isinstance(turn.inputs[0], Place)


# -- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("switched_on", [SWITCHED_ON, SWITCHED_ON - {CHOICE}], ids=["on", "off"])
def test_a_program_chooses_the_largest_logits(switched_on: frozenset[str], tmp_path: Path) -> None:
    folder = save_model(transformers.GemmaConfig(**GROUPED, head_dim=16), tmp_path)
    loaded, _ = packed(folder, "float32", switched_on)
    tokens = [text(count, stride=7, first=3, vocabulary=loaded.vocabulary) for count in (5, 3)]
    trial = Trial(loaded, tokens, attention=lambda pages: PagedAttention(compiled_library(), pages))
    with torch.inference_mode():
        batch = trial.batch({0: 5, 1: 3})
        logits = loaded.forward(batch)
    expected = logits.argmax(1).tolist() if CHOICE in switched_on else None
    assert (batch.chosen if batch.chosen is None else batch.chosen.tolist()) == expected
