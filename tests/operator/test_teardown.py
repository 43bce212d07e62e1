"""`motet down` beside a `motet up` in the foreground: it leads no session, because its shell does."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from motet_operator.local.state_directory import StateDirectory
from motet_operator.local.teardown import take_down
from tests.common.waiting import PATIENCE_S

HOLDER = """
import signal, sys, time
from pathlib import Path
from motet_operator.local.lock import StackLock
from motet_operator.local.state_directory import StateDirectory
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "hangs" else lambda *_: sys.exit(0))
with StackLock(StateDirectory.of(Path(sys.argv[1])).lock):
    print("holds", flush=True)
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
