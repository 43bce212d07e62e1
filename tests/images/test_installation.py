"""What the Dockerfiles do, without Docker: the wheel with a deployable's extras in an environment of its own, started
as the image starts it, by a user that is not root, on a file system that cannot be written.
"""

import contextlib
import http.client
import json
import os
import shutil
import socket
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

from tests.images.dockerfile import FOLDERS, read
from tests.repo.tree import ROOT

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
    def serving(self, port: int, *paths: str, env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
        """Once each of these paths is answered with 200."""
        with tempfile.TemporaryFile("w+") as output, self.started(output, env=env) as process:
            deadline = time.monotonic() + 60
            while [path for path in paths if get(port, path) != 200]:
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    pytest.fail(f"ended with {process.returncode}:\n{output.read()}")
                time.sleep(0.1)
            yield process


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(built)


@pytest.fixture(scope="module")
def installed(request: pytest.FixtureRequest, wheel: Path) -> Iterator[Installed]:
    if os.getuid() != 0 or any(shutil.which(tool) is None for tool in ("unshare", "setpriv")):
        pytest.skip("needs root, unshare and setpriv: it makes a file system that cannot be written")
    file = read(FOLDERS[request.param])
    # Outside this checkout, and where a user that is not root can look.
    folder = Path(tempfile.mkdtemp(prefix="motet-image-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
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
        yield Installed(folder, file.entrypoint)
    finally:
        shutil.rmtree(folder)


def image(name: str) -> "pytest.MarkDecorator":
    return pytest.mark.parametrize("installed", [name], indirect=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


def serves(installed: Installed, env: Mapping[str, str]) -> None:
    metrics = free_port()
    env = {"MOTET_METRICS_ADDRESS": f"127.0.0.1:{metrics}", **env}
    with installed.serving(metrics, "/livez", "/readyz", env=env) as process:
        assert user_of(process) == USER
        process.terminate()
        assert process.wait(30) == 0


@image("scheduler")
def test_the_scheduler_runs_on_what_its_image_holds(installed: Installed) -> None:
    serves(installed, {"MOTET_SCHEDULER_ADDRESS": f"127.0.0.1:{free_port()}"})


@image("scheduler")
def test_an_image_holds_no_more_than_it_needs(installed: Installed) -> None:
    said = subprocess.run(
        [
            *(sys.executable, "-m", "pip", f"--python={installed.folder / 'bin' / 'python'}", "list"),
            *("--format=json", "--disable-pip-version-check"),
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    held = {one["name"] for one in json.loads(said)}
    assert {"motet", "grpcio", "kubernetes"} <= held
    assert not held & {"torch", "transformers", "fastapi", "SQLAlchemy", "typer", "pytest", "ruff"}


@image("operator")
def test_the_operators_image_migrates_a_database(installed: Installed) -> None:
    code, said = installed.run("python", "-P", "-m", "motet.store")
    assert code == 0, said


@image("operator")
def test_the_operator_says_what_it_lacks_outside_a_cluster(installed: Installed) -> None:
    code, said = installed.run(env={"MOTET_CLUSTER_RUNNER_TEMPLATE": "/etc/motet/runner/template.yaml"})
    assert code == 2, said
    assert "MOTET_CLUSTER_RUNNER_TEMPLATE: /etc/motet/runner/template.yaml is no template for runner pods" in said


@pytest.mark.soak
@image("supervisor")
def test_the_supervisor_runs_on_what_its_image_holds(installed: Installed) -> None:
    serves(installed, {"MOTET_SUPERVISOR_ADDRESS": f"127.0.0.1:{free_port()}"})


@pytest.mark.soak
@image("predictor")
def test_the_predictor_runs_on_what_its_image_holds(installed: Installed) -> None:
    serves(installed, {"MOTET_PREDICTOR_ADDRESS": f"127.0.0.1:{free_port()}"})


@pytest.mark.soak
@image("gateway")
def test_the_gateway_runs_on_what_its_image_holds(installed: Installed) -> None:
    port = free_port()
    with installed.serving(port, "/version", env={"MOTET_GATEWAY_PORT": str(port)}) as process:
        assert user_of(process) == USER


@pytest.mark.soak
@image("runner")
def test_the_runners_image_reads_a_model(installed: Installed) -> None:
    code, said = installed.run(env={"MOTET_RUNNER_MODEL_URI": "file:///nowhere"})
    assert code == 2, said
    assert "there is no model folder /nowhere" in said
