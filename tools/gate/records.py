"""How long the last runs took, kept outside the tree: a checkout of CI lives for one run."""

import json
import os
from dataclasses import asdict

from tools.gate.plan import Record
from tools.kube.locate import cache

FILE = cache().parent / "tests.json"


def read(kind: str) -> Record | None:
    try:
        return Record(**json.loads(FILE.read_text())[kind])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(kind: str, record: Record) -> None:
    try:
        records = json.loads(FILE.read_text())
    except (OSError, ValueError):
        records = {}
    FILE.parent.mkdir(parents=True, exist_ok=True)
    partial = FILE.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(records | {kind: asdict(record)}, indent=1))
    partial.replace(FILE)
