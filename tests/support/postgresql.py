"""Starts a PostgreSQL server for a test run, on loopback. Its folder is removed with it.

async def test_something(postgresql: PostgreSQL) -> None:
    url = await postgresql.new_database()
"""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from testbed.machine import lacking

DEBIAN = Path("/usr/lib/postgresql")
USER, PASSWORD = "motet", "secret"
START_WITHIN_S = 30.0
MISSING = f"a PostgreSQL server, on the PATH or under {DEBIAN}"


def find(program: str) -> str | None:
    newest_first = sorted(DEBIAN.glob(f"*/bin/{program}"), reverse=True)
    return shutil.which(program) or next((str(path) for path in newest_first), None)


class PostgreSQL:
    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.host = host
        self._data = folder / "data"
        self._log = folder / "log"
        with socket.socket() as free:
            free.bind((host, 0))
            self.port = int(free.getsockname()[1])
        # PostgreSQL refuses to run as root.
        self._user: dict[str, Any] = {"cwd": folder}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            self._user |= {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        password = folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        command = [str(find("initdb")), f"--pgdata={self._data}", f"--username={USER}", f"--pwfile={password}"]
        options = ["--auth=scram-sha-256", "--no-sync", "--encoding=UTF8", "--locale=C"]
        subprocess.run([*command, *options], check=True, capture_output=True, **self._user)
        with (self._data / "pg_hba.conf").open("a") as rules:  # its default admits only this machine
            rules.write("host all all all scram-sha-256\n")
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, database: str, *, password: str = PASSWORD, user: str = USER) -> str:
        return f"postgresql+asyncpg://{user}:{password}@{self.host}:{self.port}/{database}"

    async def new_database(self) -> str:
        """Create an empty database. Returns its URL."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        connection = await asyncpg.connect(self.url("postgres").replace("+asyncpg", ""))
        try:
            await connection.execute(f"CREATE DATABASE {name}")
        finally:
            await connection.close()
        return self.url(name)

    def start(self) -> None:
        settings = [
            f"--port={self.port}",
            f"--listen_addresses={self.host}",
            "--unix_socket_directories=",
            "--fsync=off",
        ]
        read_before = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(find("postgres")), "-D", self._data, *settings], stdout=log, stderr=log, **self._user
            )
        deadline = time.monotonic() + START_WITHIN_S
        while b"ready to accept connections" not in self._log.read_bytes()[read_before:]:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)

    def show_certificate(self, folder: Path) -> None:
        """Use TLS from the next start on, with `tls.crt` and `tls.key` of `folder`."""
        for name in ("tls.crt", "tls.key"):
            file = self._data / name
            shutil.copyfile(folder / name, file)
            file.chmod(0o600)
            shutil.chown(file, self._user.get("user", -1), self._user.get("group", -1))
        with (self._data / "postgresql.conf").open("a") as settings:
            settings.write("ssl = on\nssl_cert_file = 'tls.crt'\nssl_key_file = 'tls.key'\n")

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(3)  # quit at once
            self._process.wait(START_WITHIN_S)
            self._process = None


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    if find("postgres") is None or find("initdb") is None:
        lacking(MISSING)
    with tempfile.TemporaryDirectory(prefix="motet-postgresql-") as folder:
        server = PostgreSQL(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()
