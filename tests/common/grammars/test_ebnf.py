"""EBNF as clients write it: llguidance allows the same texts, and what is wrong is said with its place."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from motet.grammars.ebnf import MAX_DEPTH, MAX_TIMES, EbnfError, is_ebnf, lark_of_ebnf

TOKENIZER = LLTokenizer("byte")
ARITHMETIC = """
root ::= expr   # left recursion
expr ::= expr ws [-+*/] ws term
  | term
term ::= [0-9]+ ("." [0-9]+)? | "(" ws expr ws ")"
ws   ::= (" " ws)?
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


def allows(grammar: str, text: str) -> bool:
    lark = "\n".join(lark_of_ebnf(grammar))
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('root ::= "SELECT " column "a" | "x"\ncolumn ::= "c1 " | "c2 "', ["SELECT c1 a", "x"], ["SELECT c3 a", ""]),
        ('root ::= word "s"\nword ::= [a-z]+', ["cats", "ss"], ["cat", "s"]),  # a word does not take the last s
        ('root ::= "a"\n  | "b"\n\nunused ::= unused', ["a", "b"], ["c"]),
        ('root ::= "" | "a" rest?\nrest ::= ""', ["", "a"], ["b"]),
        (r'root ::= [^"\\/\]-]{2,3} . "\u00e9\n/"', ["abcé\n/", "ab\né\n/"], ["a]bé\n/"]),
        (r"root ::= [\x41-\U0001F600] [-a] [a-] [\^b] [^]", ["B-a^x", "😀a-b\n"], ["@aa^x", "Bbabx"]),
        ('root ::= "a"{2} "b"{,2} "c"{1,}', ["aac", "aabbcc"], ["ac", "aabbbc", "aa"]),
        ("root ::= root-a | rootA | root_a\nroot-a ::= [0]\nrootA ::= [1]\nroot_a ::= [2]", ["0", "1", "2"], ["3"]),
        (ARITHMETIC, ["1+2", "(1.5 *  (2 - 3))/4"], ["1+", "()", "(1", ".5"]),
        (JSON, ['{"a": [1, {"b": null}], "c":"\\n"}', "{}"], ["[]", '{"a"}', "{'a':1}", '{"a":01}']),
        ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["((x)", "()"]),
    ],
    ids=range(11),
)
def test_it_allows_what_it_says(grammar: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not allows(grammar, text)] == []
    assert [text for text in wrong if allows(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ('rot ::= "a"', "it has no rule 'root'"),
        ("", "it has no rule 'root'"),
        ('root ::= "a" b', "line 1, column 14: there is no rule 'b'"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: there is another rule 'root'"),
        ('root ::= "a\n"', "line 1, column 10: this text has no end"),
        ("root ::= [a", "line 1, column 10: this set of characters has no end"),
        ('root ::=\n  ("a"\nx ::= "b"', "line 2, column 3: this group has no end"),
        ('root ::= "a")', "line 1, column 13: nothing opens this group"),
        ("root ::= [z-a]", "line 1, column 10: 'z' comes after 'a'"),
        ("root ::= []", "line 1, column 10: it allows no character"),
        ('root ::= "a" $', "line 1, column 14: '$' means nothing here"),
        ("root ::= * x", "line 1, column 10: '*' has nothing to stand for here"),
        ('"a"', "line 1, column 1: a rule has to begin here"),
        (r'root ::= "\d"', r"there is no escape \d"),
        (r'root ::= "\ud83d"', r"\ud83d is no character"),
        (r'root ::= "\U00110000"', "is no character"),
        ('root ::= "a"{3,2}', "line 1, column 13: write {least,most}"),
        ('root ::= "a"{}', "line 1, column 13: write {least,most}"),
        (f'root ::= "a"{{{MAX_TIMES + 1}}}', f"at most {MAX_TIMES} times"),
        ('root ::= "a"{' + "9" * 5000 + "}", f"at most {MAX_TIMES} times"),
        ("root ::= " + "(" * 10_000, f"more than {MAX_DEPTH} groups are open"),
        ('root ::= "a"' + "*" * 10_000, "too many repetitions"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(grammar: str, says: str) -> None:
    with pytest.raises(EbnfError, match=re.escape(says)):
        list(lark_of_ebnf(grammar))


def test_a_long_chain_of_rules_is_followed_without_recursion() -> None:
    links = "\n".join(f"r{n} ::= r{n + 1}" for n in range(10_000))
    assert len(list(lark_of_ebnf(f"root ::= r0\n{links}\nr10000 ::= [a]"))) == 10_003


@pytest.mark.parametrize(
    ("text", "ebnf"),
    [
        ('root ::= "a"', True),
        ('# a comment\n  root  ::= "a"', True),
        ('start: "a"', False),
        ('start: "a ::= b"', False),
        ("start: x\nx: /a ::= b/", False),
    ],
)
def test_it_is_told_from_larks_language(text: str, ebnf: bool) -> None:
    assert is_ebnf(text) is ebnf


def _written(part: st.SearchStrategy[tuple[str, str]]) -> st.SearchStrategy[tuple[str, str]]:
    """The same in EBNF and as a regular expression."""
    several = st.lists(part, min_size=1, max_size=3)
    return st.one_of(
        several.map(lambda parts: (" ".join(one for one, _ in parts), "".join(other for _, other in parts))),
        several.map(lambda parts: (f"({' | '.join(o for o, _ in parts)})", f"({'|'.join(r for _, r in parts)})")),
        st.tuples(part, st.sampled_from(["*", "+", "?", "{1,2}"])).map(
            lambda both: (f"({both[0][0]}){both[1]}", f"({both[0][1]}){both[1]}")
        ),
    )


LETTER = st.sampled_from([('"a"', "a"), ('"b"', "b"), ('"ab"', "ab"), ("[ab]", "[ab]"), ("[^a]", "[^a]"), ('""', "")])


@given(st.recursive(LETTER, _written, max_leaves=8), st.text("abc", max_size=6))
def test_without_recursion_it_is_a_regular_expression(both: tuple[str, str], text: str) -> None:
    ebnf, regex = both
    assert allows(f"root ::= {ebnf}", text) is (re.fullmatch(regex, text) is not None)
