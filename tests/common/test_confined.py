"""What a confined process may do."""

import subprocess
import sys

CODE = """
import socket
from motet.confined import without_sockets
socket.socketpair()
without_sockets()
open("/proc/self/stat").close()
for family in (socket.AF_INET, socket.AF_UNIX):
    try:
        socket.socket(family)
    except PermissionError:
        print("refused")
"""


BUSY_CODE = """
import os, resource, time
from motet.confined import yielding_often
def busy_until(at):
    while time.monotonic() < at:
        pass
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
until = time.monotonic() + 1.0
if os.fork() == 0:
    busy_until(until)
    os._exit(0)
with yielding_often(0.001):
    busy_until(until)
used = resource.getrusage(resource.RUSAGE_SELF)
print((used.ru_nivcsw + used.ru_nvcsw) / (used.ru_utime + used.ru_stime))
time.sleep(0.05)
print(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - used.ru_nvcsw)
"""


def test_a_process_that_yields_often_runs_half_a_millisecond_at_a_time() -> None:
    """Without that, two busy processes on one CPU change at ticks: 250 times in a second, mostly."""
    said = subprocess.run([sys.executable, "-c", BUSY_CODE], capture_output=True, text=True, check=True)
    a_second, when_idle = said.stdout.split()
    assert float(a_second) > 600
    assert int(when_idle) < 10  # no alarm wakes it any more


def test_a_process_without_sockets_makes_none_and_reads_files() -> None:
    said = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert said.stdout == "refused\nrefused\n"
