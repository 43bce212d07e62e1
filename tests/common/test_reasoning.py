"""Reasoning is divided from content in the same way however the text is cut, and nothing is lost."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from motet.reasoning.formats import FORMATS, ExpectedReasoning, ReasoningFormat, is_begun
from motet.reasoning.splitter import MAX_HELD_SPACE, ReasoningSplitter

THINK = FORMATS["think"]
Parts = tuple[str, str]


def split(form: ReasoningFormat, pieces: list[str], *, begun: bool = False) -> Parts:
    splitter = ReasoningSplitter(ExpectedReasoning(form.begin, form.end, begun))
    parts = [*(splitter.feed(piece) for piece in pieces), splitter.flush()]
    return "".join(one for one, _ in parts), "".join(one for _, one in parts)


@pytest.mark.parametrize(
    ("text", "begun", "reasoning", "content"),
    [
        ("<think>\nSo it is.\n</think>\n\nYes.", False, "So it is.", "Yes."),
        ("\n<think>a</think>b", False, "a", "b"),
        ("So it is.\n</think>\n\nYes. ", True, "So it is.", "Yes. "),
        ("Yes.", False, "", "Yes."),
        ("  Yes.", False, "", "  Yes."),
        ("So <think>a</think>", False, "", "So <think>a</think>"),
        ("<think></think>Yes", False, "", "Yes"),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("<think>cut off </thi", False, "cut off </thi", ""),
        ("<think>cut off", False, "cut off", ""),
        ("cut off", True, "cut off", ""),
        ("<thi", False, "", "<thi"),
        ("</think>Yes", True, "", "Yes"),
        ("<think>a < b </ c</think>\n", False, "a < b </ c", ""),
        (f"<think>a{' ' * 70}</think>b", False, f"a{' ' * 6}", "b"),
        (f"{' ' * 65}<think>a</think>b", False, "", f"{' ' * 65}<think>a</think>b"),
        ("", False, "", ""),
        ("", True, "", ""),
    ],
)
def test_an_answer_is_reasoning_and_then_content(text: str, begun: bool, reasoning: str, content: str) -> None:
    assert split(THINK, [text], begun=begun) == (reasoning, content)
    assert split(THINK, [*text], begun=begun) == (reasoning, content)


signs = st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "é", " " * MAX_HELD_SPACE])
texts = st.lists(signs, max_size=12).map("".join)


@given(texts, st.lists(st.integers(0, 200), max_size=12), st.booleans())
@example("<think>a \n</think> b", [8, 9, 10, 12], False)
def test_how_a_text_is_cut_changes_nothing(text: str, cuts: list[int], begun: bool) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    assert split(THINK, pieces, begun=begun) == split(THINK, [text], begun=begun) == split(THINK, [*text], begun=begun)


@given(texts, st.booleans())
def test_only_tags_and_white_space_beside_them_are_lost(text: str, begun: bool) -> None:
    reasoning, content = split(THINK, [text], begun=begun)
    rest = text
    if not begun and rest.lstrip().startswith(THINK.begin) and reasoning + content != text:
        rest = rest.lstrip().removeprefix(THINK.begin)
    if begun or rest is not text:
        before, end, behind = rest.partition(THINK.end)
        assert before.split() == reasoning.split()
        assert behind.lstrip() == content
        assert not end or reasoning + " " * MAX_HELD_SPACE >= before.strip()
    else:
        assert (reasoning, content) == ("", text)


def test_long_texts_are_shown_while_they_come() -> None:
    splitter = ReasoningSplitter(ExpectedReasoning(THINK.begin, THINK.end, begun=True))
    for _ in range(1000):
        assert splitter.feed("word ") != ("", "")
    assert not splitter.over
    splitter.feed("</think>")
    assert splitter.over
    assert splitter.feed("x") == ("", "x")


@pytest.mark.parametrize(
    ("before", "continued", "begun"),
    [
        ("<|assistant|><think>\n", "", True),
        ("<|assistant|><think>\n\n</think>\n\n", "", False),
        ("what is <think>?<|assistant|>", "", False),
        ("<think>", "So it", False),
        ("", "<think>So it", True),
        ("", "<think>So</think>it", False),
        ("", "<think>So</think><think>it", True),
    ],
)
def test_an_answer_begins_inside_where_the_prompt_ends_inside(before: str, continued: str, begun: bool) -> None:
    assert is_begun(THINK, before, continued) is begun
