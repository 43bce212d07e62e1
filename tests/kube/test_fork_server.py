"""Processes that a server forks are like those that are started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.cluster import programs
from testbed.cluster.network import CannotIsolate, Network, network
from testbed.cluster.programs import Program
from testbed.fork_server import ForkServer
from testbed.machine import lacking
from testbed.tree import ROOT

pytestmark = pytest.mark.kube

COMMAND = [sys.executable, "-P", "-m", "motet_scheduler"]


@pytest.fixture
def isolated() -> Iterator[Network]:
    try:
        with network() as made:
            yield made
    except CannotIsolate as error:
        lacking(str(error))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    made = ForkServer(["motet_scheduler"])
    monkeypatch.setattr(programs, "fork_server", made)
    yield made
    made.close()


def scheduler(folder: Path, isolated: Network) -> Program:
    folder.mkdir()
    own = {"MOTET_DATA_DIR": str(folder), "MOTET_SCHEDULER_ADDRESS": f"unix:{folder}/s.sock"}
    return Program(COMMAND, folder / "log", isolated, (folder / "s.sock").exists, env={**os.environ, **own})


def is_forked(program: Program) -> bool:
    return "fork_server" in Path(f"/proc/{program.pid}/cmdline").read_text()


def seen_from_outside(program: Program) -> list[str]:
    of = Path(f"/proc/{program.pid}")
    lines = [line for line in (of / "status").read_text().splitlines() if line.startswith(("PPid", "Sig", "Threads"))]
    return [*lines, str((of / "ns/net").readlink()), f"leads its session: {os.getsid(program.pid) == program.pid}",
            str((of / "cwd").readlink()), str((of / "fd/0").readlink()), (of / "fd/1").readlink().name]  # fmt: skip


def test_a_forked_process_looks_like_a_started_one_and_ends_like_it(
    server: ForkServer, isolated: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs: dict[bool, list[str]] = {}
    seen: dict[bool, list[str]] = {}
    for forked in (True, False):
        monkeypatch.setattr(programs, "fork_server", server if forked else None)
        with scheduler(tmp_path / str(forked), isolated) as program:
            assert is_forked(program) == forked
            seen[forked] = seen_from_outside(program)
            program.stop()
            logs[forked] = [line.partition('"event"')[2].partition(",")[0] for line in program.tail().splitlines()]
    assert seen[True] == seen[False]
    assert logs[True] == logs[False]
    assert "stopped" in logs[True][-1]


def test_the_end_of_a_forked_process_is_seen(server: ForkServer, isolated: Network, tmp_path: Path) -> None:
    with scheduler(tmp_path / "one", isolated) as program, scheduler(tmp_path / "two", isolated) as other:
        os.kill(program.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        with pytest.raises(AssertionError, match="ended with -9"):
            while time.monotonic() < deadline:
                program.assert_alive()
        other.assert_alive()


DIES = """
import sys, time
from pathlib import Path
from testbed.cluster import programs
from testbed.cluster.network import network
from testbed.fork_server import ForkServer
from tests.kube.test_fork_server import scheduler

programs.fork_server = ForkServer(["motet_scheduler"])
with network() as isolated, scheduler(Path(sys.argv[1]), isolated) as program:
    print(program.pid, flush=True)
    time.sleep(60)
"""


def test_a_forked_process_ends_with_the_one_that_asked_for_it(isolated: Network, tmp_path: Path) -> None:
    command = [sys.executable, "-c", DIES, str(tmp_path / "data")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as asked:
        assert asked.stdout is not None
        forked = Path(f"/proc/{int(asked.stdout.readline())}")
        assert forked.exists()
        asked.kill()
    deadline = time.monotonic() + 10
    while forked.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_cannot_enter_its_network_says_so(server: ForkServer, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        process = server.start("motet_scheduler", env=None, output=log.fileno(), network=Path("/dev/null"))
    assert process.wait(timeout=30) == 1
    assert (tmp_path / "log").read_text() == "/dev/null: cannot be entered: Invalid argument\n"


FORKS_ONCE = """
import os

server, fork = os.getpid(), os.fork
os.fork = lambda: fork() if os.getpid() == server else os._exit(1)
"""


@pytest.mark.timeout(30)
def test_a_process_that_cannot_be_forked_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no test that waits for ever."""
    (tmp_path / "forks_once").mkdir()
    (tmp_path / "forks_once/__main__.py").write_text(FORKS_ONCE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    server = ForkServer(["forks_once"])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no process could be forked"):
            server.start("forks_once", env=None, output=1, network=tmp_path)
    server.close()


@pytest.mark.parametrize(
    ("command", "env", "cwd"),
    [
        ([*COMMAND[:3], "motet_gateway"], {}, None),
        ([*COMMAND, "--help"], {}, None),
        (["/usr/bin/python3", *COMMAND[1:]], {}, None),
        (COMMAND, {"PYTHONPATH": "/older"}, None),
        (COMMAND, {"LD_PRELOAD": "library.so"}, None),
        (COMMAND, {}, Path("/tmp")),
    ],
)
def test_what_the_server_has_not_imported_is_not_forked(
    command: list[str], env: dict[str, str], cwd: Path | None
) -> None:
    server = ForkServer(["motet_scheduler"])
    assert server.can_start(COMMAND, {**os.environ, "MOTET_TIME_SCALE": "1"}, None)
    assert not server.can_start(command, {**os.environ, **env}, cwd)
