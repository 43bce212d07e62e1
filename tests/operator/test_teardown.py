"""`motet down` beside other commands. A `motet up` in the foreground leads no session, because its shell does."""

import asyncio
import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from motet.errors import StateDirectoryError
from motet.processes import ProcessIdentity, ProcessRecord, ProcessRecords, identity_of
from motet.processes.linux import boot_id, send, session_members
from motet_operator.local.lock import StackLock
from motet_operator.local.state_directory import StateDirectory
from motet_operator.local.teardown import take_down
from tests.common.waiting import PATIENCE_S

HOLDER = """
import signal, sys, time
from pathlib import Path
from motet_operator.local.lock import StackLock
from motet_operator.local.state_directory import StateDirectory
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "hangs" else lambda *_: sys.exit(0))
with StackLock(StateDirectory.of(Path(sys.argv[1])).lock, to_stop=sys.argv[2] == "is a down"):
    print("holds", flush=True)
    time.sleep(1 if sys.argv[2] == "is a down" else 600)
"""

SLOW = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), sys.exit(0)))
print("runs", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("how", "seconds", "status"), [("stopped", PATIENCE_S, 0), ("hangs", 0.2, -signal.SIGKILL)])
def test_an_up_in_the_foreground_ends_also_if_it_is_stopped_or_hangs(
    tmp_path: Path, how: str, seconds: float, status: int
) -> None:
    layout = StateDirectory.of(tmp_path / "state")
    layout.prepare()
    command = [sys.executable, "-c", HOLDER, str(layout.data), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "holds\n"
            if how == "stopped":
                holder.send_signal(signal.SIGSTOP)
            assert asyncio.run(take_down(layout, seconds=seconds)) == ["motet up"]
            assert holder.wait(PATIENCE_S) == status
        finally:
            holder.kill()


def test_a_second_down_waits_for_the_first_and_leaves_it_alone(tmp_path: Path) -> None:
    layout = StateDirectory.of(tmp_path / "state")
    layout.prepare()
    command = [sys.executable, "-c", HOLDER, str(layout.data), "is a down"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "holds\n"
            with pytest.raises(StateDirectoryError, match=rf"`motet down` or another .* \(pid {holder.pid}\)\. Try"):
                StackLock(layout.lock).__enter__()
            assert asyncio.run(take_down(layout, seconds=PATIENCE_S)) == []
            assert holder.wait(PATIENCE_S) == 0
        finally:
            holder.kill()


def test_of_two_downs_at_once_both_end_well(tmp_path: Path) -> None:
    layout = StateDirectory.of(tmp_path / "state")
    layout.prepare()

    async def both() -> list[list[str]]:
        return await asyncio.gather(*(take_down(layout, seconds=PATIENCE_S) for _ in range(2)))

    up = [sys.executable, "-c", HOLDER, str(layout.data), "is an up"]
    with (
        subprocess.Popen(up, stdout=subprocess.PIPE, text=True) as holder,
        subprocess.Popen(
            [sys.executable, "-c", SLOW], stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as service,
    ):
        try:
            assert holder.stdout is not None
            assert service.stdout is not None
            assert holder.stdout.readline() == "holds\n"
            assert service.stdout.readline() == "runs\n"
            own = identity_of(service.pid)
            assert own is not None
            record = ProcessRecord(
                name="gateway", kind="gateway", pid=own.pid, start_ticks=own.start_ticks, boot=boot_id(),
                fingerprint="", log=str(layout.log("gateway")),
            )  # fmt: skip
            ProcessRecords(layout.service_records).write(record)
            assert ["gateway", "motet up"] in asyncio.run(both())
            assert service.wait(PATIENCE_S) == 0
        finally:
            holder.kill()
            service.kill()


COUNTS = """
import signal, sys, threading
from pathlib import Path
from motet_operator.local.lock import StackLock
from motet_operator.local.state_directory import StateDirectory
ended = threading.Event()
def term(*_):
    print("asked to stop", flush=True)
    threading.Timer(1.0, ended.set).start()
signal.signal(signal.SIGTERM, term)
with StackLock(StateDirectory.of(Path(sys.argv[1])).lock):
    print("holds", flush=True)
    while not ended.wait(0.05):
        pass
"""


def test_of_two_downs_at_once_one_asks_the_up_to_stop(tmp_path: Path) -> None:
    """A second request would mean to kill everything."""
    layout = StateDirectory.of(tmp_path / "state")
    layout.prepare()

    async def both() -> list[list[str]]:
        return await asyncio.gather(*(take_down(layout, seconds=PATIENCE_S) for _ in range(2)))

    with subprocess.Popen([sys.executable, "-c", COUNTS, layout.data], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "holds\n"
            assert sorted(asyncio.run(both())) == [[], ["motet up"]]
            assert holder.stdout.read() == "asked to stop\n"
        finally:
            holder.kill()


async def test_a_down_waits_for_a_command_that_looks_whether_the_lock_is_free(tmp_path: Path) -> None:
    layout = StateDirectory.of(tmp_path / "state")
    layout.prepare()
    with layout.lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        down = asyncio.create_task(take_down(layout, seconds=PATIENCE_S))
        await asyncio.sleep(0.3)
        assert not down.done()
    assert await down == []


def test_pid_0_is_no_process() -> None:
    nobody = ProcessIdentity(0, 0)
    assert not send(nobody, signal.SIGTERM)
    assert session_members(nobody) == []
