"""What tools that wait for objects make of a status: Flux and Helm by kstatus's rules, and Argo CD by a script."""

import re
from collections.abc import Callable
from typing import Any, Literal

Object = dict[str, Any]
Verdict = Literal["Current", "InProgress", "Failed", "Terminating"]


def kstatus(it: Object) -> Verdict:
    """The published rules for kinds that kstatus does not know, in their order."""
    metadata, status = it["metadata"], it.get("status") or {}
    if "deletionTimestamp" in metadata:
        return "Terminating"
    if status.get("observedGeneration", metadata.get("generation")) != metadata.get("generation"):
        return "InProgress"
    conditions = status.get("conditions") or ()
    for one in conditions:
        if one["status"] == "True" and one["type"] in ("Reconciling", "Stalled"):
            return "InProgress" if one["type"] == "Reconciling" else "Failed"
    ready = [one["status"] for one in conditions if one["type"] == "Ready"]
    return "InProgress" if ready and ready[0] != "True" else "Current"


class Table:
    """A Lua table: an absent field is nil."""

    def __init__(self, fields: Object | None = None) -> None:
        self.__dict__ |= {name: _as_lua(value) for name, value in (fields or {}).items()}

    def __getattr__(self, name: str) -> None:
        return None


def _as_lua(value: Any) -> Any:
    return (
        Table(value)
        if isinstance(value, dict)
        else [_as_lua(one) for one in value]
        if isinstance(value, list)
        else value
    )


_LUA = (
    (r"for _, (\w+) in ipairs\((.+)\) do", r"for \1 in \2:"),
    (r"if (.+) then", r"if \1:"),
    (r"local (\w+) = \{\}", r"\1 = Table()"),
    (r"~=", "!="),
    (r"\bnil\b", "None"),
)


def health_script(lua: str) -> Callable[[Object], Table]:
    """Run a health script of Argo CD. It uses so little of Lua that each line is one of Python; anything else is a
    SyntaxError or NameError here."""
    lines = []
    for line in lua.splitlines():
        for pattern, python in _LUA:
            line = re.sub(pattern, python, line)  # noqa: PLW2901 - line by line
        if line.strip() != "end":
            lines.append(f"  {line}")
    scope: Object = {"Table": Table}
    exec("def health(obj):\n" + "\n".join(lines), scope)
    return lambda it: scope["health"](Table(it))
