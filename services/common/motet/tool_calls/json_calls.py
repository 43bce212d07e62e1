"""Reads one call that is a JSON object, `{"name": "…", "arguments": {…}}`, its members in any order. Pure."""

import json
import re
from collections.abc import Callable, Generator
from typing import Protocol

from motet.tool_calls.reader import Needs, Reader

_PLAIN = re.compile(r'[^"{}\[\]]*')
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_RAW = re.compile(r"\\.|[\x00-\x1f]", re.DOTALL)
"""An escape, or a character that has to be escaped"""
_IGNORED = ("type", "id")
"""Members that some models write, too: strings."""


class CallSink(Protocol):
    def knows(self, name: str) -> bool: ...
    def begin_call(self, name: str) -> bool: ...
    def add_arguments(self, text: str) -> None: ...
    def end_call(self) -> None: ...


def json_call(reader: Reader, sink: CallSink, arguments: str) -> Needs:
    """False: what comes is no call, as far as it was read. `arguments`: the member that has them."""
    name, early, begun, first = "", "", False, True
    if not (yield from reader.literal("{")):
        return False
    while True:
        yield from reader.space()
        if (yield from reader.literal("}")):
            break
        if not first and not (yield from reader.literal(",")):
            return False
        first = False
        yield from reader.space()
        key = yield from reader.string()
        yield from reader.space()
        if key is None or not (yield from reader.literal(":")):
            return False
        yield from reader.space()
        if key == arguments and not begun and not early:
            if (yield from reader.peek()) != "{":
                return False
            if name:
                if not sink.begin_call(name):
                    return False
                begun = True
                if not (yield from json_object(reader, sink.add_arguments)):
                    return False
                sink.end_call()
            else:
                parts: list[str] = []
                if not (yield from json_object(reader, parts.append)):
                    return False
                early = "".join(parts)
        elif key == "name" and not name:
            name = (yield from reader.string()) or ""
            if not sink.knows(name):
                return False
        elif key not in _IGNORED or (yield from reader.string()) is None:
            return False
    if not name:
        return False
    if not begun:
        if not sink.begin_call(name):
            return False
        sink.add_arguments(early or "{}")
        sink.end_call()
    return True


def json_object(reader: Reader, say: Callable[[str], None]) -> Generator[None, None, bool]:
    """Passes an object on while it comes. False: it has no end."""
    depth, inside = 0, False
    while True:
        text, parts = reader.text, list[str]()
        while reader.at < len(text):
            match = (_IN_STRING if inside else _PLAIN).match(text, reader.at)
            assert match is not None  # it may be empty
            reader.at = match.end()
            parts.append(_RAW.sub(_escaped, match[0]) if inside else match[0])
            if reader.at == len(text):
                break
            sign = text[reader.at]
            if sign == "\\":  # the character behind it has not come yet
                break
            reader.at += 1
            parts.append(sign)
            if sign == '"':
                inside = not inside
            else:
                depth += 1 if sign in "{[" else -1
                if depth == 0:
                    say("".join(parts))
                    return True
        if reader.final:
            parts.append(text[reader.at :])
            reader.at = len(text)
        if said := "".join(parts):
            say(said)
        if not (yield from reader.wait()):
            return False


def _escaped(found: re.Match[str]) -> str:
    """Models often write line breaks in strings as they are, which JSON does not allow."""
    return json.dumps(found[0])[1:-1] if len(found[0]) == 1 else found[0]
