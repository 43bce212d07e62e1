"""Rules that a type or a limit cannot express: about a text, between fields, and between two versions of an object.

Each rule has two forms: the API server evaluates `cel`, and Motet calls `holds` when it reads an object. Both answer
`message`, so that people read the same words offline and in a cluster.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

VALIDATIONS = "x-kubernetes-validations"

Reason = Literal["FieldValueInvalid", "FieldValueForbidden", "FieldValueRequired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule for every version of a value."""

    cel: str
    message: str
    holds: Callable[[Any], bool] | None
    """None: only the API server checks this rule."""

    field: str = ""
    """The field that the error names. Empty: the value itself."""

    reason: Reason = "FieldValueInvalid"

    def check(self, value: Any) -> None:
        if self.holds is not None and not self.holds(value):
            raise PydanticCustomError("rule", "{sentence}", {"field": self.field, "sentence": self.message})


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionRule:
    """A rule for a change of a value."""

    cel: str
    message: str
    holds: Callable[[Any, Any], bool]
    """Called with the old and the new value."""

    field: str = ""
    reason: Reason = "FieldValueForbidden"


class ValidatedBy:
    """Adds rules to a type: `Annotated[str, ValidatedBy(rule, …)]`."""

    def __init__(self, *rules: Rule) -> None:
        self.rules = rules

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(core) | {VALIDATIONS: validations(self.rules)}

    def _check(self, value: Any) -> Any:
        for rule in self.rules:
            rule.check(value)
        return value


def validations(rules: Iterable[Rule | TransitionRule]) -> list[dict[str, str]]:
    """The rules in the form of a CRD's schema."""
    return [
        {
            "rule": rule.cel,
            "message": rule.message,
            "reason": rule.reason,
            **({"fieldPath": f".{rule.field}"} if rule.field else {}),
        }
        for rule in rules
    ]


def quoted(text: str) -> str:
    """A text as a string literal in CEL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def at_most(size: int, message: str) -> Rule:
    """A limit with its own message, where the message for a schema's `maxLength` would not explain the limit."""
    return Rule(cel=f"self.size() <= {size}", message=message, holds=lambda text: len(text) <= size)


def uri_rules(known: Iterable[str], coming: Mapping[str, str]) -> tuple[Rule, ...]:
    """The rules for the URI of a source. `known` are the schemes that Motet reads, `coming` those that are planned."""
    use = " or ".join(f"{scheme}://" for scheme in known)
    unsafe = "[@?%]|/[.][.](/|$)"
    schemes = f"^({'|'.join([*known, *coming])})://"
    return (
        Rule(
            cel=f"!self.matches({quoted(unsafe)})",
            message="must not contain '..', '@', '?' or '%' (no traversal, no inline credentials, no signed URLs)",
            holds=lambda uri: re.search(unsafe, uri) is None,
        ),
        *(_not_yet(scheme, what, use) for scheme, what in coming.items()),
        Rule(
            cel=f"self.matches({quoted(schemes)})",
            message=f"must not have a scheme that Motet does not know; use {use}",
            holds=lambda uri: re.search(schemes, uri) is not None,
        ),
        Rule(
            cel="!self.startsWith('file://') || self.startsWith('file:///')",
            message="must be absolute in a cluster (file:///models/base); only motet up knows the manifest's folder",
            holds=None,
        ),
    )


def form(scheme: str, rest: str, message: str) -> Rule:
    """A rule for the text after a scheme."""
    start, whole = f"{scheme}://", f"^{scheme}://{rest}$"
    return Rule(
        cel=f"!self.startsWith({quoted(start)}) || self.matches({quoted(whole)})",
        message=message,
        holds=lambda uri: not uri.startswith(start) or re.search(whole, uri) is not None,
    )


def _not_yet(scheme: str, what: str, use: str) -> Rule:
    start = f"{scheme}://"
    return Rule(
        cel=f"!self.startsWith({quoted(start)})",
        message=f"not yet: {start} ({what}) comes later; use {use}",
        holds=lambda uri: not uri.startswith(start),
    )
