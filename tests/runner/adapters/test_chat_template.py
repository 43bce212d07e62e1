"""The chat template and the tokenizer that an adapter's folder brings: what is used of them, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from motet.adapter_template import AdapterTemplate, digest_of_template
from motet.errors import AdapterIncompatible
from motet_runner.adapters.chat_template import own_template
from motet_runner.adapters.tokenizer_check import check_tokenizer

OF_BASE = "{% for message in messages %}{{ message.content }}{% endfor %}"
OWN = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
WORDS = ["<unk>", "<s>", "</s>", "hello", "world", "hell", "o"]
VOCABULARY = 10
"""Of the base model: three ids more than its tokenizer has"""


def tokenizer(words: list[str] = WORDS) -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>"])
    return made


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(OF_BASE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (made := tmp_path / "adapter").mkdir()
    return made


def config(folder: Path, **fields: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


# ---------------------------------------------------------------------------------------------------------- templates


def test_an_adapter_without_a_template_has_the_base_models(base: Path, folder: Path) -> None:
    assert own_template(folder, base) is None
    config(folder, eos_token="<|other|>")
    assert own_template(folder, base) is None, "special tokens alone are no template"


def test_a_template_of_its_own_comes_with_its_special_tokens_and_the_bases(base: Path, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(OWN)
    config(folder, eos_token={"content": "<|im_end|>"}, chat_template="not this one")
    found = own_template(folder, base)
    assert found is not None
    assert found.text == OWN
    assert (found.special_tokens["bos_token"], found.special_tokens["eos_token"]) == ("<s>", "<|im_end|>")
    assert not found.shows_tools
    assert AdapterTemplate.decode(found.encode()) == found
    assert digest_of_template(found.encode()).startswith("sha256:")


@pytest.mark.parametrize(
    ("inline", "text"),
    [
        (OWN, OWN),
        ([{"name": "rag", "template": "x"}, {"name": "default", "template": OWN}], OWN),
        ([{"name": "rag", "template": "x"}], None),
        ("", None),
        (None, None),
        (7, None),
    ],
)
def test_a_template_in_the_configuration_is_read_as_the_base_models_is(
    base: Path, folder: Path, inline: object, text: str | None
) -> None:
    config(folder, chat_template=inline)
    found = own_template(folder, base)
    assert (found.text if found is not None else None) == text


def test_the_base_models_template_saved_again_is_the_base_models(base: Path, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(OF_BASE)
    assert own_template(folder, base) is None
    config(folder, bos_token="<s>", eos_token="</s>", pad_token="<|pad|>")
    assert own_template(folder, base) is None, "it writes no padding"
    config(folder, eos_token="hello", unk_token="<unk>")
    assert own_template(folder, base) is None, "it writes no end, either"
    for each in (base, folder):
        (each / "chat_template.jinja").write_text(OWN)
    assert own_template(folder, base) is not None, "this one writes another end"
    config(folder, eos_token="</s>", unk_token="<unk>", pad_token="</s>")
    assert own_template(folder, base) is None, "what the template does not read may differ"


def test_a_template_that_offers_tools_says_so(base: Path, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if tools %}{{ tools | tojson }}{% endif %}{# no tools #}")
    found = own_template(folder, base)
    assert found is not None
    assert found.shows_tools


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{% for m in messages %}\n\n{{ m.content }", r"chat_template\.jinja, line 3: unexpected '}'"),
        ("{% if x %}\n", r"chat_template\.jinja, line 1: Unexpected end of template"),
        ("a\n{{ messages | no_such_filter }}", r"chat_template\.jinja, line 2: No filter named 'no_such_filter'"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", r"chat_template\.jinja cannot be parsed"),
        ("{{ " + "9" * 5000 + " }}", r"chat_template\.jinja"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, r"chat_template\.jinja"),
    ],
    ids=["brace", "end", "filter", "nested", "number", "blocks"],
)
def test_what_is_no_jinja_is_refused_with_file_and_line(base: Path, folder: Path, text: str, says: str) -> None:
    (folder / "chat_template.jinja").write_text(text)
    with pytest.raises(AdapterIncompatible, match=says) as refused:
        own_template(folder, base)
    assert refused.value.reason == "FormatRejected"
    assert len(refused.value.message) < 1000


def test_a_broken_template_in_the_configuration_is_named(base: Path, folder: Path) -> None:
    config(folder, chat_template="{% endfor %}")
    with pytest.raises(AdapterIncompatible, match=r"tokenizer_config\.json: chat_template, line 1: "):
        own_template(folder, base)
    config(folder, chat_template=[{"name": "default"}])
    with pytest.raises(AdapterIncompatible, match=r"tokenizer_config\.json: chat_template needs a name and a template"):
        own_template(folder, base)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("chat_template.jinja", b"x" * ((1 << 20) + 1), "larger than 1048576 bytes"),
        ("chat_template.jinja", b"Hi \xff", "not UTF-8: see byte 3"),
        ("tokenizer_config.json", json.dumps({"chat_template": "é" * (1 << 20)}).encode(), "larger than 1048576 bytes"),
        ("tokenizer_config.json", b"[]", "must be a JSON object"),
        ("tokenizer_config.json", b'{"a": 1, "a": 2}', "twice"),
        ("tokenizer_config.json", b'{"chat_template": "\\ud800"}', "not valid JSON"),
        ("tokenizer_config.json", b'{"chat_template": "x", "eos_token": "' + b"e" * 300 + b'"}', "eos_token has more"),
    ],
)
def test_what_is_too_large_or_no_text_is_refused(
    base: Path, folder: Path, name: str, content: bytes, says: str
) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(AdapterIncompatible, match=says):
        own_template(folder, base)


# ----------------------------------------------------------------------------------------------------------- tokenizers


def check(folder: Path, base: Path, vocabulary: int = VOCABULARY) -> None:
    check_tokenizer(folder, base, vocabulary)


def save(folder: Path, change: Callable[[Tokenizer], object], words: list[str] = WORDS) -> None:
    made = tokenizer(words)
    change(made)
    made.save(str(folder / "tokenizer.json"))


def test_without_a_tokenizer_or_with_the_bases_nothing_is_refused(base: Path, folder: Path) -> None:
    check(folder, base)
    (folder / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    config(folder, eos_token="</s>", added_tokens_decoder={"1": {"content": "<s>"}, "2": {"content": "</s>"}})
    check(folder, base)
    (base / "tokenizer.json").unlink()
    check(folder, base)
    check_tokenizer(folder, None, 0)


def test_padding_truncation_and_form_may_differ(base: Path, folder: Path) -> None:
    def padded(made: Tokenizer) -> None:
        made.enable_padding(pad_id=9, pad_token="[PAD]", length=16)
        made.enable_truncation(8)

    save(folder, padded)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content, indent=3, sort_keys=True))
    check(folder, base)


@pytest.mark.parametrize("number", [7, 4096], ids=["within", "beyond"])
def test_a_token_added_for_padding_is_not_used_and_not_refused(base: Path, folder: Path, number: int) -> None:
    save(folder, lambda made: made.add_special_tokens(["[PAD]"]))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][-1]["id"] = number
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "added_tokens.json").write_text(json.dumps({"[PAD]": number}))
    config(folder, pad_token="[PAD]", added_tokens_decoder={str(number): {"content": "[PAD]"}})
    check(folder, base)
    config(folder, pad_token="</s>")
    with pytest.raises(AdapterIncompatible, match=r"'\[PAD\]' has the id"):
        check(folder, base)


CHANGES: dict[str, tuple[Callable[[Tokenizer], object], str]] = {
    "added": (lambda made: made.add_special_tokens(["<|im_start|>"]), r"'<\|im_start\|>' has the id 7, which the base"),
    "beyond": (
        lambda made: made.add_special_tokens([f"<extra{i}>" for i in range(5)]),
        r"tokenizer\.json: '<extra\d>' has the id \d+, (which|and) the base model's",
    ),
    "normalizer": (lambda made: setattr(made, "normalizer", normalizers.Lowercase()), "normalizer is not that"),
    "pre_tokenizer": (
        lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.WhitespaceSplit()),
        "pre_tokenizer is not that",
    ),
    "flags": (
        lambda made: made.add_special_tokens([AddedToken("hello", lstrip=True)]),
        "'hello' is not found as in the base model's",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tokenizer_that_gives_other_ids_is_refused_with_the_field(base: Path, folder: Path, change: str) -> None:
    how, says = CHANGES[change]
    save(folder, how)
    with pytest.raises(AdapterIncompatible, match=says) as refused:
        check(folder, base)
    assert refused.value.reason == "TokenizerDiffers"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            [*WORDS[:3], "world", "hello", *WORDS[5:]],
            "'world' has the id 3, which has the id 4 in the base model's tokenizer",
        ),
        (WORDS[:-1], "it lacks the base model's token 'o'"),
        ([*WORDS, "more"], "'more' has the id 7, which the base model's tokenizer does not have"),
        ([*WORDS, "m", "o2", "r", "e"], "the base model's"),
    ],
)
def test_other_words_are_refused(base: Path, folder: Path, words: list[str], says: str) -> None:
    save(folder, lambda _: None, words)
    with pytest.raises(AdapterIncompatible, match=says):
        check(folder, base)


def test_an_id_beyond_the_base_models_vocabulary_is_named_as_that(base: Path, folder: Path) -> None:
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 10}))
    with pytest.raises(AdapterIncompatible, match=r"added_tokens\.json: '<\|im_end\|>' has the id 10, .* has 10 ids"):
        check(folder, base)
    (folder / "added_tokens.json").unlink()
    config(folder, added_tokens_decoder={"4294967296": {"content": "x"}})
    with pytest.raises(AdapterIncompatible, match=r"tokenizer_config\.json: added_tokens_decoder: 'x' has the id"):
        check(folder, base)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b'{"model": 7}'),
        ("tokenizer.json", b'{"padding": 7}'),
        ("added_tokens.json", b'{"a": "b"}'),
        ("added_tokens.json", b'{"a": true}'),
        ("added_tokens.json", b"[1]"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"-1": "a"}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"1": 7}}'),
    ],
)
def test_files_that_are_no_tokenizer_are_refused_by_name(base: Path, folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(AdapterIncompatible, match=name.replace(".", r"\.")):
        check(folder, base)
