"""How each process of the local stack is started, and how its health is checked."""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version

from motet.addresses import reachable_host
from motet.keys import CALLERS_VARIABLE
from motet.processes import ProcessSpec
from motet.processes.manager import MANAGED_BY_VARIABLE, Probe, at_once
from motet.settings import Database, ProcessSettings
from motet.telemetry import is_alive
from motet.transport.over_grpc import is_healthy
from motet_operator.environment import runner_environment
from motet_operator.local.state_directory import StateDirectory
from motet_operator.reconcile import RunnerTemplate
from motet_operator.settings import Settings

STOP_ORDER = {"gateway": 0, "runner": 1, "supervisor": 2, "predictor": 2, "scheduler": 3}
"""The gateway first, so that no new requests arrive; the scheduler last, because all others are connected to it."""

_PACKAGES = {
    "gateway": "motet_gateway",
    "scheduler": "motet_scheduler",
    "predictor": "motet_predictor",
    "supervisor": "motet_supervisor",
    "runner": "motet_runner",
}


class ServiceSpecs:
    """Makes the process specifications. Pure, except for the probes in them."""

    def __init__(self, layout: StateDirectory, process: ProcessSettings, settings: Settings) -> None:
        self._layout = layout
        self._process = process
        self._settings = settings
        self._version = version("motet")
        # Read once: specifications are made in every round.
        self._database_url = Database().url(process)
        # What came from outside is named as well: a changed setting must not leave an adopted process as it was.
        self._inherited = {
            variable: value
            for variable, value in os.environ.items()
            if variable.startswith("MOTET_")
            and not variable.startswith(("MOTET_OPERATOR_", MANAGED_BY_VARIABLE))
            and variable != CALLERS_VARIABLE
        }

    def control(self, *, store_ready: bool) -> list[ProcessSpec]:
        """The services that each stack has once. The predictor starts once the database is migrated."""
        specs = [self._grpc_service("scheduler"), self._grpc_service("supervisor"), self._gateway()]
        if store_ready:
            specs.append(self._grpc_service("predictor"))
        # While one of them is stopped, no request of any tenant begins. (A stopped runner has others beside it.)
        return [replace(spec, replace_stopped=True) for spec in specs]

    def runner(
        self,
        instance: str,
        pool: str,
        revision: str,
        template: RunnerTemplate,
        restart_wait: Callable[[], float] = at_once,
    ) -> ProcessSpec:
        address = self._layout.address(instance)
        env = {variable.name: variable.value for variable in template.pod.env}
        env |= runner_environment(pool, revision, template)
        env |= {
            "MOTET_RUNNER_INSTANCE": instance,
            "MOTET_RUNNER_LISTEN": address,
            # The fetch process reads Secrets for sources from there.
            "MOTET_RUNNER_MANIFESTS": str(self._settings.manifests.absolute()),
        }
        return replace(self._spec(instance, "runner", env, address), restart_wait=restart_wait)

    def _grpc_service(self, name: str) -> ProcessSpec:
        return self._spec(name, name, {}, self._layout.address(name))

    def _gateway(self) -> ProcessSpec:
        settings = self._settings
        env = {
            "MOTET_GATEWAY_HOST": settings.host,
            "MOTET_GATEWAY_PORT": str(settings.port),
            "MOTET_GATEWAY_METRICS_DIR": str(self._layout.sockets),
            "MOTET_GATEWAY_DRAIN_SECONDS": str(settings.gateway_drain_seconds),
        }

        async def answers() -> bool:
            return await listens_http(settings.host, settings.port)

        return ProcessSpec(
            name="gateway",
            kind="gateway",
            command=_command("gateway"),
            log=self._layout.log("gateway"),
            env=self._common("gateway") | env,
            cwd=self._layout.data,
            probe=answers,
            alive=self._liveness_probe("gateway"),
            stop_order=STOP_ORDER["gateway"],
            version=self._version,
        )

    def _spec(self, name: str, kind: str, env: Mapping[str, str], address: str) -> ProcessSpec:
        async def healthy() -> bool:
            return await is_healthy(address)

        return ProcessSpec(
            name=name,
            kind=kind,
            command=_command(kind),
            log=self._layout.log(name),
            env={**self._common(name), **env},
            cwd=self._layout.data,
            probe=healthy,
            alive=self._liveness_probe(name),
            stop_order=STOP_ORDER[kind],
            version=self._version,
        )

    def _liveness_probe(self, name: str) -> Probe:
        address = self._layout.metrics_address(name)
        return lambda: is_alive(address)

    def _common(self, name: str) -> dict[str, str]:
        layout, process = self._layout, self._process
        return self._inherited | {
            "MOTET_DATA_DIR": str(layout.data),
            "MOTET_LOG_LEVEL": process.log_level,
            "MOTET_LOG_FORMAT": "json",
            "MOTET_METRICS_ADDRESS": layout.metrics_address(name),
            "MOTET_TIME_SCALE": str(process.time_scale),
            "MOTET_DATABASE_URL": self._database_url,
            "MOTET_SCHEDULER_ADDRESS": layout.address("scheduler"),
            "MOTET_PREDICTOR_ADDRESS": layout.address("predictor"),
            "MOTET_SUPERVISOR_ADDRESS": layout.address("supervisor"),
            # Spinning threads of one process would take the cores from the others. torch reads this at import.
            "OMP_WAIT_POLICY": "passive",
        }


def _command(kind: str) -> tuple[str, ...]:
    # -P: a file in the working directory must not stand in for one of our imports.
    return (sys.executable, "-P", "-m", _PACKAGES[kind])


async def listens_http(host: str, port: int) -> bool:
    """Whether the gateway answers at all, healthy or not. /health needs no API key. This runs often during a start, so
    a full HTTP client would cost too much."""
    async with asyncio.timeout(1):
        reader, writer = await asyncio.open_connection(reachable_host(host), port)
        try:
            writer.write(f"GET /health HTTP/1.1\r\nhost: localhost:{port}\r\nconnection: close\r\n\r\n".encode())
            await writer.drain()
            return (await reader.readline()).startswith(b"HTTP/1.1 ")
        finally:
            writer.close()
