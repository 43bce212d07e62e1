"""`motet up`: check the options and manifests, start the operator's parent, wait until everything is ready, and print
commands to try."""

import asyncio
import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from motet.addresses import http_url
from motet.errors import ManifestError, SetupError
from motet.keys import CALLERS_VARIABLE
from motet.processes import ProcessRecord, ProcessRecords
from motet.processes.launch import last_log_line, rotate
from motet.read_settings import read
from motet.resources import ServingPool, files_of, read_all
from motet.settings import ProcessSettings
from motet_cli import bundled_manifests
from motet_cli.folders import expanded, readable
from motet_cli.log_file import log_to
from motet_cli.readiness import StartupFailed, StartupReady, StartupWatch, read_records, read_status
from motet_cli.settings import Settings
from motet_cli.up_output import UpOutput, program
from motet_operator.local.lock import StackLock, is_held
from motet_operator.local.parent import Parent, operator_spec, own_environment
from motet_operator.local.state_directory import StateDirectory
from motet_operator.local.teardown import take_down, what_runs
from motet_operator.settings import Settings as OperatorSettings

INTERRUPTED = 130

GOES_ON = "What ran before goes on."

QUESTION_ANNOTATION = "motet.dev/example-question"
"""An annotation of a pool: the question in the example commands that `motet up` prints."""

QUESTION = "Hello! Who are you?"


@dataclass(frozen=True, kw_only=True)
class Options:
    data_dir: Path
    manifests: Path | None
    port: int
    runners: int | None
    detach: bool
    wait_seconds: float


def up(options: Options) -> int:
    """Returns the exit status. Raises SetupError for an error that a person has to correct."""
    process, host = read(ProcessSettings), read(Settings).host
    layout = StateDirectory.of(options.data_dir)
    with StackLock(layout.lock):
        # The lock is held only for the checks. The process that runs the stack takes it again.
        if not what_runs(layout):
            layout.clear_run()  # after a stack was killed, its files still say that it is ready
        try:
            layout.prepare()
            manifests, question = _manifests(options, layout)
            port = _port(layout, host, options.port)
        except SetupError:
            if not what_runs(layout):
                layout.clear_run()  # nothing was started, so leave no files
            raise
        # Of a stack whose `motet up` has died: this one adopts it, and never stops it because something fails.
        earlier = read_records(layout) if what_runs(layout) else {}
        rotate(layout.log("up"))
    url = http_url(host, port)
    os.environ |= {
        "MOTET_DATA_DIR": str(layout.data),
        "MOTET_OPERATOR_MANIFESTS": str(manifests),
        "MOTET_OPERATOR_HOST": host,
        "MOTET_OPERATOR_PORT": str(port),
    }
    os.environ.pop("MOTET_OPERATOR_RUNNERS", None)
    os.environ.pop(CALLERS_VARIABLE, None)  # otherwise every process of the stack would inherit the key
    if options.runners is not None:
        os.environ["MOTET_OPERATOR_RUNNERS"] = str(options.runners)
    for name in ("MOTET_STEP_TRACE", "MOTET_SCHEDULER_RECORD", "MOTET_SUPERVISOR_RECORD"):
        if file := os.environ.get(name):
            os.environ[name] = str(Path(file).absolute())
    log_to(layout.log("up"))
    progress = UpOutput(layout, url, question)
    try:
        if options.detach:
            return _detached(layout, earlier, progress, options.wait_seconds)
        scale, wait = process.time_scale, options.wait_seconds
        return asyncio.run(_run_in_foreground(layout, earlier, url, progress, wait, time_scale=scale))
    finally:
        progress.close()


def _manifests(options: Options, layout: StateDirectory) -> tuple[Path, str]:
    """The folder to watch, and the question for the example commands. Raises ManifestError."""
    if options.manifests is None:
        bundled_manifests.copy_to(layout.manifests)
        folder = layout.manifests
    else:
        folder = expanded(options.manifests).absolute()
        with readable(folder):
            if not folder.exists():
                raise ManifestError(f"{folder} does not exist. Give -f a folder of manifests.")
    try:
        files = files_of(folder)
    except OSError as error:
        raise ManifestError(f"{folder}: {error.strerror}. Give -f a folder of manifests, or a file.") from None
    reading = read_all(files)
    if reading.problems:
        for problem in reading.problems[:20]:
            typer.echo(str(problem), err=True)
        count = len(reading.problems)
        raise ManifestError(f"{count} problem{'s' if count > 1 else ''} in {folder}; nothing was started.")
    pools = [manifest.resource for manifest in reading.manifests if isinstance(manifest.resource, ServingPool)]
    if not pools:
        raise ManifestError(f"{folder} declares no ServingPool, so there is nothing to serve. Add one.")
    questions = [pool.metadata.annotations.get(QUESTION_ANNOTATION) for pool in pools]
    return folder, next((question for question in questions if question), QUESTION)


def _port(layout: StateDirectory, host: str, port: int) -> int:
    """The port, or a free one for 0. Raises SetupError if another process listens there. The gateway of this stack may,
    if it still runs."""
    gateway = ProcessRecords(layout.service_records).read().get("gateway")
    if gateway is not None and gateway.alive and str(read_status(layout).get("url", "")).endswith(f":{port}"):
        return port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise SetupError(f"MOTET_HOST={host} is not an address of this machine: {error.strerror}.") from error
    with socket.socket(found[0], found[1]) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(found[4])
            trial.listen()
        except PermissionError as error:
            raise SetupError(f"you may not listen on port {port}. Choose one from 1024 up with --port.") from error
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise SetupError(f"MOTET_HOST={host} is not an address of this machine: {error.strerror}.") from error
            raise SetupError(
                f"port {port} on {host} is in use ({error.strerror}). Free it, or choose another one with --port."
            ) from error
        return int(trial.getsockname()[1])


# ------------------------------------------------------------------------------------------------- in the foreground


async def _run_in_foreground(
    layout: StateDirectory,
    earlier: Mapping[str, ProcessRecord],
    url: str,
    progress: UpOutput,
    wait_seconds: float,
    *,
    time_scale: float,
) -> int:
    with StackLock(layout.lock, url=url):
        silent_seconds = read(OperatorSettings).silent_seconds
        parent = Parent(layout, own_environment(), silent_seconds=silent_seconds, time_scale=time_scale)
        parent.only_adopts = bool(earlier)
        running = asyncio.create_task(parent.run(), name="parent")
        watching = asyncio.create_task(_watch(layout, earlier, progress, wait_seconds), name="watch")
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        status = 0
        if running.done() or parent.leaves:  # ctrl-C while it was starting
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            status = INTERRUPTED
            if parent.leaves:
                progress.say(f"{GOES_ON} {_how_to_stop(layout)}")
        elif isinstance(outcome := watching.result(), StartupFailed) and not earlier:
            progress.failed(outcome)
            status = outcome.exit_status
            parent.ask_to_stop()
        else:
            parent.only_adopts = False
            if isinstance(outcome, StartupFailed):
                progress.failed(outcome)
                progress.say(f"{GOES_ON} Ctrl-C stops everything.")
            else:
                progress.ready(outcome, hint="Ctrl-C stops everything.")
            following = asyncio.create_task(progress.follow(), name="follow")
            await parent.stop.wait()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        if status == 0:
            progress.say("stopping")
        await running
        return status


async def _watch(
    layout: StateDirectory, earlier: Mapping[str, ProcessRecord], progress: UpOutput, wait_seconds: float
) -> StartupReady | StartupFailed:
    fingerprint = operator_spec(layout, own_environment()).fingerprint
    watch = StartupWatch(layout, fingerprint=fingerprint, earlier=earlier)
    deadline = time.monotonic() + wait_seconds
    while True:
        outcome = watch.look()
        progress.show(watch)
        if outcome is not None:
            return outcome
        if time.monotonic() > deadline:
            return watch.too_late(wait_seconds)
        await asyncio.sleep(0.05)


# --------------------------------------------------------------------------------------------------------- detached


def _detached(
    layout: StateDirectory, earlier: Mapping[str, ProcessRecord], progress: UpOutput, wait_seconds: float
) -> int:
    log = layout.log("up")
    with log.open("ab") as output:
        offset = output.tell()
        parent = subprocess.Popen(
            [sys.executable, "-P", "-m", "motet_operator.local.parent"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=layout.data,
            start_new_session=True,
        )
    try:
        outcome = asyncio.run(_watch_detached(layout, earlier, progress, wait_seconds, parent))
    except KeyboardInterrupt:
        if earlier:
            progress.say(f"{GOES_ON} {_how_to_stop(layout)}")
        else:
            asyncio.run(take_down(layout))
        return INTERRUPTED
    if outcome is None:
        raise SetupError(
            last_log_line(log, since=offset).removeprefix("motet up: ")
            or f"`motet up` ended right after its start. See its log: {log}"
        )
    if isinstance(outcome, StartupFailed):
        progress.failed(outcome)
        if not earlier:
            asyncio.run(take_down(layout))
            parent.wait()
            return outcome.exit_status
    hint = _how_to_stop(layout)
    if isinstance(outcome, StartupFailed):
        progress.say(f"{GOES_ON} {hint}")
    else:
        progress.ready(outcome, hint=hint)
    parent.returncode = 0  # it keeps running; without this, Popen would warn that we did not wait for it
    return outcome.exit_status if isinstance(outcome, StartupFailed) else 0


async def _watch_detached(
    layout: StateDirectory,
    earlier: Mapping[str, ProcessRecord],
    progress: UpOutput,
    wait_seconds: float,
    parent: "subprocess.Popen[bytes]",
) -> StartupReady | StartupFailed | None:
    """Wait until the stack is ready or has failed. None: the parent has ended."""
    watching = asyncio.create_task(_watch(layout, earlier, progress, wait_seconds), name="watch")
    try:
        while not watching.done():
            await asyncio.wait({watching}, timeout=0.2)
            if not watching.done() and parent.poll() is not None and not is_held(layout.lock):
                return None
        return watching.result()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def _how_to_stop(layout: StateDirectory) -> str:
    return f"{program()} down --data-dir {layout.shell_path}   stops everything."
