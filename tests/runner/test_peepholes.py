"""What is brought together in the recordings of families: with it and without it, a forward pass gives the same bits.
What nearly has the shape stays as it was recorded."""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from structlog.testing import capture_logs

from motet_kernels.cpp import PagedAttention
from motet_kernels.cpp.attention import no_attention
from motet_kernels.cpp.peepholes import PEEPHOLES, Together, brought_together
from motet_kernels.cpp.peepholes.matching import Found, Uses
from motet_kernels.cpp.program import CompiledProgram
from motet_kernels.cpp.steps import ByPosition, Compute
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.program import CHOICE, PREFETCH, SWITCHED_ON, RecordedForward
from motet_runner.execute.forward.record.row_trace import RowTrace
from motet_runner.execute.forward.record.row_views import rows_for
from motet_runner.execute.forward.record.tracing import Tracing
from motet_runner.execute.forward.trial import Trial, recorded_iteration, text
from motet_runner.execute.load.load_model import load
from testbed.compiled_kernels import compiled_library
from tests.runner.engines import kernels_named
from tests.runner.families import GROUPED, SMALL, save_model
from tests.runner.trials import pack, probe_logits


def counts(**found: int) -> dict[str, int]:
    return dict.fromkeys(PEEPHOLES, 0) | found


ROTATES = {"by_position": 2, "rotate": 4, "write_rotated": 2}
LLAMA = counts(modules_norm=5, sum_and_norm=4, **ROTATES, silu_times=2)
NORMS_QUERIES = LLAMA | {"modules_norm": 9, "norm_and_rotate": 4}
MODELS: dict[str, tuple[Any, dict[str, int], dict[str, int]]] = {
    "Llama": (transformers.LlamaConfig(**GROUPED), LLAMA, LLAMA),
    "biases": (transformers.LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True), LLAMA, LLAMA),
    "norms of queries and keys": (transformers.Qwen3Config(**GROUPED, head_dim=16), NORMS_QUERIES, NORMS_QUERIES),
    "tied embeddings that are scaled, weights of 1 + w after the norm, a gate with GELU": (
        transformers.GemmaConfig(**GROUPED, head_dim=16),
        LLAMA | {"silu_times": 0},
        LLAMA | {"silu_times": 0},
    ),
    "two ropes, norms of queries and of what is added": (
        transformers.Gemma3TextConfig(
            **GROUPED, head_dim=16, sliding_window=24, layer_types=["sliding_attention", "full_attention"]
        ),
        NORMS_QUERIES | {"by_position": 4, "modules_norm": 13, "silu_times": 0},
        NORMS_QUERIES | {"by_position": 4, "modules_norm": 13, "silu_times": 0},
    ),
    "norms of all queries at once, and rotations in float32": (
        transformers.Olmo2Config(**GROUPED),
        LLAMA | {"modules_norm": 9, "sum_and_norm": 1},
        LLAMA | {"modules_norm": 9, "sum_and_norm": 1, "rotate": 0, "write_rotated": 0},
    ),
    "residuals that are multiplied": (
        transformers.GraniteConfig(**GROUPED, residual_multiplier=0.5, embedding_multiplier=3.0),
        LLAMA,
        LLAMA,
    ),
    "rotation of a part of each head, layer norms": (
        transformers.PhiConfig(**SMALL),
        counts(by_position=2, rotate=4),
        counts(by_position=2, rotate=4),
    ),
    "a residual that is read twice": (
        transformers.GPTNeoXConfig(**SMALL | {"hidden_size": 64}),
        counts(by_position=2, rotate=4),
        counts(by_position=2, rotate=4),
    ),
}
"""Each with what is found in float32 and in bfloat16"""


def packed(folder: Path, dtype: str, switched_on: Collection[str] = SWITCHED_ON) -> tuple[LoadedModel, list[Any]]:
    """As a recorded forward pass, with what the log says"""
    loaded = load(folder, dtype, "cpu")
    with capture_logs() as logs:
        pack(loaded, kernels_named("cpp"), switched_on)
    return loaded, logs


def found(logs: list[Any]) -> dict[str, int]:
    (told,) = (line for line in logs if line["event"] == "steps_brought_together")
    return {kind: count for kind, count in told.items() if kind in PEEPHOLES}


def logits_of(loaded: LoadedModel) -> torch.Tensor:
    with torch.inference_mode():
        return probe_logits(loaded, lambda pages: PagedAttention(compiled_library(), pages))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_models_keep_their_bits(name: str, dtype: str, tmp_path: Path) -> None:
    compiled_library()
    config, *expected = MODELS[name]
    folder = save_model(config, tmp_path)
    plain, nothing = packed(folder, dtype, ())
    assert found(nothing) == {}
    together, logs = packed(folder, dtype)
    assert found(logs) == expected[dtype == "bfloat16"]
    assert torch.equal(logits_of(together), logits_of(plain))


NEEDED = {"sum_and_norm": {"modules_norm"}, "norm_and_rotate": {"modules_norm", "rotate"}, "write_rotated": {"rotate"}}


def qwen3(folder: Path) -> Path:
    """It has steps of all kinds."""
    return save_model(MODELS["norms of queries and keys"][0], folder)


@pytest.mark.parametrize("kind", PEEPHOLES)
def test_each_kind_is_switched_off_alone(kind: str, tmp_path: Path) -> None:
    _, logs = packed(qwen3(tmp_path), "float32", SWITCHED_ON - {kind})
    rest = {other: count for other, count in NORMS_QUERIES.items() if other != kind}
    assert found(logs) == {other: 0 if kind in NEEDED.get(other, ()) else count for other, count in rest.items()}


@pytest.mark.parametrize("kind", PEEPHOLES)
def test_an_error_of_one_kind_costs_that_kind_alone(kind: str, tmp_path: Path) -> None:
    def fails(*_: object) -> None:
        raise KeyError("nobody knows")

    folder = qwen3(tmp_path)
    with patch.dict(PEEPHOLES, {kind: fails}):
        loaded, logs = packed(folder, "float32")
    assert isinstance(loaded.fused, RecordedForward)
    (told,) = (line for line in logs if line["event"] == "steps_left_apart")
    assert (told["kind"], told["reason"]) == (kind, "KeyError: 'nobody knows'")
    assert found(logs)[kind] == 0
    others = {other for other, count in found(logs).items() if not count}
    assert others == {kind, *(other for other, needed in NEEDED.items() if kind in needed)}


def other_table(by: Compute) -> Compute:
    table, positions = by.inputs
    assert isinstance(table.of, ByPosition)
    swapped = {"cos": "sin", "sin": "cos"}
    steps = [replace(step, operation=swapped.get(step.operation, step.operation)) for step in table.of.steps]
    return replace(by, inputs=(replace(table, of=replace(table.of, steps=steps)), positions))


def exchanged(by: Compute) -> Compute:
    first, second, *others = by.inputs
    return replace(by, inputs=(second, first, *others))


def turned_the_other_way(by: Compute) -> Compute:
    x, cosines, sines, *others = by.inputs
    return replace(by, inputs=(x, sines, cosines, *others))


def other_epsilon(by: Compute) -> Compute:
    return replace(by, real=0.5)


WRONG: dict[str, Callable[[Compute], Compute]] = {
    "by_position": other_table, "modules_norm": other_epsilon, "sum_and_norm": other_epsilon,
    "rotate": turned_the_other_way, "norm_and_rotate": other_epsilon, "write_rotated": turned_the_other_way,
    "silu_times": exchanged,
}  # fmt: skip


@pytest.mark.parametrize("kind", PEEPHOLES)
def test_a_wrong_one_of_each_kind_does_not_serve(kind: str, tmp_path: Path) -> None:
    right = PEEPHOLES[kind]

    def wrong(uses: Uses, number: int) -> Found | None:
        one = right(uses, number)
        return one and replace(one, by=WRONG[kind](one.by))

    folder = qwen3(tmp_path)
    with patch.dict(PEEPHOLES, {kind: wrong}):
        loaded, logs = packed(folder, "bfloat16")
    assert loaded.fused is None
    assert found(logs) == NORMS_QUERIES
    assert [line["event"] for line in logs][-1] == "fused_forward_differs"


def test_queries_and_keys_may_share_a_norm(tmp_path: Path) -> None:
    folder = qwen3(tmp_path)
    results = []
    for switched_on in ((), SWITCHED_ON):
        loaded = load(folder, "bfloat16", "cpu")
        for layer in loaded.model.model.layers:
            layer.self_attn.k_norm = layer.self_attn.q_norm
        with capture_logs() as logs:
            pack(loaded, kernels_named("cpp"), switched_on)
        results.append(logits_of(loaded))
    assert found(logs) == NORMS_QUERIES
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_positions_beyond_the_table_make_it_longer(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motet_kernels.positions.FIRST_POSITIONS", 8)
    folder = save_model(transformers.LlamaConfig(**GROUPED), tmp_path)
    plain, together = (packed(folder, dtype, switched_on)[0] for switched_on in ((), SWITCHED_ON))
    assert torch.equal(logits_of(together), logits_of(plain))
    program = together.fused.program
    assert program._tabled >= 21  # noqa: SLF001
    with pytest.raises(IndexError, match="a position"):
        tokens, positions, keep = torch.tensor([3]), torch.tensor([program._tabled]), torch.tensor([0])  # noqa: SLF001
        program(tokens, positions, keep, attention=no_attention(compiled_library()), lora=None)


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


def the_mean_of_a_product(x: X, angles: X) -> X:
    wide, other = x.float(), (x * 2).float()
    return weight(x.dtype) * (wide * torch.rsqrt((wide * other).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def a_weight_of_one_and_more(x: X, angles: X) -> X:
    return norm(x, 1 + weight(x.dtype))


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


def the_first_half_twice(x: X, angles: X) -> X:
    return turned(x, angles, lambda heads: torch.cat((-halves(heads)[0], halves(heads)[0]), -1))


def partners_of_other_numbers(x: X, angles: X) -> X:
    other = x * 2
    return turned(x, angles, lambda _: torch.cat((-halves(heads_of(other))[1], halves(heads_of(other))[0]), -1))


def cosines_of_other_numbers(x: X, angles: X) -> X:
    return x + (x * 2).cos() + (angles.repeat_interleave(HEADS, -1) + x).sin()


def cosines_of_three_ropes(x: X, angles: X) -> X:
    """Their tables would take much memory."""
    for factor in (1.0, 0.5, 0.25):
        both = (angles * factor).cos() + (angles * factor).sin()
        x = x * both.repeat_interleave(HEADS, -1).to(x.dtype)
    return x


def squares_of_positions(x: X, angles: X) -> X:
    return x * (angles * angles).repeat_interleave(HEADS, -1)


def the_gate_is_read_again(x: X, angles: X) -> X:
    gate = torch.nn.functional.silu(x)
    return gate * x + gate


def the_gate_times_itself(x: X, angles: X) -> X:
    gate = torch.nn.functional.silu(x)
    return gate * gate


def a_gate_with_gelu(x: X, angles: X) -> X:
    return torch.nn.functional.gelu(x) * x


def one_gate_for_all_numbers(x: X, angles: X) -> X:
    return torch.nn.functional.silu(x[..., :1]) * x


def a_part_of_a_gate(x: X, angles: X) -> X:
    first, second = halves(x)
    product = torch.nn.functional.silu(x)[..., : first.shape[-1]] * second
    return torch.cat((product, product), -1)


def a_gate_times_a_constant(x: X, angles: X) -> X:
    return torch.nn.functional.silu(x) * weight(x.dtype)


NEARLY: dict[Callable[[X, X], X], dict[str, int]] = {
    reads_the_sum_before_the_norm: {"modules_norm": 1},
    sums_in_float32: {"modules_norm": 1, "sum_and_norm": 1},
    reads_the_squares_again: {},
    the_mean_of_a_product: {},
    a_weight_of_one_and_more: {"modules_norm": 1},
    another_numbers_mean: {},
    the_other_half_is_negative: {"by_position": 2},
    halves_stay_where_they_are: {"by_position": 2},
    the_first_half_twice: {"by_position": 2},
    partners_of_other_numbers: {"by_position": 2},
    cosines_of_three_ropes: {},
    cosines_of_other_numbers: {},
    squares_of_positions: {},
    the_gate_is_read_again: {},
    the_gate_times_itself: {},
    a_gate_with_gelu: {},
    a_gate_times_a_constant: {"silu_times": 1},
    one_gate_for_all_numbers: {},
    a_part_of_a_gate: {},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    folder = save_model(transformers.LlamaConfig(**GROUPED), tmp_path_factory.mktemp("small"))
    return {dtype: load(folder, dtype, "cpu") for dtype in ("float32", "bfloat16")}


def recorded_steps(loaded: LoadedModel, forward: Callable[[X, X], X]) -> Together:
    """What this makes of embeddings and angles. What is brought together gives the bits of the steps themselves."""
    table = torch.randn(loaded.vocabulary, WIDTH, generator=torch.Generator().manual_seed(0)).to(loaded.dtype)
    frequencies = torch.linspace(0.1, 1.0, WIDTH // HEADS)

    def logits(batch: Any) -> X:
        x = torch.nn.functional.embedding(batch.input_ids, table)
        return forward(x, batch.positions[..., None].float() * frequencies)[0][batch.keep]

    rows = rows_for(loaded.model)
    trace = RowTrace({}, loaded.dtype, rows, vocabulary=loaded.vocabulary, positions=loaded.max_positions)
    tracing = Tracing(trace)
    with torch.inference_mode():
        result = tracing.run(recorded_iteration(loaded, *rows), logits)
    apart = tracing.program({}, {})
    together = brought_together(apart, positions=trace.positions, logits=result)
    assert not together.failed
    library, rows_of = compiled_library(), torch.arange(7)
    values = {"tokens": trace.tokens, "positions": trace.positions, "logits": result}
    bits = [
        CompiledProgram(library, steps, **values)(
            rows_of * 3, rows_of * 11, rows_of, attention=no_attention(library), lora=None, longest=100
        )
        for steps in (apart, together.steps)
    ]
    assert not bits[0].isnan().any()
    assert torch.equal(*bits)
    return together


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("forward", NEARLY)
def test_what_nearly_has_the_shape_stays(
    forward: Callable[[X, X], X], dtype: str, small: dict[str, LoadedModel]
) -> None:
    assert recorded_steps(small[dtype], forward).counts == counts(**NEARLY[forward])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_right_shapes_are_found(dtype: str, small: dict[str, LoadedModel]) -> None:
    """So that those above are not missed for another reason"""

    def forward(x: X, angles: X) -> X:
        total = x + x
        normed = norm(total, weight(x.dtype))
        partners = turned(normed, angles, lambda heads: torch.cat((-halves(heads)[1], halves(heads)[0]), -1))
        return torch.nn.functional.silu(partners) * total

    together = recorded_steps(small[dtype], forward)
    assert together.counts == counts(by_position=2, modules_norm=1, sum_and_norm=1, rotate=1, silu_times=1)


# -- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("switched_on", [SWITCHED_ON, SWITCHED_ON - {CHOICE}], ids=["on", "off"])
def test_a_program_chooses_the_largest_logits(switched_on: Collection[str], tmp_path: Path) -> None:
    folder = save_model(transformers.GemmaConfig(**GROUPED, head_dim=16), tmp_path)
    loaded, _ = packed(folder, "float32", switched_on)
    tokens = [text(count, stride=7, first=3, vocabulary=loaded.vocabulary) for count in (5, 3)]
    trial = Trial(loaded, tokens, attention=lambda pages: PagedAttention(compiled_library(), pages))
    with torch.inference_mode():
        batch = trial.batch({0: 5, 1: 3})
        logits = loaded.forward(batch)
    expected = logits.argmax(1).tolist() if CHOICE in switched_on else None
    assert (batch.chosen if batch.chosen is None else batch.chosen.tolist()) == expected


@pytest.mark.parametrize("switched_on", [SWITCHED_ON, SWITCHED_ON - {PREFETCH}], ids=["on", "off"])
def test_a_program_prefetches_what_adapters_read(switched_on: Collection[str], tmp_path: Path) -> None:
    """It changes no bit: `test_neither_threads_nor_what_is_brought_together_change_a_bit` has adapters."""
    loaded, _ = packed(save_model(transformers.LlamaConfig(**GROUPED), tmp_path), "float32", switched_on)
    assert loaded.fused.program._program.prefetches == (PREFETCH in switched_on)  # noqa: SLF001 # what the library reads
