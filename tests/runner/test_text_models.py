"""Models of text and images: their text is served as transformers and PEFT compute it, and no memory goes to the rest.

`docs/models.md` has the list of them.
"""

import json
import re
import shutil
from itertools import combinations
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from motet.asset_fields import AssetFields
from motet.domain import BASE, Digest
from motet.errors import ModelFolderError
from motet_runner import offline_proof
from motet_runner.adapters.certification import certify
from motet_runner.adapters.proof import Proof, ProofOrder
from motet_runner.base_tokenizer import tokenizer_of
from motet_runner.engine import Engine
from motet_runner.execute.load import base_outline
from motet_runner.execute.load.load_model import load, read_config
from motet_runner.execute.load.text_model import OF_TEXT_ALONE, TEXT_MODELS, checkpoint_of, text_config
from motet_runner.external.vllm.linears import linears_of
from motet_runner.interface import EngineConfig, ProofEnded
from motet_runner.supported_models import read_supported_config
from testbed.local_stack import BUNDLED
from tests.runner.engines import ask, run
from tests.runner.external.fake_driven import load_vllm_with
from tests.runner.families import GROUPED, WRAPPED, Family, pretrained, save_adapters, save_model
from tests.runner.peft_reference import Served, World, assert_equal, reference_logits
from tests.runner.random_models import RandomAdapter

pytestmark = pytest.mark.filterwarnings("ignore")

ADAPTER = Digest("sha256:one")
ONE = (RandomAdapter(5, 9),)
GEMMA = WRAPPED[0]
WEIGHTS = "model.safetensors"
TEMPLATES = {
    "chat_template.jinja": "a text",
    "chat_template.json": json.dumps({"chat_template": "of the processor"}),
    "tokenizer_config.json": json.dumps({"chat_template": "of the tokenizer"}),
}


def engine_with_logits(base: Path) -> tuple[Engine, dict[str, list[torch.Tensor]]]:
    logits: dict[str, list[torch.Tensor]] = {}

    def keep(requests: list[str], rows: torch.Tensor) -> None:
        for one, row in zip(requests, rows, strict=True):
            logits.setdefault(one, []).append(row.clone())

    config = EngineConfig(model=base, kernels="torch", device="cpu", kv_cache_mib=4, prove_adapters=True)
    return Engine(config, on_logits=keep), logits


def served(base: Path, adapter: Path) -> list[Served]:
    """The base and an adapter, which is proved, in one engine."""
    engine, logits = engine_with_logits(base)
    engine.load_adapter(ADAPTER, certify(adapter, engine.info).layout, proof=ProofOrder(1))
    asked = [
        ask(f"{who} {length}", adapter=who, prompt=length, max_tokens=4)
        for who in (BASE, ADAPTER)
        for length in (3, 37)
    ]
    ran = run(engine, *asked)
    (ended,) = ran.of(ProofEnded)
    assert isinstance(ended.found, Proof), ended.found
    return [Served(one.request, one.adapter, one.prompt, ran.tokens[one.request], logits[one.request]) for one in asked]


@pytest.mark.parametrize("family", WRAPPED, ids=lambda one: one.name)
def test_the_text_is_answered_as_transformers_and_peft_do(family: Family, tmp_path: Path) -> None:
    base = save_model(family.config, tmp_path / "base")
    (adapter,) = save_adapters(base, family, tmp_path / "adapters", ONE)
    answers = served(base, adapter)
    print(assert_equal(answers, reference_logits(World("", base, {ADAPTER: adapter}), answers)))


def test_each_pair_of_wrapper_and_text_model_is_proved() -> None:
    proved = {(one.config.model_type, one.config.get_text_config().model_type) for one in WRAPPED}
    assert proved == {(wrapper, text) for wrapper, texts in TEXT_MODELS.items() for text in texts}
    assert OF_TEXT_ALONE.keys() <= {text for _, text in proved}


@pytest.mark.parametrize("family", WRAPPED, ids=lambda one: one.name)
def test_only_the_text_models_weights_are_read(family: Family, tmp_path: Path) -> None:
    base = save_model(family.config, tmp_path)
    whole = pretrained(base)
    of_text = sum(
        parameter.nbytes
        for name, parameter in whole.named_parameters()
        if name.startswith(("model.language_model.", "lm_head."))
    )
    assert of_text < sum(parameter.nbytes for parameter in whole.parameters())
    assert checkpoint_of(base, read_config(base)).bytes_as(torch.float32) == of_text
    said: list[tuple[int, int]] = []
    loaded = load(base, "float32", "cpu", lambda *progress: said.append(progress))
    assert said[-1] == (of_text, of_text)
    assert sum(parameter.nbytes for parameter in loaded.model.parameters()) == of_text


@pytest.mark.parametrize("family", WRAPPED, ids=lambda one: one.name)
def test_the_outline_is_that_of_the_loaded_model(family: Family, tmp_path: Path) -> None:
    base = save_model(family.config, tmp_path)
    engine, _ = engine_with_logits(base)
    (base / WEIGHTS).unlink()
    limits = base_outline.limits_of(EngineConfig(model=base, device="cpu"))
    assert limits.target_modules == engine.info.target_modules
    assert limits.vocabulary == engine.info.vocabulary == GROUPED["vocab_size"]


def test_a_gateway_finds_context_and_ends_where_the_engine_does(tmp_path: Path) -> None:
    base = save_model(GEMMA.config, tmp_path)
    (base / "generation_config.json").unlink()
    engine, _ = engine_with_logits(base)
    fields = AssetFields(base)
    assert fields.context_length == engine.info.max_model_length == GROUPED["max_position_embeddings"]
    assert fields.eos_ids == set(engine.info.eos_token_ids) == {GROUPED["eos_token_id"]}


def test_the_token_0_ends_a_text_for_the_gateway_and_the_engine(tmp_path: Path) -> None:
    GEMMA.config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 0}))
    assert AssetFields(tmp_path).eos_ids == {text_config(tmp_path).eos_token_id} == {0}


@pytest.mark.parametrize("of_text", [False, True], ids=["text and images", "text"])
@pytest.mark.parametrize(
    "there",
    [there for count in range(4) for there in combinations(TEMPLATES, count)],
    ids=lambda there: " and ".join(there) or "none",
)
def test_the_chat_template_is_the_one_that_transformers_takes(
    there: tuple[str, ...], of_text: bool, tmp_path: Path
) -> None:
    (GEMMA.config.get_text_config() if of_text else GEMMA.config).save_pretrained(tmp_path)
    shutil.copy(BUNDLED / "model" / "tokenizer.json", tmp_path)
    for name in there:
        (tmp_path / name).write_text(TEMPLATES[name])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).chat_template
    if not of_text:  # its processor asks first
        theirs = transformers.ProcessorMixin.get_processor_dict(tmp_path)[0].get("chat_template", theirs)
    assert AssetFields(tmp_path).chat_template == (theirs or "")
    assert tokenizer_of(tmp_path).chat_template == theirs


@pytest.mark.parametrize(
    ("root", "head"),
    [
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("model.", "lm_head.weight"),
    ],
)
def test_files_may_name_the_text_model_in_any_of_the_usual_ways(root: str, head: str, tmp_path: Path) -> None:
    """Each version of transformers has saved them in its own way."""
    base = save_model(WRAPPED[2].config, tmp_path)
    expected = load(base, "float32", "cpu").model.state_dict()
    tensors = load_file(base / WEIGHTS)
    renamed = {
        name.replace("language_model.model.", root).replace("language_model.lm_head.weight", head): tensor
        for name, tensor in tensors.items()
    }
    assert len(renamed) == len(tensors)
    save_file(renamed, base / WEIGHTS, {"format": "pt"})
    found = load(base, "float32", "cpu").model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_weight_under_two_names_is_refused_by_both(tmp_path: Path) -> None:
    base = save_model(GEMMA.config, tmp_path)
    tensors = load_file(base / WEIGHTS)
    twice = tensors["language_model.model.norm.weight"].clone()
    save_file(tensors | {"model.norm.weight": twice}, base / WEIGHTS, {"format": "pt"})
    with pytest.raises(
        ModelFolderError, match=r"language_model\.model\.norm\.weight and model\.norm\.weight are the same .*Save the"
    ):
        load(base, "float32", "cpu")


def test_a_missing_weight_of_the_text_model_is_named(tmp_path: Path) -> None:
    base = save_model(GEMMA.config, tmp_path)
    tensors = load_file(base / WEIGHTS)
    del tensors["language_model.model.norm.weight"]
    save_file(tensors, base / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelFolderError, match=r"no weights for model\.norm\.weight"):
        load(base, "float32", "cpu")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("number", [7, 8], ids=["Mistral 3", "Qwen 2.5 VL"])
def test_the_wrapper_says_whether_the_output_layer_is_the_embeddings(number: int, tied: bool, tmp_path: Path) -> None:
    config = type(WRAPPED[number].config)(**(WRAPPED[number].config.to_dict() | {"tie_word_embeddings": tied}))
    base = save_model(config, tmp_path)
    theirs, ours = pretrained(base), load(base, "float32", "cpu").model
    assert torch.equal(ours.get_output_embeddings().weight, theirs.get_output_embeddings().weight)
    assert (ours.get_output_embeddings().weight is ours.get_input_embeddings().weight) == tied


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            transformers.PaliGemmaConfig(text_config=GROUPED | {"model_type": "gemma"}),
            r"'paligemma' around a text model 'gemma'\. Of models .* gemma3 around gemma3_text",
        ),
        (
            transformers.LlavaConfig(text_config=GROUPED | {"model_type": "gemma"}),
            r"'llava' around a text model 'gemma'\. Of models .* llava around llama or mistral",
        ),
        (transformers.CLIPConfig(), "'clip' around a text model 'clip_text_model'"),
    ],
    ids=lambda one: getattr(one, "model_type", ""),
)
def test_other_wrappers_are_refused_by_name(config: transformers.PreTrainedConfig, says: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelFolderError, match=says):
        load(tmp_path, "float32", "cpu")
    with pytest.raises(ModelFolderError, match=says):
        base_outline.limits_of(EngineConfig(model=tmp_path, device="cpu"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ({"model_type": "llama", "quantization_config": {"quant_method": "awq"}}, r"llava is quantised \(awq\)"),
        ({"quantization_config": "awq"}, r"llava: quantization_config in config\.json must be a JSON object"),
        ("llama", r"llava: text_config in config\.json must be a JSON object"),
    ],
    ids=["quantised", "quantised by a word", "no object"],
)
def test_what_the_config_says_of_the_text_model_is_refused_by_its_reason(
    text: object, says: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    with pytest.raises(ModelFolderError, match=says):
        read_supported_config(tmp_path)


@pytest.mark.parametrize("family", WRAPPED[1:], ids=lambda one: one.name)
def test_with_vllm_the_check_of_an_adapter_refuses_the_base_as_a_runner_does(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family.config.save_pretrained(tmp_path)
    config = EngineConfig(model=tmp_path, device="cpu")
    # A runner with vLLM asks for the linears first.
    load = load_vllm_with(lambda config: linears_of(config.model), monkeypatch)
    with pytest.raises(ModelFolderError) as refused:
        load(config)
    says = f"vLLM cannot serve {tmp_path}: config.json has model_type '{family.config.model_type}', and with vLLM "
    says += "Motet serves only models of text alone. Change model.uri, or set engine.backend to motet."
    assert str(refused.value) == says
    with pytest.raises(ModelFolderError, match=f"^{re.escape(says)}$"):
        base_outline.limits_of(config, with_vllm=True)


@pytest.mark.parametrize("number", [2, 8, 10], ids=["LLaVA", "Qwen 2.5 VL", "Qwen 3 VL"])
def test_the_whole_models_recorded_answers_are_the_engines(number: int, tmp_path: Path) -> None:
    """As `motet adapter check` has PEFT compute them: token by token, with a cache"""
    family = WRAPPED[number]
    config = type(family.config)(**family.config.to_dict())
    config.text_config.vocab_size = json.loads((BUNDLED / "model" / "config.json").read_text())["vocab_size"]
    base = save_model(config, tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / "model" / name, base)
    (adapter,) = save_adapters(base, family, tmp_path / "adapters", ONE)
    engine = EngineConfig(model=base, dtype="float32", device="cpu", kernels="torch", kv_cache_mib=4)
    layout = certify(adapter, base_outline.limits_of(engine)).layout
    found = offline_proof.prove(engine, layout, recorded=False)
    assert found.peft is not None, found.not_with_peft
    assert found.peft.largest <= 1e-4
    assert not found.not_proved or "MOTET_RUNNER_PROVE_ADAPTERS" in found.not_proved


def test_an_adapter_fits_the_wrapper_and_the_text_model_alone(tmp_path: Path) -> None:
    wrapped = save_model(GEMMA.config, tmp_path / "wrapped")
    model = pretrained(wrapped)
    text = transformers.Gemma3ForCausalLM(GEMMA.config.get_text_config())
    text.model.load_state_dict(model.model.language_model.state_dict())
    alone = tmp_path / "alone"
    text.save_pretrained(alone)
    for trained_on in (wrapped, alone):
        (adapter,) = save_adapters(trained_on, GEMMA, tmp_path / f"of {trained_on.name}", ONE)
        for base in (wrapped, alone):
            answers = served(base, adapter)
            assert_equal(answers, reference_logits(World("", trained_on, {ADAPTER: adapter}), answers))
