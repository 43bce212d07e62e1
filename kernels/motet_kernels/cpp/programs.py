"""Runs compilers and tests of libraries, which may hang or crash. No such program outlives this process."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_WATCHED = Path(__file__).with_name("watched.py")


def run(command: Sequence[str], *, seconds: float) -> "subprocess.CompletedProcess[str]":
    """Raises OSError or subprocess.TimeoutExpired. After an error, or if this process ends first, the program and all
    that it has started are killed."""
    watched = [sys.executable, "-I", "-S", str(_WATCHED), *command]
    lives, held = os.pipe()
    try:
        with subprocess.Popen(
            watched,
            stdin=lives,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | {"LC_ALL": "C"},  # the programs' messages are parsed
        ) as process:
            try:
                output, errors = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                raise subprocess.TimeoutExpired(list(command), seconds) from None
            finally:
                os.close(held)  # watched.py kills what still runs
                held = -1
    finally:
        os.close(lives)
        if held != -1:
            os.close(held)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
