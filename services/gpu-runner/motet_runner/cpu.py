"""The system's information about this machine's CPU."""

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

_MULTIPLY_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""The flags of x86's vectors and tiles, and of ARM's vectors"""


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    return _first(cpuinfo, "model name") or platform.machine()


def multiplies_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """True if the CPU has instructions for bfloat16 products. Without them, bfloat16 is converted to float32 before
    each product."""
    flags = _first(cpuinfo, "flags") or _first(cpuinfo, "Features")
    return not _MULTIPLY_BFLOAT16.isdisjoint(flags.split())


def _first(cpuinfo: Path, name: str) -> str:
    """The entry of the first core; empty if there is none."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in found if key.strip() == name), "")
