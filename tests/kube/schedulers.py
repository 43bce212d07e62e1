"""A scheduler as a process beside the operators of a site, without gateways and runners."""

import json
import os
import sys
from typing import Any

from tests.kube.operators import TIME_SCALE, OperatorNamespaces
from tests.kube.programs import Program

WAITS_FOR_RUNNERS = {"MOTET_SCHEDULER_FORGET_RUNNER_SECONDS": "86400"}
"""Of a runner that it has never heard a scheduler soon says that nothing is left on it. Where nothing runs the runners
this one says it of none, so that each drains until its deadline."""


class SchedulerProgram(Program):
    """Where the site's operators expect it. What it was told last is on its disk."""

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
        """The last catalog; empty before the first."""
        if not self._catalog.exists():
            return {}
        remembered: dict[str, Any] = json.loads(self._catalog.read_bytes())["remembered"]
        return remembered

    def adapters(self) -> dict[str, dict[str, Any]]:
        """Those of the last catalog by `namespace/name`, each as it was stated."""
        specs = [one["spec"] for one in self.told().get("adapters", ())]
        return {f"{spec['ref']['namespace']}/{spec['ref']['name']}": spec for spec in specs}
