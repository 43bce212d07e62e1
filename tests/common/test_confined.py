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
import resource, time
from motet.confined import pausing_often
until = time.monotonic() + 0.5
with pausing_often(0.001):
    while time.monotonic() < until:
        pass
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_nvcsw)
time.sleep(0.05)
print(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - used.ru_nvcsw)
"""


def test_a_busy_process_pauses_often_until_it_has_done_its_work() -> None:
    """The kernel counts how often a process has left its processor on its own."""
    said = subprocess.run([sys.executable, "-c", BUSY_CODE], capture_output=True, text=True, check=True)
    in_half_a_second, afterwards = map(int, said.stdout.split())
    assert in_half_a_second > 100  # of 900, where nobody else runs
    assert afterwards < 10


def test_a_process_without_sockets_makes_none_and_reads_files() -> None:
    said = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert said.stdout == "refused\nrefused\n"
