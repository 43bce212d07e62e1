"""How the process of a service starts and ends: signals, logging, metrics, and an error message if it cannot start."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import structlog
from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsError

from motet import tls
from motet.clock import monotonic
from motet.errors import SetupError
from motet.health import Health
from motet.settings import RENAMED, ProcessSettings
from motet.task_group import run_together
from motet.telemetry import configure_logging, new_registry, serving_metrics

log = structlog.get_logger(__name__)

SETUP_FAILED = 2
"""Exit status of a process that a person has to correct. The process manager waits longer before it tries again."""

Read = TypeVar("Read", bound=BaseSettings)


def read(kind: type[Read]) -> Read:
    """Read settings from the environment. If one is wrong, print a sentence that names the variable, and exit."""
    if old_names := sorted(RENAMED.keys() & os.environ.keys()):
        print_reason("\n".join(f"{old} is now called {RENAMED[old]}: set that instead." for old in old_names))
        sys.exit(SETUP_FAILED)
    try:
        return kind()
    except ValidationError as error:
        prefix = kind.model_config.get("env_prefix", "")
        for problem in error.errors():
            field, *inside = problem["loc"] or ("",)
            where = "".join(f"[{step!r}]" for step in inside)
            given = f" is {problem['input']!r}" if not isinstance(problem["input"], dict) else ""
            print_reason(f"{prefix}{field}".upper() + f"{where}{given}: {problem['msg']}.")
    except SettingsError as error:
        print_reason(f"{error}. Lists and mappings are written as JSON.")
    sys.exit(SETUP_FAILED)


TERMINATION_LOG = Path("/dev/termination-log")
"""In a pod, Kubernetes puts the content of this file into the pod's status. The operator repeats it in the pool's."""


def print_reason(sentence: str) -> None:
    print(sentence, file=sys.stderr)  # noqa: T201 - the last line a person sees
    with suppress(OSError):
        if TERMINATION_LOG.is_file():
            TERMINATION_LOG.write_text(sentence)


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
