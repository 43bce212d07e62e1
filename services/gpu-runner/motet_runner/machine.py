"""The names of this machine: beside its step times, which do not hold for another machine, and beside its proofs."""

import os
import platform
from contextlib import suppress
from pathlib import Path

from motet_runner.cpu import cpu_name

MACHINE_ID = Path("/etc/machine-id")


def machine_name(accelerator: str = "") -> str:
    """`accelerator`: the name of the GPU that computes; empty: the CPU does."""
    if accelerator:
        return accelerator
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{cpu_name()}, {cpus} CPU{'s' * (cpus > 1)}"


def hardware_name(gpu: str = "") -> str:
    """The model of what computes. `gpu`: its name; empty: the CPU computes."""
    return gpu or cpu_name()


def machine_identity(gpu: str = "") -> str:
    """What computes, told from everything else that may share a folder with it. In a container, the host's name is the
    pod's. `gpu`: the number that no other GPU has."""
    identity = ""
    with suppress(OSError, UnicodeDecodeError):
        identity = MACHINE_ID.read_text(encoding="ascii").strip()
    return f"{platform.node()} {identity} {gpu}"
