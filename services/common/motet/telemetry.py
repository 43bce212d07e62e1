"""Log lines and metrics of a process. Neither contains prompts or answers.

Each process has one registry. Its main function makes the registry and gives it to the `Metrics` class. The names of
metrics start with `motet_`.
"""

import asyncio
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Generic, Protocol, TextIO, TypeVar, cast

import structlog
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics import MetricWrapperBase

from motet.addresses import bound_socket
from motet.clock import Clock
from motet.errors import SetupError
from motet.health import Health
from motet.rpc.metrics import StreamMetrics
from motet.settings import ProcessSettings
from motet.transport.over_grpc import socket_path


def configure_logging(service: str, settings: ProcessSettings) -> None:
    """Send structlog and the standard library's logging to stderr, one line for each event."""
    stream = _LossyStream(sys.stderr.fileno())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    render: structlog.typing.Processor
    if settings.log_format == "json":
        shared.append(structlog.processors.format_exc_info)
        render = structlog.processors.JSONRenderer()
    else:
        # The library's default shows the variables of each frame, which hold prompts and tokens, and takes seconds.
        plain = structlog.dev.plain_traceback
        render = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)
    level = logging.getLevelName(settings.log_level.upper())
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", stream)),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)


class _LossyStream:
    """Drops a line that it cannot write, for example because the disk is full. The process goes on.

    It buffers nothing. Python would try once more to write what is left in a buffer when the process ends, and turn its
    exit status into 120.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        left = memoryview(text.encode(errors="backslashreplace"))
        with suppress(OSError):
            while left:
                left = left[os.write(self._descriptor, left) :]
        return len(text)

    def flush(self) -> None:
        """Nothing is buffered."""


def new_registry() -> CollectorRegistry:
    """A registry with the metrics of the process itself, such as its memory."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    StreamMetrics(registry)
    return registry


OTHER_LABEL = "other"

KEEP_NAME_SECONDS = 300.0
"""How long a name keeps its series after its last use. Prometheus scrapes at least once a minute, so it has then read
the last values. Without this time, names that are in use would replace each other with every request."""


class Removing(Protocol):
    def remove_by_labels(self, labels: dict[str, str]) -> None:
        """Remove the series that have these labels."""


AnyMetric = TypeVar("AnyMetric", bound=MetricWrapperBase)


class Labelled(Generic[AnyMetric]):
    """A metric whose series are found again at once. `labels()` of the library checks its arguments every time, under a
    lock."""

    def __init__(self, metric: AnyMetric) -> None:
        self._metric = metric
        self._series: dict[tuple[str, ...], AnyMetric] = {}

    def labels(self, *values: str) -> AnyMetric:
        if (series := self._series.get(values)) is None:
            series = self._series[values] = self._metric.labels(*values)
        return series

    def remove_by_labels(self, labels: dict[str, str]) -> None:
        self._series.clear()
        self._metric.remove_by_labels(labels)


class BoundedLabels:
    """Limits how many names that users choose (tenants, adapters) are values of labels: the `most` last used ones.

    With 0 all labels are empty, which for Prometheus is the same as no label. When a new name replaces an old one, the
    series of the old one are removed. A name that cannot replace any is counted under `other`.
    """

    def __init__(
        self,
        most: int,
        labels: tuple[str, ...],
        metrics: Sequence[Removing],
        *,
        clock: Clock,
    ) -> None:
        self._most = most
        self._labels = labels
        self._metrics = metrics
        self._clock = clock
        self._used: OrderedDict[tuple[str, ...], float] = OrderedDict()

    def of(self, *names: str) -> tuple[str, ...]:
        """The values for the labels, in their order."""
        if not self._most:
            return ("",) * len(names)
        now = self._clock()
        if names not in self._used and len(self._used) >= self._most and not self._free_one(now):
            return (OTHER_LABEL,) * len(names)
        self._used[names] = now
        self._used.move_to_end(names)
        return names

    def _free_one(self, now: float) -> bool:
        oldest, used = next(iter(self._used.items()))
        if now - used < KEEP_NAME_SECONDS:
            return False
        del self._used[oldest]
        for metric in self._metrics:
            metric.remove_by_labels(dict(zip(self._labels, oldest, strict=True)))
        return True


ASK_SECONDS = 5.0
READ_SECONDS = 30.0
"""How long a client may take to ask, and to read its answer."""
AT_ONCE = 16
"""How many connections are taken in one turn of the event loop."""
MAX_CONNECTIONS = 8 * AT_ONCE
"""A stranger may open any number. Beyond this one, the oldest one ends: a probe is answered within a few turns, before
it can become the oldest."""
MAX_READERS = 8
"""How many wait for the metrics at once. Each gets its own text, one after another."""


@asynccontextmanager
async def serving_metrics(
    address: str, registry: CollectorRegistry, health: Health | None = None
) -> AsyncIterator[None]:
    """Answer GET and HEAD on `unix:/path` or `host:port`. With an empty address, serve nothing.

    `/livez` and `/readyz` answer what `health` says: status 200, or 503 with the reason. Any other path answers with
    the metrics. With many names these take seconds to write, so that happens in a thread, for one reader at a time.
    """
    if not address:
        yield
        return
    health = health or Health()
    writing = asyncio.Lock()
    readers = 0
    connections: dict[asyncio.StreamWriter, None] = {}

    async def metrics() -> tuple[str, str, bytes]:
        nonlocal readers
        if readers >= MAX_READERS:
            return _verdict(f"{readers} others read the metrics")
        readers += 1
        try:
            async with writing:
                return "200 OK", CONTENT_TYPE_LATEST, await asyncio.to_thread(generate_latest, registry)
        finally:
            readers -= 1

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(connections) >= MAX_CONNECTIONS:
            oldest = next(iter(connections))
            del connections[oldest]
            oldest.transport.abort()
        connections[writer] = None
        try:
            async with asyncio.timeout(ASK_SECONDS):
                request = await reader.readuntil(b"\r\n\r\n")
            method, target, *_ = *request.split(b" ", 2), b""
            match target.partition(b"?")[0]:
                case b"/livez":
                    status, kind, body = _verdict(health.dead_reason())
                case b"/readyz":
                    status, kind, body = _verdict(health.unready_reason())
                case _:
                    status, kind, body = await metrics()
            head = (
                f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            writer.write(head.encode() + (b"" if method == b"HEAD" else body))
            writer.close()
            async with asyncio.timeout(READ_SECONDS):
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # the client is gone and needs no answer
        finally:
            writer.transport.abort()
            connections.pop(writer, None)

    path = socket_path(address)
    try:
        if path is not None:
            path.unlink(missing_ok=True)
            server = await asyncio.start_unix_server(answer, path, backlog=AT_ONCE)
        else:
            host, _, port = address.rpartition(":")
            bound = bound_socket(host.strip("[]") or "127.0.0.1", int(port))
            server = await asyncio.start_server(answer, sock=bound, backlog=AT_ONCE)
    except (OSError, ValueError, OverflowError) as error:
        raise SetupError(
            f"cannot serve metrics on {address}: {error}. Set MOTET_METRICS_ADDRESS to unix:/path or host:port."
        ) from None
    try:
        yield
    finally:
        server.close()
        if path is not None:
            path.unlink(missing_ok=True)


async def is_alive(address: str) -> bool:
    """Whether the process that serves metrics at `unix:/path` answers that it is alive. The caller sets a timeout."""
    try:
        reader, writer = await asyncio.open_unix_connection(socket_path(address))
    except OSError:
        return False
    try:
        writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        return b" 200 " in await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()


def _verdict(why_not: str) -> tuple[str, str, bytes]:
    status = "503 Service Unavailable" if why_not else "200 OK"
    return status, "text/plain; charset=utf-8", f"{why_not or 'ok'}\n".encode()
