"""Results of measurements that the next start need not repeat: a file beside the compiled kernels."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger(__name__)

KEPT_SECONDS = 7 * 24 * 3600.0
"""Choices expire: a machine may get other neighbours."""


@dataclass(frozen=True)
class KeptChoices:
    """A file of choices. A damaged file counts as an empty one."""

    path: Path
    what: str
    """The name of the choice in the file and the log"""

    def find(self, key: str) -> Any:
        entry = self._read().get(key)
        if not isinstance(entry, dict) or not isinstance(at := entry.get("at"), int | float):
            return None
        return entry.get(self.what) if 0 <= time.time() - at < KEPT_SECONDS else None

    def keep(self, key: str, choice: int | str) -> None:
        entries = self._read() | {key: {self.what: choice, "at": time.time()}}
        written = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            written.write_text(json.dumps(entries, indent=1), encoding="utf-8")
            written.replace(self.path)
        except OSError as error:
            log.info("choice_not_kept", choice=self.what, reason=error.strerror)

    def _read(self) -> dict[str, Any]:
        try:
            entries = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}
