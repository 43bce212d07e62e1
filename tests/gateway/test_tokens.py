"""Text to tokens and back."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from motet.errors import Internal, InvalidRequest
from motet_gateway.tokens.chat_template import CannotRender, ChatTemplate
from motet_gateway.tokens.detokenizer import detokenizer
from motet_gateway.tokens.stop_strings import StopStrings
from motet_gateway.tokens.text_model import ModelTokenizer
from motet_gateway.tokens.token_bytes import TokenBytes
from testbed.fake_services import byte_tokenizer, model_assets

TOKENIZER = byte_tokenizer()
BYTES = TokenBytes(TOKENIZER)

# Few letters, so that stop strings and texts meet often.
words = st.text(alphabet="ab\n", max_size=24)
stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


def cut(text: str, borders: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(b % (len(text) + 1) for b in borders)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool, list[str]]:
    matcher = StopStrings(stops)
    shown = []
    for piece in pieces:
        shown.append(matcher.feed(piece))
        if matcher.stopped:
            return "".join(shown), True, shown
    shown.append(matcher.flush())
    return "".join(shown), False, shown


def expected(text: str, stops: list[str]) -> str:
    """Letter by letter: the text before the first stop string to complete."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@given(words, stops, st.lists(st.integers(0, 30), max_size=10))
def test_stop_strings_do_not_depend_on_where_tokens_end(text: str, stops: list[str], borders: list[int]) -> None:
    shown, stopped, _ = run(cut(text, borders), stops)
    assert shown == expected(text, stops)
    assert stopped == any(stop in text for stop in stops)


@given(words, stops, st.lists(st.integers(0, 30), max_size=10))
def test_no_part_of_a_stop_string_is_ever_shown(text: str, stops: list[str], borders: list[int]) -> None:
    final = expected(text, stops)
    so_far = ""
    for piece in run(cut(text, borders), stops)[2]:
        so_far += piece
        assert final.startswith(so_far)


def test_a_stop_string_may_be_kept_in_the_text() -> None:
    matcher = StopStrings(["END"], include=True)
    assert matcher.feed("the E") + matcher.feed("ND of it") == "the END"


@given(st.text(max_size=40))
def test_decoded_text_is_complete_and_never_splits_characters(text: str) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    decoded = detokenizer(BYTES)
    pieces = [decoded.feed([token]) for token in tokens]
    assert "".join(pieces) + decoded.flush() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_answer_that_ends_within_a_character_shows_a_replacement_mark() -> None:
    decoded = detokenizer(BYTES)
    tokens = TOKENIZER.encode("ok 🙃", add_special_tokens=False).ids[:-1]
    text = "".join(decoded.feed([token]) for token in tokens) + decoded.flush()
    assert text.startswith("ok ")
    assert text.endswith("\ufffd")


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    assert detokenizer(BYTES).feed([0]) == ""
    assert detokenizer(BYTES, skip_special_tokens=False).feed([0]) == "<|end|>"


def template(text: str) -> ChatTemplate:
    return ChatTemplate.from_text(text, {"bos_token": "<s>"})


HELLO = [{"role": "user", "content": "Hello <b>"}]


def test_templates_get_special_tokens_and_unescaped_json() -> None:
    assert template("{{ bos_token }}{{ messages[0] | tojson }}").render(HELLO) == (
        '<s>{"role": "user", "content": "Hello <b>"}'
    )


def test_templates_may_break_loops_and_mark_generations() -> None:
    text = "{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}"
    assert template(text + "{% generation %}x{% endgeneration %}").render(HELLO) == "1x"


def test_a_templates_own_refusal_reaches_the_client() -> None:
    with pytest.raises(CannotRender, match="roles must alternate") as caught:
        template("{{ raise_exception('roles must alternate') }}").render(HELLO)
    assert caught.value.field == "", "it is the template's"


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(999999999) %}x{% endfor %}",
        "{{ missing.field.deeper }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(text: str) -> None:
    with pytest.raises(CannotRender, match="cannot render these messages"):
        template(text).render(HELLO)


def test_a_template_cannot_reach_pythons_internals() -> None:
    assert template("{{ messages[0].content.format.__globals__ }}").render(HELLO) == ""


def test_a_template_cannot_write_without_end() -> None:
    text = "{% for i in range(9999) %}{% for j in range(9999) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    with pytest.raises(CannotRender, match="makes more than"):
        template(text).render(HELLO)


def test_the_answer_continues_the_final_message() -> None:
    text = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]\n{% endfor %}"
    messages = [*HELLO, {"role": "assistant", "content": "I think "}]
    rendered = template(text).render(messages, continue_final_message=True)
    assert rendered.endswith("[assistant]I think ")


ENDED = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"


@given(prefill=st.text(min_size=1).filter(str.strip), question=st.text())
@example(prefill="<", question="")
@example(prefill="s", question="")
@example(prefill=">", question="s>")
def test_a_prefill_is_cut_at_its_own_end_whatever_the_template_writes_after_it(prefill: str, question: str) -> None:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": prefill}]
    rendered = template(ENDED).render(messages, continue_final_message=True)
    assert rendered == f"<|user|>{question}</s><|assistant|>{prefill}"


def test_a_template_that_trims_messages_trims_a_prefill() -> None:
    text = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} [end] \n{% endfor %}"
    messages = [*HELLO, {"role": "assistant", "content": " I think \n"}]
    rendered = template(text).render(messages, continue_final_message=True)
    assert rendered.endswith("[assistant] I think")


def test_a_template_that_writes_the_prefill_twice_shows_no_mark() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "I think "}]
    rendered = template(ENDED + "summary: {{ messages[-1].content }}").render(messages, continue_final_message=True)
    assert rendered.endswith("<|assistant|>I think </s>summary: I think ")


@pytest.mark.parametrize("ascii_only", ["true", "false"])
def test_a_prefill_in_json_keeps_its_space(ascii_only: str) -> None:
    text = "{% for m in messages %}{{ m | tojson(ensure_ascii=" + ascii_only + ") }}{% endfor %}"
    messages = [*HELLO, {"role": "assistant", "content": "I think "}]
    assert template(text + text).render(messages, continue_final_message=True).endswith('"content": "I think ')


@pytest.mark.parametrize(
    ("text", "content", "match"),
    [
        ("{{ messages[-1].content | trim }} {{ messages[-1].content }}", "I think", "more than once and changes"),
        ("{{ messages[-1].content[:30] }} {{ messages[-1].content }}", "I think", "more than once and changes"),
        ("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}", "I think", "omits the final message or changes"),
        ("{{ messages[-1].content | upper }}", "I think", "omits the final message or changes"),
        ("{{ messages[-1].content[:4] }}", "I think", "omits the final message or changes"),
        (ENDED, " \n", "is empty"),
    ],
)
def test_a_prefill_that_the_template_does_not_write_is_refused(text: str, content: str, match: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content}]
    with pytest.raises(CannotRender, match=match) as caught:
        template(text).render(messages, continue_final_message=True)
    assert caught.value.field == "continue_final_message"


def test_without_a_template_the_error_names_the_other_endpoint(tmp_path: Path) -> None:
    for name, data in model_assets(template=None).items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        ModelTokenizer.from_folder(tmp_path).chat_template()


def test_recommended_sampling_comes_from_the_models_folder(tmp_path: Path) -> None:
    for name, data in model_assets().items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": [1, 2]}))
    model = ModelTokenizer.from_folder(tmp_path)
    assert model.defaults == {"temperature": 0.6}
    assert model.eos_ids == {1, 2}
    assert model.context_length == 512


def test_a_broken_tokenizer_has_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(Internal, match=r"tokenizer\.json"):
        ModelTokenizer.from_folder(tmp_path)
