"""Reads the metrics that another process of this machine serves on its Unix socket."""

import asyncio
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

MAX_SECONDS = 1.0
"""How long the process may take."""


async def read_metrics(path: Path) -> str | None:
    """None if it does not answer."""
    try:
        async with asyncio.timeout(MAX_SECONDS):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                answer = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        log.debug("metrics_scrape_failed", socket=path.name, reason=str(error))
        return None
    return answer.partition(b"\r\n\r\n")[2].decode(errors="replace")
