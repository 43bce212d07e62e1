"""Stores how long the last runs took, and at which commit each family was green. The file is outside of the checkout:
CI deletes its checkouts."""

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.gate.plan import RunRecord
from tools.kube.binaries import cache

FILE = cache().parent / "tests.json"
GREEN = "green"
"""The key of the green commits. All other keys are kinds of runs."""


def read(kind: str) -> RunRecord | None:
    try:
        return RunRecord(**json.loads(FILE.read_text())[kind])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(kind: str, record: RunRecord) -> None:
    _write(kind, asdict(record))


def green(machine: str) -> dict[str, str]:
    """For each family of tests, the commit at which it was last green on this machine."""
    try:
        kept = json.loads(FILE.read_text())[GREEN]
        return dict(kept["commits"]) if kept["machine"] == machine else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_green(machine: str, families: Iterable[str], commit: str) -> None:
    """Add to the records, and remove those of another machine."""
    commits = green(machine) | dict.fromkeys(families, commit)
    _write(GREEN, {"machine": machine, "commits": commits})


def _write(name: str, value: dict[str, Any]) -> None:
    try:
        records = dict(json.loads(FILE.read_text()))
    except (OSError, ValueError, TypeError):
        records = {}
    replace_file(FILE, json.dumps(records | {name: value}, indent=1).encode())


def replace_file(file: Path, content: bytes) -> None:
    """Whole or not at all. Without room on the disk the file stays as it was: that fails no test."""
    partial = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(file)
