"""Where tools keep what they have downloaded: outside of the tree, so that other clones find it."""

from collections.abc import Mapping
from pathlib import Path


def cache_folder(environment: Mapping[str, str], name: str, *, named_by: str) -> Path:
    """The folder `name` in the user's cache, or the one that the variable `named_by` names."""
    if named := environment.get(named_by):
        return Path(named).expanduser().absolute()
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "motet" / name
