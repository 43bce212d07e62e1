"""JSON that strangers have written: no key twice, no numbers that are none, no nesting without an end."""

import json
from typing import Any, NoReturn

from motet.errors import AdapterIncompatible


def parse(raw: bytes, name: str) -> Any:
    """Raises AdapterIncompatible with what is wrong in the file of this name."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise AdapterIncompatible(f"{name} has {twice[:100]!r} twice, and only one can be meant.", reason=REASON)
        return found

    def no_number(text: str) -> NoReturn:
        raise AdapterIncompatible(f"{name} holds {text}, which is no number in JSON.", reason=REASON)

    try:
        return json.loads(raw, object_pairs_hook=unique, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise AdapterIncompatible(f"{name} is not JSON: {str(error)[:200]}.", reason=REASON) from None


REASON = "FormatRejected"
