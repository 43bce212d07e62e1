"""Grammars in EBNF, as clients of vLLM, SGLang and llama.cpp write them (GBNF), in llguidance's language. Pure.

EBNF speaks of characters, llguidance of lexemes, each of which takes as many characters as it can. So what needs no
recursion becomes one lexeme, however many rules it has: there the two mean the same. Only between two references of a
grammar to itself a part takes as much as it can.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

MAX_DEPTH = 64
"""Of groups in groups"""
MAX_TIMES = 10_000
ROOT = "root"

_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r\n]|\#[^\r\n]*)+)
    |(?P<text>"(?:\\.|[^"\\\r\n])*")
    |(?P<characters>\[(?:\\.|[^\]\\\r\n])*\])
    |(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)
    |(?P<times>\{[ \t]*[0-9]*[ \t]*(?:,[ \t]*[0-9]*[ \t]*)?\})
    |(?P<sign>::=|[()|*+?.])""",
    re.VERBOSE,
)
_RULE = re.compile(r"^[ \t]*[A-Za-z_][A-Za-z0-9_.-]*[ \t]*::=", re.MULTILINE)
_SIGN = re.compile(
    r"\\x(?P<x>[0-9A-Fa-f]{2})|\\u(?P<u>[0-9A-Fa-f]{4})|\\U(?P<long>[0-9A-Fa-f]{8})|\\(?P<other>.)|(?P<plain>.)",
    re.DOTALL,
)
_NAMED: Final = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}
_SUFFIXES: Final = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_OPEN: Final = {'"': "this text has no end", "[": "this set of characters has no end"}
_ANY = r"/(.|\n)/"


class EbnfError(ValueError):
    """It says where."""


@dataclass(frozen=True, slots=True)
class _Literal:
    """A text, or one of some characters, as llguidance writes it."""

    written: str


@dataclass(frozen=True, slots=True)
class _Reference:
    rule: str
    at: int


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: "_Part"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple["_Part", ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    parts: tuple["_Part", ...]


_Part = _Literal | _Reference | _Repeat | _Sequence | _Choice


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


def is_ebnf(text: str) -> bool:
    """Whether a grammar is written in EBNF, and not in Lark's language."""
    return _RULE.search(text) is not None


def lark_of_ebnf(text: str, *, start: str = "start") -> Iterator[str]:
    """Lines whose rule `start` is the grammar's root. The names of all others begin with `start`. Raises EbnfError."""
    rules = _Reader(text).rules()
    if ROOT not in rules:
        raise EbnfError(f"it has no rule {ROOT!r}, with which an answer begins")
    for part in rules.values():
        for one in _references(part):
            if one.rule not in rules:
                raise EbnfError(f"{_place(text, one.at)}: there is no rule {one.rule!r}")
    return _Writer(rules, start).lines()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [*_tokens(text), _Token("end", "", len(text))]
        self._next = 0
        self._depth = 0

    def rules(self) -> dict[str, _Part]:
        found: dict[str, _Part] = {}
        while self._kind != "end":
            name = self._take()
            if name.kind != "name" or self._take().text != "::=":
                raise self._error(name, "a rule has to begin here, as in: name ::= ...")
            if name.text in found:
                raise self._error(name, f"there is another rule {name.text!r}")
            found[name.text] = self._choice()
            if self._kind != "end" and not self._begins_rule:
                raise self._error(self._tokens[self._next], "nothing opens this group")
        return found

    def _choice(self) -> _Part:
        parts = [self._sequence()]
        while self._tokens[self._next].text == "|":
            self._next += 1
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else _Choice(tuple(parts))

    def _sequence(self) -> _Part:
        parts: list[_Part] = []
        while (part := self._part()) is not None:
            parts.append(self._repeated(part))
        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))

    def _part(self) -> _Part | None:
        token = self._tokens[self._next]
        match token.kind, token.text:
            case "text", _:
                said = "".join(sign for sign, _ in self._signs(token))
                part: _Part = _Literal(json.dumps(said, ensure_ascii=False)) if said else _Sequence(())
            case "characters", _:
                part = _Literal(self._characters(token))
            case "sign", ".":
                part = _Literal(_ANY)
            case "sign", "(":
                return self._group()
            case "name", _ if not self._begins_rule:
                part = _Reference(token.text, token.at)
            case ("name" | "end", _) | ("sign", "|" | ")"):
                return None
            case _:
                raise self._error(token, f"{token.text!r} has nothing to stand for here")
        self._next += 1
        return part

    def _group(self) -> _Part:
        opened = self._take()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(opened, f"more than {MAX_DEPTH} groups are open")
        part = self._choice()
        if self._take().text != ")":
            raise self._error(opened, "this group has no end")
        self._depth -= 1
        return part

    def _repeated(self, part: _Part) -> _Part:
        repeats = 0
        while self._kind == "times" or self._tokens[self._next].text in _SUFFIXES:
            token = self._take()
            repeats += 1
            if repeats > MAX_DEPTH:
                raise self._error(token, "too many repetitions of one part")
            least, most = self._times(token) if token.kind == "times" else _SUFFIXES[token.text]
            part = _Repeat(part, least, most)
        return part

    def _times(self, token: _Token) -> tuple[int, int | None]:
        first, comma, second = (one.strip() for one in token.text[1:-1].partition(","))
        if any(len(one) > len(str(MAX_TIMES)) or int(one or 0) > MAX_TIMES for one in (first, second)):
            raise self._error(token, f"a part can be repeated at most {MAX_TIMES} times, or without a limit")
        most = int(second) if second else None if comma else int(first or 0)
        if not (first or second) or (most is not None and most < int(first or 0)):
            raise self._error(token, "write {least,most}, {least,} or {times}")
        return int(first or 0), most

    def _characters(self, token: _Token) -> str:
        signs = [*self._signs(token)]
        but = bool(signs) and signs[0] == ("^", False)
        rest = signs[but:]
        written: list[str] = []
        while rest:
            (first, _), rest = rest[0], rest[1:]
            last = first
            if len(rest) > 1 and rest[0] == ("-", False):
                (last, _), rest = rest[1], rest[2:]
                if last < first:
                    raise self._error(token, f"{first!r} comes after {last!r}")
            written.append(_code(first) if first == last else f"{_code(first)}-{_code(last)}")
        if not written:
            if not but:
                raise self._error(token, "it allows no character")
            return _ANY
        return f"/[{'^' * but}{''.join(written)}]/"

    def _signs(self, token: _Token) -> Iterator[tuple[str, bool]]:
        """The characters between the token's first and last one, and whether each was escaped."""
        for found in _SIGN.finditer(token.text, 1, len(token.text) - 1):
            if plain := found["plain"]:
                yield plain, False
            elif other := found["other"]:
                if other.isalnum() and other not in _NAMED:
                    raise self._error(token, f"there is no escape \\{other}; for a backslash write \\\\")
                yield _NAMED.get(other, other), True
            else:
                code = int(found["x"] or found["u"] or found["long"], 16)
                if not (code < 0xD800 or 0xE000 <= code <= 0x10FFFF):
                    raise self._error(token, f"{found[0]} is no character")
                yield chr(code), True

    @property
    def _kind(self) -> str:
        return self._tokens[self._next].kind

    @property
    def _begins_rule(self) -> bool:
        return self._kind == "name" and self._tokens[self._next + 1].text == "::="

    def _take(self) -> _Token:
        token = self._tokens[self._next]
        self._next += token.kind != "end"
        return token

    def _error(self, token: _Token, why: str) -> EbnfError:
        return EbnfError(f"{_place(self._text, token.at)}: {why}")


class _Writer:
    def __init__(self, rules: dict[str, _Part], start: str) -> None:
        self._rules = rules
        self._start = start
        self._numbers = {name: at for at, name in enumerate(rules)}
        self._regular = _without_recursion(rules)
        self._lexemes: dict[str, str] = {}
        """How one is written → its name"""

    def lines(self) -> Iterator[str]:
        """Of the rules that can be reached."""
        yield f"{self._start}: {self._in_rule(_Reference(ROOT, 0))}"
        waiting, seen = [ROOT], {ROOT}
        while waiting:
            name = waiting.pop()
            part = self._rules[name]
            for one in _references(part):
                if one.rule not in seen:
                    seen.add(one.rule)
                    waiting.append(one.rule)
            if name in self._regular:
                yield f"{self._name(name)}: {self._in_lexeme(part)}"
            else:
                yield f"{self._name(name)}: {self._in_rule(part)}"
        for written, lexeme in self._lexemes.items():
            yield f"{lexeme}: {written}"

    def _name(self, rule: str) -> str:
        name = f"{self._start}_{self._numbers[rule]}"
        return name.upper() if rule in self._regular else name

    def _in_rule(self, part: _Part) -> str:
        if self._is_regular(part):
            return self._lexeme(part)
        match part:
            case _Choice(parts):
                return f"({' | '.join(map(self._in_rule, parts))})"
            case _Sequence(parts):
                return " ".join(self._runs(parts))
            case _Repeat(inner, least, most):
                return f"({self._in_rule(inner)}){_times(least, most)}"
            case _Reference(rule):
                return self._name(rule)
            case _Literal():
                raise AssertionError("a literal has no recursion")

    def _runs(self, parts: tuple[_Part, ...]) -> Iterator[str]:
        """What stands together and has no recursion is one lexeme."""
        for regular, run in groupby(parts, self._is_regular):
            if regular:
                together = tuple(run)
                yield self._lexeme(together[0] if len(together) == 1 else _Sequence(together))
            else:
                yield from map(self._in_rule, run)

    def _lexeme(self, part: _Part) -> str:
        if isinstance(part, _Reference):
            return self._name(part.rule)
        return self._lexemes.setdefault(self._in_lexeme(part), f"{self._start.upper()}_L{len(self._lexemes)}")

    def _in_lexeme(self, part: _Part) -> str:
        match part:
            case _Literal(written):
                return written
            case _Reference(rule):
                return self._name(rule)
            case _Sequence(parts):
                return " ".join(map(self._in_lexeme, parts)) or '""'
            case _Choice(parts):
                return f"({' | '.join(map(self._in_lexeme, parts))})"
            case _Repeat(inner, least, most):
                return f"({self._in_lexeme(inner)}){_times(least, most)}"

    def _is_regular(self, part: _Part) -> bool:
        return all(one.rule in self._regular for one in _references(part))


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while at < len(text):
        if (found := _TOKEN.match(text, at)) is None:
            why = _OPEN.get(text[at], f"{text[at]!r} means nothing here")
            raise EbnfError(f"{_place(text, at)}: {why}")
        at = found.end()
        if (kind := found.lastgroup) is not None and kind != "space":
            yield _Token(kind, found[0], found.start())


def _references(part: _Part) -> Iterator[_Reference]:
    match part:
        case _Reference():
            yield part
        case _Repeat(inner):
            yield from _references(inner)
        case _Sequence(parts) | _Choice(parts):
            for one in parts:
                yield from _references(one)


def _without_recursion(rules: dict[str, _Part]) -> set[str]:
    """The rules that do not come back to themselves, nor refer to one that does."""
    users = defaultdict[str, set[str]](set)
    left: dict[str, int] = {}
    for name, part in rules.items():
        used = {one.rule for one in _references(part)}
        left[name] = len(used)
        for one in used:
            users[one].add(name)
    ready = [name for name, used in left.items() if not used]
    found = set[str]()
    while ready:
        name = ready.pop()
        found.add(name)
        for user in users[name]:
            left[user] -= 1
            if not left[user]:
                ready.append(user)
    return found


def _times(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _code(sign: str) -> str:
    return f"\\u{{{ord(sign):X}}}"


def _place(text: str, at: int) -> str:
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    return f"line {line}, column {column}"
