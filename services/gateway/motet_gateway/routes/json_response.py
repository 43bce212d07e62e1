"""JSON answers of the routes that are not in a hurry."""

from typing import Any

import orjson
from starlette.responses import Response


def json_response(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
