"""Tokenizers of adapters: the base model's, saved again, is the base model's; one that gives other ids is refused."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from motet.errors import AdapterIncompatible
from motet_runner.adapters import tokenizer_texts
from motet_runner.adapters.chat_template import own_template
from motet_runner.adapters.tokenizer_check import check_tokenizer
from tests.runner.adapters.base_tokenizers import FORMS, write_base

VOCABULARY = 1024
MAX_WARNING_CHARACTERS = 253
"""That a status keeps"""


def check(folder: Path, base: Path) -> tuple[str, ...]:
    return check_tokenizer(folder, base, VOCABULARY)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("bases")
    return {form: write_base(made / form, form) for form in FORMS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (made := tmp_path / "adapter").mkdir()
    return made


def changed(base: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((base / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))


# --------------------------------------------------------------------------------------------------------- saved again


def pad_and_truncate(tokenizer: Any) -> None:
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer(["a b c", "d"], padding=True, truncation=True, max_length=2)


TRAININGS: dict[str, tuple[dict[str, Any], Callable[[Any], object]]] = {
    "plain": ({}, lambda _: None),
    "pad is end": ({}, lambda tokenizer: setattr(tokenizer, "pad_token", tokenizer.eos_token)),
    "new pad": ({}, lambda tokenizer: tokenizer.add_special_tokens({"pad_token": "[PAD]"})),
    "padded": ({}, pad_and_truncate),
    "left": ({"padding_side": "left", "model_max_length": 512}, lambda _: None),
    "adds end": ({"add_eos_token": True}, lambda _: None),
}


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("form", FORMS)
def test_the_base_models_tokenizer_saved_again_is_the_base_models(
    bases: dict[str, Path], tmp_path: Path, form: str, training: str
) -> None:
    options, change = TRAININGS[training]
    once, twice = tmp_path / "once", tmp_path / "twice"
    tokenizer = AutoTokenizer.from_pretrained(str(bases[form]), **options)
    change(tokenizer)
    tokenizer.save_pretrained(str(once))
    AutoTokenizer.from_pretrained(str(once)).save_pretrained(str(twice))
    for saved in (once, twice):
        assert (saved / "tokenizer.json").is_file()
        warnings = check(saved, bases[form])
        assert all(len(one) <= MAX_WARNING_CHARACTERS for one in warnings)
        assert own_template(saved, bases[form]) is None


def test_a_token_for_masking_that_the_library_adds_is_not_used_and_not_refused(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(bases["gemma"], base := tmp_path / "base")
    changed(bases["gemma"], base, lambda content: content["added_tokens"].pop(4))
    config = json.loads((base / "tokenizer_config.json").read_text())
    del config["added_tokens_decoder"]["4"]
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(str(base), mask_token="<mask>")
    tokenizer.save_pretrained(str(saved := tmp_path / "saved"))
    added = json.loads((saved / "tokenizer.json").read_text())["added_tokens"]
    assert "<mask>" in [one["content"] for one in added]
    assert check(saved, base) == ()


def test_another_part_that_changes_the_ids_of_no_sample_text_is_told(bases: dict[str, Path], folder: Path) -> None:
    odd = {"type": "Replace", "pattern": {"String": "in no sample text"}, "content": ""}
    changed(bases["llama-3"], folder, lambda content: content.update(normalizer=odd))
    (told,) = check(folder, bases["llama-3"])
    assert told.startswith("tokenizer.json: normalizer is not that of the base model's tokenizer, which is used: ")
    assert told.endswith(" sample texts have the same ids")


@pytest.mark.parametrize("form", FORMS)
def test_what_changes_no_id_is_not_told(bases: dict[str, Path], folder: Path, form: str) -> None:
    def change(content: dict[str, Any]) -> None:
        model = content["model"]
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):
            model[name] = None if model[name] == "" else ""
        model["dropout"] = 0.5
        for part in (content["pre_tokenizer"] or {}).get("pretokenizers", ()):
            if "trim_offsets" in part:
                part["trim_offsets"] = not part["trim_offsets"]
        content["padding"] = {
            "strategy": {"Fixed": 64},
            "direction": "Left",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        }
        content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}

    changed(bases[form], folder, change)
    assert check(folder, bases[form]) == ()


@pytest.mark.parametrize("form", ["llama-2", "phi-3"])
def test_how_a_text_begins_after_a_blank_or_a_token_is_told(bases: dict[str, Path], folder: Path, form: str) -> None:
    """As transformers 5 saves the tokenizer of Llama 2"""

    def change(content: dict[str, Any]) -> None:
        content["model"]["unk_token"] = content["normalizer"] = None
        content["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}

    changed(bases[form], folder, change)
    (told,) = check(folder, bases[form])
    assert told.startswith(
        "tokenizer.json: model.unk_token, normalizer, pre_tokenizer are not those of the base model's"
    )
    assert told.endswith(" sample texts have the same ids, ' hello' has not")
    assert len(told) <= MAX_WARNING_CHARACTERS


@pytest.mark.parametrize("form", ["llama-2", "llama-3", "gemma"])
def test_tokens_that_are_added_to_a_text_are_told(bases: dict[str, Path], folder: Path, form: str) -> None:
    changed(bases[form], folder, lambda content: content.update(post_processor=None))
    (told,) = check(folder, bases[form])
    assert told.startswith("tokenizer.json: post_processor adds other tokens than the base model's")


# ------------------------------------------------------------------------------------------------ the base's own files


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"2": {"content": "<|tool|>"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"4096": {"content": "<|tool|>"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "a"}}}),
        ("added_tokens.json", {"<|tool|>": 2}),
    ],
)
def test_a_copy_of_the_base_models_files_is_accepted_whatever_they_say(
    tmp_path: Path, folder: Path, name: str, content: dict[str, Any]
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")).save(str(base / "tokenizer.json"))
    (base / name).write_text(json.dumps(content))
    shutil.copytree(base, folder, dirs_exist_ok=True)
    assert check_tokenizer(folder, base, 32) == ()
    (folder / name).write_text(json.dumps(content).replace("<|tool|>", "<|toll|>").replace('"7"', '"9"'))
    with pytest.raises(AdapterIncompatible, match=r"'(<\|toll\|>|a)' has the id "):
        check_tokenizer(folder, base, 32)


@pytest.mark.parametrize("token", ["<|tool|>", "<|user|>"], ids=["rare", "in a sample text"])
@pytest.mark.parametrize("form", ["qwen", "llama-2", "gpt-2"])
def test_a_token_that_only_the_base_models_configuration_names_may_be_saved(
    bases: dict[str, Path], tmp_path: Path, form: str, token: str
) -> None:
    base, saved = tmp_path / "base", tmp_path / "saved"
    shutil.copytree(bases[form], base)
    config = json.loads((base / "tokenizer_config.json").read_text())
    number = Tokenizer.from_file(str(base / "tokenizer.json")).get_vocab_size()
    config["added_tokens_decoder"][str(number)] = {
        "content": token,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
        "special": True,
    }
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    AutoTokenizer.from_pretrained(str(base)).save_pretrained(str(saved))
    check(saved, base)
    with pytest.raises(AdapterIncompatible, match=f"{re.escape(token)}' has the id"):
        check(saved, bases[form])


def test_what_the_base_models_files_say_wrongly_is_not_the_adapters_fault(
    bases: dict[str, Path], tmp_path: Path, folder: Path
) -> None:
    shutil.copytree(bases["qwen"], base := tmp_path / "base")
    (base / "tokenizer_config.json").write_text('{"added_tokens_decoder": [1]}')
    changed(base, folder, lambda content: content.update(padding=None))
    assert check(folder, base) == ()


# ------------------------------------------------------------------------------------------------------------ other ids


def set_model(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["model"].update(fields)


def other_order(content: dict[str, Any]) -> None:
    content["model"]["merges"].reverse()


def one_merge_less(content: dict[str, Any]) -> None:
    content["model"]["ignore_merges"] = False
    content["model"]["merges"].pop()


def other_split(content: dict[str, Any]) -> None:
    content["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Digits", "individual_digits": False})
    content["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Whitespace"})


def set_prefix(content: dict[str, Any]) -> None:
    content["pre_tokenizer"]["add_prefix_space"] = True


REFUSED: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "lower case": ("qwen", lambda one: one.update(normalizer={"type": "Lowercase"}), "normalizer is not that"),
    "compatible": ("qwen", lambda one: one.update(normalizer={"type": "NFKC"}), "normalizer is not that"),
    "not composed": ("qwen", lambda one: one.update(normalizer=None), "normalizer is not that"),
    "accents": ("llama-3", lambda one: one.update(normalizer={"type": "StripAccents"}), "normalizer is not that"),
    "strip": (
        "llama-3",
        lambda one: one.update(normalizer={"type": "Strip", "strip_left": False, "strip_right": True}),
        "normalizer is not that",
    ),
    "line breaks": (
        "llama-3",
        lambda one: one.update(normalizer={"type": "Replace", "pattern": {"String": "\r\n"}, "content": "\n"}),
        "normalizer is not that",
    ),
    "no prefix": (
        "llama-2",
        lambda one: one.update(normalizer=one["normalizer"]["normalizers"][1]),
        "normalizer is not that",
    ),
    "prefix": ("gpt-2", set_prefix, "pre_tokenizer is not that"),
    "split": ("llama-3", other_split, "pre_tokenizer is not that"),
    "no split": ("gpt-2", lambda one: one.update(pre_tokenizer=None), "pre_tokenizer is not that"),
    "order": ("gpt-2", other_order, r"model\.merges is not that"),
    "one less": ("gpt-2", one_merge_less, r"model\.merges is not that"),
    "no bytes": ("llama-2", set_model(byte_fallback=False), r"model\.byte_fallback is not that"),
    "suffix": ("llama-3", set_model(end_of_word_suffix="e", ignore_merges=False), r"model\.end_of_word_suffix"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_tokenizer_that_gives_other_ids_is_refused_with_the_field_and_a_text(
    bases: dict[str, Path], folder: Path, change: str
) -> None:
    form, how, says = REFUSED[change]
    changed(bases[form], folder, how)
    with pytest.raises(AdapterIncompatible, match=rf"tokenizer\.json: .*{says}.* has other ids") as refused:
        check(folder, bases[form])
    assert refused.value.reason == "TokenizerDiffers"


def test_scores_of_words_count(tmp_path: Path, folder: Path) -> None:
    def save(where: Path, score: float) -> None:
        words = [("<unk>", 0.0), ("a", -1.0), ("b", -1.0), ("ab", score)]
        made = Tokenizer(models.Unigram(words, unk_id=0, byte_fallback=False))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        made.save(str(where / "tokenizer.json"))

    (base := tmp_path / "base").mkdir()
    save(base, -1.5)
    save(folder, -3.0)
    with pytest.raises(AdapterIncompatible, match=r"model\.vocab is not that of the base model's tokenizer, and '.*ab"):
        check_tokenizer(folder, base, 4)


def test_a_text_that_only_one_of_them_can_tokenise_differs(tmp_path: Path, folder: Path) -> None:
    (base := tmp_path / "base").mkdir()
    for where, unknown in ((base, "<unk>"), (folder, "<none>")):
        Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token=unknown)).save(str(where / "tokenizer.json"))
    with pytest.raises(AdapterIncompatible, match=r"model\.unk_token is not that"):
        check_tokenizer(folder, base, 4)


def test_no_ordinary_text_begins_with_a_blank(bases: dict[str, Path]) -> None:
    for base in bases.values():
        tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
        texts = [*tokenizer_texts.ordinary_texts(tokenizer, ["    ", "<s>", " x"])]
        assert not [text for text in texts if not text or text[0] in " ▁"]
        assert "hello" in texts, "words of this tokenizer"
        assert texts[-1] == "<s>"


def test_the_number_of_texts_does_not_grow_with_the_vocabulary() -> None:
    words = {f"w{number}": number for number in range(100_000)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    texts = [*tokenizer_texts.ordinary_texts(tokenizer, [*words])]
    most = tokenizer_texts.MAX_FROM_VOCABULARY + tokenizer_texts.MAX_ADDED
    assert most - 200 <= len(texts) <= most + 60
    assert len([*tokenizer_texts.rare_texts([*words])]) < 400
