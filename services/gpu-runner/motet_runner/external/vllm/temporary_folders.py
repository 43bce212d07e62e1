"""Folders from which vLLM reads adapters. This process may end at any moment without removing them, so the next one
removes what is left of those that have ended."""

import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "motet-vllm-"


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", ignore_cleanup_errors=True)


def remove_left() -> None:
    """To be called before the first folder is made: an earlier process of a container may have had the same pid."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        pid = left.name.removeprefix(PREFIX).partition("-")[0]
        if pid == str(os.getpid()) or not Path("/proc", pid).exists():
            shutil.rmtree(left, ignore_errors=True)
