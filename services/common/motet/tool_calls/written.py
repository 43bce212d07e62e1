"""Writes calls as a model of a format does: what `parser` reads. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from motet.tool_calls.formats import ToolFormat

Call = tuple[str, Mapping[str, Any]]
"""The tool's name and its arguments."""

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def written_calls(form: ToolFormat, calls: Sequence[Call]) -> str:
    if form.between:
        return _block(form, form.between.join(_call(form, *one) for one in calls))
    return form.before.join(_block(form, _call(form, *one)) for one in calls)


def _block(form: ToolFormat, calls: str) -> str:
    begin = "" if form.at_start else form.begin
    return f"{begin}{form.inside}{form.opening}{calls}{form.closing}{form.inside}{form.end}"


def _call(form: ToolFormat, name: str, arguments: Mapping[str, Any]) -> str:
    if form.arguments:
        return orjson.dumps({"name": name, form.arguments: arguments}).decode()
    return f"{name}({', '.join(_python(arguments))})"


def _python(arguments: Mapping[str, Any]) -> Iterable[str]:
    if all(_KEY.fullmatch(key) for key in arguments):
        return (f"{key}={value!r}" for key, value in arguments.items())
    return (f"**{dict(arguments)!r}",)
