"""Reads one call that is written as in Python, `name(key=value, …)`, and writes its arguments as JSON. Pure."""

import json
import re
from collections.abc import Callable, Generator

from motet.tool_calls.json_calls import CallSink
from motet.tool_calls.reader import MAX_SHORT, Needs, Reader

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD = re.compile(r"[^\s,:\[\](){}'\"]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NUMERIC = re.compile(r"[-+.0-9eE]+")
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|[^xuU0-7])", re.DOTALL)
_ENDS = {"[": "]", "(": ")", "{": "}"}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_ITSELF = "\\'\""

Say = Callable[[str], None]


def python_call(reader: Reader, sink: CallSink, _arguments: str) -> Needs:
    """False: what comes is no call, as far as it was read."""
    name = yield from reader.short(_NAME)
    yield from reader.space()
    if not sink.knows(name) or not (yield from reader.literal("(")):
        return False
    yield from reader.space()
    begun = False
    if (yield from reader.literal("**")):
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            return False
        if not sink.begin_call(name):
            return False
        if not (yield from _value(reader, sink.add_arguments)):
            return False
        yield from reader.space()
        if not (yield from reader.literal(")")):
            return False
        sink.end_call()
        return True
    while not (yield from reader.literal(")")):
        if begun and not (yield from reader.literal(",")):
            return False
        yield from reader.space()
        if begun and (yield from reader.literal(")")):
            break
        key = yield from reader.short(_KEY)
        yield from reader.space()
        if not key or not (yield from reader.literal("=")):
            return False
        if not begun and not sink.begin_call(name):
            return False
        sink.add_arguments(f'{", " if begun else "{"}"{key}": ')
        begun = True
        if not (yield from _value(reader, sink.add_arguments)):
            return False
        yield from reader.space()
    if not begun and not sink.begin_call(name):
        return False
    sink.add_arguments("}" if begun else "{}")
    sink.end_call()
    return True


def _value(reader: Reader, say: Say) -> Needs:
    """Up to the comma or bracket behind it. Says it piece by piece: what is no Python comes out as no JSON."""
    ends: list[str] = []
    comma, behind_value = False, False
    while True:
        yield from reader.space()
        sign = yield from reader.peek()
        if not sign:
            return False
        if sign in "])}":
            if not ends or sign != ends.pop():
                return False
            reader.at += 1
            say("}" if sign == "}" else "]")
            comma, behind_value = False, True
        elif sign == ",":
            if not ends:
                return False
            reader.at += 1
            comma, behind_value = True, False
        elif sign == ":":
            if not ends:
                return False
            reader.at += 1
            say(": ")
            behind_value = False
        elif behind_value:  # `1 2` would be said as 12
            return False
        else:
            if comma:
                say(", ")
                comma = False
            behind_value = sign not in _ENDS
            if sign in _ENDS:
                reader.at += 1
                ends.append(_ENDS[sign])
                say("{" if sign == "{" else "[")
            elif sign in "'\"":
                if not (yield from _text(reader, sign, say)):
                    return False
            elif word := (yield from reader.short(_WORD)):
                say(_WORDS.get(word) or (word if _NUMBER.fullmatch(word) else json.dumps(word, ensure_ascii=False)))
            elif not (yield from _long_number(reader, say)):
                return False
        if not ends and sign not in ",:":
            return True


def _long_number(reader: Reader, say: Say) -> Needs:
    """One that is no short thing. Schemas do not bound how many digits a number has."""
    if not _NUMERIC.fullmatch(reader.text, reader.at, reader.at + MAX_SHORT):
        return False
    while match := _NUMERIC.match(reader.text, reader.at):
        reader.at = match.end()
        say(match[0])
        yield from reader.peek()
    return True


def _text(reader: Reader, quote: str, say: Say) -> Needs:
    """A text, of one line or of several."""
    if (yield from reader.literal(3 * quote)):
        quote = 3 * quote
    else:
        reader.at += 1
    say('"')
    plain = re.compile(rf"[^{quote[0]}\\]*")
    while True:
        match = plain.match(reader.text, reader.at)
        assert match is not None  # it may be empty
        reader.at = match.end()
        if match[0]:
            say(json.dumps(match[0], ensure_ascii=False)[1:-1])
        sign = yield from reader.peek()
        if not sign:
            return False
        if sign == "\\":
            if not (yield from _escape(reader, say)):
                return False
        elif (yield from reader.literal(quote)):
            say('"')
            return True
        elif sign == quote[0]:
            reader.at += 1
            say('\\"' if sign == '"' else sign)


def _escape(reader: Reader, say: Say) -> Generator[None, None, bool]:
    found = yield from reader.short(_ESCAPE)
    if not found:
        return False
    kind = found[1]
    if kind in "xuU01234567":
        code = int(found[1:], 8) if kind.isdigit() else int(found.lstrip("\\xuU"), 16)
        say(json.dumps(chr(code))[1:-1] if code <= 0x10FFFF else "\\ufffd")
    else:
        meant = _ESCAPED.get(kind)
        meant = meant if meant is not None else kind if kind in _ITSELF else found
        say(json.dumps(meant, ensure_ascii=False)[1:-1])
    return True
