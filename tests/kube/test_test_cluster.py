"""The test cluster is isolated: its networks are separate, and no process remains after a run."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from motet.processes.linux import all_stats
from testbed.cluster.network import CannotIsolate, Network, network
from testbed.machine import lacking
from testbed.tree import ROOT

pytestmark = pytest.mark.kube

OWN = Path("/proc/thread-self/ns/net")
DIES = """
import os, pathlib, sys
from testbed.cluster.network import network
from testbed.cluster.programs import Program
def is_asleep():
    return "sleep" in pathlib.Path(f"/proc/{program.pid}/comm").read_text()
with network() as own:
    program = Program(["sleep", "600"], pathlib.Path(sys.argv[1]) / "log", own, is_asleep)
    program.start()
    print(program.pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def isolated() -> Iterator[Network]:
    try:
        made = network()
        with made as own:
            yield own
    except CannotIsolate as error:
        lacking(str(error))


def test_a_thread_and_its_children_are_inside_the_network(isolated: Network) -> None:
    outside = OWN.readlink()
    with isolated.inside():
        inside = OWN.readlink()
        with isolated.inside():
            pass
        assert OWN.readlink() == inside
        seen: list[Path] = []
        child = threading.Thread(target=lambda: seen.append(OWN.readlink()))
        child.start()
        child.join()
        assert seen == [inside]
    assert OWN.readlink() == outside != inside


def test_two_networks_may_use_the_same_addresses(isolated: Network) -> None:
    with network() as other:
        for one in (isolated, other):
            one.add_address("203.0.113.5")
        with isolated.inside():
            server = socket.create_server(("203.0.113.5", 8000))
        with server:
            with other.inside(), pytest.raises(ConnectionRefusedError):
                socket.create_connection(("203.0.113.5", 8000), timeout=5)
            with isolated.inside():
                socket.create_connection(("203.0.113.5", 8000), timeout=5).close()


def test_programs_end_with_a_run_that_is_killed(isolated: Network, tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", DIES, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert run.stdout is not None
    assert run.stdin is not None
    program = int(run.stdout.readline())
    run.kill()
    run.wait()
    run.stdout.close()
    run.stdin.close()

    def left() -> bool:
        return any(stat.identity.pid == program and not stat.dead for stat in all_stats())

    deadline = time.monotonic() + 5
    while left():
        assert time.monotonic() < deadline, "the program is still there"
        time.sleep(0.05)
