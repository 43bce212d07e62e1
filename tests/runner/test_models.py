"""Which bases are served, and how the others are refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from motet.errors import ModelFolderError, SetupError
from motet_kernels.cpp import PagedAttention
from motet_runner.execute.batch.flat_batch import CURRENT, FlatBatch
from motet_runner.execute.batch.flat_batch_builder import FlatBatchBuilder
from motet_runner.execute.batch.row_table import RowTable
from motet_runner.execute.forward import attention
from motet_runner.execute.forward.trial import probe_row
from motet_runner.execute.load import load_model as execute
from motet_runner.execute.load.dtype import dtype_named
from motet_runner.execute.load.model_check import ModelCheck
from motet_runner.interface import Finish
from motet_runner.memory.paged import PagedStore
from motet_runner.plan import DecodeRows, RowStep, StepPlan
from motet_runner.supported_models import read_supported_config
from testbed.compiled_kernels import compiled_library
from tests.runner.engines import ask, make_engine, run
from tests.runner.families import BY_NAME, FAMILIES, GROUPED, MORE, SMALL, save_model
from tests.runner.random_models import VOCABULARY, save_base


@pytest.mark.parametrize("kernels", ["torch", "cpp"])
@pytest.mark.parametrize("family", BY_NAME)
def test_packed_chunked_and_decoded_tokens_equal_transformers(family: str, kernels: str, tmp_path: Path) -> None:
    """Two sequences at once; one in two chunks and then token by token, past any window."""
    base = save_base(family, tmp_path / "base", config=BY_NAME[family].config)
    loaded = execute.load(base, "float32", "cpu")
    first = [(5 * i + 2) % VOCABULARY for i in range(60)]
    second = [(3 * i + 9) % VOCABULARY for i in range(30)]
    reference = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = {id(tokens): reference(torch.tensor([tokens])).logits[0] for tokens in (first, second)}
        store = PagedStore(8, loaded.shape, loaded.dtype, loaded.device)
        table = RowTable()
        builder = FlatBatchBuilder(table, store, loaded.device)
        if kernels == "cpp":
            builder.use(None, PagedAttention(compiled_library(), store.data))
        for row, tokens, pages in ((0, first, (5, 1, 7, 0)), (1, second, (2, 3))):
            table.join(probe_row(row, tokens))
            table.extend(row, pages)
        plans = [
            (RowStep(1, 0, 11, samples=True), RowStep(0, 0, 37, samples=True)),
            (RowStep(0, 37, 13, samples=True), RowStep(1, 11, 1, samples=True)),
            *((RowStep(0, 50 + i, 1, samples=True), RowStep(1, 12 + i, 1, samples=True)) for i in range(10)),
        ]
        for steps in plans:
            decoding = all(step.count == 1 for step in steps)
            plan = StepPlan(number=0, decodes=DecodeRows.of(steps)) if decoding else StepPlan(number=0, prefills=steps)
            batch = builder.build(plan)
            for step, row in zip(steps, loaded.forward(batch), strict=True):
                theirs = expected[id((first, second)[step.row])][step.start + step.count - 1]
                assert float((row - theirs).abs().max()) <= 1e-4
            assert batch.calls == 2


REFUSED = {
    "two kinds of rope that depend on lengths": (
        transformers.Gemma3TextConfig(
            **GROUPED, head_dim=16,
            rope_parameters={
                "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
                "sliding_attention": {
                    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
                    "factor": 2.0, "original_max_position_embeddings": 64,
                },
            },
            layer_types=["sliding_attention", "full_attention"],
        ),
        "several rope types",
    ),
    "an encoder-decoder": (transformers.T5Config(vocab_size=64, d_model=16, num_layers=1, num_heads=2), "decoder"),
    "Mamba": (transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2), "Mamba"),
    "attention of its own": (
        transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2),
        "not yet: Bloom",
    ),
    "a state beside the attention of each layer": (
        transformers.FalconH1Config(
            **GROUPED, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1,
            mamba_chunk_size=16,
        ),
        r"FalconH1.* keeps a state besides keys and values \(model\.layers\.0\.mamba\.conv1d is Conv1d\)",
    ),
    "Jamba": (
        transformers.JambaConfig(
            **GROUPED, attn_layer_period=2, attn_layer_offset=1, num_experts=2, num_experts_per_tok=1, mamba_d_state=8,
            mamba_dt_rank=4, use_mamba_kernels=False,
        ),
        "Jamba.* keeps a state",
    ),
    "Bamba": (
        transformers.BambaConfig(
            **GROUPED, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8
        ),
        "Bamba.* keeps a state",
    ),
    "Zamba 2": (
        transformers.Zamba2Config(
            **GROUPED, mamba_d_state=8, n_mamba_heads=4, mamba_headdim=16, layers_block_type=["mamba", "hybrid"],
            use_mamba_kernels=False,
        ),
        "Zamba2.* keeps a state",
    ),
    "Granite with Mamba": (
        transformers.GraniteMoeHybridConfig(
            **GROUPED, layer_types=["mamba", "attention"], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8,
            num_local_experts=2, num_experts_per_tok=1, shared_intermediate_size=32,
        ),
        "GraniteMoeHybrid.*(linear_attention|mamba)",
    ),
    "recurrent layers": (
        transformers.RecurrentGemmaConfig(
            **{name: value for name, value in GROUPED.items() if name != "max_position_embeddings"}, head_dim=16,
            lru_width=32, attention_window_size=24, block_types=("recurrent", "attention"),
        ),
        "RecurrentGemma.* keeps a state",
    ),
    "linear attention": (
        transformers.Qwen3NextConfig(
            **GROUPED, head_dim=8, layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4,
            linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2,
            num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        ),
        "Qwen3Next.*linear_attention",
    ),
    "lightning attention": (
        transformers.MiniMaxConfig(
            **GROUPED, head_dim=8, layer_types=["linear_attention", "full_attention"], num_local_experts=2,
            num_experts_per_tok=1, block_size=16,
        ),
        "MiniMax.*linear_attention",
    ),
    "RWKV": (
        transformers.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, context_length=64),
        "Rwkv.* keeps a state",
    ),
    "convolutions between attention": (
        transformers.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]),
        "conv",
    ),
    "a table of attention of its own": (
        transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2),
        "not yet: Falcon.* table of its own",
    ),
    "a mask of its own": (transformers.DogeConfig(**GROUPED), "not yet: Doge.* attends with attention_mask"),
    "an error with our attention": (
        transformers.MptConfig(vocab_size=64, d_model=32, n_heads=2, n_layers=2),
        r"not yet: Mpt.* does not run with our attention \(AttributeError: ",
    ),
    "an encoder": (transformers.BertConfig(**SMALL), "not yet: Bert"),
    "keys and values of different widths": (
        transformers.DeepseekV3Config(
            **SMALL, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
            v_head_dim=8, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1,
            moe_intermediate_size=16,
        ),
        "not yet: Deepseek",
    ),
    "sinks": (
        transformers.GptOssConfig(
            **GROUPED, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        "s_aux",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_an_unsupported_model_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    config, says = REFUSED[kind]
    folder = tmp_path / "base"
    kinds = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    kinds.from_config(config).save_pretrained(folder)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(ModelFolderError, match=says):
            execute.load(folder, dtype, "cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("untrained", [True, False], ids=["as initialised", "large weights"])
def test_a_state_is_noticed_without_its_name(
    untrained: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small weights, what a neighbour leaves changes logits by 0.00004 of them."""
    config, _ = REFUSED["a state beside the attention of each layer"]
    if untrained:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    else:
        save_model(config, tmp_path)
    monkeypatch.setattr(execute, "_refuse_states", lambda _: None)
    with pytest.raises(ModelFolderError, match=r"FalconH1.* when a sequence is computed beside another .* mixes"):
        execute.load(tmp_path, dtype, "cpu")
    monkeypatch.setattr(ModelCheck, "_check_neighbours", lambda *_: None)
    with pytest.raises(ModelFolderError, match=r"FalconH1.* when a sequence is computed in two parts .* mixes"):
        execute.load(tmp_path, dtype, "cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", [*BY_NAME, *(pytest.param(family.name, marks=pytest.mark.soak) for family in MORE)])
def test_every_family_loads_in_half_precision(family: str, dtype: str, tmp_path: Path) -> None:
    """The experts of a mixture get as many rows as the neighbours send there, and results other last digits."""
    config = {one.name: one for one in (*FAMILIES, *MORE)}[family].config
    assert execute.load(save_model(config, tmp_path), dtype, "cpu").linears


def test_a_hybrid_familys_model_without_a_state_is_served(tmp_path: Path) -> None:
    """The family also has models all of whose layers are attention."""
    config = transformers.GraniteMoeHybridConfig(
        **GROUPED, layer_types=["attention"] * 2, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8,
        num_local_experts=2, num_experts_per_tok=1, shared_intermediate_size=32,
    )  # fmt: skip
    assert execute.load(save_model(config, tmp_path), "bfloat16", "cpu").linears


def test_attention_that_is_not_the_models_own_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a model asks of its attention that ours does not know of."""
    config, _ = REFUSED["sinks"]
    monkeypatch.setattr(attention, "HARMLESS", attention.HARMLESS | {"s_aux"})
    with pytest.raises(ModelFolderError, match=r"GptOss.* gives other logits with our attention than with its own"):
        execute.load(save_model(config, tmp_path), "float32", "cpu")


def test_code_of_others_is_not_run(llama: Path, tmp_path: Path) -> None:
    raw = json.loads((llama / "config.json").read_text())
    strange = {"model_type": "strange", "architectures": ["StrangeForCausalLM"]}
    (tmp_path / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    (tmp_path / "strange.py").write_text("raise SystemExit('it ran')")
    own = {"auto_map": {"AutoConfig": "strange.Config", "AutoModelForCausalLM": "strange.Model"}}
    for auto_map, says in (
        ({}, "know. Use a model"),
        (own, "know. The folder has code of its own, which Motet does not"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | strange | auto_map))
        with pytest.raises(ModelFolderError, match=f"has model_type 'strange', .* does not {says}"):
            execute.load(tmp_path, "auto", "cpu")


def test_a_type_that_the_device_lacks_is_refused_or_another_one_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    old, raw = torch.device("cuda"), {"dtype": "bfloat16"}
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    with pytest.raises(SetupError, match=r"engine\.dtype is bfloat16, which this GPU .*float16 or float32"):
        dtype_named("bfloat16", old, raw)
    assert dtype_named("auto", old, raw) is torch.float16
    assert dtype_named("auto", old, {"dtype": "float32"}) is torch.float32
    with pytest.raises(SetupError, match=r"config\.json has dtype 'float64'\. Set engine\.dtype to one of float32"):
        dtype_named("auto", old, {"dtype": "float64"})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert dtype_named("auto", old, raw) is dtype_named("bfloat16", old, raw) is torch.bfloat16


def test_a_quantised_base_is_refused(llama: Path, tmp_path: Path) -> None:
    raw = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ModelFolderError, match=r"\(awq\), .* or a pool whose engine\.backend is vllm"):
        execute.load(tmp_path, "auto", "cpu")
    assert read_supported_config(tmp_path, with_vllm=True)["quantization_config"]


def test_a_folder_without_a_model_says_what_is_missing(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"config\.json"):
        execute.load(tmp_path, "auto", "cpu")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFolderError, match="not valid JSON"):
        execute.load(tmp_path, "auto", "cpu")
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises(ModelFolderError, match="could not be loaded"):
        execute.load(tmp_path, "auto", "cpu")


def test_weights_that_end_too_early_are_named(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    whole = (llama / "model.safetensors").read_bytes()
    for part in (whole[: len(whole) // 2], b""):
        (tmp_path / "model.safetensors").write_bytes(part)
        with pytest.raises(ModelFolderError, match=rf"{tmp_path}: model\.safetensors is damaged"):
            execute.load(tmp_path, "auto", "cpu")


def test_weights_of_another_model_differ_from_damaged_ones(llama: Path, tmp_path: Path) -> None:
    raw = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"intermediate_size": raw["intermediate_size"] * 2}))
    (tmp_path / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    with pytest.raises(ModelFolderError, match=r"other shapes than config\.json says"):
        execute.load(tmp_path, "auto", "cpu")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kv_cache_mib": 0}, "kvCacheMiB"),
        ({"max_model_length": 1024}, "maxModelLength"),
        ({"dtype": "int4"}, "dtype"),
        ({"preset": "splitwise"}, "not yet"),
    ],
)
def test_impossible_settings_are_refused_with_their_name(llama: Path, settings: dict, says: str) -> None:
    with pytest.raises(SetupError, match=says):
        make_engine(llama, **settings)


def test_numbers_that_are_not_finite_fail_their_own_sequence(llama: Path) -> None:
    """One token's embedding is poisoned: who says it fails, the others never notice."""
    engine = make_engine(llama)
    expected = run(engine, ask("good")).tokens["good"]
    poisoned = 499
    assert poisoned not in expected
    engine.diagnostics.loaded.model.get_input_embeddings().weight.data[poisoned] = float("nan")
    ran = run(engine, ask("good"), ask("bad", prompt=(3, poisoned, 4)))
    assert ran.last["bad"].finish is Finish.FAILED
    assert ran.tokens == {"good": expected, "bad": []}
    again = run(engine, *(ask(f"r{i}", prompt=ask("good").prompt) for i in range(8)))
    assert all(tokens == expected for tokens in again.tokens.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(llama: Path, dtype: str) -> None:
    engine = make_engine(llama, dtype=dtype)
    assert len(run(engine, ask("a"), ask("b", prompt=50)).tokens["b"]) == 40


def test_the_end_token_of_the_generation_config_counts(llama: Path, tmp_path: Path) -> None:
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    first = run(make_engine(llama), ask("a")).tokens["a"][0]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [first, 3]}))
    engine = make_engine(tmp_path)
    assert engine.info.eos_token_ids == (first, 3)
    ran = run(engine, ask("a", ignore_eos=False))
    assert ran.tokens["a"] == [first]
    assert ran.last["a"].finish is Finish.STOP


def test_layers_can_be_called_one_by_one(tmp_path: Path) -> None:
    """A layer knows its place in the pages, whoever calls it: here one layer runs twice, with other work between."""
    loaded = execute.load(save_base("llama", tmp_path / "base"), "float32", "cpu")
    decoder = loaded.model.model
    tokens = list(range(3, 40))

    def batch() -> FlatBatch:
        table = RowTable()
        table.join(probe_row(0, tokens))
        store = PagedStore(4, loaded.shape, loaded.dtype, loaded.device)
        steps = (RowStep(0, 0, len(tokens), samples=True, new_pages=(2, 0, 3)),)
        table.extend(0, steps[0].new_pages)
        return FlatBatchBuilder(table, store, loaded.device).build(StepPlan(number=0, prefills=steps))

    with torch.inference_mode():
        at_once, one_by_one = batch(), batch()
        expected = loaded.forward(at_once)
        token = CURRENT.set(one_by_one)
        try:
            hidden = decoder.embed_tokens(one_by_one.input_ids)
            rotation = decoder.rotary_emb(hidden, one_by_one.positions)
            decoder.layers[0](hidden, position_embeddings=rotation)
            for layer in decoder.layers:
                hidden = layer(hidden, position_embeddings=rotation)
        finally:
            CURRENT.reset(token)
        logits = loaded.model.lm_head(decoder.norm(hidden)[:, -1:])[0]
        assert torch.equal(logits, expected)
        full = [2, 0]
        assert torch.equal(one_by_one.store.data[full], at_once.store.data[full])
