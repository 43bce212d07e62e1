"""What every process with streams counts."""

from prometheus_client import CollectorRegistry, Counter

FAILED_MESSAGES = Counter(
    "motet_failed_messages_total",
    "Messages of gRPC streams that this process refused or failed to handle. Each ends only its own request; the log "
    "says why.",
    ["stream", "message"],
    registry=None,
)
"""Of the process, as its memory is: the streams of all its services count here."""


class StreamMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        registry.register(FAILED_MESSAGES)
