"""Request bodies: of JSON, and not too large."""

from starlette.requests import Request

from motet.errors import InvalidRequest, RequestTooLarge, UnsupportedMediaType


async def read_json(request: Request, *, limit: int) -> bytes:
    """The raw body. Raises when it is not declared as JSON, or larger than `limit`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        # Not only neatness: a web page cannot send this content type to another origin without asking first.
        raise UnsupportedMediaType(
            f"The content type is {kind or 'missing'}; send JSON with the header 'content-type: application/json'."
        )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    if not size:
        raise InvalidRequest("The body is empty; send a JSON object.")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"The body is larger than the {limit} bytes that this gateway takes.")
