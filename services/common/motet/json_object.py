"""JSON whose sender may have written anything."""

from typing import Any

import orjson


def json_object(text: bytes | str) -> dict[str, Any]:
    """Empty if the text is no JSON object."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
