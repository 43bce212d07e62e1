"""Runs a scheduler process for the operators of a site, without gateways and runners."""

import json
import os
import sys
from typing import Any

from testbed.cluster.operators import TIME_SCALE, OperatorNamespaces
from testbed.cluster.programs import Program

WAITS_FOR_RUNNERS = {"MOTET_SCHEDULER_FORGET_RUNNER_SECONDS": "86400"}
"""A scheduler soon reports a runner that it does not know as drained. With this setting it reports none, so that each
runner drains until its deadline: nothing runs the runners here."""


class SchedulerProgram(Program):
    """A scheduler at the address that the site's operators expect. Its disk has the catalog that it got last."""

    def __init__(self, home: OperatorNamespaces, name: str = "scheduler", *, env: dict[str, str] | None = None) -> None:
        folder = home.folder / name
        self._catalog = folder / "scheduler" / "catalog.json"
        socket = home.folder / "scheduler.sock"
        own = {
            "MOTET_DATA_DIR": str(folder),
            "MOTET_TIME_SCALE": str(TIME_SCALE),
            "MOTET_SCHEDULER_ADDRESS": f"unix:{socket}",
        }
        assert home.cluster.network is not None
        super().__init__(
            [sys.executable, "-P", "-m", "motet_scheduler"],
            home.folder / f"{name}.log",
            home.cluster.network,
            socket.exists,
            env={**os.environ, **own, **(env or {})},
        )

    def told(self) -> dict[str, Any]:
        """The newest catalog; empty before the first one."""
        if not self._catalog.exists():
            return {}
        remembered: dict[str, Any] = json.loads(self._catalog.read_bytes())["remembered"]
        return remembered

    def adapters(self) -> dict[str, dict[str, Any]]:
        """The adapters of the newest catalog by `namespace/name`, each as it was declared."""
        specs = [one["spec"] for one in self.told().get("adapters", ())]
        return {f"{spec['ref']['namespace']}/{spec['ref']['name']}": spec for spec in specs}
