"""Compiles grammars with llguidance: for a model's tokens in an engine, also in a trial.

A client writes its grammar, and llguidance bounds neither the time nor the memory that it takes to compile one. So the
gateway tries each one first, in a process that may be killed (`motet_gateway.grammars`). What a mask may cost is
bounded here: a grammar that passes a bound ends its own request.
"""

import json
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from motet.errors import InvalidRequest, MotetError, StructuredOutputUnavailable
from motet.grammars.ebnf import EbnfError, lark_of_ebnf
from motet.grammars.grammar import Grammar, GrammarForm, impossible
from motet.grammars.structural_tags import TagError, TagWriter
from motet.grammars.unions import told_apart
from motet.reasoning.formats import ExpectedReasoning
from motet.reasoning.grammar import ANSWER, reasoning_rules
from motet.tool_calls.grammar import CallRules, call_grammar

WHITE_SPACE = r"(\x20?|\x0A(\x20{0,24}|\x09{0,8}))"
"""Between the tokens of JSON: a blank, or a new line with its indent, as programs write JSON. A model that prefers
white space to an answer must come to an end."""
MAX_EXACT = 1 << 53
"""llguidance computes with numbers as JavaScript does: beyond it they are rounded."""
MAX_MESSAGE = 300
MAX_TAKE_SECONDS = 0.005
"""Of CPU time, for one token. It is the engine's thread that takes tokens, so an ambiguous grammar, each of whose steps
takes longer than the one before, would delay all rows. Usual ones take some microseconds."""
MAX_SLOW_TAKES = 1
"""A virtual machine that had to wait counts that as CPU time, too. It rarely meets one answer twice."""
TRIED_MASKS = 8
"""An object's first names come after two tokens."""

_EXCERPT = re.compile(r"^ *\d+ \||<backtrace>|<non-verbose/>", re.MULTILINE)
_IN_LARK = re.compile(r"(?:at )?(\d+)\((\d+)\)")
_TEMPERATURE = re.compile(r"\[[^\[\]\n]*\btemperature\s*=")
"""From the last bracket before it: the search stays linear, and it holds the interpreter for all other threads."""
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): (failed to compile JSON schema: )?")
_ONE_OF = (
    "oneOf: its branches must exclude each other by their types, or by a required property that is another constant in "
    "each. Use anyOf"
)
_ANY_TOKENS = '%llguidance {"no_forcing": true}\n'
"""A text that the grammar leaves no choice about may have any tokens: a mask allows all that `take` does."""
_LIMITS = LLParserLimits(
    max_items_in_row=1000,
    step_lexer_fuel=10_000,  # 0.7 ms
    step_max_items=10_000,  # 0.5 ms
    max_lexer_states=5_000,  # of 2 KB each
    max_grammar_size=50_000,
    precompute_large_lexemes=False,  # its cost grows with the vocabulary, so a trial would not show it
    verbose_errors=False,  # others' errors would repeat the client's text
)


class GrammarMask:
    """Which tokens one sequence may get next. See `motet_runner.row_mask.TokenRules`."""

    __slots__ = ("_chooses_again", "_eos", "_matcher", "_slow_takes", "_taken")

    def __init__(self, matcher: LLMatcher, eos: Collection[int], taken: int) -> None:
        self._matcher = matcher
        self._eos = eos
        self._taken = taken
        self._chooses_again = False
        self._slow_takes = 0

    @property
    def _too_slow(self) -> bool:
        return self._slow_takes > MAX_SLOW_TAKES

    def back_to(self, place: int) -> None:
        if (again := self._taken - place) > 0:
            self._matcher.rollback(again)
            self._taken = place

    def take(self, token: int, place: int) -> bool:
        self.back_to(place)
        if token in self._eos:
            taken = self._matcher.is_accepting()
        else:
            began = time.thread_time()
            if taken := self._matcher.try_consume_tokens([token]) == 1:
                self._taken += 1
            self._slow_takes += time.thread_time() - began > MAX_TAKE_SECONDS
        taken &= not self._too_slow
        self._chooses_again &= not taken
        return taken

    def allowed(self) -> bytes:
        self._chooses_again = True
        return b"" if self._too_slow else self._matcher.compute_bitmask()

    @property
    def failure(self) -> MotetError | None:
        if not self._chooses_again:
            return None
        if self._too_slow:
            return impossible("the answer cannot go on: a step of it takes too much time")
        if self._matcher.is_error():
            return impossible(f"the answer cannot go on: a step of it takes too much ({self._matcher.stop_reason()})")
        return impossible("what it allows next, the request's other options forbid")


class Grammars:
    def __init__(self, tokenizer_file: Path, vocabulary: int, eos: Collection[int]) -> None:
        """It takes a second or more for a large vocabulary, and Python stands still meanwhile."""
        self._eos = frozenset(eos)
        self._tokenizer: LLTokenizer | None = None
        self._why_none = "the model names no token that ends an answer"
        if self._eos:
            try:
                self._tokenizer = LLTokenizer(
                    tokenizer_file.read_text(), n_vocab=vocabulary, eos_token=sorted(self._eos)
                )
            except (OSError, ValueError) as error:
                self._why_none = f"the model's tokenizer.json cannot be used for it ({_short(str(error))})"

    def mask(self, grammar: Grammar, delivered: Sequence[int]) -> GrammarMask:
        """For an answer that has these tokens. Raises InvalidRequest for a grammar that cannot be served, and
        StructuredOutputUnavailable if none can."""
        return self.started(self.compiled(grammar), delivered)

    def compiled(self, grammar: Grammar) -> LLMatcher:
        """At its beginning. Raises as `mask` does."""
        if self._tokenizer is None:
            raise StructuredOutputUnavailable(f"This engine serves no structured output: {self._why_none}.")
        return _matcher(self._tokenizer, grammar)

    def started(self, matcher: LLMatcher, delivered: Sequence[int]) -> GrammarMask:
        """The matcher becomes the mask's own."""
        if delivered and matcher.try_consume_tokens(list(delivered)) != len(delivered):
            raise impossible("the answer that the client has so far does not follow it")
        return GrammarMask(matcher, self._eos, len(delivered))

    def try_grammar(self, grammar: Grammar) -> None:
        """Compile it, and make masks along one of the shortest answers, as an engine would: also behind the reasoning,
        if it begins there. Raises InvalidRequest."""
        tokenizer = self._tokenizer or LLTokenizer("byte")
        matcher = _matcher(tokenizer, grammar)
        if (behind := grammar.behind) is not None:
            _try_masks(matcher.deep_copy())
            tags = behind.end if behind.begun else behind.begin + behind.end
            reasoning = tokenizer.tokenize_str(tags, parse_special=True)
            if matcher.try_consume_tokens(reasoning) != len(reasoning):  # this tokenizer writes the tags in another way
                matcher = _matcher(tokenizer, replace(grammar, behind=None))
        _try_masks(matcher)


def _try_masks(matcher: LLMatcher) -> None:
    for _ in range(TRIED_MASKS):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        lowest = (bits & -bits).bit_length() - 1  # mostly a single character
        ended = matcher.is_stopped() or matcher.is_accepting()
        if bits and not ended and not matcher.is_error():
            ended = not matcher.try_consume_tokens([lowest])
        if matcher.is_error():
            raise impossible(
                "one of its first steps has too many possibilities, such as the names of an object with hundreds "
                f"of optional properties ({matcher.stop_reason()})"
            )
        if not bits:
            raise impossible("no text can follow it")
        if ended:
            return


def _matcher(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    match grammar.form:
        case GrammarForm.TOOL_CALLS:
            return _call_matcher(tokenizer, grammar)
        case GrammarForm.LARK:
            return _matcher_of_client(tokenizer, grammar)
        case GrammarForm.EBNF:
            lark = _lark_of_ebnf(grammar.text)
        case GrammarForm.STRUCTURAL_TAG:
            lark = _lark_of_tags(tokenizer, grammar.text)
        case GrammarForm.REGEX:
            lark = f"start: {_regex_rule(grammar.text)}"
        case GrammarForm.JSON_SCHEMA:
            lark = f"start: {_json_rule(_object(grammar.text))}"
    return _matcher_of_lark(tokenizer, _ANY_TOKENS + lark, grammar.behind)


def _compiled(tokenizer: LLTokenizer, lark: str, behind: ExpectedReasoning | None) -> LLMatcher:
    source = LLMatcher.grammar_from_lark(lark)
    if behind is not None:
        before = _ANY_TOKENS + reasoning_rules(behind, partial(_special_token, tokenizer))
        source = json.dumps({"grammars": [{"lark_grammar": before}, {"name": ANSWER, "lark_grammar": lark}]})
    return LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)


def _matcher_of_lark(tokenizer: LLTokenizer, lark: str, behind: ExpectedReasoning | None = None) -> LLMatcher:
    matcher = _compiled(tokenizer, lark, behind)
    if matcher.is_error():
        why = matcher.get_error()
        raise impossible(_ONE_OF if "'coerce_one_of'" in why else _short(why))
    return matcher


def _matcher_of_client(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Of a grammar that the client wrote in llguidance's language."""
    lark = grammar.text
    if (found := _TEMPERATURE.search(lark)) is not None:
        raise impossible(f"line {lark.count(chr(10), 0, found.start()) + 1}: no rule has a temperature of its own")
    matcher = _compiled(tokenizer, _ANY_TOKENS + lark, grammar.behind)
    if matcher.is_error():
        why = matcher.get_error()
        place = _IN_LARK.match(why)
        where = f"line {int(place[1]) - _ANY_TOKENS.count(chr(10))}, column {place[2]}: " if place else ""
        raise impossible(where + _short(why))
    return matcher


def _call_matcher(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    try:
        rules = CallRules.from_text(grammar.text)
        lark = call_grammar(rules, special=partial(_special_token, tokenizer), json_rule=_json_rule)
    except (ValueError, KeyError):
        raise impossible("another version of Motet has sent it") from None
    try:
        return _matcher_of_lark(tokenizer, _ANY_TOKENS + lark, grammar.behind)
    except InvalidRequest:
        for name, schema in rules.tools.items():  # to say which one
            try:
                _matcher_of_lark(tokenizer, f"{_ANY_TOKENS}start: {_json_rule(schema)}")
            except InvalidRequest as error:
                why = error.message.removeprefix(impossible("").message)
                raise impossible(f"the parameters of the tool {name}: {why}") from None
        raise


def _special_token(tokenizer: LLTokenizer, text: str) -> str:
    tokens = tokenizer.tokenize_str(text, parse_special=True) if text else []
    return f"<[{tokens[0]}]>" if len(tokens) == 1 and tokenizer.is_special_token(tokens[0]) else ""


def _lark_of_ebnf(text: str) -> str:
    try:
        return "\n".join(lark_of_ebnf(text))
    except EbnfError as error:
        raise impossible(_short(str(error))) from None


def _lark_of_tags(tokenizer: LLTokenizer, text: str) -> str:
    writer = TagWriter(pieces=partial(_pieces, tokenizer), json_rule=_json_rule, regex_rule=_regex_rule)
    try:
        return writer.lark(_object(text))
    except TagError as error:
        raise impossible(_short(str(error))) from None


def _pieces(tokenizer: LLTokenizer, text: str) -> list[tuple[str, bool]]:
    """Its special tokens apart: what a model means by them is no text. All between them is as the client has written
    it: a tokenizer may have a normal form of it, and no tokens for some characters."""
    pieces: list[tuple[str, bool]] = []
    at = 0
    for token in filter(tokenizer.is_special_token, tokenizer.tokenize_str(text, parse_special=True)):
        name = tokenizer.decode_str([token])
        if (begins := text.find(name, at)) >= 0:  # else it stands for a character that the tokenizer does not know
            pieces += [*_text_piece(text[at:begins]), (f"<[{token}]>", True)]
            at = begins + len(name)
    return pieces + _text_piece(text[at:])


def _text_piece(text: str) -> list[tuple[str, bool]]:
    return [(json.dumps(text, ensure_ascii=False), False)] if text else []


def _regex_rule(text: str) -> str:
    (rule,) = orjson.loads(LLMatcher.grammar_from_regex(text))["grammars"]
    lark: str = rule["lark_grammar"]
    return lark.removeprefix("start: ")


def _json_rule(said: Mapping[str, Any]) -> str:
    schema = dict(said)
    _check_numbers(schema)
    # A client's own options would take the bounds away.
    schema["x-guidance"] = {"whitespace_pattern": WHITE_SPACE, "coerce_one_of": told_apart(schema)}
    try:
        return f"%json {orjson.dumps(schema).decode()}"
    except TypeError:  # orjson reads what it cannot write again
        raise impossible("it is nested too deeply") from None


def _object(text: str) -> dict[str, Any]:
    try:
        schema = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise impossible(f"it is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise impossible("a JSON schema must be an object")
    return schema


def _check_numbers(schema: dict[str, Any]) -> None:
    waiting: list[Any] = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, int | float) and abs(one) >= MAX_EXACT:
            raise impossible(f"numbers from 2^53 on, such as {one}, are not exact")


def _short(text: str) -> str:
    """Without llguidance's excerpt of the grammar, which is ours."""
    line = " ".join(_PLACE.sub("", _EXCERPT.split(text, maxsplit=1)[0]).split())
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…"
