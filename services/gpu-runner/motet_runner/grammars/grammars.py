"""Compiles grammars for a model's tokens, with llguidance. It needs no torch.

A client writes its grammar, so all that one may cost is bounded: what it takes to compile it, the states that its lexer
may have, and the work for each mask. A grammar that passes a bound ends its own request.
"""

import re
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from motet.errors import InvalidRequest, MotetError
from motet.grammar import Grammar, GrammarForm
from motet_runner.grammars.unions import told_apart

MAX_LEXER_STATES = 5_000
"""Of some 2 KB each"""
MAX_FUEL_PER_TOKEN = 20_000
"""About 1.5 ms"""
MAX_ITEMS_PER_TOKEN = 20_000
"""About 1 ms"""
MAX_GRAMMAR_SIZE = 100_000
WHITE_SPACE = r"(\x20?|\x0A(\x20{0,24}|\x09{0,8}))"
"""Between the tokens of JSON: a blank, or a new line with its indent, as programs write JSON. A model that prefers
white space to an answer must come to an end."""
MAX_MESSAGE = 300
_EXCERPT = re.compile(r"^ *\d+ \|", re.MULTILINE)
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_ONE_OF = (
    "oneOf: its branches must exclude each other by their types, or by a required property that is another constant in "
    "each. Use anyOf"
)

_ANY_TOKENS = '%llguidance {"no_forcing": true}\n'
"""A text that the grammar leaves no choice about may have any tokens: a mask allows all that `take` does."""
_LIMITS = LLParserLimits(
    step_lexer_fuel=MAX_FUEL_PER_TOKEN,
    step_max_items=MAX_ITEMS_PER_TOKEN,
    max_lexer_states=MAX_LEXER_STATES,
    max_grammar_size=MAX_GRAMMAR_SIZE,
    verbose_errors=False,  # others' errors would repeat the client's text
)


class GrammarMask:
    """Which tokens one sequence may get next. See `motet_runner.interface.RowMask`."""

    __slots__ = ("_chooses_again", "_eos", "_matcher")

    def __init__(self, matcher: LLMatcher, eos: Collection[int]) -> None:
        self._matcher = matcher
        self._eos = eos
        self._chooses_again = False

    def take(self, token: int) -> bool:
        ends = token in self._eos
        taken = self._matcher.is_accepting() if ends else self._matcher.try_consume_tokens([token]) == 1
        self._chooses_again &= not taken
        return taken

    def allowed(self) -> bytes:
        self._chooses_again = True
        return self._matcher.compute_bitmask()

    @property
    def failure(self) -> MotetError | None:
        if not self._chooses_again:
            return None
        why = self._matcher.get_error() or "what it allows next, the request's other options forbid"
        return _impossible(f"the answer cannot go on: {why}")


class Grammars:
    def __init__(self, tokenizer_file: Path, vocabulary: int, eos: Collection[int]) -> None:
        self._file = tokenizer_file
        self._vocabulary = vocabulary
        self._eos = frozenset(eos)

    def mask(self, grammar: Grammar, delivered: Sequence[int]) -> GrammarMask:
        """For an answer that has these tokens. Raises InvalidRequest for a grammar that cannot be served."""
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(_lark(grammar)), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _impossible(_ONE_OF if "oneOf" in (why := matcher.get_error()) else why)
        if delivered and matcher.try_consume_tokens(list(delivered)) != len(delivered):
            raise _impossible("the answer that the client has so far does not follow it")
        return GrammarMask(matcher, self._eos)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Takes a second or more for a large vocabulary."""
        try:
            text = self._file.read_text()
            return LLTokenizer(text, n_vocab=self._vocabulary, eos_token=sorted(self._eos) or None)
        except (OSError, ValueError) as error:
            raise _impossible(f"the model's tokenizer.json cannot be used for it ({_short(str(error))})") from None


def _lark(grammar: Grammar) -> str:
    """In llguidance's language."""
    if grammar.form is GrammarForm.REGEX:
        (rule,) = orjson.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"]
        return f"{_ANY_TOKENS}{rule['lark_grammar']}"
    schema = _object(grammar.text)
    # A client's own options would take the bounds away.
    schema["x-guidance"] = {"whitespace_pattern": WHITE_SPACE, "coerce_one_of": told_apart(schema)}
    try:
        return f"{_ANY_TOKENS}start: %json {orjson.dumps(schema).decode()}"
    except TypeError:  # orjson reads what it cannot write again
        raise _impossible("it is nested too deeply") from None


def _object(text: str) -> dict[str, Any]:
    try:
        schema = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _impossible(f"it is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise _impossible("a JSON schema must be an object")
    return schema


def _impossible(why: str) -> InvalidRequest:
    return InvalidRequest(f"The grammar of this request cannot be served: {_short(why)}", param="response_format")


def _short(text: str) -> str:
    """Without llguidance's excerpt of the grammar, which is ours."""
    line = " ".join(_PLACE.sub("", _EXCERPT.split(text, maxsplit=1)[0]).split())
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…"
