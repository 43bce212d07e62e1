"""What the gateway says of its API at /openapi.json, from which docs/reference/api.md is written."""

from motet_gateway.openapi.document import document

__all__ = ["document"]
