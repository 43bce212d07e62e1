"""The gate lets nothing through that computes something else than the modules, and all that computes the same."""

import re
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from structlog.testing import capture_logs
from torch.nn.functional import gelu, silu

from motet.errors import SetupError
from motet_kernels import Segment, TorchBackend, torch_decoder
from motet_kernels.cpp import CppBackend, PagedAttention
from motet_kernels.cpp.linear import PackedWeights
from motet_kernels.cpp.program import CompiledProgram
from motet_kernels.cpp.steps import Attend, ByPosition, Compute, Multiply
from motet_kernels.torch_decoder import TorchDecoder
from motet_kernels.torch_linear import TorchWeights
from motet_runner.engine import Engine
from motet_runner.execute.batch.page_groups import DecodeGroup, PromptChunk
from motet_runner.execute.forward import program as recorded
from motet_runner.execute.forward.fused import TorchForward
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.program import RecordedForward
from motet_runner.execute.forward.protocol import Forward
from motet_runner.execute.gate import memory_needs, texts
from motet_runner.execute.gate.allowed_error import linear_fault
from motet_runner.execute.gate.gate import Gate
from motet_runner.execute.gate.same_experts import SameExperts, choices_of
from motet_runner.execute.gate.yardstick import Yardstick
from motet_runner.execute.kernels.packed_model import PackedModel
from motet_runner.execute.kernels.roles import Kernels
from motet_runner.execute.load.load_model import load
from motet_runner.execute.tune.thread_choice import threads_to_judge
from motet_runner.memory.paged import PagedStore
from testbed.compiled_kernels import built, compiled_library
from tests.runner.engines import ask, kernels_named, make_engine, run
from tests.runner.families import save_model
from tests.runner.random_models import ENDS, VOCABULARY, llama, save_base

pytestmark = pytest.mark.usefixtures("judged_each_time")

WINDOW = 12
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
} | ENDS  # fmt: skip
BIASED = {"attention_bias": True, "mlp_bias": True}
SOME_SLIDE = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, Any] = {
    "torch": transformers.Qwen3Config(**SMALL, **SOME_SLIDE, use_sliding_window=True, attention_bias=True),
    "cpp": transformers.LlamaConfig(**SMALL, **BIASED),
    "recorded": transformers.Gemma2Config(
        **SMALL, **SOME_SLIDE, query_pre_attn_scalar=16, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
}
FORWARDS = {"torch": TorchForward, "cpp": RecordedForward, "recorded": RecordedForward}
DTYPES = ("bfloat16", "float32")


@dataclass
class Judged:
    """A right forward pass, and the gate that lets it through"""

    loaded: LoadedModel
    kernels: Kernels
    gate: Gate
    forward: Any
    program: dict[str, Any]
    """What a recorded one was made of"""

    def fault(self, forward: Forward | None = None) -> str:
        return ended(self.gate.fault_of_forward(self.kernels, forward or self.forward))


def ended(parts: Any) -> str:
    with torch.inference_mode():
        while True:
            try:
                next(parts)
            except StopIteration as end:
                return end.value


def judged(kind: str, dtype: str, folder: Path, *, seed: int = 0) -> Judged:
    if kind != "torch":
        compiled_library()
    loaded = load(save_model(MODELS[kind], folder, seed=seed), dtype, "cpu")
    kernels = kernels_named("torch" if kind == "torch" else "cpp")
    gate, program = Gate(loaded, threads=(1, 2)), {}

    def noted(library: Any, steps: Any, **values: Any) -> CompiledProgram:
        program.update(values, steps=steps)
        return CompiledProgram(library, steps, **values)

    if kernels.library is not None:
        assert ended(gate.fault_of(kernels)) == ""
    packed = PackedModel(loaded, kernels, gate)
    with torch.inference_mode(), patch.object(recorded, "CompiledProgram", noted):
        for _ in packed.parts():
            pass
    assert packed.note == ""
    assert isinstance(packed.fused, FORWARDS[kind])
    return Judged(loaded, kernels, gate, packed.fused, program)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Judged]:
    known: dict[tuple[str, str], Judged] = {}

    def of(kind: str, dtype: str) -> Judged:
        if (kind, dtype) not in known:
            known[kind, dtype] = judged(kind, dtype, tmp_path_factory.mktemp("base"))
        return known[kind, dtype]

    return of


@contextmanager
def changed(owner: Any, **to: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in to}
    for name, value in to.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


Mutant = Callable[[Any], AbstractContextManager[Any]]
"""Gets the forward pass, which does one thing wrong inside."""


# -- torch's fused forward, its attention and its adapters ---------------------------------------------------------


def weights(**to: Callable[[Any], Any]) -> Mutant:
    return lambda forward: changed(
        forward._decoder,  # noqa: SLF001
        _weights=replace(forward._decoder._weights, **{name: of(forward._decoder._weights) for name, of in to.items()}),  # noqa: SLF001
    )


def first_layer(**to: Callable[[Any], Any]) -> Mutant:
    def layers(of: Any) -> Any:
        first, *others = of.layers
        return [replace(first, **{name: change(of) for name, change in to.items()}), *others]

    return weights(layers=layers)


def how(**to: Any) -> Mutant:
    """Of the first layer's attention"""
    return lambda forward: changed(forward, _how=[forward._how[0]._replace(**to), *forward._how[1:]])  # noqa: SLF001


def attended(change: Callable[[torch.Tensor], torch.Tensor], *, layer: int = 0) -> Mutant:
    """Other queries, keys and values"""

    def mutant(forward: Any) -> AbstractContextManager[Any]:
        attend = forward._attend  # noqa: SLF001

        def other(batch: Any, number: int, heads: torch.Tensor) -> torch.Tensor:
            return attend(batch, number, change(heads.clone()) if number == layer else heads)

        return changed(forward, _attend=other)

    return mutant


def of_class(owner: Any, name: str, instead: Callable[..., Any]) -> Mutant:
    """`instead` gets what is there, and the arguments."""
    there = getattr(owner, name)

    def other(*args: Any, **options: Any) -> Any:
        return instead(there, *args, **options)

    return lambda _: changed(owner, **{name: other})


def head_is(number: int, of: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def copied(heads: torch.Tensor) -> torch.Tensor:
        heads[:, number] = heads[:, of]
        return heads

    return copied


def without_residual(added_to: Any, self: TorchWeights, y: Any, x: Any, bias: Any = None, *, inputs: int) -> Any:
    return added_to(self, torch.zeros_like(y) if self.inputs == inputs else y, x, bias)


def unturned(turned: slice) -> Callable[..., torch.Tensor]:
    def some(rotated: Any, self: Any, layer: Any, qkv: torch.Tensor, rotation: Any) -> torch.Tensor:
        nothing = torch.ones_like(rotation[0]), torch.zeros_like(rotation[1])
        plain = rotated(self, layer, qkv.clone(), nothing)
        heads = rotated(self, layer, qkv, rotation)
        heads[:, turned] = plain[:, turned]
        return heads

    return some


def scaled_lora(factor: float) -> Callable[..., None]:
    def scaled(add: Any, self: Any, y: torch.Tensor, *rest: Any) -> None:
        before = y.clone()
        add(self, y, *rest)
        y.copy_(before + factor * (y - before))

    return scaled


def without_down(add: Any, self: Any, y: Any, x: Any, *rest: Any) -> None:
    if x.shape[1] != SMALL["intermediate_size"]:
        add(self, y, x, *rest)


def moved(by: int) -> Callable[..., Any]:
    def make(make_batch: Any, self: Any, segments: Any) -> Any:
        first, *others = segments
        missed = [Segment(first.start + by, first.stop, first.adapter), *others]
        return make_batch(self, missed if others else segments)  # a batch always has a row with an adapter

    return make


def exchanged(make_batch: Any, self: Any, segments: Any) -> Any:
    adapters = [segment.adapter for segment in segments][::-1]
    return make_batch(
        self, [Segment(one.start, one.stop, other) for one, other in zip(segments, adapters, strict=True)]
    )


def chunk_mask(mask: Any, self: Any, *rest: Any, by: int) -> Any:
    return mask(replace(self, before=self.before + by, masks={}) if self.before else self, *rest)


def decode_mask(mask: Any, self: Any, *rest: Any, by: int) -> Any:
    return mask(replace(self, lengths=self.lengths + by, masks={}), *rest)


def layer_that(change: Callable[..., torch.Tensor]) -> Mutant:
    return of_class(TorchDecoder, "_layer", change)


def averaged(norm: torch.Tensor) -> torch.Tensor:
    return torch.full_like(norm, float(norm.float().mean()))


OF_TORCH: dict[str, Mutant] = {
    "no MLP": lambda _: changed(torch_decoder, silu=torch.zeros_like),
    "ReLU for SiLU": lambda _: changed(torch_decoder, silu=torch.relu),
    "GELU for SiLU": lambda _: changed(torch_decoder, silu=gelu),
    "SiLU twice": lambda _: changed(torch_decoder, silu=lambda x: silu(silu(x))),
    "the final norm is averaged": weights(final_norm=lambda of: averaged(of.final_norm)),
    "the final norm is another one": weights(final_norm=lambda of: of.layers[0].mlp_norm),
    "the final norm has no weight": weights(final_norm=lambda of: torch.ones_like(of.final_norm)),
    "epsilon is 0.1": weights(epsilon=lambda _: 0.1),
    "an epsilon of 1e-2": weights(epsilon=lambda _: 1e-2),
    "a norm before attention is averaged": first_layer(attention_norm=lambda of: averaged(of.layers[0].attention_norm)),
    "a norm before the MLP is averaged": first_layer(mlp_norm=lambda of: averaged(of.layers[0].mlp_norm)),
    "the norms of q and k change places": first_layer(
        q_norm=lambda of: of.layers[0].k_norm, k_norm=lambda of: of.layers[0].q_norm
    ),
    "q and k are not normed": first_layer(q_norm=lambda _: None),
    "gate and up of another layer": first_layer(gate_up=lambda of: of.layers[1].gate_up),
    "o of another layer": first_layer(o=lambda of: of.layers[1].o),
    "layers in another order": weights(layers=lambda of: of.layers[::-1]),
    "no biases of q, k and v": lambda forward: changed(forward._decoder, _biases=[(None, None)] * 2),  # noqa: SLF001
    "o's bias is left out": first_layer(o_bias=lambda _: None),
    "a layer is left out": layer_that(lambda call, self, n, x, *rest: x if n else call(self, n, x, *rest)),
    "a layer computes twice": layer_that(lambda call, self, n, x, *rest: call(self, n, call(self, n, x, *rest), *rest)),
    "no residual around attention": of_class(
        TorchWeights, "added_to", lambda *args: without_residual(*args, inputs=SMALL["hidden_size"])
    ),
    "no residual around the MLP": of_class(
        TorchWeights, "added_to", lambda *args: without_residual(*args, inputs=SMALL["intermediate_size"])
    ),
    "k is not rotated": of_class(TorchDecoder, "_rotated", unturned(slice(4, 6))),
    "q is not rotated": of_class(TorchDecoder, "_rotated", unturned(slice(0, 4))),
    "one head is not rotated": of_class(TorchDecoder, "_rotated", unturned(slice(3, 4))),
    "attention's scale is off by a tenth": how(scale=1.1 * 16**-0.5),
    "attention has no scale": how(scale=1.0),
    "a window is one shorter": how(window=WINDOW - 1),
    "a window is one longer": how(window=WINDOW + 1),
    "no window": how(window=None),
    "a soft cap that is not the model's": how(softcap=1.0),
    "one head's v is another's": attended(head_is(6, 7)),
    "one head's k is another's": attended(head_is(4, 5)),
    "one head's q is another's": attended(head_is(0, 1)),
    "a head attends to other keys and values": attended(lambda heads: heads[:, [2, 1, 0, 3, 4, 5, 6, 7]]),
    "k and v change places": attended(lambda heads: heads[:, [0, 1, 2, 3, 6, 7, 4, 5]]),
    "a chunk does not see its newest key": of_class(PromptChunk, "mask", lambda *args: chunk_mask(*args, by=-1)),
    "a chunk sees a later key": of_class(PromptChunk, "mask", lambda *args: chunk_mask(*args, by=1)),
    "a decode does not see its own key": of_class(DecodeGroup, "mask", lambda *args: decode_mask(*args, by=-1)),
    "a decode sees one key too many": of_class(DecodeGroup, "mask", lambda *args: decode_mask(*args, by=1)),
    "the scale of adapters is off by a tenth": of_class(TorchBackend, "add_lora_together", scaled_lora(1.1)),
    "adapters are left out": of_class(TorchBackend, "add_lora_together", scaled_lora(0.0)),
    "adapters count twice": of_class(TorchBackend, "add_lora_together", scaled_lora(2.0)),
    "down has no adapters": of_class(TorchBackend, "add_lora_together", without_down),
    "an adapter misses its first row": of_class(TorchBackend, "make_batch", moved(1)),
    "two adapters change places": of_class(TorchBackend, "make_batch", exchanged),
}


# -- the compiled kernels' batches ---------------------------------------------------------------------------------


def sequences_with(column: int, by: int) -> Mutant:
    """The column of `SequenceAttention.make_batch`'s table, of all that have tokens before"""

    def other(make: Any, self: Any, table: Any, sequences: Any) -> Any:
        sequences = sequences.copy()
        sequences[sequences[:, 2] > 0, column] += by
        return make(self, table, sequences)

    return of_class(PagedAttention, "make_batch", other)


OF_CPP: dict[str, Mutant] = {
    "chunks do not know of a token before them": sequences_with(2, -1),
    "an adapter misses its first row": of_class(CppBackend, "make_batch", moved(1)),
    "two adapters change places": of_class(CppBackend, "make_batch", exchanged),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "name"), [*(("torch", name) for name in OF_TORCH), *(("cpp", name) for name in OF_CPP)]
)
def test_a_forward_pass_that_does_one_thing_wrong_is_refused(
    kind: str, name: str, dtype: str, right: Callable[[str, str], Judged]
) -> None:
    of = right(kind, dtype)
    with (OF_TORCH if kind == "torch" else OF_CPP)[name](of.forward):
        fault = of.fault()
    assert fault.startswith("its logits are off by "), fault


@pytest.mark.parametrize("kind", FORWARDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_right_forward_pass_is_let_through(kind: str, dtype: str, right: Callable[[str, str], Judged]) -> None:
    assert right(kind, dtype).fault() == ""


@pytest.mark.soak
@pytest.mark.parametrize("kind", FORWARDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(1, 21))
def test_the_right_forward_pass_of_twenty_models_is_let_through(
    kind: str, dtype: str, seed: int, tmp_path: Path
) -> None:
    judged(kind, dtype, tmp_path, seed=seed)


def kept_in_order(call: Any, self: Any, batch: Any) -> torch.Tensor:
    return call(self, replace(batch, keep=batch.keep.sort().values))


def all_rows(call: Any, self: Any, batch: Any) -> torch.Tensor:
    return call(self, replace(batch, keep=torch.arange(batch.tokens), choices=None))


def first_rows(call: Any, self: Any, batch: Any) -> torch.Tensor:
    return call(self, replace(batch, keep=torch.arange(len(batch.keep))))


def zeros_in_long_iterations(call: Any, self: Any, batch: Any) -> torch.Tensor:
    return call(self, batch) * (batch.tokens < 512)


def other_last_tokens(call: Any, self: Any, batch: Any) -> torch.Tensor:
    ids = batch.input_ids.clone()
    ids.view(-1)[512:] = 0
    return call(self, replace(batch, input_ids=ids))


def other_end(call: Any, self: Any, batch: Any) -> torch.Tensor:
    """The last token of one of the short sequences"""
    ids = batch.input_ids.clone()
    last = {int(sequence): row for row, sequence in enumerate(batch.line.sequence_of)}
    if batch.tokens == texts.CROWD_TOKENS:
        ids.view(-1)[last[20]] = 0
    return call(self, replace(batch, input_ids=ids))


@pytest.mark.parametrize("kind", FORWARDS)
@pytest.mark.parametrize(
    "wrong", [kept_in_order, all_rows, first_rows, zeros_in_long_iterations, other_last_tokens, other_end]
)
def test_a_forward_pass_that_takes_tokens_for_others_is_refused(
    wrong: Callable[..., torch.Tensor], kind: str, right: Callable[[str, str], Judged]
) -> None:
    of = right(kind, "float32")
    with of_class(FORWARDS[kind], "__call__", wrong)(None):
        fault = of.fault()
    assert fault.startswith("it gives logits of other tokens" if wrong is all_rows else "its logits are off by"), fault


def test_every_row_that_a_long_iteration_computes_is_judged(right: Callable[[str, str], Judged]) -> None:
    """By itself, or by a later token of its sequence"""
    of = right("torch", "float32")
    call, judged_rows = TorchForward.__call__, []

    def noted(self: TorchForward, batch: Any) -> torch.Tensor:
        if batch.tokens == texts.CROWD_TOKENS:
            judged_rows.append((batch.keep.tolist(), batch.line.sequence_of))
        return call(self, batch)

    with patch.object(TorchForward, "__call__", noted):
        assert of.fault() == ""
    [(kept, sequence_of)] = judged_rows
    assert len({*kept}) == texts.SOME
    assert {*range(texts.CROWD_TOKENS - 16, texts.CROWD_TOKENS)} <= {*kept}
    last = {int(sequence): row for row, sequence in enumerate(sequence_of)}
    assert {*last.values()} <= {*kept}


def test_many_right_tokens_do_not_hide_a_wrong_one(right: Callable[[str, str], Judged]) -> None:
    of = right("torch", "float32")
    call, yardstick = TorchForward.__call__, of.gate.yardstick
    assert yardstick is not None

    def one_off(by: float) -> Callable[..., torch.Tensor]:
        """As many times what is allowed for it"""

        def other(self: TorchForward, batch: Any) -> torch.Tensor:
            logits = call(self, batch).clone()
            if batch.tokens == texts.CROWD_TOKENS:
                place = texts.places_of(batch, texts.CROWD)[batch.keep][7]
                allowed = torch.maximum(yardstick.times**2 * yardstick.own[place], yardstick.least[place])
                logits[7] += by * allowed.sqrt()
            batch.chosen = None
            return logits

        return other

    with patch.object(TorchForward, "__call__", one_off(3)):
        assert of.fault() == ""
    with patch.object(TorchForward, "__call__", one_off(8)):
        assert re.fullmatch(r"its logits are off by \S+ for one token, and rounding explains \S+", of.fault())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", FORWARDS)
def test_a_row_alone_is_judged_with_each_number_of_threads(
    kind: str, threads: int, right: Callable[[str, str], Judged]
) -> None:
    """With an adapter: threads then share out what one of them does for many rows."""
    of = right(kind, "bfloat16")
    before, call = torch.get_num_threads(), FORWARDS[kind].__call__

    def other(self: Any, batch: Any) -> torch.Tensor:
        alone = (batch.tokens, torch.get_num_threads()) == (1, threads)
        logits = call(self, replace(batch, lora=None) if alone else batch)
        batch.chosen = None
        return logits

    with patch.object(FORWARDS[kind], "__call__", other):
        assert of.fault().startswith("its logits are off by ")
    assert torch.get_num_threads() == before


def test_the_threads_that_are_judged_are_those_that_may_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motet_runner.execute.tune.thread_choice.usable_cores", lambda: 6)
    assert threads_to_judge(None) == [1, 6]
    assert threads_to_judge(3) == [torch.get_num_threads()], "it has been set by then"
    monkeypatch.setattr("motet_runner.execute.tune.thread_choice.usable_cores", lambda: 1)
    assert threads_to_judge(None) == [1]


def first_linear_for_others(_: Any, self: CppBackend, rank: int, changed: frozenset[str], *, scales: bool) -> Any:
    """As if an offset that is negative, which a linear has that the adapter does not change, were 0"""
    of_rank = self.layout(rank).offsets
    return np.array([(*(of_rank[one] if one in changed else (0, 0)), -1) for one in self._linears], dtype=np.int64)


def test_an_adapter_that_changes_some_linears_is_judged(right: Callable[[str, str], Judged]) -> None:
    of = right("cpp", "bfloat16")
    with of_class(CppBackend, "_find_offsets", first_linear_for_others)(None):
        assert of.fault().startswith("its logits are off by ")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FORWARDS)
def test_a_token_far_from_the_first_one_is_judged(kind: str, dtype: str, right: Callable[[str, str], Judged]) -> None:
    of = right(kind, dtype)
    call, longest = FORWARDS[kind].__call__, []

    def other(self: Any, batch: Any) -> torch.Tensor:
        longest.append(batch.longest)
        return call(self, replace(batch, positions=torch.where(batch.positions < 64, batch.positions, 64)))

    with patch.object(FORWARDS[kind], "__call__", other):
        assert of.fault().startswith("its logits are off by ")
    assert max(longest) == SMALL["max_position_embeddings"] - 15


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 80])
def test_a_window_that_is_wider_than_the_texts_is_judged(window: int | None, dtype: str, tmp_path: Path) -> None:
    config = transformers.MistralConfig(**SMALL, sliding_window=64)
    with patch.dict(MODELS, {"cpp": config}):
        of = judged("cpp", dtype, tmp_path)
    steps = [replace(step, window=window) if isinstance(step, Attend) else step for step in of.program.pop("steps")]
    fault = of.fault(RecordedForward(CompiledProgram(compiled_library(), steps, **of.program)))
    assert fault.startswith("its logits are off by ")


def test_a_token_that_is_not_the_likeliest_is_noticed(right: Callable[[str, str], Judged]) -> None:
    of = right("cpp", "float32")
    call = RecordedForward.__call__

    def other(self: RecordedForward, batch: Any) -> torch.Tensor:
        logits = call(self, batch)
        batch.chosen = (batch.chosen + 1) % VOCABULARY
        return logits

    with patch.object(RecordedForward, "__call__", other):
        assert of.fault() == "it chooses tokens whose logits are not the largest"


# -- what the gate is there for ------------------------------------------------------------------------------------


@pytest.fixture
def compiled() -> Iterator[None]:
    """The library was built before: the test of what is built would notice, too."""
    compiled_library()
    library = built()
    with patch("motet_runner.execute.kernels.kernel_choice.build", lambda *_: library):
        yield


def tiny(folder: Path) -> Path:
    return save_base("llama", folder, config=llama())


def changed_over(base: Path, **settings: Any) -> Engine:
    engine = make_engine(base, kernels="auto", **settings)
    while engine.idle() is not None:
        time.sleep(0.01)
    return engine


def unscaled(attend: Any, self: PagedAttention, *rows: Any, scale: float, **others: Any) -> torch.Tensor:
    return attend(self, *rows, scale=1.1 * scale, **others)


def raises(error: Exception) -> Callable[..., Any]:
    def instead(*_: Any, **__: Any) -> Any:
        raise error

    return instead


WRONG_ATTENTION = of_class(PagedAttention, "attend", unscaled)


def test_kernels_that_are_asked_for_and_wrong_end_the_start(tmp_path: Path, compiled: None) -> None:
    says = r"kernels is cpp, and its kernels cannot serve: its logits are off"
    with WRONG_ATTENTION(None), pytest.raises(SetupError, match=says):
        make_engine(tiny(tmp_path), kernels="cpp")


def test_kernels_whose_attention_is_wrong_leave_the_model_to_torch(tmp_path: Path, compiled: None) -> None:
    with WRONG_ATTENTION(None), capture_logs() as logs:
        engine = changed_over(tiny(tmp_path))
    assert [line for line in logs if line["event"] == "compiled_kernels_do_not_serve"]
    state = engine.report().kernels
    assert state.serving == "torch"
    assert state.note.startswith("the compiled kernels do not serve: its logits are off by ")
    assert isinstance(engine.diagnostics.loaded.fused, TorchForward)
    assert len(run(engine, ask("a")).tokens["a"]) == 40


def test_what_could_not_be_judged_does_not_serve_and_is_not_judged_again(tmp_path: Path, compiled: None) -> None:
    """Memory ends in the truth. Wrong kernels must not serve for that, nor may right ones cost it again."""
    ended_at: list[object] = []

    def short(*args: Any) -> Any:
        ended_at.append(args)
        raise MemoryError("none left")

    with WRONG_ATTENTION(None), patch("motet_runner.execute.gate.yardstick.wide", short):
        engine = changed_over(tiny(tmp_path))
    assert len(ended_at) == 1
    state = engine.report().kernels
    assert (state.serving, engine.diagnostics.loaded.fused) == ("torch", None)
    assert state.note == (
        "the model's modules serve, and not the forward pass of these kernels: not judged: MemoryError: none left"
    )


@pytest.mark.parametrize("error", [MemoryError("none left"), RuntimeError("no thread")], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("when", ["at the start", "later"])
def test_kernels_that_fail_while_they_are_judged_leave_the_model_to_torch(
    error: Exception, when: str, tmp_path: Path, compiled: None
) -> None:
    base = tiny(tmp_path)
    expected = run(make_engine(base, kernels="torch"), ask("a")).tokens
    with (
        changed(PagedAttention, attend=raises(error)),
        changed(Future, done=lambda build: build.exception() is None) if when == "at the start" else nullcontext(),
    ):
        engine = make_engine(base, kernels="auto") if when == "at the start" else changed_over(base)
        assert run(engine, ask("a")).tokens == expected
    state = engine.report().kernels
    reason = f"the compiled kernels do not serve: not judged: {type(error).__name__}: {error}"
    assert (state.serving, state.note) == ("torch", reason)


def test_kernels_whose_packed_products_fail_serve_with_the_weights_as_they_are(tmp_path: Path, compiled: None) -> None:
    with changed(PackedWeights, linear=raises(RuntimeError("no thread"))):
        engine = changed_over(tiny(tmp_path))
        state = engine.report().kernels
        assert state.serving.startswith("cpp")
        assert state.note == "some weights are not packed: RuntimeError: no thread"
        assert len(run(engine, ask("a")).tokens["a"]) == 40


def test_memory_that_ends_in_a_forward_pass_is_no_shortage_of_room_for_weights(tmp_path: Path, compiled: None) -> None:
    with changed(RecordedForward, __call__=raises(MemoryError("none left"))):
        engine = changed_over(tiny(tmp_path))
        state = engine.report().kernels
        assert state.serving.startswith("cpp")
        without = "the model's modules serve, and not the forward pass of these kernels"
        assert state.note == f"{without}: not judged: MemoryError: none left"
        assert len(run(engine, ask("a")).tokens["a"]) == 40


def test_a_yardstick_that_was_not_finished_is_none(tmp_path: Path) -> None:
    loaded = load(save_model(MODELS["cpp"], tmp_path), "float32", "cpu")
    kernels, gate = kernels_named("cpp"), Gate(loaded)
    with patch("motet_runner.execute.gate.yardstick.TorchBackend", raises(MemoryError("none left"))):
        assert ended(gate.fault_of(kernels)) == "not judged: MemoryError: none left"
    assert ended(gate.fault_of(kernels)) == "not judged: MemoryError: none left", "it is decided"
    assert ended(gate.fault_of_forward(kernels, None)) == "not judged: MemoryError: none left"
    assert ended(Gate(loaded).fault_of(kernels)) == ""


def test_where_memory_has_no_room_to_judge_nothing_is_computed(tmp_path: Path) -> None:
    """Neither for logits nor for pages"""
    loaded = load(save_model(MODELS["cpp"], tmp_path), "float32", "cpu")
    kernels, right = kernels_named("cpp"), Gate(loaded)
    assert ended(right.fault_of(kernels)) == ""
    short = memory_needs.room_bytes(loaded) - 1
    assert short > 103 * VOCABULARY * 16 + 30 * loaded.shape.bytes_per_page()
    for_judgement = memory_needs.judgement_bytes(loaded)
    assert for_judgement > 68 * VOCABULARY * 8 + 30 * loaded.shape.bytes_per_page()

    def left(room: int) -> Any:
        return patch("motet_runner.execute.gate.memory_needs.available_host_bytes", lambda: room)

    with patch.object(loaded.model, "forward"), left(short):
        faults = [ended(Gate(loaded).fault_of(kernels))]
    with patch.object(loaded.model, "forward"), left(for_judgement - 1):
        faults.append(ended(right.fault_of_forward(kernels, None)))
    for fault in faults:
        assert re.fullmatch(r"not judged: MemoryError: \d+ MiB are needed to judge, and \d+ MiB are left", fault)
    with left(for_judgement):
        assert ended(right.fault_of_forward(kernels, None)) == "", "the truth is there, and takes nothing more"


@pytest.mark.parametrize("kind", FORWARDS)
def test_a_trial_takes_the_pages_that_were_counted(kind: str, right: Callable[[str, str], Judged]) -> None:
    """One session after the other: the pages of the first are gone by then."""
    of = right(kind, "float32")
    alive: weakref.WeakSet[PagedStore] = weakref.WeakSet()
    most = 0

    class Counted(PagedStore):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            nonlocal most
            super().__init__(*arguments, **options)
            alive.add(self)
            most = max(most, sum(store.data.nbytes for store in alive))

    with patch("motet_runner.execute.forward.trial.PagedStore", Counted):
        assert of.fault() == ""
    beside = (
        104 * VOCABULARY * 16 + memory_needs.FAR_COPIES * 7 * of.loaded.shape.bytes_per_page() // of.loaded.shape.layers
    )
    assert most == memory_needs.room_bytes(of.loaded) - beside == 36 * of.loaded.shape.bytes_per_page()


def test_the_truth_is_computed_in_parts(tmp_path: Path) -> None:
    """Each with a bounded number of logits. It is the same truth, and between two parts nothing computes in it."""
    loaded = load(save_model(MODELS["recorded"], tmp_path), "float32", "cpu")
    kernels, truths, most = kernels_named("torch"), [], []
    forward = type(loaded.model).forward

    def noted(*args: Any, **options: Any) -> Any:
        output = forward(*args, **options)
        if output.logits.dtype is torch.float64:
            most.append(output.logits.shape[1])
        return output

    for rows in (104, 30):
        most.clear()
        judge = Gate(loaded)
        with (
            patch.object(type(loaded.model), "forward", noted),
            patch("motet_runner.execute.gate.yardstick.WIDE_LOGIT_BYTES", rows * VOCABULARY * 8),
            torch.inference_mode(),
        ):
            for _ in judge.prepare(kernels):
                assert torch.ones(1, dtype=torch.float32).exp().dtype is torch.float32
        assert max(most) == rows
        truths.append(judge.yardstick.truth)
        assert ended(judge.fault_of(kernels)) == ""
    one, other = truths
    assert torch.allclose(one, other, rtol=1e-6)


ROUTED = {
    "Mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2),
    "Phi MoE": transformers.PhimoeConfig(**SMALL, num_local_experts=8),
}


@pytest.mark.parametrize("name", ROUTED)
def test_where_a_router_is_undecided_no_more_is_allowed(name: str, tmp_path: Path, compiled: None) -> None:
    """Experts that are nearly alike to it, and differ: rounding would choose another one for some tokens."""
    base = save_model(ROUTED[name], tmp_path)
    loaded = load(base, "bfloat16", "cpu")
    kernels, judge = kernels_named("cpp"), Gate(loaded)
    assert ended(judge.fault_of(kernels)) == ""
    own, truth = judge.yardstick.own, judge.yardstick.truth
    assert float(own.max().sqrt()) < 0.1 * float(truth.double().square().mean().sqrt()), "each token, rounded"
    with WRONG_ATTENTION(None):
        assert ended(judge.fault_of(kernels)).startswith("its logits are off by ")


def test_an_activation_that_compares_is_not_taken_for_a_router() -> None:
    same, places = SameExperts(3, choices_of(ROUTED["Phi MoE"])), torch.arange(3)
    scores, hidden = torch.eye(3, 8), torch.ones(3, 64)
    with same.noted(places):
        assert (hidden > 0).all()
        decided = scores > 0
    with same.followed(places):
        assert not (-hidden > 0).any(), "what is computed counts"
        assert torch.equal(-scores > 0, decided), "the decision of the truth counts"
    assert choices_of(MODELS["torch"]) == frozenset()


def test_the_number_of_experts_is_found_wherever_a_family_says_it() -> None:
    assert choices_of(transformers.DbrxConfig(ffn_config={"moe_num_experts": 6, "moe_top_k": 2})) == {6}
    # Its router also chooses among experts that compute nothing.
    assert 20 in choices_of(transformers.LongcatFlashConfig(n_routed_experts=16, zero_expert_num=4))
    assert choices_of(transformers.LlamaConfig(num_experts=[8, 8])) == frozenset(), "not one number"


def test_what_is_no_choice_among_experts_is_not_taken_for_a_router() -> None:
    config = ROUTED["Mixtral"]
    scores = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    others: dict[str, Callable[[torch.Tensor], Any]] = {
        "the largest of each column": lambda x: x.max(dim=0, keepdim=True),
        "columns of the largest rows": lambda x: x.topk(1, dim=0),
        "the largest of many numbers": lambda x: x.repeat(1, 8).max(dim=-1, keepdim=True),
        "some of many numbers": lambda x: x.repeat(1, 8).topk(2),
    }
    for what, other in others.items():
        same = SameExperts(3, choices_of(config))
        for place in range(3):
            row = scores[place : place + 1]
            with same.noted(torch.tensor([place])):
                other(row)
                decided = row.topk(2).indices
            with same.followed(torch.tensor([place])):
                found, expected = other(-row), (-row).topk(2)
            assert torch.equal(expected.indices, decided), what
            with torch.inference_mode():
                computed = other(-row)
            assert all(map(torch.equal, found, computed)), what


def test_a_router_that_chooses_groups_first_chooses_those_of_the_truth() -> None:
    config = transformers.Glm4MoeConfig(n_routed_experts=8, n_group=4, topk_group=2)
    same, places, scores = SameExperts(3, choices_of(config)), torch.arange(3), torch.eye(3, 4)
    with same.noted(places):
        of_truth = scores.topk(2).indices
    with same.followed(places):
        assert torch.equal((-scores).topk(2).indices, of_truth)


def yardstick_of(own: torch.Tensor, least: torch.Tensor) -> Yardstick:
    return Yardstick([], [], {}, torch.empty(0), SameExperts(0, frozenset()), least, own, times=1.5)


def test_a_token_that_is_all_zeros_hides_no_wrong_one() -> None:
    own, least = torch.ones(100, dtype=torch.float64), torch.full((100,), 1e-6, dtype=torch.float64)
    own[3] = least[3] = 0.0
    squares = own.clone()
    yardstick = yardstick_of(own, least)
    assert yardstick.fault(torch.arange(100), squares) == ""
    squares[70] = 100.0
    assert "for one token" in yardstick.fault(torch.arange(100), squares)


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_where_the_modules_give_no_numbers_nothing_is_let_through(number: float) -> None:
    own, least = torch.ones(100, dtype=torch.float64), torch.zeros(100, dtype=torch.float64)
    own[3] = number
    fault = yardstick_of(own, least).fault(torch.arange(100), torch.ones(100, dtype=torch.float64))
    assert fault == "not judged: the logits of the model's modules are not finite"


@pytest.mark.parametrize(
    "wrong",
    [
        WRONG_ATTENTION,
        of_class(CppBackend, "add_lora", scaled_lora(1.1)),
        of_class(CppBackend, "make_batch", exchanged),
    ],
    ids=["attention", "the scale of adapters", "two adapters change places"],
)
def test_kernels_of_a_type_whose_weights_are_not_packed_are_judged_too(
    wrong: Mutant, tmp_path: Path, compiled: None
) -> None:
    base = tiny(tmp_path)
    with wrong(None):
        state = changed_over(base, dtype="float16").report().kernels
    assert state.note.startswith("the compiled kernels do not serve: its logits are off by ")
    state = changed_over(base, dtype="float16").report().kernels
    assert (state.serving[:3], state.note) == ("cpp", "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_sums_are_no_fault(dtype: torch.dtype) -> None:
    """However many inputs there are: the kernels add up in blocks, as torch does."""
    weight = torch.randn(64, 40_000, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(dtype) / 200
    assert linear_fault([weight], PackedWeights(compiled_library(), [weight])) == ""


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", ["torch", "cpp"])
def test_the_right_forward_pass_of_a_wide_model_is_let_through(kernels: str, dtype: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "head_dim": 128}
    config = transformers.LlamaConfig(**SMALL | wide, initializer_range=0.02)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    packed = PackedModel(loaded := load(tmp_path, dtype, "cpu"), kernels_named(kernels), Gate(loaded))
    with torch.inference_mode():
        for _ in packed.parts():
            pass
    assert packed.note == ""
    assert packed.fused is not None


def test_a_weight_whose_products_are_wrong_is_not_packed(tmp_path: Path) -> None:
    loaded = load(save_model(MODELS["torch"], tmp_path), "bfloat16", "cpu")
    linear = TorchWeights.linear

    def wrong(self: TorchWeights, x: Any, bias: Any = None, index: int = 0) -> torch.Tensor:
        y = linear(self, x, bias, index)
        return y * 1.02 if self.inputs == SMALL["intermediate_size"] else y

    packed = PackedModel(loaded, kernels_named("torch"), Gate(loaded))
    with torch.inference_mode(), patch.object(TorchWeights, "linear", wrong):
        for _ in packed.parts():
            pass
    assert packed.fused is None
    assert packed.note.startswith("some weights are not packed: a product is off by ")
    own = {path for path, module in loaded.linears.items() if module.weight.numel()}
    assert own == {path for path in loaded.linears if path.endswith("down_proj")}


# -- the recorded one: each of its steps ---------------------------------------------------------------------------

OTHER = {
    "add": "subtract", "subtract": "add", "multiply": "add", "divide": "multiply", "negative": "copy", "cube": "copy",
    "rsqrt": "sqrt", "tanh": "sigmoid", "gelu_tanh": "relu", "silu": "relu", "rms_norm": "layer_norm", "cos": "sin",
    "sin": "cos", "mean": "sum", "exp": "copy",
    "modules_norm": "layer_norm", "sum_and_norm": "modules_norm", "rotate": "copy", "silu_times": "multiply",
    "norm_and_rotate": "rotate", "write_rotated": "write", "write_normed_rotated": "write_rotated",
}  # fmt: skip


def adds_epsilon(step: Compute) -> bool:
    """It is less than rounding, so its sign does not matter."""
    return step.operation == "add" and any(
        isinstance(one.of, torch.Tensor) and one.of.numel() == 1 for one in step.inputs
    )


def wrong_steps(steps: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    def instead(number: int, step: Any) -> list[Any]:
        return [*steps[:number], step, *steps[number + 1 :]]

    products = [step for step in steps if isinstance(step, Multiply)]
    yield (
        "epsilon",
        [replace(step, real=0.1) if isinstance(step, Compute) and step.real else step for step in steps],
    )
    biased = [
        step for step in products if step.bias is not None and ".0." in step.path
    ]  # a later one moves logits less
    for x in dict.fromkeys(step.x for step in biased):
        yield (
            f"no biases of {[step.path for step in biased if step.x is x]}",
            [replace(step, bias=None) if isinstance(step, Multiply) and step.x is x else step for step in steps],
        )
    for number, step in enumerate(steps):
        if isinstance(step, Compute) and step.operation in OTHER and not adds_epsilon(step):
            yield (
                f"{number}: {OTHER[step.operation]} for {step.operation}",
                instead(number, replace(step, operation=OTHER[step.operation])),
            )
        if isinstance(step, Compute) and isinstance(table := step.inputs[0].of, ByPosition):
            turned = [replace(one, operation=OTHER.get(one.operation, one.operation)) for one in table.steps]
            inputs = replace(step.inputs[0], of=replace(table, steps=turned)), *step.inputs[1:]
            yield f"{number}: another table", instead(number, replace(step, inputs=inputs))
        if (
            isinstance(step, Compute)
            and step.operation == "look_up"
            and isinstance(table := step.inputs[0].of, torch.Tensor)
        ):
            other = replace(step.inputs[0], of=table.roll(1, 0).contiguous())
            yield f"{number}: the next row of a table", instead(number, replace(step, inputs=(other, step.inputs[1])))
        if isinstance(step, Attend):
            yield f"{number}: scale", instead(number, replace(step, scale=2 * step.scale))
            yield f"{number}: soft cap", instead(number, replace(step, softcap=None if step.softcap else 1.0))
            yield f"{number}: window", instead(number, replace(step, window=(step.window or WINDOW) - 1))
        if isinstance(step, Multiply):
            alike = [
                other for other in products
                if other is not step and (other.weights.inputs, other.y.size) == (step.weights.inputs, step.y.size)
            ]  # fmt: skip
            if alike:
                yield (
                    f"{number}: weights of {alike[0].path}",
                    instead(number, replace(step, weights=alike[0].weights, index=alike[0].index)),
                )
            if step.path:
                yield f"{number}: no adapters for {step.path}", instead(number, replace(step, path=step.path + "?"))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("cpp", "float32"),
        ("recorded", "bfloat16"),
        pytest.param("cpp", "bfloat16", marks=pytest.mark.soak),
        pytest.param("recorded", "float32", marks=pytest.mark.soak),
    ],
)
def test_a_program_with_one_wrong_step_is_refused(kind: str, dtype: str, right: Callable[[str, str], Judged]) -> None:
    of = right(kind, dtype)
    values = {name: value for name, value in of.program.items() if name != "steps"}
    passed, count = [], 0
    for name, steps in wrong_steps(list(of.program["steps"])):
        program = CompiledProgram(compiled_library(), steps, **values)
        with patch.object(CppBackend, "index_of", unless_marked):
            fault = of.fault(RecordedForward(program))
        count += 1
        if not fault:
            passed.append(name)
    assert count > 50
    assert not passed


index_of = CppBackend.index_of


def unless_marked(backend: CppBackend, path: str) -> int:
    return -1 if path.endswith("?") else index_of(backend, path)
