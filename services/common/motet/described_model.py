"""Models whose JSON schema has the docstrings under their fields as descriptions.

Pydantic can do this itself (`use_attribute_docstrings`), but then it parses the source of every class at every start of
a process: 35 ms of a gateway's start, 70 ms of the operator's. Here the source is parsed only when a schema is made.
"""

import ast
import inspect
import textwrap
from itertools import pairwise

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

_LIBRARIES = {"builtins", "typing", "pydantic", "pydantic_settings"}
"""Their classes have no fields of their own that need a description."""


class DescribedModel(BaseModel):
    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in field_docstrings(cls).items():
            key = (cls.model_fields[name].alias or name) if name in cls.model_fields else ""
            if key in properties:
                properties[key] = {**properties[key], "description": text}
        return schema


def field_docstrings(kind: type) -> dict[str, str]:
    """The docstring under each annotated field of a class, with those of its base classes."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] in _LIBRARIES:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for pair in pairwise(definition.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = inspect.cleandoc(text)
    return found
