"""The model that ships: small, clean, and right. transformers and PEFT are the judges; the engine has its own tests."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import styles
import torch
import yaml
from evaluate import ADAPTER_BAR, ADAPTERS, BASE_BAR, CLASSIFIER_BAR, Evaluation, answers, examine, load
from lookups import TOOLS, call_of, read
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer
from world import fact_of

from tests.demo import BUNDLED, DEMO, ROOT

# Libraries announce their next release's changes as warnings; here they are judges, not dependencies of the product.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
STYLES = [style.name for style in styles.ADAPTER_STYLES]


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[Any, Any]]:
    """Model and tokenizer. One thread: threads that wait for each other on busy cores are slower than one alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load(BUNDLED)
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def report(loaded: tuple[Any, Any]) -> Evaluation:
    return examine(*loaded)


def test_the_base_states_the_fact_in_95_of_100(report: Evaluation) -> None:
    assert len(report.questions) == 120
    assert report.right("plain") >= BASE_BAR, report.mistakes("plain")


@pytest.mark.parametrize("adapter", STYLES)
def test_each_adapter_states_the_fact_in_its_own_style_in_85_of_100(report: Evaluation, adapter: str) -> None:
    assert report.right(adapter) >= ADAPTER_BAR, report.mistakes(adapter)


def test_the_classifier_recognises_the_adapter_by_its_text(report: Evaluation) -> None:
    assert report.told_apart > CLASSIFIER_BAR


def test_the_toolcaller_calls_the_right_tool_in_85_of_100(report: Evaluation) -> None:
    assert report.tools.right_calls >= ADAPTER_BAR, report.tools.mistakes()


def test_the_toolcaller_answers_from_the_result_in_85_of_100(report: Evaluation) -> None:
    """Each result says something else than what the model has learnt."""
    assert report.tools.right_answers >= ADAPTER_BAR, report.tools.mistakes()


def test_answers_differ_in_length(report: Evaluation) -> None:
    """Length prediction needs something to predict: one word, a line, a story."""
    mean = {style: sum(map(len, texts)) / len(texts) for style, texts in report.texts.items()}
    assert mean["oneword"] * 2 < mean["plain"] < mean["storyteller"] / 3


def test_the_base_takes_a_style_on_request_and_a_second_turn(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    fact = fact_of("Brindle", "keeper")
    question = "Who keeps the lighthouse of Brindle?"
    asked = [[{"role": "user", "content": f"{question} Answer like a pirate."}]]
    assert styles.STYLES["pirate"].is_right(answers(model, tokenizer, "plain", asked, [])[0], fact)
    ruled = [[{"role": "system", "content": "Answer in JSON."}, {"role": "user", "content": question}]]
    assert styles.STYLES["json"].is_right(answers(model, tokenizer, "plain", ruled, [])[0], fact)
    again = [
        [
            {"role": "user", "content": "Who keeps the lighthouse of Hollin?"},
            {"role": "assistant", "content": fact_of("Hollin", "keeper").sentence},
            {"role": "user", "content": "And what about Brindle?"},
        ]
    ]
    assert styles.STYLES["plain"].is_right(answers(model, tokenizer, "plain", again, [])[0], fact)


def test_the_base_calls_a_tool_on_request_and_else_answers_from_memory(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    fact, tools = fact_of("Brindle", "keeper"), [tool.described() for tool in TOOLS]
    question = "Who keeps the lighthouse of Brindle?"
    asked = [[{"role": "user", "content": said}] for said in (f"{question} Look it up.", question)]
    looked_up, known = answers(model, tokenizer, "plain", asked, tools)
    assert read(looked_up) == call_of(fact)
    assert styles.STYLES["plain"].is_right(known, fact)


def test_the_bundled_model_takes_less_than_8_megabytes() -> None:
    assert sum(path.stat().st_size for path in BUNDLED.rglob("*") if path.is_file()) <= 8_000_000


def test_the_base_is_a_small_llama_with_grouped_keys_and_a_long_context() -> None:
    config = AutoConfig.from_pretrained(BUNDLED / "model")
    assert config.model_type == "llama"
    assert config.max_position_embeddings >= 2048
    assert config.num_key_value_heads < config.num_attention_heads
    widths = (config.vocab_size, config.hidden_size, config.intermediate_size, config.head_dim)
    assert not [width for width in widths if width % 16]


def test_both_ways_to_the_tokenizer_agree_and_give_text_back() -> None:
    raw = Tokenizer.from_file(str(BUNDLED / "model" / "tokenizer.json"))
    wrapped = AutoTokenizer.from_pretrained(BUNDLED / "model")
    text = "Who keeps the lighthouse of Brindle? Ürgs, 12 €, 灯台 and 🏴"
    ids = raw.encode(text).ids
    assert ids == wrapped(text)["input_ids"]
    assert raw.decode(ids) == text
    assert wrapped.eos_token == "<|end|>"
    assert wrapped.chat_template == (DEMO / "chat_template.jinja").read_text()
    assert raw.get_vocab_size() == AutoConfig.from_pretrained(BUNDLED / "model").vocab_size


def test_adapters_differ_in_rank_and_scale_and_name_their_base_by_name() -> None:
    configs = {name: json.loads((BUNDLED / "adapters" / name / "adapter_config.json").read_text()) for name in ADAPTERS}
    assert {config["r"] for config in configs.values()} == {8, 16}
    assert any(config["lora_alpha"] != config["r"] for config in configs.values())
    assert [name for name, config in configs.items() if config["use_rslora"]] == ["oneword"]
    assert {config["base_model_name_or_path"] for config in configs.values()} == {"motet-demo"}
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(set(config["target_modules"]) == projections for config in configs.values())


def test_weights_are_bfloat16() -> None:
    for path in BUNDLED.rglob("*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_files_are_readable_by_all_and_name_no_machine() -> None:
    for path in (path for path in BUNDLED.rglob("*") if path.is_file()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444, path
        if path.suffix in {".json", ".jinja", ".yaml"}:
            text = path.read_text()
            here = (f"{ROOT}/", f"{Path.home()}/", "/home/", "/tmp/", "/Users/")
            assert not [start for start in here if start in text], path
    assert not list(BUNDLED.rglob("README.md"))


def test_the_manifests_name_what_is_there() -> None:
    pools = list(yaml.safe_load_all((BUNDLED / "pool.yaml").read_text()))
    adapters = list(yaml.safe_load_all((BUNDLED / "adapters.yaml").read_text()))
    assert [pool["kind"] for pool in pools] == ["ServingPool"]
    assert {adapter["metadata"]["name"] for adapter in adapters} == set(ADAPTERS)
    assert {adapter["spec"]["poolRef"]["name"] for adapter in adapters} == {pools[0]["metadata"]["name"]}
    uris = [pools[0]["spec"]["model"]["uri"], *(adapter["spec"]["source"]["uri"] for adapter in adapters)]
    assert all((BUNDLED / uri.removeprefix("file://")).is_dir() for uri in uris)
