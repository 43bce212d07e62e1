"""Calls of tools in answers: found in any cut of the text, and nothing of it is lost."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.tool_calls.formats import FORMATS, TOOL_FORMATS, ToolFormatName
from motet.tool_calls.parser import CallDelta, CallParser
from motet.tool_calls.reader import MAX_UNDECIDED

NAMES = ("look_up", "send")


def parsed(
    form: ToolFormatName, pieces: Sequence[str], *, only_one: bool = False
) -> tuple[str, list[tuple[str, str, bool]], CallParser]:
    """The content, and name, arguments and completeness of each call, as a client puts the stream together."""
    ids = count()
    parser = CallParser(FORMATS[form], NAMES, lambda: f"id{next(ids)}", only_one=only_one)
    content, calls = "", dict[int, list[str]]()
    for piece in (*pieces, None):
        for delta in parser.flush() if piece is None else parser.feed(piece):
            if isinstance(delta, str):
                content += delta
                continue
            if delta.id:
                calls[delta.index] = [delta.name, ""]
            calls[delta.index][1] += delta.arguments
    streamed = [
        (name, arguments, whole.complete) for (name, arguments), whole in zip(calls.values(), parser.calls, strict=True)
    ]
    assert streamed == [(call.name, call.arguments, call.complete) for call in parser.calls]
    return content, streamed, parser


ONE = {
    "hermes": '<tool_call>\n{"name": "look_up", "arguments": {"q": "a}\\"b", "n": [1, {}]}}\n</tool_call>',
    "llama3": '{"name": "look_up", "parameters": {"q": "a}\\"b", "n": [1, {}]}}',
    "mistral": '[TOOL_CALLS] [{"name": "look_up", "arguments": {"q": "a}\\"b", "n": [1, {}]}}]',
    "pythonic": "[look_up(q='a}\"b', n=[1, {}])]",
}
TWO = {
    "hermes": '<tool_call>{"name": "send", "arguments": {}}</tool_call>\n'
    '<tool_call>{"arguments": {"x": null}, "name": "look_up"}</tool_call>',
    "llama3": '<|python_tag|>{"type": "function", "name": "send", "parameters": {}}; '
    '{"name": "look_up", "parameters": {"x": null}}',
    "mistral": '[TOOL_CALLS][{"name": "send", "arguments": {}}, {"name": "look_up", "arguments": {"x": null}, '
    '"id": "1"}]',
    "pythonic": "[send(), look_up(x=None)]",
}


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_a_call_in_each_format(form: ToolFormatName) -> None:
    content, calls, parser = parsed(form, [ONE[form]])
    assert (content, [name for name, _, _ in calls], parser.complete) == ("", ["look_up"], True)
    assert json.loads(calls[0][1]) == {"q": 'a}"b', "n": [1, {}]}


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_two_calls_in_each_format(form: ToolFormatName) -> None:
    content, calls, parser = parsed(form, [TWO[form] + "\n"])
    assert (content, [name for name, _, _ in calls], parser.complete) == ("", ["send", "look_up"], True)
    assert [json.loads(arguments) for _, arguments, _ in calls] == [{}, {"x": None}]


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_only_the_first_call_counts_if_one_is_wanted(form: ToolFormatName) -> None:
    for pieces in ([TWO[form]], list(TWO[form])):
        content, calls, parser = parsed(form, pieces, only_one=True)
        assert (content, [name for name, _, _ in calls], parser.enough) == ("", ["send"], True)


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_arguments_come_while_they_are_written(form: ToolFormatName) -> None:
    parser = CallParser(FORMATS[form], NAMES, lambda: "id")
    begun = ONE[form].index("q")
    first, *more = [one for one in parser.feed(ONE[form][: begun + 7]) if isinstance(one, CallDelta)]
    assert (first.id, first.name) == ("id", "look_up")
    assert "".join(one.arguments for one in more).startswith('{"q": "a')
    assert not parser.complete


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_an_answer_that_ends_within_a_call_has_the_beginning_of_its_arguments(form: ToolFormatName) -> None:
    for end in range(ONE[form].index("q") + 5, len(ONE[form]) - 4):
        content, calls, _ = parsed(form, [ONE[form][:end]])
        assert content == ""
        assert len(calls) == 1
        assert parsed(form, [ONE[form]])[1][0][1].startswith(calls[0][1])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        "<tool_call>I think</tool_call>",
        '<tool_call>{"name": "send", "arguments": "x"}</tool_call>',
        '{"name": "Ann", "parameters": {}}',
        '{"answer": 1}',
        "[TOOL_CALLS] send",
        "[1, 2]",
        "[send]",
        "[other(a=1)]",
        "<tool_",
        "  two words \n\n",
    ],
)
@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_what_is_no_call_of_a_tool_of_the_request_is_content(form: ToolFormatName, text: str) -> None:
    for pieces in ([text], list(text)):
        assert parsed(form, pieces)[:2] == (text, [])


def test_a_call_behind_a_broken_one_is_found() -> None:
    text = '<tool_call>hm <tool_call>{"name": "send", "arguments": {"a": 1}}</tool_call> Done.'
    assert parsed("hermes", [text])[:2] == ("<tool_call>hm Done.", [("send", '{"a": 1}', True)])


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_text_before_and_behind_calls_is_content(form: ToolFormatName) -> None:
    text = ("" if FORMATS[form].at_start else "Look. ") + ONE[form] + " Done."
    before = "" if FORMATS[form].at_start else "Look."
    assert parsed(form, [text])[0] == f"{before} Done."


@pytest.mark.parametrize(
    "arguments", ['{"q": x}', '{"q": [1}}', '{"q": NaN}', '{"q": 1,}', '{"q": ' + "[" * 9999 + "]" * 9999 + "}"]
)
def test_a_call_whose_arguments_are_no_object_is_not_whole(arguments: str) -> None:
    text = f'<tool_call>{{"name": "send", "arguments": {arguments}}}</tool_call>'
    _, calls, parser = parsed("hermes", [text])
    assert (calls[0][::2], parser.complete) == (("send", False), False)


def test_in_python_a_call_that_is_no_call_is_not_whole() -> None:
    for text in (
        "[send(a={1: 2})]",
        "[send(a={'x': y z})]",
        "[send(a='b' 5)]",
        "[send(a=[1 2])]",
        "[send(a=['b' 'c'])]",
    ):
        assert not parsed("pythonic", [text])[2].complete


def test_a_line_break_in_a_string_is_escaped() -> None:
    text = '<tool_call>{"name": "send",\n"arguments": {\n"a": "one\ntwo\\n\tthree\\\\"}}</tool_call>'
    for pieces in ([text], list(text)):
        _, calls, parser = parsed("hermes", pieces)
        assert parser.complete
        assert json.loads(calls[0][1]) == {"a": "one\ntwo\n\tthree\\"}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("a=True, b=None, c=-1.5e3", {"a": True, "b": None, "c": -1500.0}),
        ("a=true, b=null,", {"a": True, "b": None}),
        ("a=(1, 2,), b={'x': [1]}", {"a": [1, 2], "b": {"x": [1]}}),
        (r"""a='it\'s "\n\x41\u00e9\101\\', b=""", None),
        (r"""a='it\'s "\n\x41\u00e9\101\\'""", {"a": "it's \"\nAéA\\"}),
        ('a="""two\n"lines" """', {"a": 'two\n"lines" '}),
        ("a=0x1f, b=word", {"a": "0x1f", "b": "word"}),
        ("**{'a-b': 1}", {"a-b": 1}),
        ("", {}),
    ],
)
def test_arguments_in_python_become_json(written: str, meant: object) -> None:
    _, calls, parser = parsed("pythonic", [f"[send({written})]"])
    assert parser.complete is (meant is not None)
    if meant is not None:
        assert json.loads(calls[0][1]) == meant


@pytest.mark.parametrize("number", ["9" * 3000, "-1." + "5" * 3000])
def test_a_long_number_in_python_is_passed_on(number: str) -> None:
    text = f"[send(a={number}, b=[{number}])]"
    for pieces in ([text], [text[:1200], *text[1200:]]):
        content, calls, parser = parsed("pythonic", pieces)
        assert (content, parser.complete) == ("", True)
        assert calls[0][1] == f'{{"a": {number}, "b": [{number}]}}'
    assert not parsed("pythonic", [f"[send(a={number}x)]"])[2].complete


SIGNS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        '{"name": ',
        '"send"',
        ', "arguments": ',
        '"look_up"',
    ),
    *(', "parameters": ', "{", "}", "[", "]", ",", ":", "; ", "\n", " ", '"', "'", "\\", "send(", "a=", ")", "1", "x"),
    *("{}}", "{}", "**{", "[send(a=", "\u00e9", "   "),
]
TEXTS = st.lists(
    st.one_of(st.sampled_from(SIGNS), st.sampled_from([*ONE.values(), *TWO.values()]), st.text(max_size=3))
)


@given(st.sampled_from(TOOL_FORMATS), TEXTS, st.data(), st.booleans())
def test_how_the_text_is_cut_changes_nothing(
    form: ToolFormatName, parts: list[str], data: st.DataObject, only_one: bool
) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parsed(form, [text], only_one=only_one)[:2]
    assert parsed(form, pieces, only_one=only_one)[:2] == whole
    assert parsed(form, list(text), only_one=only_one)[:2] == whole


def bare(text: str) -> str:
    return "".join(text.split())


@given(st.sampled_from(["hermes", "llama3", "mistral"]), TEXTS)
def test_nothing_of_a_text_is_lost(form: ToolFormatName, parts: list[str]) -> None:
    """What is neither content nor arguments is the format's own: a little for each call."""
    text = re.sub(r"[\x00-\x1f]", " ", "".join(parts))  # in strings these are escaped
    content, calls, _ = parsed(form, [text])
    if not calls:
        assert content == text
    signs = iter(bare(text))
    assert all(sign in signs for sign in bare(content))
    shown = Counter(bare(content + "".join(arguments for _, arguments, _ in calls if arguments != "{}")))
    rest = Counter(bare(text))
    assert shown <= rest
    assert (rest - shown).total() <= len(calls) * OF_ONE_CALL


OF_ONE_CALL = len('<tool_call>{"type":"function","name":"look_up","parameters":{}};</tool_call>') + 10


@given(TEXTS)
def test_without_calls_a_text_stays_as_it_is_in_python_too(parts: list[str]) -> None:
    text = "".join(parts)
    content, calls, _ = parsed("pythonic", [text])
    assert calls or content == text


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_a_text_that_stays_undecided_for_long_is_content(form: ToolFormatName) -> None:
    begin = FORMATS[form].begin + FORMATS[form].opening
    text = begin + " " * (MAX_UNDECIDED + 1) + ONE[form]
    for pieces in ([text], [text[:100], *text[100:]]):
        assert parsed(form, pieces)[:2] == (text, [])
