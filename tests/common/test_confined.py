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
with pausing_often(0.001):
    while time.process_time() < 0.3:
        pass
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_nvcsw)
time.sleep(0.05)
print(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - used.ru_nvcsw)
"""


def test_a_busy_process_pauses_often_until_it_has_done_its_work() -> None:
    """The kernel counts how often a process has left its processor on its own."""
    said = subprocess.run([sys.executable, "-c", BUSY_CODE], capture_output=True, text=True, check=True)
    while_busy, afterwards = map(int, said.stdout.split())
    assert while_busy > 50  # of 500, where nobody else runs
    assert afterwards < 10


def test_a_process_without_sockets_makes_none_and_reads_files() -> None:
    said = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert said.stdout == "refused\nrefused\n"
