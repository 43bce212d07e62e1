"""Stores how long the last runs took. The file is outside of the checkout: CI deletes its checkouts."""

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from tools.gate.plan import RunRecord
from tools.kube.binaries import cache

FILE = cache().parent / "tests.json"
"""How long the last run of each kind took"""


def read(kind: str) -> RunRecord | None:
    try:
        return RunRecord(**json.loads(FILE.read_text())[kind])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(kind: str, record: RunRecord) -> None:
    try:
        records = dict(json.loads(FILE.read_text()))
    except (OSError, ValueError, TypeError):
        records = {}
    replace_file(FILE, json.dumps(records | {kind: asdict(record)}, indent=1).encode())


def replace_file(file: Path, content: bytes) -> None:
    """Whole or not at all. Without room on the disk the file stays as it was: that fails no test."""
    partial = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(file)
