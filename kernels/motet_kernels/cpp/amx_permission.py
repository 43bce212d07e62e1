"""Asks Linux for the CPU's tiles (AMX). A sandbox or an old Linux may refuse, although the CPU's flags name AMX."""

import ctypes
import platform

_ARCH_PRCTL = 158
_ASK_FOR_STATE, _TILE_DATA = 0x1023, 18


def tiles_allowed() -> bool:
    """Ask for this process, and return the answer. Each process must ask."""
    if platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA) == 0)
