"""A file about each process, so that the next operator, `motet status` and `motet down` find it.

Each process has one small file. It is replaced in one step, so a reader gets either the old or the new content.
"""

import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import orjson

from motet.disk import sync_folder
from motet.processes.linux import ProcessIdentity, boot_id, is_alive

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    name: str
    kind: str
    pid: int
    start_ticks: int
    boot: str
    fingerprint: str
    log: str
    phase: str = ""
    restarts: int = 0
    failures: int = 0
    exit_status: int | None = None
    ready: bool = False
    stop_order: int = 0
    reason: str = ""

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.start_ticks)

    @property
    def alive(self) -> bool:
        return self.boot == boot_id() and is_alive(self.identity)


_FIELDS = {field.name for field in fields(ProcessRecord)}


class ProcessRecords:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self) -> dict[str, ProcessRecord]:
        found: dict[str, ProcessRecord] = {}
        with suppress(FileNotFoundError, NotADirectoryError):
            for path in sorted(self.folder.glob("*.json")):
                # Skip a file that cannot be read: of another version, or written only in part to a full disk.
                with suppress(OSError, orjson.JSONDecodeError, TypeError, AttributeError):
                    content = orjson.loads(path.read_bytes())
                    record = ProcessRecord(**{name: value for name, value in content.items() if name in _FIELDS})
                    found[record.name] = record
        return found

    def write(self, record: ProcessRecord) -> None:
        """Raises OSError. The process itself goes on."""
        assert _NAME.fullmatch(record.name), record.name
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / f"{record.name}.json", orjson.dumps(asdict(record)))

    def remove(self, name: str) -> None:
        with suppress(OSError):
            (self.folder / f"{name}.json").unlink(missing_ok=True)

    def clear(self) -> None:
        for name in self.read():
            self.remove(name)


def write_atomically(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Replace a file in one step. `durable`: it outlives a crash of the machine, after which records are of no use."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            sync_folder(path.parent)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
