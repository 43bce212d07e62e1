"""JSON responses, for routes that are not called often."""

from typing import Any

import orjson
from starlette.responses import Response


def json_response(content: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), headers=headers, media_type="application/json")
