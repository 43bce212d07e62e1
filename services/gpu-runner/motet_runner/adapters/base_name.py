"""Whether an adapter names another base model than the one it is to serve with. Pure."""

import re
from pathlib import Path

REPOSITORY = re.compile(r"[\w.-]{1,96}/([\w.-]{1,96})", re.ASCII)
"""A hub's owner and name. Other texts are folders where the model once lay: they say nothing."""

CACHED = re.compile(r"models--[\w.-]{1,96}?--([\w.-]{1,96})", re.ASCII)
"""The folder of a repository in a hub's cache"""


def name_in_hub(model: Path, uri: str = "") -> str:
    """The name of the base model's repository, without its owner; empty: it is not known to be from a hub."""
    found = REPOSITORY.fullmatch(uri.removeprefix("hf://")) if uri.startswith("hf://") else None
    cached = [one for part in model.parts if (one := CACHED.fullmatch(part)) is not None]
    return found[1] if found is not None else cached[-1][1] if cached else ""


def other_base(trained_on: str, base_name: str) -> str | None:
    """A warning if an adapter says that it was trained on another base model: equal shapes can hide it. Owners may
    differ: a hub has many copies."""
    named = REPOSITORY.fullmatch(trained_on)
    if named is None or not base_name or named[1].lower() == base_name.lower() or trained_on.startswith("."):
        return None
    return f"base_model_name_or_path is {trained_on}, and this base model is {base_name}"
