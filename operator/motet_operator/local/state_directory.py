"""The files of one local stack, in its state directory.

DATA/lock             held by `motet up` while it runs
DATA/status.json      what `motet status` prints
DATA/motet.db         the database
DATA/adapters/        what `motet adapter push` has copied
DATA/cache/           adapters, certificates, tokenizers
DATA/logs/<name>.log  one for each process
DATA/manifests/       the bundled manifests, if no folder was given
DATA/run/             records of processes, runners, valid manifests and adapters' folders, and the sockets if their
                      paths are short enough
"""

import hashlib
import os
import shlex
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from motet.errors import StateDirectoryError

MAX_SOCKET_PATH = 100
"""Bytes. The kernel's limit is 107; gRPC needs some of them."""

MIN_FREE_BYTES = 2 * 1024 * 1024
"""Bytes for the database, records and first log lines: with less, a start would fail later and less clearly."""

MAX_INSTANCE_NAME = 31
_LONGEST_SOCKET_NAME = "x" * MAX_INSTANCE_NAME + ".metrics.sock"


def default_data_dir() -> Path:
    """`$XDG_DATA_HOME/motet`, by default `~/.local/share/motet`."""
    base = os.environ.get("XDG_DATA_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "share") / "motet"


@dataclass(frozen=True)
class StateDirectory:
    data: Path

    @classmethod
    def of(cls, data: Path) -> "StateDirectory":
        return cls(data.expanduser().absolute())

    @property
    def shell_path(self) -> str:
        """The state directory as a person types it into a shell."""
        return shlex.quote(str(self.data))

    @property
    def run(self) -> Path:
        return self.data / "run"

    @property
    def logs(self) -> Path:
        return self.data / "logs"

    @property
    def lock(self) -> Path:
        return self.data / "lock"

    @property
    def status(self) -> Path:
        return self.data / "status.json"

    @property
    def manifests(self) -> Path:
        return self.data / "manifests"

    @property
    def accepted_manifests(self) -> Path:
        """What the operator has accepted, with the last valid versions of files that have a problem now."""
        return self.run / "manifests.json"

    @property
    def operator_records(self) -> Path:
        """Kept by `motet up`."""
        return self.run / "up"

    @property
    def service_records(self) -> Path:
        """Kept by the operator."""
        return self.run / "services"

    @cached_property
    def sockets(self) -> Path:
        """The folder of the sockets: `run`, or one with a short path if that of `run` is too long."""
        with suppress(OSError):
            recorded = (self.run / "sockets").read_text().strip()
            if recorded:
                return Path(recorded)
        if len(os.fsencode(self.run / _LONGEST_SOCKET_NAME)) < MAX_SOCKET_PATH:
            return self.run
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        base = Path(runtime if runtime.startswith("/") and len(runtime) < 40 else "/tmp")  # noqa: S108 - made 0700 and checked
        key = hashlib.sha256(os.fsencode(self.data)).hexdigest()[:12]
        return base / f"motet-{os.getuid()}-{key}"

    def address(self, name: str) -> str:
        return f"unix:{self.sockets}/{name}.sock"

    def metrics_address(self, name: str) -> str:
        return f"unix:{self.metrics_socket(name)}"

    def metrics_socket(self, name: str) -> Path:
        return self.sockets / f"{name}.metrics.sock"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def prepare(self) -> None:
        """Create the folders and check that they can be written. Raises StateDirectoryError, which says what to do."""
        try:
            for folder in (self.data, self.logs, self.run):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.run.chmod(0o700)
            self._prepare_sockets()
            trial = self.data / f".trial.{os.getpid()}"
            try:
                trial.write_bytes(bytes(MIN_FREE_BYTES))
            finally:
                trial.unlink(missing_ok=True)
        except OSError as error:
            raise StateDirectoryError(
                f"cannot write to the state directory {self.data}: {error.strerror or error}. "
                "Free some space, or choose another one with --data-dir."
            ) from error

    def _prepare_sockets(self) -> None:
        folder = self.sockets
        if folder == self.run:
            return
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise StateDirectoryError(
                f"Motet keeps its sockets in {folder}, because the path of the state directory is too long for them. "
                "Other users can access that folder: remove it, or choose a shorter path with --data-dir."
            )
        (self.run / "sockets").write_text(f"{folder}\n")

    def clear_run(self) -> None:
        """Remove what only a running stack needs. Call it only when no process of the stack runs."""
        sockets = self.sockets
        if sockets != self.run:
            shutil.rmtree(sockets, ignore_errors=True)
        shutil.rmtree(self.run, ignore_errors=True)
        with suppress(OSError):
            self.status.unlink(missing_ok=True)
        self.__dict__.pop("sockets", None)
