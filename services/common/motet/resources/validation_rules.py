"""Rules that a type or a limit cannot express: about a text, between fields, and between two versions of an object.

Each rule has two forms: the API server evaluates `cel`, and Motet calls `holds` when it reads an object. Both answer
`message`, so that people read the same words offline and in a cluster.
"""

from collections.abc import Callable, Iterable
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
