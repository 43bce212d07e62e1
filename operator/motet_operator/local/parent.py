"""`motet up` after its start: holds the lock, restarts the operator, reaps orphans, and at the end stops everything.

It does as little as possible, so that little can fail. If it dies, the other processes keep running.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from importlib.metadata import version

from motet.imports import without_collections

with without_collections():
    from motet.addresses import http_url
    from motet.clock import monotonic
    from motet.errors import SETUP_FAILED, SetupError
    from motet.keys import CALLERS_VARIABLE
    from motet.processes import LifecycleConfig, ProcessManager, ProcessRecords, ProcessSpec
    from motet.processes.linux import become_subreaper, reap_orphans, send
    from motet.processes.manager import MANAGED_BY_VARIABLE
    from motet.read_settings import read
    from motet.settings import ProcessSettings
    from motet.telemetry import configure_logging, is_alive
    from motet_operator.local.lock import StackLock
    from motet_operator.local.state_directory import StateDirectory
    from motet_operator.local.status import StatusFile
    from motet_operator.local.teardown import STOP_SECONDS, finish
    from motet_operator.settings import Settings

REAP_SECONDS = 1.0


def operator_spec(layout: StateDirectory, env: Mapping[str, str]) -> ProcessSpec:
    metrics = layout.metrics_address("operator")

    reported = 0

    async def has_reported() -> bool:
        nonlocal reported
        record = ProcessRecords(layout.operator_records).read().get("operator")
        # The status of thousands of adapters is read until it is of this operator, and not again.
        if record is not None and record.pid != reported:
            reported = StatusFile(layout.status).read().get("operator") or 0
        return record is not None and record.pid == reported

    return ProcessSpec(
        name="operator",
        kind="operator",
        command=(sys.executable, "-P", "-m", "motet_operator"),
        log=layout.log("operator"),
        env={**env, "OMP_WAIT_POLICY": "passive", "MOTET_METRICS_ADDRESS": metrics},
        cwd=layout.data,
        probe=has_reported,
        alive=lambda: is_alive(metrics),
        version=version("motet"),
    )


def own_environment() -> dict[str, str]:
    """All MOTET_ variables from outside. Part of the operator's specification, so that a change restarts it."""
    others = {MANAGED_BY_VARIABLE, CALLERS_VARIABLE}
    return {name: value for name, value in os.environ.items() if name.startswith("MOTET_") and name not in others}


class Parent:
    """Runs until `stop` is set. A second request to stop kills the processes at once."""

    def __init__(
        self, layout: StateDirectory, env: Mapping[str, str], *, silent_seconds: float, time_scale: float = 1.0
    ) -> None:
        self.stop = asyncio.Event()
        self.only_adopts = False
        """It has taken over a running stack and is not done yet: ctrl-C then ends it alone, and the stack runs on."""
        self.leaves = False
        """It was ended like that."""
        self._kill_now = asyncio.Event()
        self._layout = layout
        config = LifecycleConfig(stop_grace=STOP_SECONDS, liveness_seconds=silent_seconds).scaled(time_scale)
        self._processes = ProcessManager(ProcessRecords(layout.operator_records), config=config, clock=monotonic)
        self._spec = operator_spec(layout, env)

    def ask_to_stop(self) -> None:
        """The first call stops the stack in order; the second kills it."""
        if self.stop.is_set():
            self._kill_now.set()
        self.stop.set()

    def _interrupted(self) -> None:
        if self.only_adopts:
            self.leaves = True
            self.stop.set()
        else:
            self.ask_to_stop()

    async def run(self) -> None:
        """The caller holds the lock. When this returns, no process of the stack runs, unless `leaves` is set."""
        become_subreaper()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_signal_handler(signal.SIGTERM, self.ask_to_stop)
        for signum in (signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(signum, self._interrupted)
        reaping = asyncio.create_task(self._reap_now_and_then(), name="reap")
        try:
            self._replace_operator()
            self._processes.apply([self._spec])
            await self.stop.wait()
            if self.leaves:
                self._processes.release()
            else:
                await self._stop_everything()
        finally:
            reaping.cancel()
            await asyncio.gather(reaping, return_exceptions=True)

    def _replace_operator(self) -> None:
        """Kill an operator that a dead `motet up` left with other settings. On SIGTERM it would stop all services.
        If it is killed, the next operator adopts those that still fit."""
        found = self._processes.recorded(self._spec.name)
        if found is not None and found.alive and found.fingerprint != self._spec.fingerprint:
            send(found.identity, signal.SIGKILL)

    async def _stop_everything(self) -> None:
        stopping = asyncio.create_task(self._processes.stop_all(), name="stop the operator")
        killing = asyncio.create_task(self._kill_now.wait(), name="kill")
        await asyncio.wait({stopping, killing}, return_when=asyncio.FIRST_COMPLETED)
        killed = not stopping.done()
        killing.cancel()
        if killed:
            self._processes.kill_all()
        await stopping
        await finish(self._layout, grace=0.0 if killed else None)

    def _reap(self) -> None:
        reap_orphans(self._processes.own_pids)

    async def _reap_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(REAP_SECONDS)
            self._reap()


def main() -> None:
    """`motet up --detach` runs this in a session of its own, with everything in the environment."""
    try:
        process, settings = read(ProcessSettings), read(Settings)
        configure_logging("motet-up", process)
        layout = StateDirectory.of(process.data_dir)
        with StackLock(layout.lock, url=http_url(settings.host, settings.port)):
            asyncio.run(_run(layout, settings.silent_seconds, process.time_scale))
    except SetupError as error:
        print(f"motet up: {error}", file=sys.stderr)  # noqa: T201 - the last line a person sees
        sys.exit(SETUP_FAILED)


async def _run(layout: StateDirectory, silent_seconds: float, time_scale: float) -> None:
    await Parent(layout, own_environment(), silent_seconds=silent_seconds, time_scale=time_scale).run()


if __name__ == "__main__":
    main()
