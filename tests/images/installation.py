"""An image without Docker: the wheel with a deployable's extras in an environment of its own, started as the image
starts, by a user that is not root, on a file system that cannot be written.
"""

import contextlib
import http.client
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
from hatchling.builders.wheel import WheelBuilder

from testbed.machine import lacking
from testbed.tree import ROOT
from tests.images.dockerfile import FOLDERS, read

OUTSIDE = "/var/tmp"
"""Not in this checkout, and where a user that is not root can look; /tmp is another one inside."""

USER = 65532
INSIDE = """\
set -eu
# Whoever is not root may not look into every home: what is needed of the interpreter is put there again, alone.
if test -n "$CLOSED"; then
  kept="$(mktemp -d)"; mount --bind "$INTERPRETER" "$kept"
  mount -t tmpfs -o mode=755 tmpfs "$CLOSED"; mkdir -p "$INTERPRETER"; mount --bind "$kept" "$INTERPRETER"
fi
mount --bind "$IMAGE" "$IMAGE"; mount -o remount,bind,ro "$IMAGE"
mount -t tmpfs tmpfs /tmp -o mode=1777
mkdir -p /tmp/data; chown 65532:65532 /tmp/data
mount -o remount,bind,ro /
if touch /probe 2> /dev/null; then echo "the root can be written" >&2; exit 99; fi
cd /tmp
exec setpriv --reuid=65532 --regid=65532 --clear-groups --no-new-privs --bounding-set=-all --pdeathsig=KILL -- "$@"
"""


@dataclass(frozen=True)
class Installed:
    """What would be an image."""

    folder: Path
    command: list[str]

    @contextlib.contextmanager
    def started(self, output: IO[str], *arguments: str, env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
        """In a mount namespace of its own; `arguments` in the place of the image's command."""
        interpreter = Path(sys.base_prefix).resolve()
        closed = [parent for parent in interpreter.parents if parent.stat().st_mode & 0o005 != 0o005]
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation=private", "sh", "-c", INSIDE, "sh", *(arguments or self.command)],
            env={
                "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin:/usr/sbin:/sbin",
                "HOME": "/tmp",
                "PYTHONDONTWRITEBYTECODE": "1",
                "INTERPRETER": str(interpreter),
                "CLOSED": str(closed[-1]) if closed else "",
                "IMAGE": str(self.folder),
                "MOTET_DATA_DIR": "/tmp/data",
                **env,
            },
            stdout=output,
            stderr=output,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def run(self, *arguments: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
        with tempfile.TemporaryFile("w+") as output:
            with self.started(output, *arguments, env=env or {}) as process:
                code = process.wait(120)
            output.seek(0)
            return code, output.read()

    @contextlib.contextmanager
    def serving(
        self, port: int, *paths: str, env: Mapping[str, str], within_s: float = 60
    ) -> Iterator[subprocess.Popen[str]]:
        """Once each of these paths is answered with 200."""
        with tempfile.TemporaryFile("w+") as output, self.started(output, env=env) as process:
            deadline = time.monotonic() + within_s
            while [path for path in paths if get(port, path) != 200]:
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    pytest.fail(f"not in time, or ended with {process.returncode}:\n{output.read()}")
                time.sleep(0.1)
            yield process


def build_wheel(folder: Path) -> Path:
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(built)


@contextlib.contextmanager
def installation(deployable: str, wheel: Path) -> Iterator[Installed]:
    if os.getuid() != 0 or any(shutil.which(tool) is None for tool in ("unshare", "setpriv")):
        lacking("root, unshare and setpriv: it makes a file system that cannot be written")
    file = read(FOLDERS[deployable])
    with _folder("image") as folder:
        venv.create(folder, symlinks=True)
        wanted = f"{wheel}[{','.join(file.extras)}]"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pip", f"--python={folder / 'bin' / 'python'}", "install", "--quiet"),
                *("--disable-pip-version-check", "--no-compile", "--constraint", ROOT / "constraints.txt", wanted),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        if deployable == "runner":
            command = shlex.split(file.stages[1].last("RUN").rpartition("&&")[2])
            assert command[0] == "/opt/motet/bin/python"
            subprocess.run([folder / "bin" / "python", *command[1:]], check=True, cwd=folder)
        yield Installed(folder, file.entrypoint)


@contextlib.contextmanager
def volume(*sources: Path) -> Iterator[Path]:
    """A folder with copies of these files and folders, for our user to read."""
    with _folder("volume") as folder:
        for source in sources:
            if source.is_dir():
                shutil.copytree(source, folder / source.name)
            else:
                shutil.copyfile(source, folder / source.name)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, USER, USER)
        yield folder


@contextlib.contextmanager
def _folder(what: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"motet-{what}-", dir=OUTSIDE))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def get(port: int, path: str) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def user_of(process: subprocess.Popen[str]) -> int:
    """`unshare`, `sh` and `setpriv` become what they start."""
    return Path(f"/proc/{process.pid}").stat().st_uid
