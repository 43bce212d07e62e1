"""Rules that a schema cannot say: between fields, and between an object and what it was before.

Their sentences are those of the CEL rules in the CRDs, so that a person reads the same words offline and in a cluster.
"""

from typing import Any

from pydantic_core import PydanticCustomError

from motet.resources.coming import COMING_SCHEMES

SCHEMES = ("file",)


def broken(field: str, sentence: str) -> PydanticCustomError:
    """An error at `field` of the object that is being validated."""
    return PydanticCustomError("rule", "{sentence}", {"field": field, "sentence": sentence})


def check_uri(uri: str) -> None:
    scheme, _, rest = uri.partition("://")
    if scheme in COMING_SCHEMES:
        raise broken("uri", f"not yet: {scheme}:// ({COMING_SCHEMES[scheme]}) comes later; use file://")
    if scheme not in SCHEMES:
        raise broken("uri", f"{scheme}:// is no scheme that Motet knows; use file://")
    if ".." in rest.split("/"):
        raise broken("uri", "must not contain '..'")


def changes(before: Any, after: Any) -> list[tuple[tuple[str, ...], str]]:
    """What may not change between two versions of one object: (field, sentence) for each rule that is broken."""
    found: list[tuple[tuple[str, ...], str]] = []
    old, new = before.spec, after.spec
    if before.kind == "LoRAAdapter":
        if new.pool_ref != old.pool_ref:
            found.append((("spec", "poolRef"), "poolRef is immutable; create a new LoRAAdapter"))
        if old.base_model is not None and new.base_model != old.base_model:
            found.append((("spec", "baseModel"), "baseModel is immutable; create a new LoRAAdapter"))
        if old.model_name is not None and new.model_name != old.model_name:
            found.append((("spec", "modelName"), "modelName may be set once"))
        if old.source.digest is not None and new.source.digest is None:
            found.append((("spec", "source"), "digest may be changed but not removed"))
    if before.kind == "ServingPool":
        if new.model.uri != old.model.uri:
            found.append((("spec", "model", "uri"), "create a new ServingPool to change the base model"))
        if new.group != old.group:
            found.append((("spec", "group"), "group is immutable"))
    return found
