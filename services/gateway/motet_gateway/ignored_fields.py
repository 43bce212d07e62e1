"""The header that names the fields of a body that have no effect here, because nobody knows them. Pure."""

import re
from collections.abc import Sequence

MAX_NAMES = 8
_SHOWN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""A client writes these names: whatever else they are, they end no header and fill none."""


def header(names: Sequence[str]) -> str:
    """Empty: there are none. Of names beyond `MAX_NAMES`, or that cannot stand in a header, only the number is said."""
    shown = [name for name in names if _SHOWN.fullmatch(name)][:MAX_NAMES]
    rest = len(names) - len(shown)
    return ", ".join([*shown, f"and {rest} more"] if rest and shown else [f"{rest} fields"] if rest else shown)
