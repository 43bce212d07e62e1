"""Child processes, kept alive: started in sessions of their own, probed, restarted, stopped with patience and then
without, and found again by whoever comes after the one that started them.

`lifecycle` decides and is pure; `linux`, `launch` and `records` touch the machine; `Keeper` joins them.
"""

from motet.processes.keeper import Keeper, ProcessSpec, ProcessStatus
from motet.processes.lifecycle import Lifecycle, Phase, Policy
from motet.processes.linux import Identity, identity_of, is_alive
from motet.processes.records import Record, Records

__all__ = [
    "Identity",
    "Keeper",
    "Lifecycle",
    "Phase",
    "Policy",
    "ProcessSpec",
    "ProcessStatus",
    "Record",
    "Records",
    "identity_of",
    "is_alive",
]
