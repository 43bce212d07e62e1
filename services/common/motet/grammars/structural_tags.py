"""Structural tags: texts in which some parts follow a format, as clients of vLLM and SGLang ask for them, in
llguidance's language. Pure.

There are two ways to write them: a tree of formats, and the earlier one, a list of tags that begin with triggers.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Final

from motet.grammars.ebnf import MAX_TIMES, EbnfError, lark_of_ebnf

MAX_DEPTH = 32
MAX_TEXT_BYTES = 4096
"""Of one text. A tokenizer reads it whole, and holds the interpreter for all other threads meanwhile."""
TEXT: Final = r"/(.|\n)*/"
_NOT_YET: Final = "it is not supported; use one of "
_KNOWN_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "const_string": frozenset({"value"}),
    "json_schema": frozenset({"json_schema", "style", "any_order"}),
    "grammar": frozenset({"grammar"}),
    "regex": frozenset({"pattern"}),
    "any_text": frozenset({"excludes"}),
    "sequence": frozenset({"elements"}),
    "or": frozenset({"elements"}),
    "optional": frozenset({"content"}),
    "star": frozenset({"content"}),
    "plus": frozenset({"content"}),
    "repeat": frozenset({"content", "min", "max"}),
    "tag": frozenset({"begin", "content", "end"}),
    "triggered_tags": frozenset({"triggers", "tags", "at_least_one", "stop_after_first", "excludes"}),
    "tags_with_separator": frozenset({"tags", "separator", "at_least_one", "stop_after_first"}),
}

Json = Mapping[str, Any]
Ends = tuple[str, ...]
"""One of these texts ends what is written. Empty: nothing does."""


class TagError(ValueError):
    """It names the place."""


class TagWriter:
    def __init__(
        self,
        *,
        pieces: Callable[[str], Sequence[tuple[str, bool]]],
        json_rule: Callable[[Json], str],
        regex_rule: Callable[[str], str],
    ) -> None:
        """`pieces`: a text as the model writes it, its special tokens apart: each written in llguidance's language, and
        whether it is such a token. `json_rule` and `regex_rule`: how a schema and a regular expression are written."""
        self._pieces = pieces
        self._json_rule = json_rule
        self._regex_rule = regex_rule
        self._lines: list[str] = []
        self._numbers = count()
        self._named: dict[tuple[object, ...], str] = {}

    def lark(self, said: Json) -> str:
        """Raises TagError, and InvalidRequest of the rules."""
        if "format" in said:
            start = self._format(said["format"], "format", (), last=True)
        else:
            try:
                start = self._format(_of_earlier_form(said), "", (), last=True)
            except TagError as error:  # there tags have another name
                raise TagError(re.sub("^tags", "structures", str(error))) from None
        return "\n".join([f"start: {start}", *self._lines]) + "\n"

    # --------------------------------------------------------------------------------------------------------- formats

    def _format(self, form: Any, path: str, ends: Ends, *, last: bool) -> str:
        """Something that ends with one of `ends`. `last`: nothing but these comes after it, so that it may be any
        text."""
        kind = form.get("type") if isinstance(form, dict) else None
        if not isinstance(kind, str) or kind not in _KNOWN_FIELDS:
            raise TagError(f"{_dot(path)}type: {_NOT_YET}{', '.join(_KNOWN_FIELDS)}")
        for name in form.keys() - _KNOWN_FIELDS[kind] - {"type"}:
            raise TagError(f"{_dot(path)}{str(name)[:64]}: a format of this type has no such field")
        if path.count(".") > MAX_DEPTH:
            raise TagError(f"format: more than {MAX_DEPTH} formats are nested")
        match kind:
            case "any_text":
                if not last:
                    raise TagError(f"{path}: any text can only be the last part, or stand in a tag that has an end")
                return self._text(_texts(form, "excludes", path, ()), ends)
            case "triggered_tags":
                if not last:
                    raise TagError(f"{path}: it allows any text, so it can only be the last part, or stand in a tag")
                return self._triggered(form, path, ends)
            case "sequence":
                return self._sequence(form, path, ends, last=last)
            case "or":
                elements = _list(form, "elements", path)
                each = (self._format(one, f"{_dot(path)}elements[{at}]", ends, last=last) for at, one in elements)
                return f"({' | '.join(each)})"
            case "tag":
                return self._tag(form, path, form.get("begin"), ends, last=last)
        return _joined(self._bounded(kind, form, path), self._end(ends))

    def _bounded(self, kind: str, form: Json, path: str) -> str:
        """It knows by itself where it ends."""
        match kind:
            case "const_string":
                return self._said(_text(form, "value", path))
            case "json_schema":
                if form.get("style", "json") != "json" or form.get("any_order"):
                    raise TagError(f"{_dot(path)}style: only JSON is supported, in the order of the schema")
                schema = form.get("json_schema")
                if not isinstance(schema, dict) and schema is not True:
                    raise TagError(f"{_dot(path)}json_schema: must be a JSON schema")
                return self._rule(self._json_rule({} if schema is True else schema))
            case "grammar":
                name = self._name()
                try:
                    self._lines += lark_of_ebnf(_text(form, "grammar", path), start=name)
                except EbnfError as error:
                    raise TagError(f"{_dot(path)}grammar: {error}") from None
                return name
            case "regex":
                return self._rule(self._regex_rule(_text(form, "pattern", path)))
            case "tags_with_separator":
                return self._separated(form, path)
        inner = self._format(form.get("content"), f"{_dot(path)}content", (), last=False)
        times = {"optional": "?", "star": "*", "plus": "+"}
        return f"({inner}){times.get(kind) or _times(form, path)}"

    def _sequence(self, form: Json, path: str, ends: Ends, *, last: bool) -> str:
        elements = _list(form, "elements", path)
        parts = [
            self._format(one, f"{_dot(path)}elements[{at}]", ends if final else (), last=last and final)
            for at, one in elements
            for final in [at == len(elements) - 1]
        ]
        return _joined(*parts)

    def _tag(self, form: Json, path: str, begin: Any, ends: Ends, *, last: bool) -> str:
        """`begin`: what of it is not written yet"""
        if not isinstance(begin, str):
            raise TagError(f"{_dot(path)}begin: must be a string")
        _bounded(begin, f"{_dot(path)}begin")
        own = form.get("end")
        own = [own] if isinstance(own, str) else own
        if not isinstance(own, list) or not own or not all(isinstance(one, str) for one in own):
            raise TagError(f"{_dot(path)}end: must be a string, or a list of strings")
        for one in own:
            _bounded(one, f"{_dot(path)}end")
        where = f"{_dot(path)}content"
        if "" in own:
            return _joined(self._said(begin), self._format(form.get("content"), where, ends, last=last))
        content = self._format(form.get("content"), where, tuple(own), last=True)
        return _joined(self._said(begin), content, self._end(ends))

    def _triggered(self, form: Json, path: str, ends: Ends) -> str:
        triggers = _texts(form, "triggers", path)
        excludes = _texts(form, "excludes", path, ())
        by_trigger: dict[str, list[str]] = {one: [] for one in triggers}
        for at, tag in _list(form, "tags", path):
            where = f"{_dot(path)}tags[{at}]"
            begin = tag.get("begin") if isinstance(tag, dict) and tag.get("type", "tag") == "tag" else None
            if not isinstance(begin, str):
                raise TagError(f"{where}.begin: must be a string")
            of_tag = [one for one in triggers if begin.startswith(one)]
            if len(of_tag) != 1:
                raise TagError(f"{where}.begin: must begin with exactly one of the triggers")
            rest = begin[len(of_tag[0]) :]
            by_trigger[of_tag[0]].append(self._tag(tag, where, rest, (), last=False))
        bodies = {one: self._rule(" | ".join(tags)) for one, tags in by_trigger.items() if tags}
        begins = [_joined(self._text(excludes, (one,)), body) for one, body in bodies.items()]
        tagged = self._rule(" | ".join(begins))
        free = self._text((*excludes, *triggers), ends)
        if not _flag(form, "at_least_one", path):
            if _flag(form, "stop_after_first", path):
                return f"({_joined(tagged, self._end(ends))} | {free})"
            return f"{tagged}* {free}"
        first = self._rule(" | ".join(_joined(self._said(one), body) for one, body in bodies.items()))
        if _flag(form, "stop_after_first", path):
            return _joined(first, self._end(ends))
        return f"{first} {tagged}* {free}"

    def _separated(self, form: Json, path: str) -> str:
        tags = []
        for at, tag in _list(form, "tags", path):
            where = f"{_dot(path)}tags[{at}]"
            if not isinstance(tag, dict) or tag.get("type", "tag") != "tag":
                raise TagError(f"{where}.type: must be 'tag'")
            tags.append(self._tag(tag, where, tag.get("begin"), (), last=False))
        one = self._rule(" | ".join(tags))
        more = f"({_joined(self._said(_text(form, 'separator', path)), one)})*"
        all_tags = one if _flag(form, "stop_after_first", path) else f"{one} {more}"
        return all_tags if _flag(form, "at_least_one", path) else f"({all_tags})?"

    # ----------------------------------------------------------------------------------------------------------- texts

    def _text(self, excludes: Sequence[str], ends: Ends) -> str:
        """Any text that has none of `excludes`, up to the first of `ends`, which belongs to it."""
        key = ("text", tuple(excludes), ends)
        if key in self._named:
            return self._named[key]
        text = self._any(excludes)
        choices = []
        for end in ends:
            (first, special), *rest = self._pieces(end)
            if special:
                choices.append(_joined(text, first, *(piece for piece, _ in rest)))
            else:
                name = self._name()
                self._lines.append(f"{name}[lazy]: {text} {first}")
                choices.append(_joined(name, *(piece for piece, _ in rest)))
        self._named[key] = found = self._rule(" | ".join(choices) or text)
        return found

    def _any(self, excludes: Sequence[str]) -> str:
        """A lexeme. Special tokens are no text, so they need not be excluded."""
        without = [pieces[0][0] for one in excludes if len(pieces := self._pieces(one)) == 1 and not pieces[0][1]]
        key = ("any", *without)
        if key not in self._named:
            name = self._named[key] = self._name().upper()
            has = f" & ~({TEXT} ({' | '.join(without)}) {TEXT})" if without else ""
            self._lines.append(f"{name}: {TEXT}{has}")
        return self._named[key]

    def _said(self, text: str) -> str:
        return " ".join(piece for piece, _ in self._pieces(text)) if text else ""

    def _end(self, ends: Ends) -> str:
        if len(ends) <= 1:
            return self._said(ends[0]) if ends else ""
        if ("end", ends) not in self._named:
            self._named["end", ends] = self._rule(" | ".join(map(self._said, ends)))
        return self._named["end", ends]

    def _rule(self, body: str) -> str:
        name = self._name()
        self._lines.append(f"{name}: {body}")
        return name

    def _name(self) -> str:
        return f"part_{next(self._numbers)}"


def _of_earlier_form(said: Json) -> Json:
    structures = said.get("structures")
    if not isinstance(structures, list) or not all(isinstance(one, dict) for one in structures):
        raise TagError("structures: must be a list of objects with begin, schema and end; or send format")
    tags = [
        {
            "type": "tag",
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": _schema(one.get("schema"), f"structures[{at}].schema")},
            "end": one.get("end"),
        }
        for at, one in enumerate(structures)
    ]
    return {"type": "triggered_tags", "triggers": said.get("triggers"), "tags": tags}


def _schema(said: Any, path: str) -> Any:
    """Clients send it as text, too; without one, anything may stand there."""
    if not isinstance(said, str):
        return True if said is None else said
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        raise TagError(f"{path}: is not JSON") from None


def _list(form: Json, name: str, path: str) -> list[tuple[int, Any]]:
    found = form.get(name)
    if not isinstance(found, list) or not found:
        raise TagError(f"{_dot(path)}{name}: must be a list that is not empty")
    return [*enumerate(found)]


def _text(form: Json, name: str, path: str) -> str:
    if not isinstance(found := form.get(name), str):
        raise TagError(f"{_dot(path)}{name}: must be a string")
    return _bounded(found, f"{_dot(path)}{name}")


def _texts(form: Json, name: str, path: str, unset: Sequence[str] | None = None) -> Sequence[str]:
    if unset is not None and name not in form:
        return unset
    found = form.get(name)
    if not isinstance(found, list) or not found or not all(isinstance(one, str) and one for one in found):
        raise TagError(f"{_dot(path)}{name}: must be a list of strings, none of them empty")
    return [_bounded(one, f"{_dot(path)}{name}[{at}]") for at, one in enumerate(found)]


def _bounded(text: str, path: str) -> str:
    if len(text.encode(errors="replace")) > MAX_TEXT_BYTES:
        raise TagError(f"{path}: must be at most {MAX_TEXT_BYTES} bytes")
    return text


def _flag(form: Json, name: str, path: str) -> bool:
    found = form.get(name, False)
    if not isinstance(found, bool):
        raise TagError(f"{_dot(path)}{name}: must be true or false")
    return found


def _times(form: Json, path: str) -> str:
    least, most = form.get("min"), form.get("max")
    if type(least) is int and type(most) is int and 0 <= least <= MAX_TIMES:
        if most == -1:
            return f"{{{least},}}"
        if least <= most <= MAX_TIMES:
            return f"{{{least},{most}}}"
    raise TagError(f"{_dot(path)}max: must be an integer from min to {MAX_TIMES}, or -1 for no limit; min from 0")


def _dot(path: str) -> str:
    return f"{path}." if path else ""


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part) or '""'
