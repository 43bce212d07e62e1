"""Parses JSON from tenants: each key once, no NaN or Infinity, and a limited number and depth of values.

Nothing can stop the parser, which holds the GIL for long times. So the size is checked before parsing begins.
"""

import json
import re
from collections import Counter
from typing import Any, NoReturn

from motet.errors import AdapterIncompatible

MAX_JSON_VALUES = 500_000
"""The most commas and opening brackets: parsing this number takes some tenths of a second and less than 100 MiB. The
header of an adapter with 20,000 linears, such as all linears of a mixture of experts, has 400,000."""

MAX_DEPTH = 32
"""The most levels of objects and lists. PEFT and safetensors write four."""

REASON = "FormatRejected"

LFS_POINTER = b"version https://git-lfs"

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half of a character, or one of the two halves of a whole one"""


def parse(raw: bytes, name: str) -> Any:
    """The parsed value. Raises AdapterIncompatible, which says what is wrong in the file `name`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            duplicate = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise AdapterIncompatible(
                f"{name} has the key {duplicate[:100]!r} twice. Remove one of them.", reason=REASON
            )
        return found

    def refuse_constant(text: str) -> NoReturn:
        field = re.search(rb'"([^"\\]{1,80})"\s*:\s*' + text.encode(), raw)  # none in a list
        of = f" as {field[1].decode()}" if field is not None else ""
        raise AdapterIncompatible(f"{name} has {text}{of}, which is not a number in JSON. Replace it.", reason=REASON)

    refuse_pointer(raw, name)
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise AdapterIncompatible(f"{name} has more than {MAX_JSON_VALUES} values. Save it again.", reason="TooLarge")
    try:
        value = json.loads(raw.decode(), object_pairs_hook=unique, parse_constant=refuse_constant)
        if _HALF.search(raw):  # half of a pair, which is no text: no message could name it
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise AdapterIncompatible(
            f"{name} is not valid JSON: {str(error)[:200]}. Save it again.", reason=REASON
        ) from None
    if not _within_depth(value):
        raise AdapterIncompatible(f"{name} is nested more than {MAX_DEPTH} levels deep. Save it again.", reason=REASON)
    return value


def refuse_pointer(begin: bytes, name: str) -> None:
    """Raises AdapterIncompatible for what Git LFS leaves in the place of a file that it has not fetched."""
    if len(begin) >= 8 and LFS_POINTER.startswith(begin[: len(LFS_POINTER)]):
        raise AdapterIncompatible(
            f"{name} is a pointer of Git LFS, not the file itself. Run `git lfs pull` where it comes from.",
            reason=REASON,
        )


def _within_depth(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inside = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [child for children in inside for child in children if isinstance(child, dict | list)]
        if not level:
            return True
    return False
