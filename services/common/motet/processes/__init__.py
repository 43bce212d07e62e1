"""Starts child processes, each in its own session, probes them, restarts them, and stops them: first with SIGTERM, then
with SIGKILL. A later process can adopt children that an earlier one has started.

`lifecycle` and `restart_backoff` decide and are pure. `linux`, `launch` and `records` use the system. `ProcessManager`
joins them.
"""

from motet.processes.lifecycle import Lifecycle, LifecycleConfig, Phase
from motet.processes.linux import ProcessIdentity, identity_of, is_alive
from motet.processes.manager import ProcessManager, ProcessSpec, ProcessStatus
from motet.processes.records import ProcessRecord, ProcessRecords
from motet.processes.restart_backoff import RestartBackoff

__all__ = [
    "Lifecycle",
    "LifecycleConfig",
    "Phase",
    "ProcessIdentity",
    "ProcessManager",
    "ProcessRecord",
    "ProcessRecords",
    "ProcessSpec",
    "ProcessStatus",
    "RestartBackoff",
    "identity_of",
    "is_alive",
]
