"""The name of this machine beside its step times, which do not hold for another machine."""

import os

from motet_runner.cpu import cpu_name


def machine_name(accelerator: str = "") -> str:
    """`accelerator`: the name of the GPU that computes; empty: the CPU does."""
    if accelerator:
        return accelerator
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{cpu_name()}, {cpus} CPU{'s' * (cpus > 1)}"
