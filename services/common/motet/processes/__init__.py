"""Child processes, kept alive: started in sessions of their own, probed, restarted, stopped with patience and then
without, and found again by whoever comes after the one that started them.

`lifecycle` decides and is pure; `linux`, `launch` and `records` touch the machine; `Keeper` joins them.
"""

from motet.processes.lifecycle import Lifecycle, LifecycleConfig, Phase
from motet.processes.linux import ProcessIdentity, identity_of, is_alive
from motet.processes.manager import ProcessManager, ProcessSpec, ProcessStatus
from motet.processes.records import ProcessRecord, ProcessRecords

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
    "identity_of",
    "is_alive",
]
