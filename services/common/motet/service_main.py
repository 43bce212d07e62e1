"""How the process of a service starts and ends: signals, logging, metrics, and an error message if it cannot start."""

import asyncio
import gc
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from motet import tls
from motet.clock import monotonic
from motet.errors import SETUP_FAILED, SetupError
from motet.health import Health
from motet.read_settings import print_reason
from motet.settings import ProcessSettings
from motet.task_group import run_together
from motet.telemetry import configure_logging, new_registry, serving_metrics

log = structlog.get_logger(__name__)

Main = Callable[[asyncio.Event, CollectorRegistry, Health], Awaitable[None]]


LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def run(name: str, settings: ProcessSettings, main: Main, *, loop_factory: LoopFactory | None = None) -> None:
    """Run `main(stop, registry, health)` until it returns. SIGTERM and SIGINT set `stop`.

    `name` is the role that the TLS certificate of this process must have. After a SetupError, raises SystemExit.
    """
    configure_logging(name, settings)
    # What is imported stays. Without this, each full collection would visit all of it.
    gc.freeze()
    try:
        with tls.acting_as(_identity(name, settings)), asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_run(settings, main))
    except SetupError as error:
        log.error("start_failed", reason=error.message, code=error.code)
        print_reason(f"{name}: {error.message}")
        sys.exit(SETUP_FAILED)


def _identity(role: str, settings: ProcessSettings) -> tls.TlsIdentity | None:
    if settings.tls_dir is None:
        return None
    identity = tls.TlsIdentity(settings.tls_dir, role, clock=monotonic)
    identity.check()
    return identity


async def _run(settings: ProcessSettings, main: Main) -> None:
    stop, health = asyncio.Event(), Health()

    def end() -> None:
        health.stop()
        stop.set()

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_on_loop_error)
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, end)
    registry = new_registry()
    async with serving_metrics(settings.metrics_address, registry, health):
        log.info("starting")
        await main(stop, registry, health)
        log.info("stopped")


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # gRPC asks for the result of a call that arrived while the server stopped. Such a call was cancelled: no error.
    if not isinstance(context.get("exception"), asyncio.CancelledError):
        loop.default_exception_handler(context)


async def run_until(stop: asyncio.Event, *work: Awaitable[object]) -> None:
    """Run everything until `stop` is set, then cancel it. The first failure cancels the rest and is raised."""
    running = asyncio.ensure_future(run_together(*work))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            try:
                running.result()
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None  # `run` catches a SetupError, not a group with one in it
    finally:
        for task in (running, stopping):
            task.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)
