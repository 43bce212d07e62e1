"""Faults that a test orders over a socket in the kubelet's folder. Orders and answers are lines of JSON."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson


@dataclass
class NodeFaults:
    """The faults that are active until a test ends them."""

    lies: dict[tuple[str, str], bool] = field(default_factory=dict)
    """The forced results of probes, by `namespace/pod` and liveness, readiness or startup."""
    start_delay_s: float = 0.0
    """A wait before each container, like a slow image pull."""
    silent: bool = False
    """If true, the node sends the API server nothing: no Lease, no status of its own or of its pods."""


Handler = Callable[[dict[str, Any]], Awaitable[object]]


async def serve(socket: Path, handler: Handler) -> asyncio.AbstractServer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                said: object = {"ok": await handler(orjson.loads(await reader.readline()))}
            except Exception as error:  # the test receives it
                said = {"error": f"{type(error).__name__}: {error}"}
            writer.write(orjson.dumps(said) + b"\n")
            await writer.drain()
        finally:
            writer.close()

    return await asyncio.start_unix_server(answer, socket)
